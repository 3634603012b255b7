"""Name what one optimizer step is fed with."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Window:
    """Hold the micro-batches of one optimizer step that this rank trains on."""

    step: int  # steps before this one: its row has step + 1
    # (tokens_bt, targets_bt) int64; rows that are missing are masked
    micro_batches: list[tuple[Tensor, Tensor]]
    target_count: int  # valid targets of this rank
    mark: int  # of a feature, from the ids of this rank's rows; 0: not asked for
