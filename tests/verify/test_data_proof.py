"""`llmexp verify data`: what it passes, and that it fails for each planted fault."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmexp import __main__
from llmexp.data import order, reader
from llmexp.data.stream import Corpus, Shard, TokenStream
from llmexp.verify import data as proof
from llmexp.verify import overlap
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


def verify(*overrides: str) -> tuple[int, dict[str, dict[str, Any]]]:
    """Runs the proof in this process: its exit code, and what its record says by check."""
    name = f"proof{next(numbers)}"
    code = __main__.run(["verify", "data", *TINY, f"hydra.run.dir={name}", *overrides])
    record = json.loads(Path(name, "verify.json").read_text()) if Path(name, "verify.json").exists() else {"checks": []}
    return code, {c["what"]: c for c in record["checks"]}


def failures(found: tuple[int, dict[str, dict[str, Any]]]) -> list[str]:
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
        (tmp_path / f"docs/{i:02}.txt").write_text(text if i % 10 else "the same licence")  # four short ones twice
    result = llmexp(
        "verify", "data", *TINY, "data=text", "data.train_files=docs/*.txt", "data.ignore_id=101", "train.max_epochs=3",
        "train.max_steps=null", "hydra.run.dir=proof", cwd=tmp_path, LLMEXP_CACHE_DIR=str(tmp_path / "cache"),
    )  # fmt: skip
    assert (result.code, result.err) == (0, "")
    record = result.json("verify.json")
    assert record["passed"] is True
    assert [c["passed"] for c in record["checks"]] == [True] * 8
    files = sorted((tmp_path / "cache/tokens").glob("*/*.bin"))
    sums = dict(reversed(line.split("  ")) for line in (tmp_path / "proof/sha256.txt").read_text().splitlines())
    assert sums == {str(f): hashlib.sha256(f.read_bytes()).hexdigest() for f in files}
    n_ids = [f"{f.stat().st_size // 2:,} ids" for f in files]
    assert all(n in result.out for n in n_ids)
    assert "PASS: data, 0 of 8 checks failed" in result.out


def test_a_corpus_in_memory_and_several_ranks_pass(here: Path) -> None:
    code, checks = verify("data=synthetic", "data.n_tokens=5000", "parallelism=ddp", "parallelism.nproc_per_node=2",
                          "batch.micro_batch_size=3", "batch.gradient_accumulation_steps=2")  # fmt: skip
    assert code == 0
    windows = next(c for name, c in checks.items() if name.startswith("windows, cut into 3 x 2 x 2 ranks"))
    assert "[s x 12, (s + 1) x 12)" in windows["what"]
    assert windows["found"].startswith("0 of ")


@pytest.mark.parametrize("flag", [["--steps", "4"], ["--shrink"]])
def test_flags_without_a_meaning_are_refused(here: Path, flag: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert __main__.run(["verify", "data", *flag, "hydra.run.dir=proof"]) == 2
    assert f"{' '.join(flag)}: has no meaning for verify data" in capsys.readouterr().err


# FAIL: ids out of range


def test_an_id_out_of_range_behind_a_stale_note_fails(here: Path) -> None:
    """The cache holds a note that the ids of a file of this size and time are fine; the proof reads them itself."""
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
    assert found[1][name]["note"].startswith("id 257 at position 1,234 is the first")
    assert found[1][name]["found"] == f"3,000 ids from {min(ids)} to 257"
    assert found[1][name]["limit"] == "0 to 256"


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
    assert failures(found) == ["token ids of array 1 in memory in range"]
    note = found[1]["token ids of array 1 in memory in range"]["note"]
    assert note.startswith(f"id {bad} at position {at:,} is the first")


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
        patch.setattr(proof, "BLOCK_BYTES", 32)
        found = proof.scan(Shard("an array", array), 10)
    values = [int(i) for i in stored]
    bad = [i for i, value in enumerate(values) if not 0 <= value < 10]
    assert found.first_bad == (bad[0] if bad else None)
    assert (found.smallest, found.largest) == (min(values), max(values))
    assert found.sha256 == hashlib.sha256(stored.tobytes()).hexdigest()


# FAIL: files that are not what was written


def test_a_flipped_bit_in_a_prepared_shard_fails(here: Path) -> None:
    """Where the sampled digest, which each start looks at, does not see it: 500,000 tokens, 16 samples of 16,384."""
    rng = np.random.default_rng(0)
    Path("a.txt").write_bytes(bytes(rng.integers(97, 123, 500_000).astype(np.uint8)))
    overrides = ["data=text", "data.train_files=a.txt", "data.val_ratio=0"]
    assert failures(verify(*overrides)) == []
    (shard,) = here.glob("cache/tokens/*/train.bin")
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
    (manifest,) = here.glob("cache/tokens/*/manifest.json")
    told = json.loads(manifest.read_text())
    for split in told["splits"].values():
        del split["sha256"]  # as older versions wrote it
    manifest.write_text(json.dumps(told))
    code, checks = verify(*overrides)
    assert code == 0
    assert checks["other files are what was written"]["passed"] is None
    assert not any(name.startswith("sha256 of") for name in checks)


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


# FAIL: overlap


def test_the_same_file_for_both_fails(here: Path) -> None:
    save("train.npy", some_ids(5000))
    found = verify("data=tokens", "data.train_files=train.npy", "data.val_files=train.npy")
    assert failures(found) == ["share of the validation tokens that train has too"]
    assert found[1]["share of the validation tokens that train has too"]["found"] == 1.0


@pytest.mark.parametrize(("repeated", "fails"), [(1, False), (30, True)])
def test_documents_in_both_fail_above_one_in_a_hundred_tokens(here: Path, repeated: int, fails: bool) -> None:
    """200 documents of about 100 letters; one of them is half a per cent, thirty are some fifteen."""
    rng = np.random.default_rng(0)
    documents = ["".join(map(chr, rng.integers(97, 123, 100))) for _ in range(400)]
    for i, text in enumerate(documents):
        folder = Path("train" if i < 200 else "val")
        folder.mkdir(exist_ok=True)
        (folder / f"{i}.txt").write_text(documents[i - 200] if 200 <= i < 200 + repeated else text)
    found = verify("data=text", "data.train_files=train/*.txt", "data.val_files=val/*.txt")
    assert failures(found) == (["share of the validation tokens that train has too"] if fails else [])
    check = found[1]["share of the validation tokens that train has too"]
    assert check["found"] == pytest.approx(repeated / 200)
    assert check["note"].startswith(f"{repeated} of 200 documents; for example the 100 tokens at ")


def split_up(ids: list[int], end: int, most: int) -> list[tuple[int, tuple[int, ...]]]:
    """(start, ids) of the parts of documents: what `pieces_of` and `check_overlap` are compared with."""
    found, document = [], 0
    while document <= len(ids):
        stop = ids.index(end, document) if end in ids[document:] else len(ids)
        found += [(at, tuple(ids[at : min(at + most, stop)])) for at in range(document, stop, most)]
        document = stop + 1
    return found


streams = st.lists(st.lists(st.integers(0, 3), max_size=12), max_size=4)


@settings(max_examples=200)
@given(
    arrays=streams,
    most=st.integers(1, 6),
    block=st.integers(1, 9),
)
def test_documents_do_not_depend_on_blocks_and_files(arrays: list[list[int]], most: int, block: int) -> None:
    stream = TokenStream([np.array(a, np.uint16) for a in arrays])
    found = list(overlap.pieces_of(stream, 0, most, block))
    pieces = [(int(s), int(n)) for p in found for s, n in zip(p.starts, p.lengths, strict=True)]
    ids = [i for a in arrays for i in a]
    expected = split_up(ids, 0, most)
    assert pieces == [(start, len(part)) for start, part in expected]
    keys = [int(k) for p in found for k in p.keys]
    of_part: dict[tuple[int, ...], int] = {}
    for (_, part), key in zip(expected, keys, strict=True):
        assert of_part.setdefault(part, key) == key  # equal documents have one key, wherever they stand


@settings(max_examples=200)
@given(train=streams, val=streams)
def test_the_share_agrees_with_a_comparison_of_all_documents(train: list[list[int]], val: list[list[int]]) -> None:
    ids = [[i for a in arrays for i in a] for arrays in (train, val)]
    if not (0 in ids[0] and 0 in ids[1]):  # one of them has no documents: the next test
        return
    sides = [TokenStream([np.array(a, np.uint16) for a in arrays]) for arrays in (train, val)]
    parts = [split_up(i, 0, overlap.DOCUMENT_TOKENS) for i in ids]
    known = {part for _, part in parts[0]}
    twice, every = (sum(len(p) for _, p in parts[1] if p in known), sum(len(p) for _, p in parts[1]))
    check = overlap.check_overlap(sides[0], sides[1], 0)
    if every == 0:
        assert check.passed is None
    else:
        assert check.found == twice / every
        assert check.passed is (twice / every <= overlap.OVERLAP_LIMIT)


def test_slices_of_a_train_text_without_ends_of_documents_are_found() -> None:
    text = np.random.default_rng(0).integers(1, 256, 20_000).astype(np.uint16)
    val = np.concatenate([[0], text[3_000:5_000], [0], text[9_001:12_000]]).astype(np.uint16)
    check = overlap.check_overlap(TokenStream([text]), TokenStream([val]), 0)
    assert check.passed is False
    assert float(check.found) > 0.5  # but for the parts that a document's end goes through


@settings(max_examples=300)
@given(train=streams, val=streams, most=st.integers(1, 8), block=st.integers(1, 20))
def test_stretches_of_train_are_found_at_every_position(
    train: list[list[int]], val: list[list[int]], most: int, block: int
) -> None:
    ids = [[i for a in arrays for i in a] for arrays in (train, val)]
    sides = [TokenStream([np.array(a, np.uint16) for a in arrays]) for arrays in (train, val)]
    if not ids[1]:
        assert overlap.check_overlap(sides[0], sides[1], None).passed is None
        return
    length = min(most, (len(ids[1]) + 1) // 2)
    there = {tuple(ids[0][at : at + length]) for at in range(0, len(ids[0]) - length + 1, length)}
    there |= {tuple(ids[0][-length:])} if len(ids[0]) >= length else set()
    starts = [at for at in range(len(ids[1]) - length + 1) if tuple(ids[1][at : at + length]) in there]
    covered = {at + i for at in starts for i in range(length)}
    share, note = overlap.stretches_in_train(sides[0], sides[1], most, block)
    assert share == len(covered) / len(ids[1])
    assert note.startswith(f"{len(covered)} of {len(ids[1])} tokens in stretches of {length}")


@settings(max_examples=50)
@given(start=st.integers(0, 2000), count=st.integers(511, 1500), before=st.integers(0, 600))
def test_nothing_that_is_long_enough_in_both_is_missed(start: int, count: int, before: int) -> None:
    text, other = (np.random.default_rng(seed).integers(1, 256, 4000).astype(np.uint16) for seed in (0, 1))
    val = np.concatenate([other[:before], text[start : start + count], other[before : before + 300]])
    share, _ = overlap.stretches_in_train(TokenStream([text]), TokenStream([val]))
    found = share * len(val)
    assert min(count, 4000 - start) - 510 <= found <= min(count, 4000 - start)
    assert found > 0 or start + 511 > 4000


def test_a_text_that_repeats_itself_is_counted_once() -> None:
    zeros = TokenStream([np.zeros(20_000, np.uint16)])
    assert overlap.stretches_in_train(zeros, zeros)[0] == 1.0


@pytest.mark.parametrize(("start", "fails"), [(1007, True), (None, False)], ids=["copied", "of its own"])
def test_a_copy_without_ends_of_documents_off_the_grid_fails(here: Path, start: int | None, fails: bool) -> None:
    """val = train[1007:6007]: it begins and ends in the middle of a stretch."""
    ids = some_ids(20_000)
    save("train.npy", ids)
    save("val.npy", some_ids(5000, 1) if start is None else ids[start : start + 5000])
    found = verify(*TOKENS)
    assert failures(found) == (["share of the validation tokens that train has too"] if fails else [])
    check = found[1]["share of the validation tokens that train has too"]
    assert check["found"] == (0.9728 if fails else 0.0)  # train[1024:5888] in stretches of 256
    example = "; for example the 256 tokens at 17 of validation and 1,024 of train" if fails else ""
    assert check["note"] == f"{'4,864' if fails else 0} of 5,000 tokens in stretches of 256{example}"


# FAIL: the order


def duplicating(seed: int, k: np.ndarray, n: int, shuffle: bool) -> np.ndarray:
    index = order.sequence_index(seed, k, n, shuffle)
    return np.where(index == 3, 4, index)


def shifted(seed: int, k: np.ndarray, n: int, shuffle: bool) -> np.ndarray:
    return order.sequence_index(seed, np.asarray(k) + 1, n, shuffle)


def other_seed(seed: int, k: np.ndarray, n: int, shuffle: bool) -> np.ndarray:
    return order.sequence_index(seed + 1, k, n, shuffle)


SYNTHETIC = ["data=synthetic", "data.n_tokens=5000", "train.max_steps=30"]
EPOCHS = [f"sequences that epoch {epoch} visits, each once" for epoch in (0, 1)]


def test_an_order_that_visits_a_sequence_twice_fails(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proof, "sequence_index", duplicating)
    monkeypatch.setattr(reader, "sequence_index", duplicating)
    found = verify(*SYNTHETIC)
    assert failures(found) == EPOCHS
    check = found[1][EPOCHS[0]]
    assert check["limit"] - check["found"] == 1
    assert "sequence 3 is the first that is missing" in check["note"]


@pytest.mark.parametrize("wrong", [shifted, other_seed], ids=["shifted", "another seed"])
def test_a_reader_with_another_order_fails(
    here: Path, monkeypatch: pytest.MonkeyPatch, wrong: Callable[..., np.ndarray]
) -> None:
    monkeypatch.setattr(reader, "sequence_index", wrong)
    (name,) = failures(verify(*SYNTHETIC))
    assert name.startswith("windows, cut into")


def test_a_reader_that_masks_what_it_should_not_fails(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    micro_batches = reader._micro_batches

    def masking(tokens: np.ndarray, *rest: Any) -> Any:
        batches, counts = micro_batches(tokens, *rest)
        batches[0][0][1][0, 5] = reader.MASKED
        return batches, counts

    monkeypatch.setattr(reader, "_micro_batches", masking)
    (name,) = failures(verify(*SYNTHETIC))
    assert name.startswith("windows, cut into")


def test_a_tail_with_rows_of_the_next_window_fails(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last window of 1.5 epochs is short; a reader that fills it up reads sequences that the run does not have."""
    real = reader.read_windows
    tail = ["data=synthetic", "data.n_tokens=5000", "train.max_steps=null", "train.max_epochs=1.5",
            "batch.micro_batch_size=7"]  # fmt: skip
    assert failures(verify(*tail)) == []
    monkeypatch.setattr(proof, "read_windows", lambda stream, **k: real(stream, **{**k, "total_sequences": 10**6}))
    (name,) = failures(verify(*tail))
    assert name.startswith("windows, cut into")


