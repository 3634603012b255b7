"""data=corpus: ids against other libraries, shards that do not depend on who wrote them, shares of
documents; tests/refusals/data.yaml has what is refused."""

import functools
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
from llmexp.data.tokenizers.base import as_tokenizer
from llmexp.data.tokenizers.bytes import byte_level
from llmexp.data.tokenizers.files import from_file
from llmexp.data.tokenizers.training import train_bpe
from llmexp.data.work import Source
from tests.conftest import ROOT
from tests.faults.helpers import small_disk

from .common import all_ids, json_lines, made, texts_of, token_corpus, tree

pytestmark = pytest.mark.skipif(find_spec("datasets") is None, reason="datasets is not installed")
tokenizers = pytest.importorskip("tokenizers")

LENGTH = 8
WEB, CODE, VAL = texts_of("web", 80), texts_of("code", 40), texts_of("val", 10)
BYTES = byte_level()


@pytest.fixture
def files(tmp_path) -> Path:
    json_lines(tmp_path / "web.jsonl", WEB)
    json_lines(tmp_path / "code.jsonl.gz", CODE, "body")
    json_lines(tmp_path / "val.jsonl", VAL)
    return tmp_path


def both(folder: Path, **weights: float) -> dict[str, Any]:
    """Return the section of the two sources, with their weights."""
    web = {"files": f"{folder}/web.jsonl"}
    code = {"files": f"{folder}/code.jsonl.gz", "text_key": "body"}
    found = {"web": web, "code": code}
    return {n: found[n] | ({"weight": weights[n]} if weights else {}) for n in found}


def two(folder: Path, **changes: Any):
    return made(folder, **{"sources": both(folder), **changes})


DAMAGE = {
    "flipped": lambda shard: shard.write_bytes(shard.read_bytes()[:-3] + b"abc"),
    "cut": lambda shard: os.truncate(shard, 4),
    "gone": lambda shard: shard.unlink(),
    "no manifest": lambda shard: (shard.parent / "manifest.json").unlink(),
    "torn manifest": lambda shard: (shard.parent / "manifest.json").write_text('{"format'),
}


def test_sources_lie_one_after_the_other_and_damaged_shards_are_made_anew(files, monkeypatch):
    """Each document with its end. What cannot be read now is not taken for damaged."""
    cache = files / "cache/corpus"
    found = two(files)
    wanted = [i for text in WEB + CODE for i in [*text.encode(), 256]]
    assert all_ids(found.train) == wanted
    assert all_ids(found.val)[:5] == [*b"val 0"]
    row = found.table[1]
    assert (row["source"], row["documents"], row["files"]) == ("code", 40, 1)
    assert row["bytes_per_token"] == pytest.approx(1 - 40 / row["tokens"])
    before = tree(cache)
    for what, damage in DAMAGE.items():
        for path in cache.glob("*/*.train.bin"):
            damage(path)
        assert all_ids(two(files).train) == wanted, what
        assert tree(cache) == before, what

    def too_many(*arguments: Any, **more: Any) -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr("mmap.mmap", too_many)
    with pytest.raises((ValueError, OSError), match="Too many open files"):
        two(files)
    assert tree(cache) == before


@functools.cache
def bpe() -> str:
    words = ["so many words, so little time " * 9, "Grüße, 你好 \U0001f600"]
    return train_bpe(words, 300, "gpt2").tokenizer_json


@settings(max_examples=25)
@example(["<|endoftext|>"])
@given(st.lists(st.text(), min_size=1, max_size=30))
def test_ids_are_those_of_datasets_and_tokenizers(tmp_path_factory, datasets, texts):
    folder = tmp_path_factory.mktemp("other")
    (folder / "tokenizer.json").write_text(bpe())
    path = json_lines(folder / "a.jsonl", [*texts, "the end"])
    other = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    other.encode_special_tokens = True
    expected = []
    for record in datasets.Dataset.from_list([json.loads(line) for line in path.open()]):
        if record["text"]:
            ids = other.encode(record["text"], add_special_tokens=False).ids
            expected += [*ids, other.token_to_id("<|endoftext|>")]
    source = Source("web", "data.sources.web.files", files=(str(path),))
    whole = work.work_of(source, from_file(str(folder), None, None), RemoteCache(folder / "out"))
    whole.folder.mkdir(parents=True)
    shards.write_unit(whole, 0, lambda chunk: True, lambda done, counts: None)
    assert np.fromfile(whole.folder / "00000-00000.train.bin", "<u2").tolist() == expected


