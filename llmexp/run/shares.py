"""Parts of a run, with what falls to each: sources of its data, groups of its parameters."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SourceShare:
    """The part of a run that one source of its data makes."""

    name: str
    tokens: int  # that the source has
    sequences: int  # that the run trains on
    epochs: float


@dataclass(frozen=True)
class GroupShare:
    """Count what one of optimizer.groups takes; with an empty pattern: what none of them does."""

    match: str
    lr: float  # factor on the rate
    weight_decay: float  # factor on the weight decay
    tensors: int
    parameters: int
