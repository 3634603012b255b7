"""Norm and clipping against numpy in float64."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from llmexp import mesh
from llmexp.settings.config import Clip
from llmexp.update import clip as clipping
from llmexp.update.limits import Limit

ALONE = mesh.join("cpu", "single", 1, 1, 1)


def gradients(made):
    return [p.grad for p in made if p.grad is not None]


def global_norm(made):
    return mesh.global_norm(ALONE, gradients(made))


def parameters(seed: int, dtype=torch.float64) -> list[torch.nn.Parameter]:
    rng = np.random.default_rng(seed)
    made = [
        torch.nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in ((3, 4), (5,), (2, 2, 2))
    ]
    for p in made:
        p.grad = torch.tensor(rng.normal(size=p.shape) * 3, dtype=dtype)
    return made


def flat(made):
    return np.concatenate([p.grad.double().numpy().ravel() for p in made])


@given(st.integers(0, 50), st.floats(0.01, 100))
def test_by_norm(seed, limit):
    made = parameters(seed)
    before = flat(made)
    norm = global_norm(made)
    left = clipping.clip_norm(gradients(made), norm, limit, by_update=True)
    np.testing.assert_array_equal(flat(made), before)
    after, clipped, none = clipping.clip_norm(gradients(made), norm, limit)
    assert none is None
    factor = min(1.0, limit / (np.linalg.norm(before) + 1e-6))
    assert left[:2] == (after, clipped)
    assert float(left[2]) == pytest.approx(factor, rel=1e-14)
    assert float(norm) == pytest.approx(np.linalg.norm(before), rel=1e-14)
    np.testing.assert_allclose(flat(made), before * factor, rtol=1e-14)
    assert float(after) == pytest.approx(np.linalg.norm(flat(made)), rel=1e-13)
    assert float(after) <= limit
    assert bool(clipped) == (factor < 1)


@given(st.integers(0, 50), st.floats(0.01, 20))
def test_by_value(seed, limit):
    made = parameters(seed)
    before = flat(made)
    after, clipped, largest = clipping.clip_values(ALONE, gradients(made), limit)
    assert float(largest) == np.abs(before).max()
    np.testing.assert_array_equal(flat(made), np.clip(before, -limit, limit))
    assert float(after) == pytest.approx(np.linalg.norm(flat(made)), rel=1e-14)
    assert bool(clipped) == bool((np.abs(before) > limit).any())


def test_no_limit_measures_and_leaves_alone():
    made = parameters(1)
    before = flat(made)
    after, clipped, _ = clipping.clip_norm(gradients(made), global_norm(made), None)
    np.testing.assert_array_equal(flat(made), before)
    assert float(after) == pytest.approx(np.linalg.norm(before), rel=1e-14)
    assert not clipped


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
    clipped, counted = clipping.clip_units(ALONE, made, ratio)
    assert clipped == (max(shares) > ratio)
    np.testing.assert_allclose(flat(made), np.concatenate(wanted), rtol=1e-12)
    limits = ratio * 2.0 ** np.arange(-4, 5)
    above = [(np.array(shares) > limit).sum() for limit in limits]
    factors = [np.minimum(1, limit / np.array(shares)).sum() for limit in limits]
    np.testing.assert_allclose(counted, [len(shares), *above, *factors], rtol=1e-12)


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
    clipping.clip_units(ALONE, made, 0.05)
    for p, (*_, wanted) in zip(made, TIMM, strict=True):
        np.testing.assert_allclose(p.grad, wanted, rtol=1e-14)


@given(st.integers(0, 50), st.floats(0.01, 30), st.floats(0.01, 30))
def test_by_groups(seed, first, second):
    """Each group by its own norm; the last tensor belongs to none."""
    made = parameters(seed)
    before = [p.grad.numpy().copy() for p in made]
    norms = [np.linalg.norm(g) for g in before]
    factors = [min(1, first / (norms[0] + 1e-6)), min(1, second / (norms[1] + 1e-6)), 1]
    after, clipped, found = clipping.clip_groups(
        ALONE, gradients(made), [1, 0, None], [second, first]
    )
    np.testing.assert_allclose(found, [norms[1], norms[0]], rtol=1e-14)
    for p, g, factor in zip(made, before, factors, strict=True):
        np.testing.assert_allclose(p.grad, g * factor, rtol=1e-14)
    assert float(after) == pytest.approx(np.linalg.norm(flat(made)), rel=1e-13)
    assert bool(clipped) == (min(factors) < 1)


@pytest.mark.parametrize("threshold", [1.0, 0.3])
def test_updates_are_limited_as_stable_adamw_writes_it(threshold):
    """Algorithm 2 of arXiv 2304.13013, with its own form of the moments."""
    rng, beta1, beta2, eps, decay = np.random.default_rng(3), 0.9, 0.95, 1e-3, 0.2
    made = [torch.nn.Parameter(torch.tensor(rng.normal(size=s))) for s in ((3, 4), (5,))]
    optimizer = torch.optim.AdamW(made, lr=0.02, betas=(beta1, beta2), eps=eps, weight_decay=decay)
    limit = clipping.UpdateLimit(ALONE, [optimizer], threshold)
    theta = [p.detach().numpy().copy() for p in made]
    v, u = ([np.zeros_like(w) for w in theta] for _ in range(2))
    seen = []
    for t in range(1, 9):
        rate = optimizer.param_groups[0]["lr"] = 0.02 / t
        hat1, hat2 = (b * (1 - b ** (t - 1)) / (1 - b**t) for b in (beta1, beta2))
        for i, p in enumerate(made):
            g = rng.normal(size=p.shape) * (10 if t == 5 else 0.1) * (i + 1)
            p.grad = torch.tensor(g)
            v[i] = hat1 * v[i] + (1 - hat1) * g
            u[i] = hat2 * u[i] + (1 - hat2) * g**2
            rms = np.sqrt(np.mean(g**2 / np.maximum(u[i], eps**2)))
            eta = rate / max(1, rms / threshold)
            theta[i] = theta[i] - eta * decay * theta[i] - eta * v[i] / (np.sqrt(u[i]) + eps)
            seen.append(rms)
        limit.before()
        optimizer.step()
        limited, counted = limit.after(False)
        assert bool(limited) == (max(seen[-2:]) > threshold)
        np.testing.assert_allclose(counted[5], np.sum(np.array(seen[-2:]) > threshold))
        for p, wanted in zip(made, theta, strict=True):
            np.testing.assert_allclose(p.detach(), wanted, rtol=1e-12)
    assert min(seen) < 1 < max(seen)
    before = [p.detach().clone() for p in made]
    limit.before()
    assert not limit.after(True)[0]  # nothing was updated
    assert all(torch.equal(p, old) for p, old in zip(made, before, strict=True))


QUANTILE = Clip(kind="quantile", max_norm=50.0, quantile=0.5, window=3, warmup_steps=5)


def test_a_window_shorter_than_the_warm_up_still_gives_a_limit():
    limit = Limit(QUANTILE)
    norm = torch.tensor(7.0)
    for number in range(5):
        assert limit.of(norm) == 50.0
        limit.add(float(number), float(number))
    assert limit.of(norm) == 3.0  # the median of 2, 3, 4
    again = Limit(QUANTILE)
    again.load_state_dict(limit.state_dict())
    assert again.of(norm) == 3.0
