"""Each rule of clipping against float64 loops on one big batch: however a window is cut, on any
ranks, in losses, norms and parameters."""

import fnmatch
import math
from collections.abc import Callable, Iterable

import numpy as np
import pytest
from torch import Tensor

from tests.conftest import train
from tests.tools import agree
from tests.train.test_invariance import CUTS, RANKS, SETTINGS, expected, layout

Tensors = dict[str, Tensor]
Clip = Callable[[Tensors, Tensors], None]
GROUPS = [("*.attention.*", 0.3), ("*norm*", None), ("blocks.1.*", 0.2), ("*_embedding.*", 0.5)]
AS_KNOB = ",".join(
    f"{{match: '{match}', max_norm: {'null' if limit is None else limit}}}"
    for match, limit in GROUPS
)


def norm_of(tensors: Iterable[Tensor]) -> float:
    return math.sqrt(sum(float((t**2).sum()) for t in tensors))


def limited(gradients: Iterable[Tensor], limit: float) -> float:
    """Scale them to a norm of at most the limit; return the norm that they have then."""
    gradients = list(gradients)
    norm = norm_of(gradients)
    factor = min(1.0, limit / (norm + 1e-6))
    for g in gradients:
        g *= factor
    return norm * factor


def by_group(weights: Tensors, gradients: Tensors) -> None:
    """The first pattern that matches; a group is scaled by its own norm."""
    left = set(gradients)
    for match, limit in GROUPS:
        names = {name for name in left if fnmatch.fnmatchcase(f".{name}", f"*{match}")}
        left -= names
        limited((gradients[name] for name in names), math.inf if limit is None else limit)


def by_unit(weights: Tensors, gradients: Tensors) -> None:
    """Each row against its weights, but for the tied head."""
    for name, g in gradients.items():
        if name != "token_embedding.weight":
            for unit in range(len(g)) if g.ndim > 1 else [...]:
                norm = norm_of([g[unit]])
                limit = 0.02 * max(norm_of([weights[name][unit].detach()]), 1e-3)
                g[unit] *= min(1.0, limit / norm) if norm else 1.0


def by_entry(weights: Tensors, gradients: Tensors) -> None:
    for g in gradients.values():
        g.clamp_(-0.05, 0.05)


def by_quantile(limits: list[float]) -> Clip:
    """The quantile 0.4 of the last three norms, from the third step on."""
    norms: list[float] = []

    def clip(weights: Tensors, gradients: Tensors) -> None:
        limit = float(np.quantile(norms[-3:], 0.4)) if len(norms) >= 2 else math.inf
        norms.append(norm_of(gradients.values()))
        limits.append(limit)
        limited(gradients.values(), limit)

    return clip


def by_zscore(limits: list[float]) -> Clip:
    """Norms of more than half a deviation above the moving mean of the clipped norms, from the
    third step on."""
    after: list[float] = []
    mean = var = 0.0

    def clip(weights: Tensors, gradients: Tensors) -> None:
        nonlocal mean, var
        limit = math.inf
        if len(after) == 2:
            mean, var = float(np.mean(after)), float(np.var(after))
        if len(after) >= 2:
            std = math.sqrt(var) + 1e-6
            z = (norm_of(gradients.values()) - mean) / std
            limit = mean + 0.5 * std / (z / 0.5) if z > 0.5 else math.inf
        limits.append(limit)
        after.append(limited(gradients.values(), limit))
        if len(after) > 2:
            mean = 0.8 * mean + 0.2 * after[-1]
            var = 0.8 * var + 0.2 * (after[-1] - mean) ** 2

    return clip


# Figures of layers and more than an epoch: tests/train/test_invariance.py. Three steps, of 16, 16
# and 3 sequences; rules that follow the run have nine of 16, at a rate at which norms do not fall
# all the way, or none would stand out.
LEFT_OUT = ("clip.", "metrics.layers_every=", "train.max_epochs=", "train.tail=")
GIVEN = [given for given in SETTINGS if not given.startswith(LEFT_OUT)]
SHORT = ["train.max_epochs=0.7", "train.tail=keep"]
NINE = ["train.max_steps=9", "optimizer.lr=1e-4", "clip.warmup_steps=2"]
MOVING = {"lr": 1e-4, "total_sequences": 144}
RULES = {  # but for the norm's, which test_invariance.py has
    "per_group": ([f"clip.limits=[{AS_KNOB}]"], lambda _: {"clip": by_group}),
    "adaptive": (
        ["clip.ratio=0.02", "clip.qk_limit=0.02"],
        lambda _: {"clip": by_unit, "qk_limit": 0.02},
    ),
    "value": (["clip.max_value=0.05"], lambda _: {"clip": by_entry}),
    "update": (["clip.threshold=0.7"], lambda _: {"threshold": 0.7}),
    "zscore": (
        ["clip.z=0.5", "clip.decay=0.8"],
        lambda limits: {"clip": by_zscore(limits), **MOVING},
    ),
    "quantile": (
        ["clip.quantile=0.4", "clip.window=3"],
        lambda limits: {"clip": by_quantile(limits), **MOVING},
    ),
}
SPLIT = "fsdp_tp 2x2, selective recomputation"
# Each rule on one kind of ranks beside the finest cut. The one that asks most of them, for norms of
# rows that both kinds split, is on all four; an entry's limit knows no other entry:
# tests/mesh/test_parallel.py has it on a split model.
FIRST = {"per_group": "fsdp 2", "adaptive": SPLIT, "update": "tp 2", "zscore": "fsdp 2"}

CASES = [
    pytest.param(rule, cut, marks=[] if cut in ("1x16", FIRST.get(rule)) else pytest.mark.slow)
    for rule in RULES
    for cut in (*CUTS, *RANKS)
]


@pytest.mark.parametrize(("rule", "cut"), CASES)
def test_it_is_the_formula(tmp_path, tokens, rule, cut):
    knobs, formula = RULES[rule]
    moving, limits = rule in ("zscore", "quantile"), list[float]()
    given = [*GIVEN, f"data.train_files=[{tokens}]", "precision=fp64", f"clip={rule}"]
    given += NINE if moving else SHORT
    result = train(tmp_path, "run", *given, *knobs, *layout(cut))
    want = expected(result, tokens, **{"max_norm": None, "total_sequences": 35, **formula(limits)})
    agree(result, want, *([1e-9] * 3 if moving else []))
    rows = result.rows()
    after = [row["grad_norm_post_clip"] for row in rows]
    np.testing.assert_allclose(after, want.clipped_norms, rtol=1e-9 if moving else 1e-12)
    assert any(row["clip_fraction"] for row in rows)
    if moving:
        shown = [row.get("clip_limit", math.inf) for row in rows]
        np.testing.assert_allclose(shown, limits, rtol=1e-9)
    shares = {"adaptive": ["clipped_units", "clipped_heads"], "update": ["clipped_tensors"]}
    for share in shares.get(rule, []):  # some are clipped and some are not: both must show
        assert any(0 < row[share] < 1 for row in rows), share
