"""From a token stream to the windows that a rank trains on, read ahead by a thread.

Dimensions: b rows of a micro-batch, t positions, n windows, r rows of this rank in a window, s
tokens of a row (t + 1).
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from llmexp.data.order import sequence_index
from llmexp.data.stream import TokenStream
from llmexp.data.window import Window
from llmexp.models.operands import IGNORE_INDEX

if TYPE_CHECKING:
    from llmexp.data.mixture import Mixture

# Small windows are made many at a time: the thread holds the interpreter lock for some microseconds
# per call of numpy or torch, and waits for it after each, so calls are what the training loop pays
# for.
_BLOCK_TOKENS = 1 << 17
Mark = Callable[[np.ndarray, int], int]


@dataclass(frozen=True)
class TargetMask:
    """The targets that do not count: those with an id, and those that follow a document's end."""

    ignore_id: int | None = None
    document_end: int | None = None

    def at(self, ids_nrs: np.ndarray, hidden_nrs: np.ndarray | None = None) -> np.ndarray | None:
        """Return bool (n, r, t) of the targets that do not count; None: all do.

        `hidden_nrs`: the ids that are no targets by their labels.
        """
        found = [] if hidden_nrs is None else [hidden_nrs[..., 1:]]
        if self.ignore_id is not None:
            found.append(ids_nrs[..., 1:] == self.ignore_id)
        if self.document_end is not None:
            found.append(ids_nrs[..., :-1] == self.document_end)
        return functools.reduce(np.logical_or, found) if found else None


@dataclass(frozen=True)
class Sampler:
    """The sequences of a run.

    Step s takes the positions k in [offset + s*R, offset + (s+1)*R), R = real_batch_size, as far
    as there are `total_sequences`. The order maps each k to a sequence i, the tokens
    [i*T, i*T + T], T = sequence_length.
    """

    stream: TokenStream
    sequence_length: int
    real_batch_size: int
    total_sequences: int
    seed: int
    shuffle: bool = True
    mask: TargetMask = TargetMask()
    mixed: Mixture | None = None  # where the stream holds several sources
    offset: int = 0  # sequences to add to s*R, where earlier steps had another batch; may be < 0

    def starts(self, k_nr: np.ndarray) -> np.ndarray:
        """Return int64 (n, r): the first token of each of the sequences `k_nr` of the run."""
        k, n = k_nr.ravel(), self.stream.n_sequences(self.sequence_length)
        if self.mixed is not None:
            found = self.mixed.starts(k, self.seed, self.shuffle, self.sequence_length)
        else:
            found = sequence_index(self.seed, k, n, self.shuffle) * self.sequence_length
        return found.reshape(k_nr.shape)


@dataclass(frozen=True)
class RankSlice:
    """The micro-batches of a window on a rank r: its rows [r*R/dp_size, (r+1)*R/dp_size)."""

    micro_batch_size: int
    dp_rank: int = 0
    dp_size: int = 1


def read_windows(
    sampler: Sampler,
    part: RankSlice,
    start_step: int,
    max_steps: int,
    *,
    mark: Mark | None = None,
    pin_memory: bool = False,
    prefetch: int = 2,
) -> Iterator[Window]:
    """Yield this rank's windows [start_step, max_steps).

    All ranks have equally many micro-batches. Up to `prefetch` windows wait to be taken; small ones
    are read from the files in blocks of up to 131,072 tokens. An error of the reading thread is
    raised here, and closing the iterator ends the thread. `mark`: of the ids of this rank's rows,
    and the place of the first one in the window.
    """
    windows = _windows(sampler, part, range(start_step, max_steps), mark, pin_memory)
    return _read_ahead(windows, prefetch, torch.cuda.current_device() if pin_memory else None)


