"""Entries of the gradient against numpy in float64."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.clipping import flat, global_norm, gradients, parameters, rule


@given(st.integers(0, 50), st.floats(0.01, 20))
def test_by_value(seed, limit):
    made = parameters(seed)
    before = flat(made)
    by_value = rule("value", made, max_value=limit)
    after, clipped, _ = by_value.clip(gradients(made), global_norm(made))
    assert float(by_value.found["grad_entry_max"]) == np.abs(before).max()
    np.testing.assert_array_equal(flat(made), np.clip(before, -limit, limit))
    assert float(after) == pytest.approx(np.linalg.norm(flat(made)), rel=1e-14)
    assert bool(clipped) == bool((np.abs(before) > limit).any())
