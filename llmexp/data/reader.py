"""From a token stream to the windows that a rank trains on, read ahead by a thread.

Dimensions: b rows of a micro-batch, t positions, n windows, r rows of this rank in a window, s
tokens of a row (t + 1).
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from queue import Empty, SimpleQueue

import numpy as np
import torch
from torch import Tensor

from llmexp.data.order import sequence_index
from llmexp.data.stream import TokenStream

MASKED = -100  # cross_entropy's ignore_index
# Small windows are made many at a time: the thread holds the interpreter lock for some microseconds
# per call of numpy or torch, and waits for it after each, so calls are what the training loop pays
# for.
_BLOCK_TOKENS = 1 << 17


@dataclass(frozen=True)
class Window:
    """The micro-batches of one optimizer step on one rank."""

    step: int  # 0-based
    micro_batches: list[
        tuple[Tensor, Tensor]
    ]  # (tokens_bt, targets_bt) int64; rows that are missing are masked
    target_count: int  # valid targets of this rank
    # of this rank's rows; the sum over ranks mod 2**63 does not depend on the cut; 0 if not asked
    # for
    digest: int


def read_windows(
    stream: TokenStream,
    *,
    sequence_length: int,
    real_batch_size: int,
    micro_batch_size: int,
    gradient_accumulation_steps: int,
    rank: int,
    dp_size: int,
    seed: int,
    shuffle: bool,
    ignore_id: int | None,
    start_step: int,
    max_steps: int,
    total_sequences: int,
    digest: bool,
    pin_memory: bool,
    prefetch: int = 2,
) -> Iterator[Window]:
    """Yield this rank's windows [start_step, max_steps).

    Window s holds the run's sequences [s*R, (s+1)*R), R = real_batch_size, as far as there are
    total_sequences; this rank takes rows [rank*R/dp_size, (rank+1)*R/dp_size) of it. Sequence i is
    the tokens [i*T, i*T + T], T = sequence_length. All ranks have equally many micro-batches.
    `prefetch` windows are read ahead; an error of the reading thread is raised here, and closing
    the iterator ends the thread.
    """
    if real_batch_size != micro_batch_size * gradient_accumulation_steps * dp_size:
        raise ValueError(
            f"batch.real_batch_size={real_batch_size}: must be micro_batch_size {micro_batch_size} "
            f"x gradient_accumulation_steps {gradient_accumulation_steps} x dp_size {dp_size}"
        )
    n = stream.n_sequences(sequence_length)
    if n < 1:
        raise ValueError(
            f"batch.sequence_length={sequence_length}: {len(stream)} tokens do not fill one "
            "sequence"
        )
    rows_per_rank = real_batch_size // dp_size

    full_windows = total_sequences // real_batch_size

    def windows() -> Iterator[Window]:
        step = start_step
        while step < max_steps:
            if step < full_windows:
                count = max(1, _BLOCK_TOKENS // (rows_per_rank * sequence_length))
                count = min(count, full_windows - step, max_steps - step)
                rows = most = rows_per_rank
            else:  # the tail window; rank 0 has the most rows
                count, most = 1, min(rows_per_rank, total_sequences - step * real_batch_size)
                rows = max(
                    0,
                    min(
                        rows_per_rank,
                        total_sequences - step * real_batch_size - rank * rows_per_rank,
                    ),
                )
            first_row = rank * rows_per_rank
            k_nr = (
                (step + np.arange(count)[:, None]) * real_batch_size + first_row + np.arange(rows)
            )
            starts = sequence_index(seed, k_nr.ravel(), n, shuffle) * sequence_length
            tokens_nrs = stream.gather(starts, sequence_length + 1).reshape(
                count, rows, sequence_length + 1
            )
            micro_steps = max(1, -(-most // micro_batch_size))
            batches, target_counts = _micro_batches(
                tokens_nrs, micro_steps, micro_batch_size, ignore_id, pin_memory
            )
            for i in range(count):
                digested = _digest(tokens_nrs[i], first_row) if digest else 0
                yield Window(step + i, batches[i], target_counts[i], digested)
            step += count

    return _read_ahead(windows(), prefetch, torch.cuda.current_device() if pin_memory else None)


def eval_batches(
    stream: TokenStream,
    *,
    sequence_length: int,
    micro_batch_size: int,
    max_sequences: int,
    ignore_id: int | None,
    rank: int,
    dp_size: int,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (tokens_bt, targets_bt) of this rank's part of `max_sequences` sequences, spread evenly
    over the stream.

    All ranks have equally many batches; rows that are missing are masked.
    """
    there = stream.n_sequences(sequence_length)
    total = min(max_sequences, there)
    per_rank = -(-total // dp_size)
    stop = min(total, (rank + 1) * per_rank)
    for i in range(-(-per_rank // micro_batch_size)):
        first = rank * per_rank + i * micro_batch_size
        index = np.arange(first, max(first, min(first + micro_batch_size, stop)), dtype=np.int64)
        tokens_rs = stream.gather(
            index * there // max(1, total) * sequence_length, sequence_length + 1
        )
        yield _micro_batches(tokens_rs[None], 1, micro_batch_size, ignore_id, False)[0][0][0]


def _micro_batches(
    tokens_nrs: np.ndarray,
    micro_steps: int,
    micro_batch_size: int,
    ignore_id: int | None,
    pin_memory: bool,
) -> tuple[list[list[tuple[Tensor, Tensor]]], list[int]]:
    """Per window its micro-batches and the number of their valid targets.

    Filled through numpy: torch would start a team of threads of its own for the copies of this
    thread.
    """
    windows, rows, length = tokens_nrs.shape[0], tokens_nrs.shape[1], tokens_nrs.shape[2] - 1
    shape = (windows, micro_steps * micro_batch_size, length)
    tokens, targets = (
        torch.empty(shape, dtype=torch.int64, pin_memory=pin_memory) for _ in range(2)
    )
    filled_tokens, filled_targets = tokens.numpy(), targets.numpy()
    filled_tokens[:, :rows], filled_tokens[:, rows:] = tokens_nrs[..., :-1], 0
    filled_targets[:, :rows], filled_targets[:, rows:] = tokens_nrs[..., 1:], MASKED
    valid = np.full(windows, rows * length)
    if ignore_id is not None:
        ignored = filled_targets == ignore_id
        filled_targets[ignored] = MASKED
        valid -= ignored.sum((1, 2))
    pairs = list(
        zip(
            *(t.view(-1, micro_batch_size, length).unbind() for t in (tokens, targets)), strict=True
        )
    )
    return [pairs[i * micro_steps : (i + 1) * micro_steps] for i in range(windows)], valid.tolist()


def _digest(tokens_rs: np.ndarray, first_row: int) -> int:
    """Return the sum of the rows' blake2b digests (8 bytes), each over the row's place in the
    window and its ids."""
    rows, width = tokens_rs.shape
    message = np.empty((rows, width + 1), "<u4")
    message[:, 0], message[:, 1:] = np.arange(first_row, first_row + rows), tokens_rs
    digests = [hashlib.blake2b(row, digest_size=8).digest() for row in message]
    return sum(int.from_bytes(digest, "little") for digest in digests) % 2**63


def _read_ahead(
    windows: Iterator[Window], prefetch: int, cuda_device: int | None
) -> Iterator[Window]:
    """Yield the same windows, produced by a daemon thread that lives as long as this generator.

    Two SimpleQueues, because taking from one that is not empty never lets go of the interpreter
    lock: with a bounded Queue the thread would take the lock in the middle of `next` and make the
    loop wait for a whole window.
    """
    ready: SimpleQueue[Window | BaseException | None] = SimpleQueue()
    room: SimpleQueue[bool] = (
        SimpleQueue()
    )  # a True for each window that may be produced; False ends the thread
    for _ in range(max(1, prefetch)):
        room.put(True)
    thread = threading.Thread(
        target=_produce, args=(windows, ready, room, cuda_device), name="llmexp-reader", daemon=True
    )

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


def _produce(
    windows: Iterator[Window],
    ready: SimpleQueue[Window | BaseException | None],
    room: SimpleQueue[bool],
    cuda_device: int | None,
) -> None:
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