def _windows(
    sampler: Sampler, part: RankSlice, steps: range, mark: Mark | None, pin_memory: bool
) -> Iterator[Window]:
    """Yield this rank's windows: which rows it takes of each, and their cut into micro-batches."""
    real, per_rank = sampler.real_batch_size, sampler.real_batch_size // part.dp_size
    first_row = part.dp_rank * per_rank
    block = max(1, _BLOCK_TOKENS // (per_rank * sampler.sequence_length))
    step, k_r = steps.start, sampler.offset + first_row + np.arange(per_rank)
    while step < steps.stop:
        left = sampler.total_sequences - sampler.offset - step * real  # sequences
        # The tail window comes alone; rank 0 has the most rows in it.
        windows_here = min(block, max(1, left // real), steps.stop - step)
        own_rows, rows_of_rank_0 = min(max(0, left - first_row), per_rank), min(left, per_rank)
        step_n = np.arange(step, step + windows_here)
        starts_nr = sampler.starts(step_n[:, None] * real + k_r)[:, :own_rows]
        tokens_nrs, masked_nrt = _read(
            sampler.stream, starts_nr, sampler.sequence_length, sampler.mask
        )
        micro_steps = max(1, -(-rows_of_rank_0 // part.micro_batch_size))
        batches, target_counts = _micro_batches(
            tokens_nrs, micro_steps, part.micro_batch_size, masked_nrt, pin_memory
        )
        for i in range(windows_here):
            marked = mark(tokens_nrs[i], first_row) if mark else 0
            yield Window(step + i, batches[i], target_counts[i], marked)
        step += windows_here


def _read(
    stream: TokenStream, starts_nr: np.ndarray, length: int, mask: TargetMask
) -> tuple[np.ndarray, np.ndarray | None]:
    """Return the ids (n, r, s) of the sequences that begin there, and what `mask` gives of them."""
    starts, shape = starts_nr.ravel(), (*starts_nr.shape, length + 1)
    ids_nrs = stream.gather(starts, length + 1).reshape(shape)
    hidden = stream.hidden(starts, length + 1)
    return ids_nrs, mask.at(ids_nrs, None if hidden is None else hidden.reshape(shape))


def eval_batches(
    stream: TokenStream,
    part: RankSlice,
    *,
    sequence_length: int,
    max_sequences: int,
    mask: TargetMask,
) -> Iterator[tuple[np.ndarray, Tensor, Tensor]]:
    """Yield (starts_b, tokens_bt, targets_bt) of this rank's part of `max_sequences` sequences.

    They are spread evenly over the stream; the inputs of row b begin there at starts_b[b]. All
    ranks have equally many batches; rows that are missing are masked, and begin at 0.
    """
    micro, there = part.micro_batch_size, stream.n_sequences(sequence_length)
    total = min(max_sequences, there)
    all_starts = np.arange(total, dtype=np.int64) * there // max(1, total) * sequence_length
    per_rank = -(-total // part.dp_size)
    begin = part.dp_rank * per_rank
    own_starts = all_starts[begin : begin + per_rank]  # the last ranks may have fewer
    for first in range(0, per_rank, micro):
        starts = own_starts[first : first + micro]
        found = _read(stream, starts[None], sequence_length, mask)
        ((tokens_bt, targets_bt),) = _micro_batches(found[0], 1, micro, found[1], False)[0][0]
        yield np.pad(starts, (0, micro - len(starts))), tokens_bt, targets_bt


def _micro_batches(
    tokens_nrs: np.ndarray,
    micro_steps: int,
    micro_batch_size: int,
    masked_nrt: np.ndarray | None,
    pin_memory: bool,
) -> tuple[list[list[tuple[Tensor, Tensor]]], list[int]]:
    """Per window its micro-batches and the number of their valid targets, which are not masked.

    Filled through numpy: torch would start a team of threads of its own for the copies of this
    thread.
    """
    windows, rows, row_tokens = tokens_nrs.shape
    length = row_tokens - 1
    shape = (windows, micro_steps * micro_batch_size, length)
    tokens, targets = (
        torch.empty(shape, dtype=torch.int64, pin_memory=pin_memory) for _ in range(2)
    )
    filled_tokens, filled_targets = tokens.numpy(), targets.numpy()
    filled_tokens[:, :rows], filled_tokens[:, rows:] = tokens_nrs[..., :-1], 0
    filled_targets[:, :rows], filled_targets[:, rows:] = tokens_nrs[..., 1:], IGNORE_INDEX
    valid = np.full(windows, rows * length)
    if masked_nrt is not None:
        filled_targets[:, :rows][masked_nrt] = IGNORE_INDEX
        valid -= masked_nrt.sum((1, 2))
    cut = (t.view(-1, micro_batch_size, length).unbind() for t in (tokens, targets))
    pairs = list(zip(*cut, strict=True))
    return [pairs[i * micro_steps : (i + 1) * micro_steps] for i in range(windows)], valid.tolist()


def _read_ahead(
    windows: Iterator[Window], prefetch: int, cuda_device: int | None
) -> Iterator[Window]:
    """Yield the same windows, produced by a daemon thread that lives as long as this generator.

    Two SimpleQueues, because taking from one that is not empty never lets go of the interpreter
    lock: with a bounded Queue the thread would take the lock in the middle of `next` and make the
    loop wait for a whole window.
    """
    ready: SimpleQueue[Window | BaseException | None] = SimpleQueue()
    # a True for each window that may be produced; False ends the thread
    room: SimpleQueue[bool] = SimpleQueue()
    for _ in range(max(1, prefetch)):
        room.put(True)

    def produce() -> None:
        try:
            if cuda_device is not None:
                # the device is per thread: pinning would start a context on device 0
                torch.cuda.set_device(cuda_device)
            while room.get():
                if (window := next(windows, None)) is None:
                    break
                ready.put(window)
            ready.put(None)
        except BaseException as error:
            ready.put(error)

    thread = threading.Thread(target=produce, name="llmexp-reader", daemon=True)

    def stop() -> None:
        while not room.empty():  # what is still allowed is not wanted any more
            with contextlib.suppress(Empty):
                room.get_nowait()
        room.put(False)
        if thread is not threading.current_thread():  # where the garbage collector may close us
            thread.join(timeout=5)

    # A thread that is inside torch while the interpreter goes down would abort the process.
    atexit.register(stop)
    thread.start()
    try:
        while (item := ready.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            room.put(True)
            yield item
    finally:
        atexit.unregister(stop)
        stop()