def test_a_file_that_changes_meanwhile_fails(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save("train.npy", some_ids(3000))
    save("val.npy", some_ids(300, 1))
    check_order = proof.check_order
    monkeypatch.setattr(proof, "check_order", lambda parts: (os.utime(path), check_order(parts))[1])
    assert failures(verify(*TOKENS)) == ["the files stayed as they were meanwhile"]


def test_a_file_that_is_cut_meanwhile_fails(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was looked at before is in the record too."""
    path = save("train.npy", some_ids(3000))
    save("val.npy", some_ids(300, 1))
    check_overlap = proof.check_overlap
    monkeypatch.setattr(proof, "check_overlap", lambda *args: (os.truncate(path, 1000), check_overlap(*args))[1])
    found = verify(*TOKENS)
    assert failures(found) == ["the files stayed as they were meanwhile"]
    assert "was cut from" in found[1]["the files stayed as they were meanwhile"]["note"]
    assert found[1][f"token ids of {path} in range"]["passed"] is True


def test_paths_from_the_environment_stay_out_of_the_record(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MY_CORPUS", "folder-of-mine")
    (here / "folder-of-mine").mkdir()
    save("folder-of-mine/train.npy", some_ids(3000))
    code, _ = verify("data=tokens", "data.train_files=${oc.env:MY_CORPUS}/train.npy", "hydra.run.dir=proof")
    assert code == 0
    assert "${oc.env:MY_CORPUS}/train.npy in range" in " ".join(capsys.readouterr().out.split())  # it is wrapped
    for file in Path("proof").iterdir():
        assert "folder-of-mine" not in file.read_text(), file
