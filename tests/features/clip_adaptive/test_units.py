"""Adaptive clipping against numpy in float64, and against timm."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.clipping import counted, flat, global_norm, gradients, parameters, rule


@given(st.integers(0, 50), st.floats(0.001, 2))
def test_by_units(seed, ratio):
    """AGC as its authors write it: rows of a matrix, whole vectors."""
    made = parameters(seed)
    rng = np.random.default_rng(seed + 1)
    for p in made:
        p.data = torch.tensor(rng.normal(size=p.shape) * (rng.random() > 0.3), dtype=p.dtype)
    wanted, shares = [], []
    for p in made:
        g, w = p.grad.numpy().copy(), p.detach().numpy()
        units = [()] if g.ndim == 1 else range(len(g))
        for unit in units:
            limit = ratio * max(np.linalg.norm(w[unit]), 1e-3)
            shares.append(np.linalg.norm(g[unit]) / (limit / ratio))
            if np.linalg.norm(g[unit]) > limit:
                g[unit] *= limit / np.linalg.norm(g[unit])
        wanted.append(g.ravel())
    adaptive = rule("adaptive", made, ratio=ratio)
    _, clipped, _ = adaptive.clip(gradients(made), global_norm(made))
    assert clipped == (max(shares) > ratio)
    np.testing.assert_allclose(flat(made), np.concatenate(wanted), rtol=1e-12)
    limits = ratio * 2.0 ** np.arange(-4, 5)
    above = [(np.array(shares) > limit).sum() for limit in limits]
    factors = [np.minimum(1, limit / np.array(shares)).sum() for limit in limits]
    np.testing.assert_allclose(
        counted(adaptive, "units"), [len(shares), *above, *factors], rtol=1e-12
    )


# Gradients and weights of two rows and a vector, and what timm.utils.agc.adaptive_clip_grad of
# timm 1.0.31 makes of them at clip_factor=0.05 in float64 (recorded 2026-11-25).
TIMM = [
    (
        [[3.0, 4.0, 0.0], [0.0, 0.0, 1e-4], [0.3, -0.4, 1.2], [0.0, 0.0, 0.0]],
        [[0.1, 0.2, 0.2], [6e-5, 0.0, 8e-5], [5.0, -1.0, 2.0], [2e-5, 0.0, 0.0]],
        [
            [0.08333333333333333, 0.16666666666666666, 0.16666666666666666],
            [3e-05, 0.0, 4e-05],
            [0.05933661039639299, -0.011867322079278599, 0.023734644158557198],
            [2e-05, 0.0, 0.0],
        ],
    ),
    ([0.6, -0.8], [0.02, 0.1], [0.0098058067569092, 0.04902903378454601]),
]


def test_units_are_clipped_as_by_timm():
    made = [torch.nn.Parameter(torch.tensor(w, dtype=torch.float64)) for w, _, _ in TIMM]
    for p, (_, g, _) in zip(made, TIMM, strict=True):
        p.grad = torch.tensor(g, dtype=torch.float64)
    rule("adaptive", made, ratio=0.05).clip(gradients(made), global_norm(made))
    for p, (*_, wanted) in zip(made, TIMM, strict=True):
        np.testing.assert_allclose(p.grad, wanted, rtol=1e-14)
