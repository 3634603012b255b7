"""Each rule of clipping against float64 loops on one big batch: however a window is cut, on any
ranks, in losses, norms and parameters."""

import fnmatch
import math

import numpy as np
import pytest
from torch import Tensor

from tests.conftest import train
from tests.tools import agree
from tests.train.test_invariance import CUTS, RANKS, SETTINGS, expected, layout

Tensors = dict[str, Tensor]
GROUPS = [("*.attention.*", 0.3), ("*norm*", None), ("blocks.1.*", 0.2), ("*_embedding.*", 0.5)]
AS_KNOB = ",".join(
    f"{{match: '{match}', max_norm: {'null' if limit is None else limit}}}"
    for match, limit in GROUPS
)


def by_group(weights: Tensors, gradients: Tensors) -> None:
    """The first pattern that matches; a group is scaled by its own norm."""
    left = set(gradients)
    for match, limit in GROUPS:
        names = {name for name in left if fnmatch.fnmatchcase(f".{name}", f"*{match}")}
        left -= names
        norm = math.sqrt(sum(float((gradients[name] ** 2).sum()) for name in names))
        for name in names:
            gradients[name] *= 1.0 if limit is None else min(1.0, limit / (norm + 1e-6))


def by_unit(weights: Tensors, gradients: Tensors) -> None:
    """Each row against its weights, but for the tied head."""
    for name, g in gradients.items():
        if name != "token_embedding.weight":
            for unit in range(len(g)) if g.ndim > 1 else [...]:
                norm = float((g[unit] ** 2).sum()) ** 0.5
                limit = 0.02 * max(float((weights[name][unit].detach() ** 2).sum()) ** 0.5, 1e-3)
                g[unit] *= min(1.0, limit / norm) if norm else 1.0


def by_entry(weights: Tensors, gradients: Tensors) -> None:
    for g in gradients.values():
        g.clamp_(-0.05, 0.05)


# Figures of layers and more than an epoch: tests/train/test_invariance.py. Three steps, of 16, 16
# and 3 sequences.
LEFT_OUT = ("clip.", "metrics.layers_every=", "train.max_epochs=")
GIVEN = [given for given in SETTINGS if not given.startswith(LEFT_OUT)]
GIVEN += ["precision=fp64", "train.max_epochs=0.7"]
RULES = {  # but for the norm's, which test_invariance.py has
    "per_group": ([f"clip.limits=[{AS_KNOB}]"], {"clip": by_group}),
    "adaptive": (["clip.ratio=0.02", "clip.qk_limit=0.02"], {"clip": by_unit, "qk_limit": 0.02}),
    "value": (["clip.max_value=0.05"], {"clip": by_entry}),
    "update": (["clip.threshold=0.7"], {"threshold": 0.7}),
}
SPLIT = "fsdp_tp 2x2, selective recomputation"
# Each rule on one kind of ranks beside the finest cut. The one that asks most of them, for norms of
# rows that both kinds split, is on all four; an entry's limit knows no other entry:
# tests/mesh/test_parallel.py has it on a split model.
FIRST = {"per_group": "fsdp 2", "adaptive": SPLIT, "update": "tp 2"}

CASES = [
    pytest.param(rule, cut, marks=[] if cut in ("1x16", FIRST.get(rule)) else pytest.mark.slow)
    for rule in RULES
    for cut in (*CUTS, *RANKS)
]


@pytest.mark.parametrize(("rule", "cut"), CASES)
def test_it_is_the_formula(tmp_path, tokens, rule, cut):
    knobs, formula = RULES[rule]
    given = [*GIVEN, f"data.train_files=[{tokens}]", f"clip={rule}", *knobs]
    result = train(tmp_path, "run", *given, *layout(cut))
    want = expected(result, tokens, **{"max_norm": None, "total_sequences": 35, **formula})
    agree(result, want)
    rows = result.rows()
    after = [row["grad_norm_post_clip"] for row in rows]
    np.testing.assert_allclose(after, want.clipped_norms, rtol=1e-12)
    assert any(row["clip_fraction"] for row in rows)
    shares = {"adaptive": ["clipped_units", "clipped_heads"], "update": ["clipped_tensors"]}
    for share in shares.get(rule, []):  # some are clipped and some are not: both must show
        assert any(0 < row[share] < 1 for row in rows), share