def test_a_folder_of_datasets_and_an_address_are_read_like_files(files, datasets):
    table = datasets.Dataset.from_dict({"body": WEB})
    datasets.DatasetDict({"train": table}).save_to_disk(str(files / "saved"))
    web = {"hf": f"{files}/saved", "text_key": "body"}
    kinds = [{"files": f"{files}/web.jsonl"}, web, {"files": f"file://{files}/we*.jsonl"}]
    here, saved, there = (made(files, sources={"web": kind}) for kind in kinds)
    assert all_ids(here.train) == all_ids(saved.train) == all_ids(there.train)
    assert [one.table[0]["hf"] for one in (here, saved)] == [None, f"{files}/saved"]
    for val, words in (
        ({"hf": web["hf"], "split": "validation"}, "no split validation; the splits are: train"),
        ({"hf": f"{files}/./saved"}, r"is in data\.sources\.web\.hf too"),
    ):
        with pytest.raises(ValueError, match=words):
            made(files, sources={"web": web}, val={"v": val})


def test_shards_are_equal_whoever_writes_them(files, monkeypatch):
    """By any number of threads, in jobs of any size, and in parts: of one unit a source, and of
    several. A part that ran twice has nothing left to do."""
    monkeypatch.setattr(shards, "CHUNK_BYTES", 700)
    monkeypatch.setattr(work, "UNIT_BYTES", 2000)
    for n in range(6):
        json_lines(files / f"more{n}.jsonl", texts_of(f"more {n}", 10 * n + 1))
    names = {"web": "web", "more": "more*"}
    sources = {name: {"files": f"{files}/{glob}.jsonl"} for name, glob in names.items()}
    val = {"near": {"share": 0.2}, "far": {"files": f"{files}/val.jsonl"}}
    chosen: dict[str, Any] = {"sources": sources, "val": val}
    made(files, **chosen, cache_dir=f"{files}/whole")
    whole = tree(files / "whole/corpus")
    n_written = len([name for name in whole if name.endswith(".json")])
    for cores, size in ((1, 9), (3, 90)):
        with monkeypatch.context() as patch:
            patch.setattr(encode, "cpu_count", lambda n=cores: n)
            patch.setattr(shards, "JOB_BYTES", size)
            made(files, **chosen, cache_dir=f"{files}/{cores}")
        assert tree(files / f"{cores}/corpus") == whole
    written: list[Path] = []
    write = shards.commit_json
    monkeypatch.setattr(shards, "commit_json", lambda *a: (written.append(a[0]), write(*a)))
    knobs = {"val_main": None, "stages": [], "max_epochs": None, "cache_dir": None}
    for of in (1, 8):
        remote = RemoteCache(files / f"of {of}")
        some = corpus(**chosen, on_bad_record="refuse", **knobs).documents(remote)
        works = pickle.loads(pickle.dumps(work.works_of(some, BYTES, remote)))
        written.clear()
        for number in range(1, of + 1):
            prepare_part(works, work.Part(number, of), remote.cache)
        before = len(written)
        prepare_part(works, work.Part(1, of), remote.cache)
        assert len(written) == before > 15
        made(files, **chosen, cache_dir=str(remote.cache))
        assert len(written) == len({*written}) == n_written
        assert tree(remote.cache / "corpus") == whole


