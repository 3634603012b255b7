"""`llmexp verify data`: what it passes, and that it fails for each planted fault."""

import hashlib
import itertools
import json
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmexp.__main__ import run
from llmexp.data import order, sampler
from llmexp.data.stream import Corpus, Shard, TokenStream
from llmexp.verify import data as proof
from llmexp.verify import reference
from tests.conftest import TINY, llmexp

LONG_AGO = 10**18
TOKENS = ["data=tokens", "data.train_files=train*.npy"]
numbers = itertools.count()


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty folder with a cache of its own, which the proof runs in."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LLMEXP_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("LLMEXP_ALLOW", "")
    return tmp_path


@pytest.fixture
def blind(monkeypatch):
    """A disk whose files look the same whatever is in them: all notes in the cache are believed."""
    monkeypatch.setattr("llmexp.data.cache.file_state", lambda _: (1, 2, 3, 4))
    monkeypatch.setattr("llmexp.data.cache.sampled", lambda _: "")


def verify(*overrides: str) -> tuple[list[str], dict[str, dict]]:
    """Run the proof in this process: which checks failed, and all of its record by their names."""
    folder = Path(f"proof{next(numbers)}")
    code = run(["verify", "data", *TINY, f"hydra.run.dir={folder}", *overrides])
    checks = {c["what"]: c for c in json.loads((folder / "verify.json").read_text())["checks"]}
    failed = [name for name, check in checks.items() if check["passed"] is False]
    assert code == bool(failed)
    return failed, checks


def save(path: str, ids) -> Path:
    np.save(path, np.asarray(ids, np.uint16))
    os.utime(path, ns=(LONG_AGO, LONG_AGO))
    return Path(path).absolute()


def some_ids(n: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 59, n)


def test_prepared_texts(here):
    """Honest files on the command line; then a bit is flipped where the sampled digest, which each
    start looks at, does not see it: 500,000 tokens, 16 samples of 16,384."""
    Path("docs").mkdir()
    rng = np.random.default_rng(0)
    for i, size in enumerate([500_000, *rng.integers(1, 900, 39)]):
        Path(f"docs/{i:02}.txt").write_bytes(rng.integers(97, 123, size).astype(np.uint8))
    overrides = ["data=text", "data.train_files=docs/*.txt", "data.ignore_id=101"]
    overrides += ["train.max_epochs=3", "train.max_steps=null"]
    words = [*TINY, *overrides, "hydra.run.dir=proof"]
    result = llmexp("verify", "data", *words, cwd=here, LLMEXP_CACHE_DIR=str(here / "cache"))
    assert (result.code, result.err) == (0, "")
    record = result.json("verify.json")
    assert record["passed"] is True
    assert [c["passed"] for c in record["checks"]] == [True] * 8
    files = sorted(here.glob("cache/corpus/*/*.bin"))
    lines = Path("proof/sha256.txt").read_text().splitlines()
    assert dict(reversed(line.split("  ")) for line in lines) == {
        str(file): hashlib.sha256(file.read_bytes()).hexdigest() for file in files
    }
    assert all(f"{file.stat().st_size // 2:,} ids" in result.out for file in files)

    shard = max(files, key=lambda file: file.stat().st_size)
    content = bytearray(shard.read_bytes())
    content[2 * (16_384 + 7_000)] ^= 1  # the second sample starts near token 32,000
    shard.write_bytes(content)
    assert verify(*overrides)[0] == [f"sha256 of {shard} as it was written"]
    assert shard.read_bytes() == content  # it was not prepared anew

    # a shard whose digest was never noted is not called proven
    for chunk in here.glob("cache/corpus/*/*-*.json"):
        told = json.loads(chunk.read_text())
        for split in told["shards"].values():
            del split["sha256"]
        chunk.write_text(json.dumps(told))
    failed, checks = verify(*overrides)
    assert failed == []
    assert checks["other files are what was written"]["passed"] is None
    assert not any(name.startswith("sha256 of") for name in checks)


@pytest.mark.usefixtures("blind")
def test_an_id_out_of_range_behind_a_stale_note_fails(here):
    """Of thirty files it is named: the proof reads the ids itself, and nobody else has noticed."""
    for i in range(30):
        save(f"train{i:02}.npy", some_ids(100, i))
    overrides = [*TOKENS, "model.vocab_size=257"]
    failed, checks = verify(*overrides)
    assert (failed, checks["token ids of all others in range"]["found"]) == ([], 30)
    assert list(here.glob("cache/notes/ids-*"))
    ids = some_ids(100)
    ids[34] = 257
    path = save("train07.npy", ids)
    assert run(["plan", *TINY, *overrides]) == 0
    failed, checks = verify(*overrides)
    assert failed == [f"token ids of {path} in range"]
    check = checks[failed[0]]
    assert check["note"].startswith("id 257 at position 34 ")
    assert (check["found"], check["limit"]) == (f"100 ids from {min(ids)} to 257", "0 to 256")
    assert checks["token ids of all others in range"]["found"] == 29
    bad = [proof.Check(f"file {i}", False, i) for i in range(30)]
    assert proof._few(bad, "all others") == bad  # and no line that none of them passes


