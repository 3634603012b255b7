"""Windows against a plain reference: which rows, where they are cut, what is masked, and what a
resume sees."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llmexp.data import sampler
from llmexp.data.order import sequence_index
from llmexp.data.sampler import RankSlice, Sampler, eval_batches, read_windows
from llmexp.data.stream import TokenStream
from llmexp.data.window import Window
from llmexp.models.operands import IGNORE_INDEX
from tests.conftest import HANG_S
from tests.tools import needs_cuda, wait_for

LENGTH = 5


def _ids(n_sequences: int) -> np.ndarray:
    """Every token differs, so that a row tells where it came from."""
    return np.arange(n_sequences * LENGTH + 3, dtype=np.uint16) + 1


def _windows(
    n_sequences: int = 20,
    micro: int = 2,
    accum: int = 2,
    dp: int = 1,
    *,
    rank: int = 0,
    start_step: int = 0,
    max_steps: int = 4,
    digest: bool = True,
    pin_memory: bool = False,
    prefetch: int = 2,
    **changed: Any,
) -> Iterator[Window]:
    stream = TokenStream([_ids(n_sequences)])
    order = replace(Sampler(stream, LENGTH, micro * accum * dp, 10**6, seed=3), **changed)
    return read_windows(
        order,
        RankSlice(micro, rank, dp),
        start_step,
        max_steps,
        digest=digest,
        pin_memory=pin_memory,
        prefetch=prefetch,
    )


def _real_rows(window: Window) -> list[tuple[list[int], list[int]]]:
    rows = []
    for tokens_bt, targets_bt in window.micro_batches:
        for tokens, targets in zip(tokens_bt.tolist(), targets_bt.tolist(), strict=True):
            if tokens != [0] * LENGTH:
                rows.append((tokens, targets))
            else:
                assert targets == [IGNORE_INDEX] * LENGTH
    return rows


@settings(max_examples=40)
@given(
    n=st.integers(1, 30),
    micro=st.integers(1, 3),
    accum=st.integers(1, 3),
    dp=st.integers(1, 3),
    steps=st.integers(1, 4),
    tail=st.integers(0, 100),
    shuffle=st.booleans(),
    start=st.integers(0, 3),
)
def test_windows_hold_the_runs_sequences_in_order_however_they_are_cut(
    n: int, micro: int, accum: int, dp: int, steps: int, tail: int, shuffle: bool, start: int
) -> None:
    real = micro * accum * dp
    total = steps * real - tail % real
    start = min(start, steps)
    options: dict[str, Any] = {
        "max_steps": steps,
        "total_sequences": total,
        "shuffle": shuffle,
        "start_step": start,
    }
    ranks = [list(_windows(n, micro, accum, dp, rank=r, **options)) for r in range(dp)]
    whole = list(_windows(n, real, 1, 1, **options))
    ids = _ids(n).tolist()
    for i, step in enumerate(range(start, steps)):
        order = sequence_index(
            3, np.arange(step * real, min(total, (step + 1) * real)), n, shuffle
        ).tolist()
        expected = [
            (ids[j * LENGTH : (j + 1) * LENGTH], ids[j * LENGTH + 1 : (j + 1) * LENGTH + 1])
            for j in order
        ]
        windows = [rank[i] for rank in ranks]
        assert [w.step for w in windows] == [step] * dp
        assert [row for w in windows for row in _real_rows(w)] == expected
        assert sum(w.target_count for w in windows) == len(expected) * LENGTH
        most = min(micro * accum, len(expected))
        assert [len(w.micro_batches) for w in windows] == [-(-most // micro)] * dp
        for w in windows:
            assert len(_real_rows(w)) <= micro * accum
            for pair in w.micro_batches:
                assert all(t.shape == (micro, LENGTH) and t.dtype == torch.int64 for t in pair)
                assert all(t.is_contiguous() for t in pair)
        assert sum(w.digest for w in windows) % 2**63 == whole[i].digest


def test_the_order_is_the_same_across_blocks_of_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many windows are read at a time; a start in the middle of a block, or single windows, see the
    same."""
    options: dict[str, Any] = {
        "n_sequences": 700,
        "micro": 8,
        "accum": 8,
        "max_steps": 150,
        "total_sequences": 149 * 64 + 5,
    }
    monkeypatch.setattr(sampler, "_BLOCK_TOKENS", 7 * 64 * LENGTH)
    digests = [w.digest for w in _windows(**options)]
    assert len(set(digests)) == 150
    assert [w.digest for w in _windows(start_step=77, **options)] == digests[77:]
    monkeypatch.setattr(sampler, "_BLOCK_TOKENS", 1)
    assert [w.digest for w in _windows(**options)] == digests


def test_a_digest_sees_tokens_and_places() -> None:
    a = next(_windows(shuffle=False)).digest
    assert a != next(_windows(seed=4)).digest
    assert a != next(_windows(shuffle=False, start_step=1)).digest
    assert next(_windows(digest=False)).digest == 0
    # The same two rows in the other order: 2 sequences, windows 0 of an even and an odd
    # permutation.
    seeds = {}
    for seed in range(20):
        window = next(_windows(2, 2, 1, seed=seed, max_steps=1))
        seeds[str(_real_rows(window))] = window.digest
    assert len(seeds) == len(set(seeds.values())) == 2


