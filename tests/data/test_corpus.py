"""data=corpus: ids against other libraries, shards that do not depend on who wrote them, shares of
documents; tests/refusals/data.yaml has what is refused."""

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
from hypothesis import example, given, settings
from hypothesis import strategies as st

from llmexp.data import encode, shards, work
from llmexp.data.progress import ProgressBar
from llmexp.data.remote import RemoteCache
from llmexp.data.shards import prepare_part
from llmexp.data.sources.corpus import corpus
from llmexp.data.sources.tokens import tokens
from llmexp.data.tokenizers.base import as_tokenizer
from llmexp.data.tokenizers.bytes import byte_level
from llmexp.data.tokenizers.files import from_file
from llmexp.data.tokenizers.training import train_bpe
from llmexp.data.work import Source
from tests.conftest import ROOT
from tests.faults.helpers import small_disk

from .common import all_ids, json_lines, made, texts_of, tree

pytestmark = pytest.mark.skipif(find_spec("datasets") is None, reason="datasets is not installed")
tokenizers = pytest.importorskip("tokenizers")

LENGTH = 8
WEB, CODE = texts_of("web", 80), texts_of("code", 40)


@pytest.fixture
def files(tmp_path) -> Path:
    json_lines(tmp_path / "web.jsonl", WEB)
    json_lines(tmp_path / "code.jsonl.gz", CODE, "body")
    json_lines(tmp_path / "val.jsonl", texts_of("val", 10))
    return tmp_path


def both(folder: Path, web: float | None = None, code: float | None = None) -> dict[str, Any]:
    """Return the section of the two sources, with their weights."""
    found = {
        "web": {"files": f"{folder}/web.jsonl", "weight": web},
        "code": {"files": f"{folder}/code.jsonl.gz", "text_key": "body", "weight": code},
    }
    return {n: {k: v for k, v in one.items() if v is not None} for n, one in found.items()}


def two(folder: Path, **changes: Any):
    return made(folder, **{"sources": both(folder), **changes})


def test_sources_lie_one_after_the_other_each_document_with_its_end(files):
    found = two(files)
    assert all_ids(found.train) == [i for text in WEB + CODE for i in [*text.encode(), 256]]
    assert all_ids(found.val)[:5] == [*b"val 0"]
    row = found.table[1]
    assert (row["source"], row["documents"], row["files"]) == ("code", 40, 1)
    assert row["bytes_per_token"] == pytest.approx(1 - 40 / row["tokens"])


@settings(max_examples=25)
@example(["<|endoftext|>"])
@given(st.lists(st.text(), min_size=1, max_size=30))
def test_ids_are_those_of_datasets_and_tokenizers(tmp_path_factory, datasets, texts):
    folder = tmp_path_factory.mktemp("other")
    words = ["so many words, so little time " * 9, "Grüße, 你好 \U0001f600"]
    (folder / "tokenizer.json").write_text(train_bpe(words, 300, "gpt2").tokenizer_json)
    path = json_lines(folder / "a.jsonl", [*texts, "the end"])
    other = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    other.encode_special_tokens = True
    table = datasets.Dataset.from_list([json.loads(line) for line in path.open()])
    expected = []
    for record in table:
        if record["text"]:
            ids = other.encode(record["text"], add_special_tokens=False).ids
            expected += [*ids, other.token_to_id("<|endoftext|>")]
    source = Source("web", "data.sources.web.files", files=(str(path),))
    tokenizer = from_file(str(folder), None, None)
    whole = work.work_of(source, tokenizer, RemoteCache(folder / "out"))
    whole.folder.mkdir(parents=True)
    shards.write_unit(whole, 0, lambda chunk: True, lambda done, counts: None)
    written = np.fromfile(whole.folder / "00000-00000.train.bin", "<u2").tolist()
    assert written == expected