@pytest.mark.usefixtures("blind")
@pytest.mark.parametrize(
    ("changed", "key", "data"),
    [
        ("a", "train_files", "data=text data.train_files=[a.txt,b.txt] data.val_files=v.txt"),
        ("v", "val_files", "data=text data.train_files=[a.txt,b.txt] data.val_files=v.txt"),
        ("a", "sources.a", "data=corpus data.sources.a.files=a.txt data.val.v.files=v.txt"),
        ("v", "val.v", "data=corpus data.sources.a.files=a.txt data.val.v.files=v.txt"),
    ],
)
def test_shards_of_another_text_behind_a_stale_note_fail(here, changed, key, data):
    for name in "abv":
        Path(f"{name}.txt").write_text(name * 4000)
    assert verify(*data.split())[0] == []
    Path(f"{changed}.txt").write_text("x" * 4000)
    (name,) = verify(*data.split())[0]
    assert name.endswith("was prepared from the files of today")
    assert key in name


OWN = """
import numpy as np
from llmexp.data.stream import Corpus, TokenStream
def corpus(vocab_size, bad, at):
    train = np.arange(4000, dtype=np.int32) % 50
    train[at] = bad
    return Corpus(TokenStream([train]), None, "mine")
"""


@pytest.mark.parametrize(("bad", "at"), [(-1, 0), (320, 3999), (2**31 - 1, 2000)])
def test_an_id_out_of_range_from_a_users_own_function_fails(here, monkeypatch, bad, at):
    (here / "owndata.py").write_text(OWN)
    monkeypatch.syspath_prepend(here)
    own = ["data=synthetic", "data._target_=owndata.corpus", f"+data.bad={bad}", f"+data.at={at}"]
    knobs = ("pattern", "n_tokens", "n_ids", "val_ratio", "seed")
    failed, checks = verify("--allow", "owndata", *own, *(f"~data.{name}" for name in knobs))
    assert failed == ["token ids of array 1 in memory in range"]
    assert checks[failed[0]]["note"].startswith(f"id {bad} at position {at:,} ")


def test_both_parts_of_one_map_are_read(tmp_path):
    """As a function of the user's may return them; neither digest is that of the file."""
    ids = some_ids(1000)
    ids[10] = 300
    mapped = np.load(save(str(tmp_path / "ids.npy"), ids), mmap_mode="r")
    corpus = Corpus(TokenStream([mapped[:900]]), TokenStream([mapped[900:]]), "mine")
    checks = proof.check_shards(corpus.shards(), 100, tmp_path)
    assert [(c.found, c.passed) for c in checks] == [
        (f"900 ids from {ids[:900].min()} to 300", False),
        (f"100 ids from {ids[900:].min()} to {ids[900:].max()}", True),
    ]
    assert not (tmp_path / "sha256.txt").exists()


@settings(max_examples=60)
@given(
    ids=st.lists(st.integers(-3, 12), min_size=1, max_size=60),
    kind=st.sampled_from([np.int8, np.int32, np.int64, np.uint16, np.uint64]),
    stride=st.sampled_from([1, 2]),
)
def test_the_scan_agrees_with_a_look_at_each_id(ids, kind, stride):
    stored = np.array(ids).astype(kind)
    array = np.repeat(stored, stride)[::stride]  # a view with holes has the same ids
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(proof, "_BLOCK_BYTES", 32)
        found = proof.scan(Shard("an array", array, array), 10)
    values = [int(i) for i in stored]
    bad = [i for i, value in enumerate(values) if not 0 <= value < 10]
    assert found.first_bad == (bad[0] if bad else None)
    assert (found.smallest, found.largest) == (min(values), max(values))
    assert found.sha256 == hashlib.sha256(stored.tobytes()).hexdigest()


MICRO_BATCHES, READ_WINDOWS = sampler._micro_batches, sampler.read_windows


def duplicating(seed, k, n, shuffle):
    index = order.sequence_index(seed, k, n, shuffle)
    return np.where(index == 3, 4, index)


def masking(tokens, *rest):
    batches, counts = MICRO_BATCHES(tokens, *rest)
    batches[0][0][1][0, 5] = sampler.IGNORE_INDEX
    return batches, counts


def overfilling(order, *rest):
    """As a reader that fills up the short last window with sequences that the run does not have."""
    return READ_WINDOWS(replace(order, total_sequences=10**6), *rest)


