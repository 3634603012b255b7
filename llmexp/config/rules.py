"""Knobs of rules: a few numbers from which sizes, rates and batches follow.

Standard library only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from llmexp.config.values import count, knob, optional, usual

ONE_NUMBER = ("model.size", "model.depth")  # that a shape follows from
LIBRARY_TARGET = "llmexp.optim.optimizers.library.library"  # of optimizer=library, with a name
# The model whose tensors have the names of transformers already.
TRANSFORMERS = "llmexp.models.hf.HuggingFace"
SHAPE_KEYS = ("n_layers", "n_heads", "n_kv_heads", "d_model", "d_ff")  # that a rule gives


@dataclass(frozen=True)
class ShapeRule:
    """Give a model its sizes by its depth."""

    aspect: float = usual("features of width for each layer", 64.0, above=0)
    head_width: int = count(
        "features of a head; the width is rounded to a multiple of it", 64, default=64
    )
    mlp_factor: float | None = optional(
        "width of the MLP over that of the model; null: 4, of Llama 8/3",
        4.0,
        above=0,
    )
    multiple: int = count("the width of the MLP is rounded to a multiple of it", 64, default=64)
    queries_per_kv: int = count(
        "query heads for each key/value head, as far as the heads divide by it", 1, default=1
    )
    expert_factor: float | None = optional(
        "width of an expert over that of the model; null: as the MLP", 0.5, above=0
    )


@dataclass(frozen=True)
class Reference:
    """Hold what was best at one size of run, and that size; null: the rule does not need it."""

    lr: float | None = optional("rate of the reference", 3e-3, above=0)
    weight_decay: float | None = optional("its weight decay", 0.1, above=0)
    N: float | None = optional(
        "its parameters, with the head, without tables of embeddings", 1e7, above=0
    )
    D: float | None = optional("its tokens", 2e8, above=0)
    C: float | None = optional("its floating-point operations", 1e16, above=0)
    B: float | None = optional("its tokens per optimizer step", 65536, above=0)


@dataclass(frozen=True)
class Powers:
    """Hold the exponents of a power law, by what it grows with."""

    N: float = knob("exponent of the parameters", -0.33, default=0.0)
    D: float = knob("exponent of the tokens", 0.38, default=0.0)
    C: float = knob("exponent of the floating-point operations", 0.33, default=0.0)
    B: float = knob("exponent of the tokens per optimizer step", 0.5, default=0.0)
    lr: float = knob("exponent of the rate", -1.0, default=0.0)


@dataclass(frozen=True)
class Exponents:
    """Hold a power law for each value that a rule sets; null: it leaves the value alone."""

    B: Powers | None = optional("tokens per optimizer step, by N, D or C", {"D": 0.38})
    lr: Powers | None = optional("rate, by N, D, C or B", {"N": -0.33, "B": 0.5})
    weight_decay: Powers | None = optional(
        "weight decay, by N, D, C, B or lr", {"B": 1, "lr": -1, "D": -1}
    )


@dataclass(frozen=True)
class ScalingRule:
    """Describe a rule: power laws through a reference, which is the user's where it has none.

    `beta2`: tokens a step from which on it is the first value, below them the second one.
    """

    source: str
    powers: Exponents
    at: Reference | None = None
    beta2: tuple[int, float, float] | None = None


SCALING_RULES = {
    "linear": ScalingRule("arXiv 1706.02677", Exponents(lr=Powers(B=1.0))),
    "sqrt": ScalingRule("arXiv 2205.10287", Exponents(lr=Powers(B=0.5))),
    "porian": ScalingRule(
        "arXiv 2406.19146, beta2 as OLMo-core's ladder",
        Exponents(B=Powers(N=2 / 3), lr=Powers(N=-1 / 3)),
        Reference(lr=0.0047, N=108e6, B=160 * 2048),
        (524_288, 0.95, 0.99),
    ),
    "step_law": ScalingRule(
        "arXiv 2503.04715, for a final rate of 1e-5",
        Exponents(B=Powers(D=0.571), lr=Powers(N=-0.713, D=0.307)),
        Reference(lr=1.79, N=1, D=1, B=0.58),
    ),
    "deepseek": ScalingRule(
        "arXiv 2401.02954",
        Exponents(B=Powers(C=0.3271), lr=Powers(C=-0.125)),
        Reference(lr=0.3118, C=1, B=0.2920),
    ),
    # the timescale B / (lr x weight_decay x D) goes with (D / N)^-0.527
    "power_lines": ScalingRule(
        "arXiv 2505.13738",
        Exponents(B=Powers(D=0.383), weight_decay=Powers(B=1.0, lr=-1.0, D=0.527 - 1, N=-0.527)),
    ),
    "t_epoch": ScalingRule(  # the timescale stays
        "arXiv 2405.13698",
        Exponents(lr=Powers(B=0.5), weight_decay=Powers(B=1.0, lr=-1.0, D=-1.0)),
    ),
    "reference": ScalingRule("optimizer.exponents", Exponents()),
}
RULE_KEYS = ("optimizer.rule", "optimizer.reference", "optimizer.exponents")
SET = {"B": "batch.real_batch_size", "lr": "optimizer.lr", "weight_decay": "optimizer.weight_decay"}


def asks_rule(optimizer: Mapping[str, Any]) -> bool:
    """Return whether an optimizer section has a rule, or what only a rule reads."""
    given = (optimizer.get(key.partition(".")[2]) for key in RULE_KEYS)
    return any(value not in (None, "none", {}) for value in given)


def rule_sets_batch(flat: Mapping[str, Any]) -> bool:
    """Return whether the rule of a flat config sets the batch."""
    name = flat.get("optimizer.rule")
    own = any(key.startswith("optimizer.exponents.B.") for key in flat)
    if name == "reference":
        return own
    return name in SCALING_RULES and SCALING_RULES[name].powers.B is not None
