"""Count and time the steps since the last row.

Counts stay on the device until a row is due; clocks run on the host.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


class Meter:
    """Counts target tokens, and times training steps; evaluation and saving are not timed."""

    def __init__(
        self,
        device: torch.device,
        tokens_seen: int,
        steps: int = 0,
        step_time: float = 0.0,
        data_time: float = 0.0,
        wall: float = 0.0,
    ) -> None:
        """Begin after so many tokens, and after what an earlier process has timed since its row."""
        # a number on a CPU; exact to 2**53
        self._tokens: Any = float(tokens_seen)
        if device.type != "cpu":
            self._tokens = torch.tensor(self._tokens, dtype=torch.float64, device=device)
        self.timed_steps = steps  # since the last row
        self._step_time, self._data_time = step_time, data_time
        self._wall = wall  # of earlier processes
        self._since: float | None = None  # the last row, or the first step

    def add(self, target_tokens: Tensor | float) -> None:
        """Count one step, without a host wait."""
        self._tokens += target_tokens
        self.timed_steps += 1

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Around everything that belongs to a training step, its wait for data included."""
        start = time.perf_counter()
        if self._since is None:
            self._since = start
        yield
        self._step_time += time.perf_counter() - start

    @contextmanager
    def waiting_for_data(self) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self._data_time += time.perf_counter() - start

    def tokens_seen(self) -> int:
        """Return the target tokens seen in all; the host waits."""
        return round(float(self._tokens))

    def since_row(self) -> dict[str, float]:
        """Return the steps since the last row and their seconds, for a process that goes on."""
        return {
            "steps": self.timed_steps,
            "step_time": self._step_time,
            "data_time": self._data_time,
            "wall": self._wall_time(),
        }

    def _wall_time(self) -> float:
        return self._wall + (0.0 if self._since is None else time.perf_counter() - self._since)

    def rates(self, tokens: int, ranks: int) -> dict[str, float]:
        """Return the rates since the last row, whose steps have these tokens.

        Rates of work count all tokens of the sequences, as banner and run.json do: those whose
        target is masked are computed too.
        """
        rate = tokens / self._step_time
        wall = self._wall_time()
        return {
            "step_time": self._step_time / self.timed_steps,
            "data_time": self._data_time / self.timed_steps,
            "overhead_share": max(0.0, 1 - self._step_time / wall) if wall else 0.0,
            "tokens_per_sec": rate,
            "tokens_per_sec_per_rank": rate / ranks,
        }

    def restart(self) -> None:
        """Begin the counts of the next row."""
        self.timed_steps = 0
        self._step_time = self._data_time = self._wall = 0.0
        self._since = time.perf_counter()
