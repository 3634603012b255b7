"""data=corpus: ids against other libraries, shards that do not depend on who wrote them, shares of
documents, and what is refused."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import pickle
import resource
import shutil
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiktoken
from hypothesis import given, settings
from hypothesis import strategies as st

from llmexp.cli.prepare import _cells
from llmexp.data import encode, shards, sources, work
from llmexp.data.corpus import corpus, corpus_sources
from llmexp.data.prepared import prepare_part
from llmexp.data.progress import ProgressBar
from llmexp.data.remote import RemoteCache
from llmexp.data.tokenizers import as_tokenizer, byte_level
from llmexp.data.work import Source
from tests.conftest import ROOT
from tests.faults.helpers import small_disk

pytestmark = pytest.mark.skipif(find_spec("datasets") is None, reason="datasets is not installed")
tokenizers = pytest.importorskip("tokenizers")

LENGTH = 8


def json_lines(path: Path, texts: list[str], key: str = "text") -> Path:
    content = "".join(json.dumps({key: text}) + "\n" for text in texts).encode()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


def texts_of(name: str, count: int) -> list[str]:
    return [f"{name} {i}: " + "so many words " * (1 + i % 5) for i in range(count)]


@pytest.fixture
def files(tmp_path) -> Path:
    json_lines(tmp_path / "web.jsonl", texts_of("web", 80))
    json_lines(tmp_path / "code.jsonl.gz", texts_of("code", 40), "body")
    json_lines(tmp_path / "val.jsonl", texts_of("val", 10))
    return tmp_path


def made(folder: Path, **changes: Any):
    knobs: dict[str, Any] = {
        "sources": {
            "web": {"files": f"{folder}/web.jsonl"},
            "code": {"files": f"{folder}/code.jsonl.gz", "text_key": "body"},
        },
        "val": {"far": {"files": f"{folder}/val.jsonl"}},
        "val_main": None,
        "stages": [],
        "max_epochs": None,
        "on_bad_record": "refuse",
        "cache_dir": f"{folder}/cache",
        "tokenizer": byte_level(),
        "sequence_length": LENGTH,
    }
    return corpus(**knobs | changes)


def tree(folder: Path) -> dict[str, str]:
    """Digest of each file, but for locks."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.suffix != ".lock"
    }


def ids_of(stream) -> list[int]:
    return stream.read(0, len(stream)).tolist()


def test_sources_lie_one_after_the_other_each_document_with_its_end(files):
    found = made(files)
    expected = []
    for text in texts_of("web", 80) + texts_of("code", 40):
        expected += [*text.encode(), 256]
    assert ids_of(found.train) == expected
    assert ids_of(found.val)[:5] == [*b"val 0"]
    row = found.table[1]
    assert (row["source"], row["documents"], row["files"]) == ("code", 40, 1)
    assert row["bytes_per_token"] == pytest.approx(1 - 40 / row["tokens"])


@settings(max_examples=25)
@given(st.lists(st.text(), min_size=1, max_size=30))
def test_ids_are_those_of_datasets_and_tokenizers(tmp_path_factory, datasets, texts):
    from llmexp.data.tokenizer_files import from_file
    from llmexp.data.train_tokenizer import train_bpe

    folder = tmp_path_factory.mktemp("other")
    trained = train_bpe(
        ["so many words, so little time " * 9, "Grüße, 你好 \U0001f600"], 300, "gpt2"
    )
    (folder / "tokenizer.json").write_text(trained.tokenizer_json)
    path = json_lines(folder / "a.jsonl", [*texts, "the end"])
    other = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    table = datasets.Dataset.from_list([json.loads(line) for line in path.open()])
    expected = []
    for record in table:
        if record["text"]:
            ids = other.encode(record["text"], add_special_tokens=False).ids
            expected += [*ids, other.token_to_id("<|endoftext|>")]
    tokenizer = from_file(str(folder), None, None)
    source = Source("web", "data.sources.web.files", files=(str(path),))
    whole = work.work_of(source, tokenizer, RemoteCache(folder / "out"))
    whole.folder.mkdir(parents=True)
    shards.write_unit(whole, 0, lambda chunk: True, lambda done, counts: None)
    written = np.fromfile(whole.folder / "00000-00000.train.bin", "<u2").tolist()
    assert written == expected