def test_ignored_ids_are_masked_as_targets_only() -> None:
    plain, masked = (
        next(_windows(shuffle=False)),
        next(_windows(shuffle=False, mask=sampler.TargetMask(7))),
    )
    assert masked.target_count == plain.target_count - 1
    for (tokens, targets), (tokens_m, targets_m) in zip(
        plain.micro_batches, masked.micro_batches, strict=True
    ):
        assert torch.equal(tokens, tokens_m)
        assert torch.equal(targets_m, torch.where(targets == 7, IGNORE_INDEX, targets))


@pytest.mark.parametrize("dp", [1, 2, 3, 5])
@pytest.mark.parametrize("wanted", [1, 4, 7, 100])
def test_evaluation_sees_each_sequence_once(dp: int, wanted: int) -> None:
    n, ids = 9, _ids(9).tolist()
    stream = TokenStream([_ids(n)])
    seen, counts = [], []
    for rank in range(dp):
        batches = list(
            eval_batches(
                stream,
                RankSlice(2, rank, dp),
                sequence_length=LENGTH,
                max_sequences=wanted,
                mask=sampler.TargetMask(),
            )
        )
        counts.append(len(batches))
        seen += _real_rows(Window(0, [batch[1:] for batch in batches], 0, 0))
        assert all(tokens.shape == targets.shape == (2, LENGTH) for _, tokens, targets in batches)
        assert all(
            stream.read(int(start), LENGTH).tolist() == row
            for starts, tokens, targets in batches
            for start, row, there in zip(starts, tokens.tolist(), targets.tolist(), strict=True)
            if there[0] != IGNORE_INDEX
        )
    total = min(n, wanted)
    spread = [i * n // total for i in range(total)]
    assert len(set(spread)) == total
    assert seen == [
        (ids[j * LENGTH : (j + 1) * LENGTH], ids[j * LENGTH + 1 : (j + 1) * LENGTH + 1])
        for j in spread
    ]
    assert len(set(counts)) == 1


def _reader_threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name == "llmexp-reader"]


def _wait_for_no_thread() -> None:
    wait_for(lambda: not _reader_threads())


@pytest.mark.parametrize(("prefetch", "taken"), [(1, 1), (1, 4), (2, 3), (5, 1), (5, 4)])
def test_the_thread_ends_with_the_iterator(prefetch: int, taken: int) -> None:
    windows = _windows(max_steps=10**6, prefetch=prefetch)
    for _ in range(taken):
        next(windows)
    assert len(_reader_threads()) == 1
    windows.close()  # type: ignore[attr-defined]
    _wait_for_no_thread()
    windows = _windows(max_steps=10**6, prefetch=prefetch)
    next(windows)
    del windows
    gc.collect()
    _wait_for_no_thread()


@pytest.fixture
def _single_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """One window per reading, as it is for windows of a usual size."""
    monkeypatch.setattr(sampler, "_BLOCK_TOKENS", 1)


@pytest.mark.usefixtures("_single_windows")
def test_the_thread_reads_ahead_and_no_further(monkeypatch: pytest.MonkeyPatch) -> None:
    read = []
    gather = TokenStream.gather
    monkeypatch.setattr(TokenStream, "gather", lambda *args: read.append(1) or gather(*args))
    windows = _windows(max_steps=100, prefetch=3)
    next(windows)
    wait_for(lambda: len(read) >= 4)
    time.sleep(0.05)
    assert len(read) == 4  # one taken, three ready
    assert [w.step for w in windows] == list(range(1, 100))
    _wait_for_no_thread()


@pytest.mark.usefixtures("_single_windows")
def test_an_error_of_the_thread_arrives_with_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    windows = _windows(max_steps=50)
    next(windows)
    monkeypatch.setattr(TokenStream, "gather", _broken)
    with pytest.raises(RuntimeError, match="the disk is gone") as caught:
        list(windows)
    assert "_broken" in "".join(traceback.format_exception(caught.value))
    _wait_for_no_thread()


def _broken(self: TokenStream, starts: np.ndarray, count: int) -> np.ndarray:
    raise RuntimeError("the disk is gone")


def test_a_process_may_end_in_the_middle() -> None:
    """With the thread busy: an abort here would turn a good run into a failed one."""
    program = f"""
import sys
sys.path.insert(0, {str(Path(__file__).resolve().parents[2])!r})
import numpy as np
from llmexp.data.sampler import RankSlice, Sampler, read_windows
from llmexp.data.stream import TokenStream
stream = TokenStream([np.zeros(1_000_000, np.uint16)])
windows = read_windows(
    Sampler(stream, 64, 512, 10**12, seed=0), RankSlice(1), 0, 10**6, prefetch=100
)
next(windows)
"""
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=HANG_S
    )
    assert (ended.returncode, ended.stderr) == (0, "")


@pytest.mark.gpu
@needs_cuda
def test_pinned_windows_hold_the_same_rows() -> None:
    plain, pinned = list(_windows()), list(_windows(pin_memory=True))
    for a, b in zip(plain, pinned, strict=True):
        assert a.digest == b.digest
        for pair_a, pair_b in zip(a.micro_batches, b.micro_batches, strict=True):
            for x, y in zip(pair_a, pair_b, strict=True):
                assert y.is_pinned()
                assert torch.equal(x, y.to("cuda", non_blocking=True).cpu())