def test_a_folder_of_datasets_and_an_address_are_read_like_files(files, datasets):
    table = datasets.Dataset.from_dict({"body": WEB})
    datasets.DatasetDict({"train": table}).save_to_disk(str(files / "saved"))
    of_files = made(files)
    web = {"hf": f"{files}/saved", "text_key": "body"}
    found = made(files, sources={"web": web})
    assert all_ids(found.train) == all_ids(of_files.train)
    assert [one.table[0]["hf"] for one in (found, of_files)] == [f"{files}/saved", None]
    there = made(files, sources={"web": {"files": f"file://{files}/we*.jsonl"}})
    assert all_ids(there.train) == all_ids(of_files.train)
    for val, words in (
        ({"hf": web["hf"], "split": "validation"}, "no split validation; the splits are: train"),
        ({"hf": f"{files}/./saved"}, r"is in data\.sources\.web\.hf too"),
    ):
        with pytest.raises(ValueError, match=words):
            made(files, sources={"web": web}, val={"v": val})


@pytest.mark.parametrize("cores", [1, 3])
def test_shards_are_equal_whoever_writes_them(files, monkeypatch, cores):
    monkeypatch.setattr(shards, "CHUNK_BYTES", 700)
    monkeypatch.setattr(shards, "JOB_BYTES", 90)
    knobs = {"val": {"near": {"share": 0.2}}}
    two(files, **knobs, cache_dir=f"{files}/whole")
    monkeypatch.setattr(encode, "cpu_count", lambda: cores)
    monkeypatch.setattr(shards, "JOB_BYTES", 9)
    two(files, **knobs, cache_dir=f"{files}/other")
    whole = tree(files / "whole" / "corpus")
    assert len([name for name in whole if name.endswith(".json")]) > 8
    assert tree(files / "other" / "corpus") == whole


@pytest.mark.parametrize("of", [1, 8])
def test_parts_joined_are_the_whole(files, monkeypatch, of):
    """Of one unit a source, and of several; a part that ran twice has nothing left to do."""
    monkeypatch.setattr(shards, "CHUNK_BYTES", 700)
    monkeypatch.setattr(work, "UNIT_BYTES", 2000)
    for n in range(6):
        json_lines(files / f"more{n}.jsonl", texts_of(f"more {n}", 10 * n + 1))
    names = {"web": "web", "more": "more*"}
    sources = {name: {"files": f"{files}/{glob}.jsonl"} for name, glob in names.items()}
    val = {"near": {"share": 0.2}, "far": {"files": f"{files}/val.jsonl"}}
    made(files, sources=sources, val=val, cache_dir=f"{files}/whole")
    written: list[Path] = []
    write = shards.commit_json

    def noted(path: Path, value: Any) -> None:
        written.append(path)
        write(path, value)

    monkeypatch.setattr(shards, "commit_json", noted)
    remote = RemoteCache(files / "parts")
    knobs = {"val_main": None, "stages": [], "max_epochs": None, "cache_dir": None}
    some = corpus(sources=sources, val=val, on_bad_record="refuse", **knobs).documents(remote)
    works = pickle.loads(pickle.dumps(work.works_of(some, byte_level(), remote)))
    for number in (*range(1, of + 1), 1):
        before = len(written)
        prepare_part(works, work.Part(number, of), remote.cache)
    assert len(written) == before
    assert len(written) == len(set(written)) > 15
    made(files, sources=sources, val=val, cache_dir=f"{files}/parts")
    whole = tree(files / "whole" / "corpus")
    assert len({*written}) >= len([name for name in whole if name.endswith(".json")])
    assert tree(files / "parts" / "corpus") == whole


@given(
    st.lists(st.integers(1, 10**12), min_size=1, max_size=9), st.integers(1, 40), st.integers(0, 99)
)
def test_every_chunk_is_in_one_part(sizes, of, chunk):
    total, start = sum(sizes), 0
    parts = [work.Part(number, of) for number in range(1, of + 1)]
    for size in sizes:
        (has,) = [part for part in parts if part.has(start, size, total, chunk)]
        assert has.meets(start, size, total)
        start += size