def test_a_dataset_of_hugging_face_in_a_folder(files, datasets):
    table = datasets.Dataset.from_dict({"body": texts_of("web", 80)})
    datasets.DatasetDict({"train": table}).save_to_disk(str(files / "saved"))
    found = made(files, sources={"web": {"hf": f"{files}/saved", "text_key": "body"}})
    of_files = made(files, sources={"web": {"files": f"{files}/web.jsonl"}})
    assert ids_of(found.train) == ids_of(of_files.train)
    printed = [_cells(one.table[0])[:4] for one in (found, of_files)]
    assert printed[0] == ("web", "train", f"{files}/saved", "80")  # the name in place of 0 files
    assert printed[1] == ("web", "train", "1", "80")


def test_an_address_is_read_like_a_file(files):
    there = {"web": {"files": f"file://{files}/we*.jsonl"}}
    here = {"web": {"files": f"{files}/web.jsonl"}}
    assert ids_of(made(files, sources=there).train) == ids_of(made(files, sources=here).train)


@pytest.mark.parametrize("cores", [1, 3])
def test_shards_are_equal_whoever_writes_them(files, monkeypatch, cores):
    """And wherever the writing was cut off."""
    monkeypatch.setattr(shards, "CHUNK_BYTES", 700)
    monkeypatch.setattr(shards, "JOB_BYTES", 90)
    knobs = {"val": {"near": {"share": 0.2}}}
    made(files, **knobs, cache_dir=f"{files}/whole")
    monkeypatch.setattr(encode, "cpu_count", lambda: cores)
    whole = tree(files / "whole" / "corpus")
    assert len([name for name in whole if name.endswith(".json")]) > 8

    class Cut(BaseException):
        pass

    left = 0
    write = shards.commit_json

    def dies(path: Path, value: Any) -> None:
        nonlocal left
        if not left:
            raise Cut
        left -= 1
        write(path, value)

    monkeypatch.setattr(shards, "commit_json", dies)
    for left in (3, 0, 1, 4, 100):  # noqa: B007
        try:
            made(files, **knobs, cache_dir=f"{files}/cut")
        except Cut:
            continue
    assert tree(files / "cut" / "corpus") == whole


@pytest.mark.parametrize("of", [1, 8])
def test_parts_joined_are_the_whole(files, monkeypatch, of):
    """Of one unit a source, and of several; a part that ran twice has nothing left to do."""
    monkeypatch.setattr(shards, "CHUNK_BYTES", 700)
    monkeypatch.setattr(work, "UNIT_BYTES", 2000)
    for n in range(6):
        json_lines(files / f"more{n}.jsonl", texts_of(f"more {n}", 10 * n + 1))
    sources = {
        "web": {"files": f"{files}/web.jsonl"},
        "more": {"files": f"{files}/more*.jsonl"},
    }
    val = {"near": {"share": 0.2}, "far": {"files": f"{files}/val.jsonl"}}
    made(files, sources=sources, val=val, cache_dir=f"{files}/whole")
    written = []
    write = shards.commit_json

    def noted(path: Path, value: Any) -> None:
        written.append(path)
        write(path, value)

    monkeypatch.setattr(shards, "commit_json", noted)
    remote = RemoteCache(files / "parts")
    some = corpus_sources(remote, sources=sources, val=val, on_bad_record="refuse")
    works = pickle.loads(pickle.dumps(work.works_of(some, byte_level(), remote)))
    for number in (*range(1, of + 1), 1):
        before = len(written)
        prepare_part(works, work.Part(number, of), remote.cache)
    assert len(written) == before
    assert len(written) == len(set(written)) > 15
    assert {path.name for path in (files / "parts" / "corpus").rglob("*.json")} == {
        path.name for path in written
    }
    made(files, sources=sources, val=val, cache_dir=f"{files}/parts")
    assert len({path.name for path in written} - {"manifest.json"}) == len(
        {path.name for path in (files / "whole" / "corpus").rglob("*-*.json")}
    )
    assert tree(files / "parts" / "corpus") == tree(files / "whole" / "corpus")


@given(
    st.lists(st.integers(1, 10**12), min_size=1, max_size=9), st.integers(1, 40), st.integers(0, 99)
)
def test_every_chunk_is_in_one_part(sizes, of, chunk):
    total, start = sum(sizes), 0
    parts = [work.Part(number, of) for number in range(1, of + 1)]
    for size in sizes:
        has = [part for part in parts if part.has(start, size, total, chunk)]
        assert len(has) == 1
        assert has[0].meets(start, size, total)
        start += size