@given(
    st.lists(st.integers(1, 10**12), min_size=1, max_size=9), st.integers(1, 40), st.integers(0, 99)
)
def test_every_chunk_is_in_one_part(sizes, of, chunk):
    """And each part gets its share of one large file."""
    total, start = sum(sizes), 0
    parts = [work.Part(number, of) for number in range(1, of + 1)]
    for size in sizes:
        (has,) = [part for part in parts if part.has(start, size, total, chunk)]
        assert has.meets(start, size, total)
        start += size
    counts = [sum(part.has(0, 9, 9, chunk) for chunk in range(4 * of)) for part in parts]
    assert max(counts) - min(counts) <= 2


def test_shards_are_token_files_of_their_tokenizer_and_may_be_many(files, monkeypatch):
    """More than are open by default: each is a map, which keeps its file open, and those of the
    sources before count, too. What may not be opened is refused and stays: it took hours."""
    monkeypatch.setattr(shards, "CHUNK_BYTES", 1)
    monkeypatch.setattr("llmexp.data.files.OTHER_FILES", 20)
    names = ("one", "two", "three")
    for name in names:
        json_lines(files / f"{name}.jsonl", [f"{name} {i}" for i in range(40)])
    chosen = {name: {"files": str(files / f"{name}.jsonl")} for name in names}
    # Its ids are all in the vocabulary of the other one.
    swapped = {token: 255 - rank for token, rank in BYTES._mergeable_ranks.items()}
    special = {"special_tokens": BYTES._special_tokens}
    other = tiktoken.Encoding("other", pat_str=".", mergeable_ranks=swapped, **special)
    bins = str(files / "cache/corpus/*/00000-000[0-3]?.train.bin")
    knobs: dict[str, Any] = {"dtype": "uint16", "cache_dir": f"{files}/notes"}
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    least = len(os.listdir("/dev/fd")) + 66
    resource.setrlimit(resource.RLIMIT_NOFILE, (least, before[1]))
    try:
        for again in (False, True):  # at the end of the preparation, and from the cache
            with monkeypatch.context() as narrow:
                narrow.setattr(resource, "getrlimit", lambda _: (least, least))
                with pytest.raises(ValueError, match="token files are more than this process"):
                    made(files, sources=chosen, val={})
                if again:
                    with pytest.raises(ValueError, match="token files are more than this process"):
                        token_corpus(bins, **knobs)
            assert len([*files.rglob("*.bin")]) >= 40
        found = made(files, sources=chosen, val={}).train
        assert len(found.shards) == 120
        again = token_corpus(bins, **knobs, tokenizer=BYTES)
        assert len(again.train) + len(again.val) == len(found)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    with pytest.raises(ValueError, match=r"made by the tokenizer bytes .* and other .* is another"):
        token_corpus(
            bins, **knobs, tokenizer=as_tokenizer(other)
        )  # their ids may all be in its vocabulary


# Slowly, so that a kill meets it at work.
PREPARE = """
import sys, time
from pathlib import Path
from llmexp.data import shards
from tests.data.common import made
shards.CHUNK_BYTES, shards.JOB_BYTES, write = 200, 50, shards.commit_json
def slow(path, value):
    time.sleep(0.02)
    write(path, value)
shards.commit_json = slow
names = {name: {"files": f"{sys.argv[1]}/{name}.jsonl"} for name in ("web", "val")}
print(len(made(Path(sys.argv[1]), val={}, cache_dir=sys.argv[2], sources=names).train))
"""


