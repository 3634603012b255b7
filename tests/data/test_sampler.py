"""Windows against a plain reference: which rows, where they are cut, what is masked, and what a
resume sees."""

import gc
import hashlib
import os
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from dataclasses import replace
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
from tests.conftest import HANG_S, ROOT
from tests.tools import needs_cuda, wait_for

LENGTH = 5


def _ids(n_sequences: int) -> np.ndarray:
    """Every token differs, so that a row tells where it came from."""
    return np.arange(n_sequences * LENGTH + 3, dtype=np.uint16) + 1


def mark(tokens_rs: np.ndarray, first_row: int) -> int:
    """Add up what tells each row and its place."""
    rows = [f"{place} {row.tolist()}".encode() for place, row in enumerate(tokens_rs, first_row)]
    return sum(int.from_bytes(hashlib.sha256(row).digest()[:8], "big") for row in rows) % 2**63


READING = {"start_step": 0, "max_steps": 4, "mark": mark, "pin_memory": False, "prefetch": 2}


def _windows(
    n: int = 20, micro: int = 2, accum: int = 2, dp: int = 1, *, rank: int = 0, **changed: Any
) -> Iterator[Window]:
    reading = {key: changed.pop(key, usual) for key, usual in READING.items()}
    first = Sampler(TokenStream([_ids(n)]), LENGTH, micro * accum * dp, 10**6, seed=3)
    return read_windows(replace(first, **changed), RankSlice(micro, rank, dp), **reading)


def _rows(ids: list[int], order: list[int]) -> list[tuple[list[int], list[int]]]:
    """Return the inputs and targets of these sequences."""
    starts = [j * LENGTH for j in order]
    return [(ids[at : at + LENGTH], ids[at + 1 : at + LENGTH + 1]) for at in starts]


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
    n=st.integers(1, 30), shape=st.tuples(*[st.integers(1, 3)] * 3), steps=st.integers(1, 4),
    tail=st.integers(0, 100), shuffle=st.booleans(), start=st.integers(0, 3),
)  # fmt: skip
def test_windows_hold_the_runs_sequences_in_order_however_they_are_cut(
    n, shape, steps, tail, shuffle, start
):
    micro, accum, dp = shape
    real = micro * accum * dp
    total = steps * real - tail % real
    start = min(start, steps)
    options = {"max_steps": steps, "total_sequences": total, "shuffle": shuffle}
    options["start_step"] = start
    ranks = [list(_windows(n, micro, accum, dp, rank=r, **options)) for r in range(dp)]
    whole = list(_windows(n, real, 1, 1, **options))
    ids = _ids(n).tolist()
    for i, step in enumerate(range(start, steps)):
        places = np.arange(step * real, min(total, (step + 1) * real))
        expected = _rows(ids, sequence_index(3, places, n, shuffle).tolist())
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
        assert sum(w.mark for w in windows) % 2**63 == whole[i].mark


def test_the_order_is_the_same_across_blocks_of_windows(monkeypatch):
    """Many windows are read at a time; a start in the middle of a block, or single windows, see the
    same."""
    sizes = {"n": 700, "micro": 8, "accum": 8}
    options: dict[str, Any] = {**sizes, "max_steps": 150, "total_sequences": 149 * 64 + 5}
    monkeypatch.setattr(sampler, "_BLOCK_TOKENS", 7 * 64 * LENGTH)
    digests = [w.mark for w in _windows(**options)]
    assert len(set(digests)) == 150
    assert [w.mark for w in _windows(start_step=77, **options)] == digests[77:]
    monkeypatch.setattr(sampler, "_BLOCK_TOKENS", 1)
    assert [w.mark for w in _windows(**options)] == digests


