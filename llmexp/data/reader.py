"""From a token stream to the windows that a rank trains on, read ahead by a thread.

Dimensions: b rows of a micro-batch, t positions, r rows of this rank in a window, s tokens of a row (t + 1).
"""

from __future__ import annotations

import hashlib
import queue
import threading
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from llmexp.data.order import sequence_index
from llmexp.data.stream import TokenStream

MASKED = -100  # cross_entropy's ignore_index
_ORDER_BLOCK = 4096  # rows whose order is computed at once: the cost of a few numpy calls is shared by many windows


@dataclass(frozen=True)
class Window:
    """The micro-batches of one optimizer step on one rank."""

    step: int  # 0-based
    micro_batches: list[tuple[Tensor, Tensor]]  # (tokens_bt, targets_bt) int64; rows that are missing are masked
    target_count: int  # valid targets of this rank
    digest: int  # of this rank's rows; the sum over ranks mod 2**63 does not depend on the cut; 0 if not asked for


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
    """This rank's windows [start_step, max_steps).

    Window s holds the run's sequences [s*R, (s+1)*R), R = real_batch_size, as far as there are total_sequences; this
    rank takes rows [rank*R/dp_size, (rank+1)*R/dp_size) of it. Sequence i is the tokens [i*T, i*T + T], T =
    sequence_length. All ranks have equally many micro-batches. `prefetch` windows are read ahead; an error of the
    reading thread is raised here, and closing the iterator ends the thread.
    """
    if real_batch_size != micro_batch_size * gradient_accumulation_steps * dp_size:
        raise ValueError(
            f"batch.real_batch_size={real_batch_size}: must be micro_batch_size {micro_batch_size} x "
            f"gradient_accumulation_steps {gradient_accumulation_steps} x dp_size {dp_size}"
        )
    n = stream.n_sequences(sequence_length)
    if n < 1:
        raise ValueError(f"batch.sequence_length={sequence_length}: {len(stream)} tokens do not fill one sequence")
    rows_per_rank = real_batch_size // dp_size

    def windows() -> Iterator[Window]:
        steps_per_block = max(1, _ORDER_BLOCK // rows_per_rank)
        for block in range(start_step, max_steps, steps_per_block):
            steps = np.arange(block, min(block + steps_per_block, max_steps), dtype=np.int64)
            first = steps * real_batch_size + rank * rows_per_rank
            order = sequence_index(seed, (first[:, None] + np.arange(rows_per_rank)).ravel(), n, shuffle)
            for step, mine in zip(steps.tolist(), order.reshape(-1, rows_per_rank), strict=True):
                in_window = min(real_batch_size, total_sequences - step * real_batch_size)
                rows = max(0, min(rows_per_rank, in_window - rank * rows_per_rank))
                most = min(rows_per_rank, in_window)  # rank 0 has the most rows
                tokens_rs = stream.gather(mine[:rows] * sequence_length, sequence_length + 1)
                pairs, target_count = _micro_batches(
                    tokens_rs, max(1, -(-most // micro_batch_size)), micro_batch_size, ignore_id, pin_memory
                )
                summed = _digest(tokens_rs, rank * rows_per_rank) if digest else 0
                yield Window(step, pairs, target_count, summed)

    return _read_ahead(windows(), prefetch, torch.cuda.current_device() if pin_memory else None)


def eval_batches(
    stream: TokenStream,
    *,
    sequence_length: int,
    micro_batch_size: int,
    max_sequences: int,
    rank: int,
    dp_size: int,
) -> Iterator[tuple[Tensor, Tensor]]:
    """(tokens_bt, targets_bt) of this rank's part of the first `max_sequences` sequences, in file order.

    All ranks have equally many batches; rows that are missing are masked.
    """
    total = min(max_sequences, stream.n_sequences(sequence_length))
    per_rank = -(-total // dp_size)
    stop = min(total, (rank + 1) * per_rank)
    for i in range(-(-per_rank // micro_batch_size)):
        first = rank * per_rank + i * micro_batch_size
        index = np.arange(first, max(first, min(first + micro_batch_size, stop)), dtype=np.int64)
        tokens_rs = stream.gather(index * sequence_length, sequence_length + 1)
        yield _micro_batches(tokens_rs, 1, micro_batch_size, None, False)[0][0]


def _micro_batches(
    tokens_rs: np.ndarray, count: int, micro_batch_size: int, ignore_id: int | None, pin_memory: bool
) -> tuple[list[tuple[Tensor, Tensor]], int]:
    """`count` micro-batches of the rows, and the number of their valid targets.

    Filled through numpy: torch would start a team of threads of its own for the copies of this thread.
    """
    rows, length = tokens_rs.shape[0], tokens_rs.shape[1] - 1
    shape = (count * micro_batch_size, length)
    tokens, targets = (torch.empty(shape, dtype=torch.int64, pin_memory=pin_memory) for _ in range(2))
    filled_tokens, filled_targets = tokens.numpy(), targets.numpy()
    filled_tokens[:rows], filled_tokens[rows:] = tokens_rs[:, :-1], 0
    filled_targets[:rows], filled_targets[rows:] = tokens_rs[:, 1:], MASKED
    valid = rows * length
    if ignore_id is not None:
        ignored = filled_targets == ignore_id
        filled_targets[ignored] = MASKED
        valid -= int(ignored.sum())
    return list(zip(tokens.split(micro_batch_size), targets.split(micro_batch_size), strict=True)), valid


def _digest(tokens_rs: np.ndarray, first_row: int) -> int:
    total = 0
    for row, tokens in enumerate(tokens_rs.astype("<i8", copy=False), first_row):
        hashed = hashlib.blake2b(row.to_bytes(8, "little"), digest_size=8)
        hashed.update(tokens.data)
        total += int.from_bytes(hashed.digest(), "little")
    return total % 2**63


def _read_ahead(windows: Iterator[Window], prefetch: int, cuda_device: int | None) -> Iterator[Window]:
    """The same windows, produced by a daemon thread that lives as long as this generator."""
    ready: queue.Queue[Window | BaseException | None] = queue.Queue(maxsize=max(1, prefetch))
    stopped = threading.Event()
    thread = threading.Thread(
        target=_produce, args=(windows, ready, stopped, cuda_device), name="llmexp-reader", daemon=True
    )
    thread.start()
    try:
        while (item := ready.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item
    finally:
        stopped.set()
        while not ready.empty():  # makes room, so that a waiting put returns and the thread sees `stopped`
            try:
                ready.get_nowait()
            except queue.Empty:
                break


def _produce(
    windows: Iterator[Window],
    ready: queue.Queue[Window | BaseException | None],
    stopped: threading.Event,
    cuda_device: int | None,
) -> None:
    try:
        if cuda_device is not None:
            torch.cuda.set_device(cuda_device)  # the device is per thread: pinning would start a context on device 0
        for window in windows:
            ready.put(window)
            if stopped.is_set():
                return
        ready.put(None)
    except BaseException as error:
        ready.put(error)