def test_the_order_and_readers_that_give_something_else(here, monkeypatch):
    plain = ["data=synthetic", "data.n_tokens=5000", "train.max_steps=30"]
    tail = ["train.max_steps=null", "train.max_epochs=1.5", "batch.micro_batch_size=7"]
    two = ["parallelism=ddp", "parallelism.nproc_per_node=2"]
    batch = ["batch.micro_batch_size=3", "batch.gradient_accumulation_steps=2"]
    assert verify(*plain)[0] == verify(*plain, *tail)[0] == []
    failed, checks = verify(*plain, *two, *batch)
    assert failed == []
    (layout,) = (c for name, c in checks.items() if name.startswith("batches, in layout 3 x 2 x 2"))
    assert "[s x 12, (s + 1) x 12)" in layout["what"]
    assert layout["found"].startswith("0 of ")

    with monkeypatch.context() as patch:
        for module in (proof, reference, sampler):
            patch.setattr(module, "sequence_index", duplicating)
        failed, checks = verify(*plain)
    assert failed == [f"sequences that epoch {epoch} visits, each once" for epoch in (0, 1)]
    assert checks[failed[0]]["limit"] - checks[failed[0]]["found"] == 1
    assert "sequence 3 " in checks[failed[0]]["note"]

    def shifted(seed, k, *rest):
        return order.sequence_index(seed, np.asarray(k) + 1, *rest)

    def other_seed(seed, *rest):
        return order.sequence_index(seed + 1, *rest)

    for module, name, wrong, more in (
        (sampler, "sequence_index", shifted, []),
        (sampler, "sequence_index", other_seed, []),
        (sampler, "_micro_batches", masking, []),
        (proof, "read_windows", overfilling, tail),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, wrong)
            (failure,) = verify(*plain, *more)[0]
        assert failure.startswith("batches, in layout"), wrong


@pytest.mark.parametrize(
    ("change", "note"),
    [(os.utime, ""), (lambda path: os.truncate(path, 1000), "was truncated from")],
)
def test_a_file_that_changes_meanwhile_fails(here, monkeypatch, change, note):
    """What was looked at before is in the record too."""
    path = save("train.npy", some_ids(3000))
    check_order = proof.check_order
    monkeypatch.setattr(proof, "check_order", lambda parts: (change(path), check_order(parts))[1])
    failed, checks = verify(*TOKENS)
    assert failed == ["the files did not change meanwhile"]
    assert note in checks[failed[0]]["note"]
    assert checks[f"token ids of {path} in range"]["passed"] is True


def test_paths_from_the_environment_stay_out_of_the_record(here, monkeypatch, capsys):
    monkeypatch.setenv("MY_CORPUS", "folder-of-mine")
    (here / "folder-of-mine").mkdir()
    save("folder-of-mine/train.npy", some_ids(3000))
    files = "${oc.env:MY_CORPUS}/train.npy"
    verify("data=tokens", f"data.train_files={files}")
    assert f"{files} in range" in " ".join(capsys.readouterr().out.split())  # it is wrapped
    written = [*here.glob("proof*/*")]
    assert written
    for file in written:
        assert "folder-of-mine" not in file.read_text(), file


def test_documents_are_counted_and_those_in_two_sets_named(here):
    texts = {
        "web": [f"web {i} has words" for i in range(60)],
        "code": [f"code {i} = {i}" for i in range(40)] + ["code 3 = 3"],
        "val": [f"val {i} has words" for i in range(30)],
    }
    for name, documents in texts.items():
        lines = "".join(json.dumps({"text": text}) + "\n" for text in documents)
        Path(f"{name}.jsonl").write_text(lines)
    sources = ["data=corpus", "tokenizer=bytes", "data.val.far.files=val.jsonl"]
    sources += [f"data.sources.{name}.files={name}.jsonl" for name in ("web", "code")]
    sources += ["data.val.near.share=0.2"]
    failed, checks = verify(*sources)
    assert failed == []
    split = ("source web", "source code", "validation set near")
    assert sum(int(checks[f"documents of the {name}"]["found"]) for name in split) == 101
    assert checks["documents of the validation set far"]["found"] == "30"
    notes = [checks[name]["note"] for name in checks if name.startswith("documents of the")]
    assert notes.count("exact copies among them: 1") == 1
    pairs = [check for name, check in checks.items() if name.startswith("documents in both")]
    assert [(check["found"], check["limit"]) for check in pairs] == [(0, 0)] * 3
    assert any(name.startswith("sequences of the source web") for name in checks)

    # documents that do not fill their shard
    path = next(p for p in Path("cache").rglob("*.train.ends") if p.stat().st_size)
    ends = np.fromfile(path, "<u8")
    honest, ends[1] = ends.copy(), ends[0]
    ends.tofile(path)
    (failure,) = verify(*sources)[0]
    assert failure.startswith("documents of the")
    honest.tofile(path)

    with open("val.jsonl", "a") as file:
        file.write(json.dumps({"text": "web 7 has words"}) + "\n")
    failed, checks = verify(*sources)
    (failure,) = failed
    assert failure in ("documents in both train and far", "documents in both far and near")
    assert "data.sources.web.files=web.jsonl, line 8" in checks[failure]["note"]
    assert "data.val.far.files=val.jsonl, line 31" in checks[failure]["note"]