def test_a_part_gets_its_share_of_one_large_file():
    for of in (2, 3, 16):
        parts = [work.Part(number, of) for number in range(1, of + 1)]
        counts = [sum(part.has(0, 9, 9, chunk) for chunk in range(40 * of)) for part in parts]
        assert max(counts) - min(counts) <= 2


def test_shards_of_several_sources_may_be_more_than_are_open_by_default(files, monkeypatch):
    """Each is a map, which keeps its file open: those of the sources before count, too."""
    monkeypatch.setattr("llmexp.data.shards.CHUNK_BYTES", 1)
    monkeypatch.setattr("llmexp.data.files.OTHER_FILES", 40)
    names = ("one", "two", "three")
    for name in names:
        json_lines(files / f"{name}.jsonl", [f"{name} {i}" for i in range(100)])
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/dev/fd")) + 150, before[1]))
    try:
        chosen = {name: {"files": str(files / f"{name}.jsonl")} for name in names}
        assert len(made(files, sources=chosen, val={}).train.shards) == 300
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_shards_that_this_process_may_not_open_are_refused_and_stay(files, monkeypatch):
    """They are whole, and took hours."""
    monkeypatch.setattr("llmexp.data.shards.CHUNK_BYTES", 1)
    json_lines(files / "one.jsonl", [f"one {i}" for i in range(100)])
    chosen = {"one": {"files": str(files / "one.jsonl")}}
    limits = len(os.listdir("/dev/fd")) + 100
    for _ in range(2):  # at the end of the preparation, and from the cache
        with monkeypatch.context() as narrow:
            narrow.setattr(resource, "getrlimit", lambda _: (limits, limits))
            with pytest.raises(ValueError, match="token files are more than this process"):
                made(files, sources=chosen, val={})
        there = sorted(path for path in files.rglob("*.bin"))
        assert len(there) >= 100
    assert len(made(files, sources=chosen, val={}).train.shards) == 100


def test_what_was_killed_goes_on(files):
    """Killed by the system while two sources are written, at any time: after a few chunks."""
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", SMALL_CHUNKS + PREPARE, f"{files}/web.jsonl"]
    subprocess.run([*command, f"{files}/whole", f"{files}/val.jsonl"], env=env, check=True)
    cut = files / "cut" / "corpus"
    last = len([*(files / "whole" / "corpus").rglob("*-*.json")]) - 2
    for chunks in (1, 4, 9, last):
        process = subprocess.Popen([*command, f"{files}/cut", f"{files}/val.jsonl"], env=env)
        while process.poll() is None and len([*cut.glob("*/*-*.json")]) < chunks:
            time.sleep(0.002)
        process.kill()
        assert process.wait() == -9
        assert len([*cut.glob("*/manifest.json")]) == (chunks == last)
    subprocess.run([*command, f"{files}/cut", f"{files}/val.jsonl"], env=env, check=True)
    assert tree(cut) == tree(files / "whole" / "corpus")


def test_a_full_disk_leaves_whole_chunks_and_there_it_goes_on(files, monkeypatch):
    monkeypatch.setattr(shards, "CHUNK_BYTES", 60_000)
    json_lines(files / "web.jsonl", texts_of("web", 8000))
    web = {"web": {"files": f"{files}/web.jsonl"}}
    made(files, sources=web, cache_dir=f"{files}/whole")
    with small_disk(files / "small", "400k") as disk:
        cut = disk / "corpus"
        with pytest.raises(ValueError, match=r"data\.cache_dir=.*No space left.*with room"):
            made(files, sources=web, cache_dir=str(disk))
        assert 1 <= len([*cut.rglob("*.json")]) < 8
        assert not [*cut.rglob(f"*{shards.TEMPORARY}")]
        subprocess.run(["mount", "-o", "remount,size=4m", disk], check=True)
        made(files, sources=web, cache_dir=str(disk))
        assert tree(cut) == tree(files / "whole" / "corpus")