@pytest.mark.parametrize("of", [2, 3, 16])
def test_a_part_gets_its_share_of_one_large_file(of):
    parts = [work.Part(number, of) for number in range(1, of + 1)]
    counts = [sum(part.has(0, 9, 9, chunk) for chunk in range(40 * of)) for part in parts]
    assert max(counts) - min(counts) <= 2


def test_shards_of_several_sources_may_be_more_than_are_open_by_default(files, monkeypatch):
    """Each is a map, which keeps its file open: those of the sources before count, too. What may
    not be opened is refused and stays: it took hours."""
    monkeypatch.setattr(shards, "CHUNK_BYTES", 1)
    monkeypatch.setattr("llmexp.data.files.OTHER_FILES", 40)
    names = ("one", "two", "three")
    for name in names:
        json_lines(files / f"{name}.jsonl", [f"{name} {i}" for i in range(100)])
    chosen = {name: {"files": str(files / f"{name}.jsonl")} for name in names}
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    least = len(os.listdir("/dev/fd")) + 150
    resource.setrlimit(resource.RLIMIT_NOFILE, (least, before[1]))
    try:
        for _ in range(2):  # at the end of the preparation, and from the cache
            with monkeypatch.context() as narrow:
                narrow.setattr(resource, "getrlimit", lambda _: (least, least))
                with pytest.raises(ValueError, match="token files are more than this process"):
                    made(files, sources=chosen, val={})
            assert len([*files.rglob("*.bin")]) >= 100
        assert len(made(files, sources=chosen, val={}).train.shards) == 300
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


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
from pathlib import Path
from tests.data.common import made
print(len(made(Path(sys.argv[1]), val={}, cache_dir=sys.argv[2], sources=eval(sys.argv[3])).train))
"""


def preparing(files: Path, cache: str, *names: str, slow: bool = False) -> subprocess.Popen[str]:
    """Start a process that prepares these files of JSON lines."""
    program = SMALL_CHUNKS * slow + PREPARE
    sources = repr({name: {"files": f"{files}/{name}.jsonl"} for name in names})
    command = [sys.executable, "-c", program, str(files), str(files / cache), sources]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env)


def test_what_was_killed_goes_on(files):
    """Killed by the system while two sources are written, at any time: after a few chunks."""
    assert preparing(files, "whole", "web", "val", slow=True).wait() == 0
    cut = files / "cut" / "corpus"
    last = len([*(files / "whole" / "corpus").rglob("*-*.json")]) - 2
    for chunks in (1, 9, last):
        process = preparing(files, "cut", "web", "val", slow=True)
        while process.poll() is None and len([*cut.glob("*/*-*.json")]) < chunks:
            time.sleep(0.002)
        process.kill()
        assert process.wait() == -9
        assert len([*cut.glob("*/manifest.json")]) == (chunks == last)
    assert preparing(files, "cut", "web", "val", slow=True).wait() == 0
    assert tree(cut) == tree(files / "whole" / "corpus")


def test_several_processes_prepare_one_source_at_once(files):
    several = [preparing(files, "cold", "web") for _ in range(3)]
    found = {process.communicate()[0] for process in several}
    assert [process.returncode for process in several] == [0] * 3
    assert found == {f"{len(made(files).train)}\n"}


def test_a_full_disk_leaves_whole_chunks_and_there_it_goes_on(files, monkeypatch):
    monkeypatch.setattr(shards, "CHUNK_BYTES", 60_000)
    json_lines(files / "web.jsonl", texts_of("web", 8000))
    made(files, cache_dir=f"{files}/whole")
    with small_disk(files / "small", "400k") as disk:
        cut = disk / "corpus"
        with pytest.raises(ValueError, match=r"data\.cache_dir=.*No space left.*with free space"):
            made(files, cache_dir=str(disk))
        assert 1 <= len([*cut.rglob("*.json")]) < 8
        assert not [*cut.rglob(f"*{shards.TEMPORARY}")]
        subprocess.run(["mount", "-o", "remount,size=4m", disk], check=True)
        made(files, cache_dir=str(disk))
        assert tree(cut) == tree(files / "whole" / "corpus")


def test_shards_are_refused_with_another_tokenizer(files):
    """As data=tokens: their ids may all be in its vocabulary."""
    made(files)
    bytes_ = byte_level()
    swapped = {token: 255 - rank for token, rank in bytes_._mergeable_ranks.items()}
    special = {"special_tokens": bytes_._special_tokens}
    other = tiktoken.Encoding("other", pat_str=".", mergeable_ranks=swapped, **special)
    knobs: dict[str, Any] = {
        "train_files": str(files / "cache/corpus/*/*.train.bin"), "val_files": None,
        "dtype": "uint16", "val_ratio": 0.1, "max_tokens": None, "cache_dir": None,
        "vocab_size": 257, "sequence_length": LENGTH,
    }  # fmt: skip
    assert len(tokens(**knobs, tokenizer=bytes_).train) > LENGTH
    with pytest.raises(ValueError, match=r"made by the tokenizer bytes .* and other .* is another"):
        tokens(**knobs, tokenizer=as_tokenizer(other))


def test_documents_in_training_and_validation_are_a_warning(files, monkeypatch):
    """Counted once from the digests. Copies inside a source are one document that is trained
    on."""
    copies = [WEB[0], WEB[7], CODE[3], WEB[0]]
    json_lines(files / "val.jsonl", [*texts_of("val", 10), *copies])
    json_lines(files / "web.jsonl", [*WEB, WEB[0], CODE[3]])
    monkeypatch.setattr(shards, "CHUNK_BYTES", 700)
    val = {"near": {"share": 0.2}, "far": {"files": f"{files}/val.jsonl"}}
    kept = two(files, val={"far": val["far"]})
    (text,) = kept.warnings
    assert "4 of its 14 are trained on, as documents of web 4;" in text
    for path in (files / "cache" / "corpus").glob("*/*.digests"):
        path.unlink()  # they are read once
    assert two(files, val={"far": val["far"]}).warnings == kept.warnings
    shutil.rmtree(files / "cache")
    source = Source("", "", shares=(("near", 0.2),))
    digests = [hashlib.blake2b(text.encode(), digest_size=16).digest() for text in copies]
    trained = sum(source.split_of(digest) == "train" for digest in digests)
    assert f"{trained} of its 14 are trained on" in two(files, val=val).warnings[0]
    json_lines(files / "val.jsonl", texts_of("val", 10))
    assert not two(files).warnings


def test_a_share_is_of_documents_and_none_moves(files):
    with pytest.raises(ValueError, match="the shares add up to"):
        two(files, val={"a": {"share": 0.6}, "b": {"share": 0.6}})
    assert not (files / "cache" / "corpus").exists()
    small = two(files, val={"near": {"share": 0.1}})
    large = two(files, val={"near": {"share": 0.3}, "other": {"share": 0.1}})

    def split(stream) -> set[bytes]:
        return set(bytes(min(i, 255) for i in all_ids(stream)).split(b"\xff")) - {b""}

    assert split(small.val) < split(large.val)
    assert split(large.train) < split(small.train)
    every = [split(large.train), split(large.val), split(large.val_sets["other"])]
    assert set.union(*every) == {text.encode() for text in WEB + CODE}
    assert sum(map(len, every)) == 120


DAMAGE = {
    "flipped": lambda shard: shard.write_bytes(shard.read_bytes()[:-3] + b"abc"),
    "cut": lambda shard: os.truncate(shard, 4),
    "gone": lambda shard: shard.unlink(),
    "no manifest": lambda shard: (shard.parent / "manifest.json").unlink(),
    "torn manifest": lambda shard: (shard.parent / "manifest.json").write_text('{"format'),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_shard_that_is_damaged_is_made_anew(files, damage):
    whole = all_ids(two(files).train)
    for path in (files / "cache" / "corpus").glob("*/*.train.bin"):
        DAMAGE[damage](path)
    assert all_ids(two(files).train) == whole


def test_records_that_are_left_out_are_counted(files):
    with open(files / "web.jsonl", "a") as file:
        file.write('{"text": 7}\n{"text": ""}\n')
    with pytest.raises(ValueError, match="line 81: 'text' is not text but int"):
        made(files)
    found = made(files, on_bad_record="skip")
    assert (found.table[0]["bad"], found.table[0]["empty"]) == (1, 1)
    assert "1 record that cannot be read was left out" in found.description
    (files / "web.jsonl").write_text('{"text": ""}\n')
    with pytest.raises(ValueError, match="there are no documents; 1 is empty"):
        made(files)
    with pytest.raises(ValueError, match="do not fill one sequence"):
        made(files, sources={"val": {"files": f"{files}/val.jsonl"}}, val={}, sequence_length=9999)


def test_a_source_of_weight_zero_is_left_out_and_its_validation_set_stays(files, monkeypatch):
    """Also of the warning of documents that are trained on. Other weights prepare nothing."""
    json_lines(files / "val.jsonl", [*texts_of("val", 10), WEB[0]])
    val = {"far": {"files": f"{files}/val.jsonl"}, "near": {"share": 0.2}}
    mixed = made(files, sources=both(files, web=1, code=1), val=val)
    monkeypatch.setattr(shards, "write_unit", None)
    knobs = {"sources": both(files, web=0, code=1), "val": val}
    found = made(files, **knobs)
    alone = made(files, sources={"code": both(files)["code"]}, val=val)
    assert all_ids(found.train) == all_ids(alone.train)
    assert found.train_sequences(LENGTH) == alone.train_sequences(LENGTH)
    starts = [one.mixed.starts(np.arange(50), 3, True, LENGTH) for one in (found, alone)]
    assert starts[0].tolist() == starts[1].tolist()
    assert all_ids(found.val_sets["near"]) == all_ids(mixed.val_sets["near"])
    assert (found.warnings, len(mixed.warnings)) == ((), 1)
    assert found.description.endswith("; web has weight 0")
    later = [{"from_tokens": 80, "weights": {"web": 1, "code": 1}}]
    assert made(files, **knobs, stages=later).mixed.counts(20).tolist() == [5, 15]


def test_an_error_begins_a_line_below_how_far_the_preparation_is(files, monkeypatch, capsys):
    json_lines(files / "web.jsonl", ["many words " * 20_000] * 40)
    with open(files / "web.jsonl", "a") as file:
        file.write("{no json\n")
    monkeypatch.setattr("llmexp.data.progress.QUIET_S", 0.0)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    with pytest.raises(ValueError, match="line 41: no valid JSON"):
        made(files)
    printed = capsys.readouterr().err
    assert printed.count("\rpreparing") > 1
    assert "web.files, 8.8 MB in files: 440.0 kB of text, " in printed
    assert printed.endswith("\n")


def test_how_far_a_preparation_is_counts_what_is_encoded_not_what_is_read_ahead(
    tmp_path, monkeypatch
):
    text = "many words " * 400_000
    (tmp_path / "a.txt").write_text(text)
    json_lines(tmp_path / "b.jsonl", [text[:200_000]] * 20)
    said: list[tuple[int, int]] = []
    write = ProgressBar.add

    def note(bar: ProgressBar, n_bytes: int, read: int) -> None:
        write(bar, n_bytes, read)
        said.append((bar._text, bar._read))

    monkeypatch.setattr(ProgressBar, "add", note)
    for name, size in (("a.txt", 4_400_000), ("b.jsonl", 4_000_000)):
        said.clear()
        made(tmp_path, sources={"web": {"files": f"{tmp_path}/{name}"}}, val={})
        assert said[-1][0] == size
        assert said[-1][1] == (tmp_path / name).stat().st_size  # in the end all is read
        for done, read in said:
            assert abs(read - done) <= 1 << 20  # two blocks


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
