"""Norm and clipping against numpy in float64."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from llmexp import mesh
from llmexp.settings.config import Clip
from llmexp.train.set_up import limit_of
from llmexp.update import clip as clipping

ALONE = mesh.join("cpu", "single", 1, 1, 1)


def gradients(made):
    return [p.grad for p in made if p.grad is not None]


def global_norm(made):
    return mesh.global_norm(ALONE, gradients(made))


def clip(kind, made, norm, max_norm, max_value):
    *found, factor = clipping.clip(ALONE, kind, gradients(made), norm, max_norm, max_value)
    assert factor is None
    return found


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
    left = clipping.clip(ALONE, "norm", gradients(made), norm, limit, None, by_update=True)
    np.testing.assert_array_equal(flat(made), before)
    after, clipped = clip("norm", made, norm, limit, None)
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
    after, clipped = clip("value", made, global_norm(made), None, limit)
    np.testing.assert_array_equal(flat(made), np.clip(before, -limit, limit))
    assert float(after) == pytest.approx(np.linalg.norm(flat(made)), rel=1e-14)
    assert bool(clipped) == bool((np.abs(before) > limit).any())


@pytest.mark.parametrize("kind", ["none", "norm", "value"])
def test_no_limit_measures_and_leaves_alone(kind):
    made = parameters(1)
    before = flat(made)
    after, clipped = clip(kind, made, global_norm(made), None, None)
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
    wanted, any_clipped = [], False
    for p in made:
        g, w = p.grad.numpy().copy(), p.detach().numpy()
        units = [()] if g.ndim == 1 else range(len(g))
        for unit in units:
            limit = ratio * max(np.linalg.norm(w[unit]), 1e-3)
            if np.linalg.norm(g[unit]) > limit:
                any_clipped = True
                g[unit] *= limit / np.linalg.norm(g[unit])
        wanted.append(g.ravel())
    assert clipping.clip_units(ALONE, made, ratio) == any_clipped
    np.testing.assert_allclose(flat(made), np.concatenate(wanted), rtol=1e-12)


QUANTILE = Clip(kind="quantile", max_norm=50.0, quantile=0.5, window=3, warmup_steps=5)


def test_a_window_shorter_than_the_warm_up_still_gives_a_limit():
    limit = limit_of(QUANTILE)
    norm = torch.tensor(7.0)
    for number in range(5):
        assert limit.of(norm) == 50.0
        limit.add(float(number), float(number))
    assert limit.of(norm) == 3.0  # the median of 2, 3, 4
    again = limit_of(QUANTILE)
    again.load_state_dict(limit.state_dict())
    assert again.of(norm) == 3.0
