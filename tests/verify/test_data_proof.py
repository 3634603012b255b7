"""`llmexp verify data`: what it passes, and that it fails for each planted fault."""

import hashlib
import itertools
import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmexp import __main__
from llmexp.data import order, sampler
from llmexp.data.stream import Corpus, Shard, TokenStream
from llmexp.verify import data as proof
from llmexp.verify import reference
from tests.conftest import TINY, llmexp

END = 59
LONG_AGO = 10**18


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder with a cache of its own, which the proof runs in."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LLMEXP_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("LLMEXP_ALLOW", "")
    return tmp_path


numbers = itertools.count()
Found = tuple[int, dict[str, dict[str, Any]]]


def verify(*overrides: str) -> Found:
    """Run the proof in this process: its exit code, and what its record says by check."""
    record = Path(f"proof{next(numbers)}", "verify.json")
    code = __main__.run(["verify", "data", *TINY, f"hydra.run.dir={record.parent}", *overrides])
    checks = json.loads(record.read_text())["checks"]
    return code, {c["what"]: c for c in checks}


def failures(found: Found) -> list[str]:
    code, checks = found
    failed = [name for name, check in checks.items() if check["passed"] is False]
    assert code == (1 if failed else 0)
    return failed


def save(path: str, ids: Any, kind: Any = np.uint16) -> Path:
    np.save(path, np.asarray(ids, kind))
    os.utime(path, ns=(LONG_AGO, LONG_AGO))
    return Path(path).absolute()


def some_ids(n: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, END, n)


TOKENS = ["data=tokens", "data.train_files=train.npy", "data.val_files=val.npy"]


# PASS