def test_shards_are_refused_with_another_tokenizer(files):
    """As data=tokens: their ids may all be in its vocabulary."""
    made(files)
    bytes_ = byte_level()
    swapped = {token: 255 - rank for token, rank in bytes_._mergeable_ranks.items()}
    other = tiktoken.Encoding(
        "other",
        pat_str=bytes_._pat_str,
        mergeable_ranks=swapped,
        special_tokens=bytes_._special_tokens,
    )
    knobs: dict[str, Any] = {
        "train_files": str(files / "cache/corpus/*/*.train.bin"), "val_files": None,
        "dtype": "uint16", "val_ratio": 0.1, "max_tokens": None, "cache_dir": None,
        "vocab_size": 257, "sequence_length": LENGTH,
    }  # fmt: skip
    assert len(sources.tokens(**knobs, tokenizer=bytes_).train) > LENGTH
    with pytest.raises(ValueError, match=r"made by the tokenizer bytes .* and other .* is another"):
        sources.tokens(**knobs, tokenizer=as_tokenizer(other))


def test_documents_in_training_and_validation_are_a_warning(files, monkeypatch):
    """Counted once from the digests. Copies inside a source are one document that is trained
    on."""
    both = [texts_of("web", 80)[0], texts_of("web", 80)[7], texts_of("code", 40)[3]]
    json_lines(files / "val.jsonl", [*texts_of("val", 10), *both, both[0]])
    with open(files / "web.jsonl", "a") as file:
        file.write(json.dumps({"text": both[0]}) + "\n" + json.dumps({"text": both[2]}) + "\n")
    monkeypatch.setattr(shards, "CHUNK_BYTES", 700)
    val = {"near": {"share": 0.2}, "far": {"files": f"{files}/val.jsonl"}}
    kept = made(files, val={"far": val["far"]})
    (text,) = kept.warnings
    assert text.startswith(
        "the validation set far shares documents with training: 4 of its 14 are trained on, as "
        "documents of web 4;"
    )
    for path in (files / "cache" / "corpus").glob("*/*.digests"):
        path.unlink()  # they are read once
    assert made(files, val={"far": val["far"]}).warnings == kept.warnings
    shutil.rmtree(files / "cache")
    split = made(files, val=val)
    source = Source("", "", shares=(("near", 0.2),))
    trained = [source.split_of(digest(text)) == "train" for text in [*both, both[0]]]
    assert f"{sum(trained)} of its 14 are trained on" in split.warnings[0]
    json_lines(files / "val.jsonl", texts_of("val", 10))
    assert not made(files).warnings


def digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


def test_a_share_is_of_documents_and_none_moves(files):
    small = made(files, val={"near": {"share": 0.1}})
    large = made(files, val={"near": {"share": 0.3}, "other": {"share": 0.1}})

    def split(stream) -> set[bytes]:
        return set(bytes(min(i, 255) for i in ids_of(stream)).split(b"\xff")) - {b""}

    assert split(small.val) < split(large.val)
    assert split(large.train) < split(small.train)
    every = [split(large.train), split(large.val), split(large.val_sets["other"])]
    assert set.union(*every) == {
        text.encode() for text in texts_of("web", 80) + texts_of("code", 40)
    }
    assert sum(map(len, every)) == 120


def flip(shard: Path) -> None:
    shard.write_bytes(shard.read_bytes()[:-3] + b"abc")


