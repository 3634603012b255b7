"""Knobs of clipping. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass

from llmexp.settings.values import choice, count, knob, optional, usual, where

MOVING = ("zscore", "quantile")  # rules whose limit of the norm follows the norms before
BY_NORM = ("norm", *MOVING)


@dataclass(frozen=True, kw_only=True)
class GroupLimit:
    """The limit of the parameters whose names a pattern matches."""

    match: str = knob("pattern of names, as in a shell; the first that matches", "*.attention.*")
    max_norm: float | None = knob("limit of their gradient's norm; null: none", 1.0, above=0)


@dataclass(frozen=True, kw_only=True)
class Clip:
    kind: str = choice(
        "how gradients are clipped, once per optimizer step, after unscaling",
        "norm | value | zscore | quantile | adaptive | per_group | update | none",
    )
    max_norm: float | None = optional(
        "limit of the global gradient norm; beside zscore and quantile an upper bound; null: none",
        1.0,
        above=0,
        acts=where("clip.kind", *BY_NORM),
    )
    max_value: float | None = optional(
        "limit of each gradient entry; null: no limit",
        0.5,
        above=0,
        acts=where("clip.kind", "value"),
    )
    z: float = usual(
        "standard deviations above the mean of the norms from which zscore clips",
        2.5,
        above=0,
        acts=where("clip.kind", "zscore"),
    )
    decay: float = usual(
        "decay per update of mean and variance of the norms",
        0.97,
        above=0,
        below=1,
        acts=where("clip.kind", "zscore"),
    )
    quantile: float = usual(
        "quantile of the last norms that is the limit",
        0.9,
        above=0,
        below=1,
        acts=where("clip.kind", "quantile"),
    )
    window: int = count(
        "updates whose norms the quantile is of",
        128,
        acts=where("clip.kind", "quantile"),
        default=128,
    )
    warmup_steps: int = count(
        "updates before zscore and quantile give a limit",
        25,
        acts=where("clip.kind", *MOVING),
        default=25,
    )
    ratio: float = usual(
        "largest norm of a unit's gradient, of the norm of its weights",
        0.01,
        above=0,
        acts=where("clip.kind", "adaptive"),
    )
    limits: list[GroupLimit] = knob(
        "limits of the norm by pattern of parameter names; the first that matches counts",
        [{"match": "*.attention.*", "max_norm": 0.5}, {"match": "*", "max_norm": 1.0}],
        acts=where("clip.kind", "per_group"),
        default=[],
    )
    threshold: float = usual(
        "largest RMS of AdamW's update of a tensor, before the rate (StableAdamW: 1)",
        1.0,
        above=0,
        acts=where("clip.kind", "update"),
    )
    qk_limit: float | None = optional(
        "beside any rule: queries and keys of a head are scaled down after a step whose largest "
        "attention logit was above it (QK-Clip: 100); null: never",
        100.0,
        above=0,
    )