@pytest.mark.parametrize("wanted", [1, 4, 7, 100])
def test_evaluation_sees_each_sequence_once(wanted: int) -> None:
    stream, ids = TokenStream([_ids(9)]), _ids(9).tolist()
    knobs = {"sequence_length": LENGTH, "max_sequences": wanted, "mask": sampler.TargetMask()}
    total = min(9, wanted)
    spread = [i * 9 // total for i in range(total)]
    assert len(set(spread)) == total
    for dp in (1, 2, 3, 5):
        ranks = [list(eval_batches(stream, RankSlice(2, r, dp), **knobs)) for r in range(dp)]
        assert len({len(batches) for batches in ranks}) == 1
        seen = [Window(0, [batch[1:] for batch in batches], 0, 0) for batches in ranks]
        assert [row for one in seen for row in _real_rows(one)] == _rows(ids, spread)
        for starts, tokens, targets in (batch for batches in ranks for batch in batches):
            assert tokens.shape == targets.shape == (2, LENGTH)
            for start, row, there in zip(starts, tokens.tolist(), targets.tolist(), strict=True):
                if there[0] != IGNORE_INDEX:
                    assert stream.read(int(start), LENGTH).tolist() == row


def _readers() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name == "llmexp-reader"]


def test_the_thread_ends_with_the_iterator():
    for prefetch, taken in ((1, 1), (1, 4), (2, 3), (5, 1), (5, 4)):
        for close in (True, False):
            windows = _windows(max_steps=10**6, prefetch=prefetch)
            for _ in range(taken):
                next(windows)
            assert len(_readers()) == 1
            if close:
                windows.close()  # type: ignore[attr-defined]
            del windows
            gc.collect()
            wait_for(lambda: not _readers())


def test_the_thread_reads_ahead_and_no_further(monkeypatch):
    monkeypatch.setattr(sampler, "_BLOCK_TOKENS", 1)  # as for windows of a usual size
    read = []
    gather = TokenStream.gather
    monkeypatch.setattr(TokenStream, "gather", lambda *args: read.append(1) or gather(*args))
    windows = _windows(max_steps=100, prefetch=3)
    next(windows)
    wait_for(lambda: len(read) >= 4)
    time.sleep(0.05)
    assert len(read) == 4  # one taken, three ready
    assert [w.step for w in windows] == list(range(1, 100))
    wait_for(lambda: not _readers())


def test_an_error_of_the_thread_arrives_with_its_traceback(monkeypatch):
    def broken(self: TokenStream, starts: np.ndarray, count: int) -> np.ndarray:
        raise RuntimeError("the disk is gone")

    monkeypatch.setattr(sampler, "_BLOCK_TOKENS", 1)
    windows = _windows(max_steps=50)
    next(windows)
    monkeypatch.setattr(TokenStream, "gather", broken)
    with pytest.raises(RuntimeError, match="the disk is gone") as caught:
        list(windows)
    assert "in broken" in "".join(traceback.format_exception(caught.value))
    wait_for(lambda: not _readers())


def test_a_process_may_end_in_the_middle() -> None:
    """With the thread busy: an abort here would turn a good run into a failed one."""
    program = """
import numpy as np
from llmexp.data.sampler import RankSlice, Sampler, read_windows
from llmexp.data.stream import TokenStream
stream = TokenStream([np.zeros(1_000_000, np.uint16)])
windows = read_windows(
    Sampler(stream, 64, 512, 10**12, seed=0), RankSlice(1), 0, 10**6, prefetch=100
)
next(windows)
"""
    command, env = [sys.executable, "-c", program], {**os.environ, "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S, env=env)
    assert (ended.returncode, ended.stderr) == (0, "")


@pytest.mark.gpu
@needs_cuda
def test_pinned_windows_hold_the_same_rows() -> None:
    plain, pinned = list(_windows()), list(_windows(pin_memory=True))
    for a, b in zip(plain, pinned, strict=True):
        assert a.mark == b.mark
        for pair_a, pair_b in zip(a.micro_batches, b.micro_batches, strict=True):
            for x, y in zip(pair_a, pair_b, strict=True):
                assert y.is_pinned()
                assert torch.equal(x, y.to("cuda", non_blocking=True).cpu())