DAMAGE = {
    "flipped": flip,
    "cut": lambda shard: os.truncate(shard, 4),
    "gone": lambda shard: shard.unlink(),
    "no manifest": lambda shard: (shard.parent / "manifest.json").unlink(),
    "torn manifest": lambda shard: (shard.parent / "manifest.json").write_text('{"format'),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_shard_that_is_damaged_is_made_anew(files, damage):
    whole = ids_of(made(files).train)
    for path in (files / "cache" / "corpus").glob("*/*.train.bin"):
        DAMAGE[damage](path)
    assert ids_of(made(files).train) == whole


WEB = {"files": "FOLDER/web.jsonl"}
REFUSED = {
    "no source": ({"sources": {}}, "data.sources: name one source at least"),
    "no section": (
        {"sources": {"web": "a.jsonl"}},
        "web=a.jsonl: keys are needed; for example dat",
    ),
    "no place": ({"sources": {"web": {"weight": 1.0}}}, "data.sources.web: either files or hf"),
    "a key": ({"sources": {"web": WEB | {"file": 1}}}, "data.sources.web.file: there is no such"),
    "zero": ({"sources": {"web": WEB | {"weight": 0}}}, r"web.weight=0: all weights are 0; for ex"),
    "negative": ({"sources": {"web": WEB | {"weight": -1}}}, "weight=-1: must be at least 0"),
    "huge": (
        {"sources": {"web": WEB | {"weight": 1e300}}},
        r"weight=1e\+300: must be at most 1e\+18",
    ),
    "some weights": (
        {"sources": {"web": WEB | {"weight": 1}, "two": {"files": "FOLDER/val.jsonl"}}, "val": {}},
        "data.sources.two.weight: the other sources have weights",
    ),
    "in both": ({"val": {"far": WEB}}, "is in data.sources.web.files too"),
    "under two names": (
        {"sources": {"web": WEB, "two": {"files": "FOLDER/copy.jsonl"}}},
        "copy.jsonl is in data.sources.web.files too under the name .*web.jsonl; a file belongs",
    ),
    "text key": ({"sources": {"web": WEB | {"text_key": "body"}}}, "line 1: no key 'body'; the ke"),
    "shares": ({"val": {"a": {"share": 0.6}, "b": {"share": 0.6}}}, "the shares add up to 1.2"),
    "main": ({"val_main": "near"}, "data.val_main=near: there is no such validation set; known: f"),
    "cache": ({"cache_dir": "FOLDER/web.jsonl"}, "the token cache cannot be written there"),
    "stages of words": ({"stages": ["web"]}, "a list of sections is needed; for example 'data.st"),
    "stage": ({"stages": [{"from_tokens": 9}]}, "weights: this key is missing .*; for example"),
    "stage start": (
        {"stages": [{"from_tokens": -5, "weights": {"web": 1.0, "code": 1}}]},
        r"data.stages.0.from_tokens=-5: must be at least 1 .*; for example .data.stages=",
    ),
    "stage weight": (
        {"stages": [{"from_tokens": 9, "weights": {"web": 1.0}}]},
        "each source needs a weight: web, code",
    ),
    "stages": (
        {"stages": [{"from_tokens": n, "weights": {"web": 1, "code": 0}} for n in (900, 90)]},
        "stages stand in order",
    ),
    "name": ({"sources": {"a.b": WEB}}, "a name has letters, digits"),
    "length": ({"sequence_length": 100_000}, "do not fill one sequence"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_and_leaves_nothing(files, name):
    changes, reason = REFUSED[name]
    changes = json.loads(json.dumps(changes).replace("FOLDER", str(files)))
    (files / "copy.jsonl").write_bytes((files / "web.jsonl").read_bytes())
    with pytest.raises(ValueError, match=reason):
        made(files, **changes)
    if name not in ("length", "text key"):
        assert not (files / "cache" / "corpus").exists()


def test_records_that_are_left_out_are_counted(files):
    with open(files / "web.jsonl", "a") as file:
        file.write('{"text": 7}\n{"text": ""}\n')
    with pytest.raises(ValueError, match="line 81: 'text' is no text but int"):
        made(files)
    found = made(files, on_bad_record="skip")
    assert (found.table[0]["bad"], found.table[0]["empty"]) == (1, 1)
    assert "1 record that cannot be read was left out" in found.description
    (files / "web.jsonl").write_text('{"text": ""}\n')
    with pytest.raises(ValueError, match="there are no documents; 1 is empty"):
        made(files)


def test_another_mixture_prepares_nothing(files, monkeypatch):
    made(files)
    monkeypatch.setattr(shards, "write_unit", None)
    again = made(files, stages=[{"from_tokens": 80, "weights": {"web": 0, "code": 1}}])
    counts = again.mixed.counts(20).tolist()
    assert counts[0] + counts[1] == 20
    assert counts[0] <= 10


def test_a_source_of_weight_zero_is_left_out_and_its_validation_set_stays(files):
    """Also of the warning of documents that are trained on."""
    json_lines(files / "val.jsonl", [*texts_of("val", 10), texts_of("web", 1)[0]])
    web, code = {"files": f"{files}/web.jsonl"}, {"files": f"{files}/code.jsonl.gz"}
    code |= {"text_key": "body", "weight": 1}
    val = {"far": {"files": f"{files}/val.jsonl"}, "near": {"share": 0.2}}
    knobs = {"sources": {"web": web | {"weight": 0}, "code": code}, "val": val}
    found = made(files, **knobs)
    alone = made(files, sources={"code": code}, val=val)
    assert ids_of(found.train) == ids_of(alone.train)
    assert found.train_sequences(LENGTH) == alone.train_sequences(LENGTH)
    starts = [one.mixed.starts(np.arange(50), 3, True, LENGTH) for one in (found, alone)]
    assert starts[0].tolist() == starts[1].tolist()
    both = made(files, sources={"web": web | {"weight": 1}, "code": code}, val=val)
    assert ids_of(found.val_sets["near"]) == ids_of(both.val_sets["near"])
    assert (found.warnings, len(both.warnings)) == ((), 1)
    assert "code has weight" not in found.description
    assert found.description.endswith("; web has weight 0")
    later = [{"from_tokens": 80, "weights": {"web": 1, "code": 1}}]
    counts = made(files, **knobs, stages=later).mixed.counts(20).tolist()
    assert counts == [5, 15]


# Slowly, so that a kill meets it at work.
SMALL_CHUNKS = """
import time
from llmexp.data import shards
shards.CHUNK_BYTES, shards.JOB_BYTES, write = 200, 50, shards.commit_json
def slow(path, value):
    time.sleep(0.02)
    write(path, value)
shards.commit_json = slow
"""
PREPARE = """
import sys
from llmexp.data.corpus import corpus
from llmexp.data.tokenizers import byte_level
found = corpus(
    sources={str(n): {"files": name} for n, name in enumerate([sys.argv[1], *sys.argv[3:]])},
    val={}, val_main=None, stages=[], max_epochs=None,
    on_bad_record="refuse", cache_dir=sys.argv[2], tokenizer=byte_level(), sequence_length=8,
)
print(len(found.train))
"""


def test_several_processes_prepare_one_source_at_once(files):
    for attempt in range(2):
        command = [sys.executable, "-c", PREPARE, f"{files}/web.jsonl", f"{files}/cold{attempt}"]
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        several = [
            subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) for _ in range(3)
        ]
        found = {process.communicate()[0] for process in several}
        assert [process.returncode for process in several] == [0] * 3
        assert found == {f"{len(made(files).train) - sum_of_code()}\n"}


def sum_of_code() -> int:
    return sum(len(text) + 1 for text in texts_of("code", 40))


def test_a_file_that_changes_while_it_is_read_leaves_nothing(files, monkeypatch):
    write = ProgressBar.add

    def changes(*arguments: Any) -> None:
        write(*arguments)
        json_lines(files / "web.jsonl", texts_of("other", 90))

    with monkeypatch.context() as patch:
        patch.setattr(ProgressBar, "add", changes)
        with pytest.raises(ValueError, match="this file changed while it was prepared; start agai"):
            made(files)
    assert bytes(ids_of(made(files).train)[:5]) == b"other"


def test_an_error_begins_a_line_below_how_far_the_preparation_is(files, monkeypatch, capsys):
    json_lines(files / "web.jsonl", ["many words " * 20_000] * 40)
    with open(files / "web.jsonl", "a") as file:
        file.write("{no json\n")
    monkeypatch.setattr("llmexp.data.progress.QUIET_S", 0.0)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    with pytest.raises(ValueError, match="line 41: no valid JSON"):
        made(files)
    said = capsys.readouterr().err
    assert said.count("\rpreparing") > 1
    assert "web.files, 8.8 MB in files: 440.0 kB of text, " in said
    assert said.endswith("\n")


def test_a_cache_that_cannot_be_read_now_is_not_taken_for_damaged(files, monkeypatch):
    made(files)
    before = tree(files / "cache" / "corpus")

    def too_many(*arguments: Any, **more: Any) -> None:
        raise OSError(24, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr("mmap.mmap", too_many)
        with pytest.raises((ValueError, OSError), match="Too many open files"):
            made(files)
    assert tree(files / "cache" / "corpus") == before


def test_a_split_of_a_dataset_that_is_not_there(files, datasets):
    table = datasets.Dataset.from_dict({"text": texts_of("web", 80)})
    table.save_to_disk(str(files / "saved"))
    source = {"web": {"hf": f"{files}/saved"}}
    with pytest.raises(ValueError, match="there is no split validation; the splits are: train"):
        made(files, sources=source, val={"v": {"hf": f"{files}/saved", "split": "validation"}})
    with pytest.raises(ValueError, match=r"is in data\.sources\.web\.hf too"):
        made(files, sources=source, val={"v": {"hf": f"{files}/./saved"}})