def test_honest_data_pass_on_the_command_line(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    rng = np.random.default_rng(0)
    for i in range(40):
        text = "".join(map(chr, rng.integers(97, 123, rng.integers(1, 900))))
        (tmp_path / f"docs/{i:02}.txt").write_text(text)
    overrides = ["data=text", "data.train_files=docs/*.txt", "data.ignore_id=101"]
    overrides += ["train.max_epochs=3", "train.max_steps=null", "hydra.run.dir=proof"]
    cache = tmp_path / "cache"
    result = llmexp("verify", "data", *TINY, *overrides, cwd=tmp_path, LLMEXP_CACHE_DIR=str(cache))
    assert (result.code, result.err) == (0, "")
    record = result.json("verify.json")
    assert record["passed"] is True
    assert [c["passed"] for c in record["checks"]] == [True] * 8
    files = sorted(cache.glob("corpus/*/*.bin"))
    lines = (tmp_path / "proof/sha256.txt").read_text().splitlines()
    assert dict(reversed(line.split("  ")) for line in lines) == {
        str(file): hashlib.sha256(file.read_bytes()).hexdigest() for file in files
    }
    assert all(f"{file.stat().st_size // 2:,} ids" in result.out for file in files)


def test_a_corpus_in_memory_and_several_ranks_pass(here: Path) -> None:
    batch = ["batch.micro_batch_size=3", "batch.gradient_accumulation_steps=2"]
    two = ["parallelism=ddp", "parallelism.nproc_per_node=2"]
    code, checks = verify("data=synthetic", "data.n_tokens=5000", *two, *batch)
    assert code == 0
    (windows,) = (
        c for name, c in checks.items() if name.startswith("batches, in layout 3 x 2 x 2")
    )
    assert "[s x 12, (s + 1) x 12)" in windows["what"]
    assert windows["found"].startswith("0 of ")


# FAIL: ids out of range


@pytest.fixture
def blind(monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk whose files look the same whatever is in them: all notes in the cache are believed."""
    monkeypatch.setattr("llmexp.data.cache.file_state", lambda _: (1, 2, 3, 4))
    monkeypatch.setattr("llmexp.data.cache.sampled", lambda _: "")


@pytest.mark.usefixtures("blind")
def test_an_id_out_of_range_behind_a_stale_note_fails(here: Path) -> None:
    """The proof reads the ids itself."""
    ids = some_ids(3000)
    path = save("train.npy", ids)
    save("val.npy", some_ids(300, 1))
    overrides = [*TOKENS, "model.vocab_size=257"]
    assert failures(verify(*overrides)) == []
    assert list(here.glob("cache/notes/ids-*"))
    ids[1234] = 257
    save("train.npy", ids)
    assert __main__.run(["plan", *TINY, *overrides]) == 0  # nobody else has noticed
    found = verify(*overrides)
    (name,) = failures(found)
    assert name == f"token ids of {path} in range"
    assert found[1][name]["note"].startswith("id 257 at position 1,234 ")
    assert found[1][name]["found"] == f"3,000 ids from {min(ids)} to 257"
    assert found[1][name]["limit"] == "0 to 256"


@pytest.mark.usefixtures("blind")
@pytest.mark.parametrize("changed", ["a", "v"])
@pytest.mark.parametrize(
    ("data", "keys"),
    [
        (
            ["data=text", "data.train_files=[a.txt,b.txt]", "data.val_files=v.txt"],
            {"a": "train_files", "v": "val_files"},
        ),
        (
            ["data=corpus", "data.sources.a={files: a.txt, weight: 1}", "data.val.v.files=v.txt"],
            {"a": "sources.a", "v": "val.v"},
        ),
    ],
    ids=["text", "corpus"],
)
def test_shards_of_another_text_behind_a_stale_note_fail(
    here: Path, changed: str, data: list[str], keys: dict[str, str]
) -> None:
    for name in ("a", "b", "v"):
        Path(f"{name}.txt").write_text(name * 4000)
    assert failures(verify(*data)) == []
    Path(f"{changed}.txt").write_text("x" * 4000)
    (name,) = failures(verify(*data))
    assert name.endswith("was prepared from the files of today")
    assert keys[changed] in name


OWN = """
import numpy as np
from llmexp.data.stream import Corpus, TokenStream
def corpus(vocab_size, bad, at):
    train = np.arange(4000, dtype=np.int32) % 50
    train[at] = bad
    return Corpus(TokenStream([train]), None, "mine")
"""


@pytest.mark.parametrize(("bad", "at"), [(-1, 0), (320, 3999), (2**31 - 1, 2000)])
def test_an_id_out_of_range_from_a_users_own_function_fails(
    here: Path, monkeypatch: pytest.MonkeyPatch, bad: int, at: int
) -> None:
    (here / "owndata.py").write_text(OWN)
    monkeypatch.syspath_prepend(here)
    own = ["data=synthetic", "data._target_=owndata.corpus", f"+data.bad={bad}", f"+data.at={at}"]
    knobs = ("pattern", "n_tokens", "n_ids", "val_ratio", "seed")
    found = verify("--allow", "owndata", *own, *(f"~data.{name}" for name in knobs))
    (name,) = failures(found)
    assert name == "token ids of array 1 in memory in range"
    assert found[1][name]["note"].startswith(f"id {bad} at position {at:,} ")


def test_both_parts_of_one_map_are_read(tmp_path: Path) -> None:
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
def test_the_scan_agrees_with_a_look_at_each_id(ids: list[int], kind: Any, stride: int) -> None:
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


# FAIL: files that are not what was written


def test_a_flipped_bit_in_a_prepared_shard_fails(here: Path) -> None:
    """Where the sampled digest, which each start looks at, does not see it: 500,000 tokens, 16
    samples of 16,384."""
    rng = np.random.default_rng(0)
    Path("a.txt").write_bytes(bytes(rng.integers(97, 123, 500_000).astype(np.uint8)))
    overrides = ["data=text", "data.train_files=a.txt", "data.val_ratio=0"]
    assert failures(verify(*overrides)) == []
    (shard,) = here.glob("cache/corpus/*/*.train.bin")
    at = 2 * (16_384 + 7_000)  # the second sample starts at (500,000 - 16,384) / 15 = token 32,241
    content = bytearray(shard.read_bytes())
    content[at] ^= 1
    shard.write_bytes(content)
    found = verify(*overrides)
    assert failures(found) == [f"sha256 of {shard} as it was written"]
    assert shard.read_bytes() == content  # it was not prepared anew


def test_a_shard_without_a_recorded_digest_is_not_called_proven(here: Path) -> None:
    Path("a.txt").write_text("".join(map(chr, 97 + some_ids(3000) % 26)))
    overrides = ["data=text", "data.train_files=a.txt"]
    verify(*overrides)
    (chunk,) = here.glob("cache/corpus/*/*-*.json")
    told = json.loads(chunk.read_text())
    for split in told["shards"].values():
        del split["sha256"]
    chunk.write_text(json.dumps(told))
    _, checks = verify(*overrides)
    assert checks["other files are what was written"]["passed"] is None
    assert not any(name.startswith("sha256 of") for name in checks)


@pytest.mark.usefixtures("blind")
def test_of_many_files_those_that_fail_are_named(here: Path) -> None:
    for i in range(30):
        save(f"train{i:02}.npy", some_ids(100, i))
    overrides = ["data=tokens", "data.train_files=train*.npy", "model.vocab_size=257"]
    code, checks = verify(*overrides)
    assert code == 0
    assert checks["token ids of all others in range"]["found"] == 30
    save("train07.npy", [*some_ids(99), 300])
    found = verify(*overrides)  # behind a note that all is fine
    assert failures(found) == [f"token ids of {here / 'train07.npy'} in range"]
    assert found[1]["token ids of all others in range"]["found"] == 29
    bad = [proof.Check(f"file {i}", False, i) for i in range(30)]
    assert proof._few(bad, "all others") == bad  # and no line that none of them passes


# FAIL: the order


def duplicating(seed: int, k: np.ndarray, n: int, shuffle: bool) -> np.ndarray:
    index = order.sequence_index(seed, k, n, shuffle)
    return np.where(index == 3, 4, index)


def shifted(seed: int, k: np.ndarray, *rest: Any) -> np.ndarray:
    return order.sequence_index(seed, np.asarray(k) + 1, *rest)


def other_seed(seed: int, *rest: Any) -> np.ndarray:
    return order.sequence_index(seed + 1, *rest)


SYNTHETIC = ["data=synthetic", "data.n_tokens=5000", "train.max_steps=30"]
EPOCHS = [f"sequences that epoch {epoch} visits, each once" for epoch in (0, 1)]


def test_an_order_that_visits_a_sequence_twice_fails(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (proof, reference, sampler):
        monkeypatch.setattr(module, "sequence_index", duplicating)
    found = verify(*SYNTHETIC)
    assert failures(found) == EPOCHS
    check = found[1][EPOCHS[0]]
    assert check["limit"] - check["found"] == 1
    assert "sequence 3 " in check["note"]


def masking(tokens: np.ndarray, *rest: Any) -> Any:
    batches, counts = MICRO_BATCHES(tokens, *rest)
    batches[0][0][1][0, 5] = sampler.IGNORE_INDEX
    return batches, counts


def overfilling(order: sampler.Sampler, *rest: Any) -> Any:
    """As a reader that fills up the short last window with sequences that the run does not have."""
    return READ_WINDOWS(replace(order, total_sequences=10**6), *rest)


MICRO_BATCHES, READ_WINDOWS = sampler._micro_batches, sampler.read_windows
TAIL = ["train.max_steps=null", "train.max_epochs=1.5", "batch.micro_batch_size=7"]


@pytest.mark.parametrize(
    ("place", "name", "wrong", "more"),
    [
        (sampler, "sequence_index", shifted, []),
        (sampler, "sequence_index", other_seed, []),
        (sampler, "_micro_batches", masking, []),
        (proof, "read_windows", overfilling, TAIL),
    ],
    ids=["shifted", "another seed", "masked", "tail"],
)
def test_a_reader_that_gives_something_else_fails(
    here: Path, monkeypatch: pytest.MonkeyPatch, place: Any, name: str, wrong: Any, more: list[str]
) -> None:
    assert failures(verify(*SYNTHETIC, *more)) == []
    monkeypatch.setattr(place, name, wrong)
    (failed,) = failures(verify(*SYNTHETIC, *more))
    assert failed.startswith("batches, in layout")


@pytest.mark.parametrize(
    ("change", "note"),
    [(os.utime, ""), (lambda path: os.truncate(path, 1000), "was truncated from")],
)
def test_a_file_that_changes_meanwhile_fails(
    here: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Path], None], note: str
) -> None:
    """What was looked at before is in the record too."""
    path = save("train.npy", some_ids(3000))
    save("val.npy", some_ids(300, 1))
    check_order = proof.check_order
    monkeypatch.setattr(proof, "check_order", lambda parts: (change(path), check_order(parts))[1])
    found = verify(*TOKENS)
    (name,) = failures(found)
    assert name == "the files did not change meanwhile"
    assert note in found[1][name]["note"]
    assert found[1][f"token ids of {path} in range"]["passed"] is True


def test_paths_from_the_environment_stay_out_of_the_record(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MY_CORPUS", "folder-of-mine")
    (here / "folder-of-mine").mkdir()
    save("folder-of-mine/train.npy", some_ids(3000))
    files = "${oc.env:MY_CORPUS}/train.npy"
    verify("data=tokens", f"data.train_files={files}")
    # it is wrapped
    assert f"{files} in range" in " ".join(capsys.readouterr().out.split())
    written = [*here.glob("proof*/*")]
    assert written
    for file in written:
        assert "folder-of-mine" not in file.read_text(), file


# documents of corpora


def write_documents(name: str, texts: list[str]) -> None:
    Path(name).write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


@pytest.fixture
def sources(here: Path) -> list[str]:
    write_documents("web.jsonl", [f"web {i} has words" for i in range(60)])
    write_documents("code.jsonl", [f"code {i} = {i}" for i in range(40)] + ["code 3 = 3"])
    write_documents("val.jsonl", [f"val {i} has words" for i in range(30)])
    return [
        "data=corpus", "tokenizer=bytes", "data.sources.web.files=web.jsonl",
        "data.sources.code.files=code.jsonl", "data.val.far.files=val.jsonl",
        "data.val.near.share=0.2",
    ]  # fmt: skip


def test_documents_are_counted_by_source_and_copies_are_named(sources: list[str]) -> None:
    found = verify(*sources)
    assert failures(found) == []
    checks = found[1]
    split = ("source web", "source code", "validation set near")
    assert sum(int(checks[f"documents of the {name}"]["found"]) for name in split) == 101
    assert checks["documents of the validation set far"]["found"] == "30"
    notes = [checks[name]["note"] for name in checks if name.startswith("documents of the")]
    assert notes.count("exact copies among them: 1") == 1
    pairs = [check for name, check in checks.items() if name.startswith("documents in both")]
    assert [(check["found"], check["limit"]) for check in pairs] == [(0, 0)] * 3
    assert any(name.startswith("sequences of the source web") for name in checks)


def test_a_document_in_two_sets_fails(sources: list[str]) -> None:
    with open("val.jsonl", "a") as file:
        file.write(json.dumps({"text": "web 7 has words"}) + "\n")
    found = verify(*sources)
    (failed,) = failures(found)
    assert failed in ("documents in both train and far", "documents in both far and near")
    note = found[1][failed]["note"]
    assert "data.sources.web.files=web.jsonl, line 8" in note
    assert "data.val.far.files=val.jsonl, line 31" in note


def test_documents_that_do_not_fill_their_shard_fail(sources: list[str]) -> None:
    verify(*sources)
    path = next(p for p in Path("cache").rglob("*.train.ends") if p.stat().st_size)
    ends = np.fromfile(path, "<u8")
    ends[1] = ends[0]
    ends.tofile(path)
    (failed,) = failures(verify(*sources))
    assert failed.startswith("documents of the")