def test_what_was_killed_goes_on_in_several_processes_at_once(files, monkeypatch):
    """Killed by the system while two sources are written, at any time: after a few chunks."""
    monkeypatch.setattr(shards, "CHUNK_BYTES", 200)
    sources = {name: {"files": f"{files}/{name}.jsonl"} for name in ("web", "val")}
    whole = made(files, sources=sources, val={}, cache_dir=f"{files}/whole").train
    cut = files / "cut/corpus"
    command = [sys.executable, "-c", PREPARE, str(files), str(cut.parent)]
    knobs: dict[str, Any] = {"text": True, "env": {**os.environ, "PYTHONPATH": str(ROOT)}}

    def preparing() -> subprocess.Popen[str]:
        return subprocess.Popen(command, stdout=subprocess.PIPE, **knobs)

    last = len([*(files / "whole/corpus").rglob("*-*.json")]) - 2
    for chunks in (1, 9, last):
        several = [preparing() for _ in range(1 + (chunks == 1))]
        while None in [one.poll() for one in several] and len([*cut.glob("*/*-*.json")]) < chunks:
            time.sleep(0.002)
        for process in several:
            process.kill()
            assert process.wait() == -9
        assert len([*cut.glob("*/manifest.json")]) == (chunks == last)
    several = [preparing() for _ in range(3)]
    assert [process.communicate()[0] for process in several] == [f"{len(whole)}\n"] * 3
    assert [process.returncode for process in several] == [0] * 3
    assert tree(cut) == tree(files / "whole/corpus")


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


def test_documents_in_training_and_validation_are_a_warning(files, monkeypatch):
    """Counted once from the digests. Copies inside a source are one document that is trained
    on."""
    copies = [WEB[0], WEB[7], CODE[3], WEB[0]]
    json_lines(files / "val.jsonl", [*VAL, *copies])
    json_lines(files / "web.jsonl", [*WEB, WEB[0], CODE[3]])
    monkeypatch.setattr(shards, "CHUNK_BYTES", 700)
    (text,) = two(files).warnings
    assert "4 of its 14 are trained on, as documents of web 4;" in text
    for path in (files / "cache" / "corpus").glob("*/*.digests"):
        path.unlink()  # they are read once
    assert two(files).warnings == (text,)
    shutil.rmtree(files / "cache")
    source = Source("", "", shares=(("near", 0.2),))
    digests = [hashlib.blake2b(text.encode(), digest_size=16).digest() for text in copies]
    trained = sum(source.split_of(digest) == "train" for digest in digests)
    val = {"near": {"share": 0.2}, "far": {"files": f"{files}/val.jsonl"}}
    assert f"{trained} of its 14 are trained on" in two(files, val=val).warnings[0]
    json_lines(files / "val.jsonl", VAL)
    assert not two(files).warnings


def test_a_share_is_of_documents_and_none_moves(files):
    small = two(files, val={"near": {"share": 0.1}})
    large = two(files, val={"near": {"share": 0.3}, "other": {"share": 0.1}})

    def split(stream) -> set[bytes]:
        return set(bytes(min(i, 255) for i in all_ids(stream)).split(b"\xff")) - {b""}

    assert split(small.val) < split(large.val)
    assert split(large.train) < split(small.train)
    every = [split(large.train), split(large.val), split(large.val_sets["other"])]
    assert set.union(*every) == {text.encode() for text in WEB + CODE}
    assert sum(map(len, every)) == 120


def test_records_that_are_left_out_are_counted(files):
    with open(files / "web.jsonl", "a") as file:
        file.write('{"text": 7}\n{"text": ""}\n')
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
    json_lines(files / "val.jsonl", [*VAL, WEB[0]])
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


def test_how_far_a_preparation_is_counts_what_is_encoded(tmp_path, monkeypatch, capsys):
    """Not what is read ahead; an error begins a line below it."""
    monkeypatch.setattr("llmexp.data.progress.QUIET_S", 0.0)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
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
        assert said[-1] == (size, (tmp_path / name).stat().st_size)  # in the end all is read
        for done, read in said:
            assert abs(read - done) <= 1 << 20  # two blocks
    with open(tmp_path / "b.jsonl", "a") as file:
        file.write("{no json\n")
    capsys.readouterr()
    with pytest.raises(ValueError, match="line 21: no valid JSON"):
        made(tmp_path, sources={"web": {"files": f"{tmp_path}/b.jsonl"}}, val={})
    printed = capsys.readouterr().err
    assert printed.count("\rpreparing") > 1
    assert "web.files, 4.0 MB in files: 400.0 kB of text, " in printed
    assert printed.endswith("\n")
