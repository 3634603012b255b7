"""Groups of parameters against numpy in float64."""

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.clipping import flat, global_norm, gradients, parameters, rule


@given(st.integers(0, 50), st.floats(0.01, 30), st.floats(0.01, 30))
def test_by_groups(seed, first, second):
    """Each group by its own norm; the last tensor belongs to none."""
    made = parameters(seed)
    before = [p.grad.numpy().copy() for p in made]
    norms = [np.linalg.norm(g) for g in before]
    factors = [min(1, first / (norms[0] + 1e-6)), min(1, second / (norms[1] + 1e-6)), 1]
    limits = [
        SimpleNamespace(match="held.1", max_norm=second),
        SimpleNamespace(match="held.0", max_norm=first),
    ]
    by_group = rule("per_group", made, limits=limits)
    after, clipped, _ = by_group.clip(gradients(made), global_norm(made))
    found = {key: float(norm) for key, norm in by_group.found.items()}
    assert found == pytest.approx(
        {"grad_norm/held.1": norms[1], "grad_norm/held.0": norms[0]}, rel=1e-14
    )
    for p, g, factor in zip(made, before, factors, strict=True):
        np.testing.assert_allclose(p.grad, g * factor, rtol=1e-14)
    assert float(after) == pytest.approx(np.linalg.norm(flat(made)), rel=1e-13)
    assert bool(clipped) == (min(factors) < 1)
