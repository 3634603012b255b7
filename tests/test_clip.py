"""Norm and clipping by it against numpy in float64."""

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmexp.train.clipping import EPSILON, clip_norm
from tests.clipping import flat, global_norm, gradients, parameters, rule


@given(st.integers(0, 50), st.none() | st.floats(0.01, 100))
def test_by_norm(seed, limit):
    """A limit of None measures and leaves alone, as the rule `none` does."""
    made = parameters(seed)
    before = flat(made)
    norm, length = global_norm(made), np.linalg.norm(before)
    left = clip_norm(gradients(made), norm, limit, by_update=True)
    np.testing.assert_array_equal(flat(made), before)
    chosen = rule("none", made) if limit is None and seed % 2 else None
    chosen = chosen or rule("norm", made, max_norm=limit)
    after, clipped, none = chosen.clip(gradients(made), norm)
    assert none is None
    factor = 1.0 if limit is None else min(1.0, limit / (length + 1e-6))
    assert left[:2] == (after, clipped)
    assert left[2] is None if limit is None else float(left[2]) == pytest.approx(factor, rel=1e-14)
    assert float(norm) == pytest.approx(length, rel=1e-14)
    np.testing.assert_allclose(flat(made), before * factor, rtol=1e-14)
    assert float(after) == pytest.approx(np.linalg.norm(flat(made)), rel=1e-13)
    assert limit is None or float(after) <= limit
    assert bool(clipped) == (factor < 1)
    if factor == 1:
        np.testing.assert_array_equal(flat(made), before)


@pytest.mark.parametrize(
    ("kind", "knobs", "coefficient"),
    [
        ("none", {}, {"clip_coefficient": 1.0}),
        ("norm", {"max_norm": None}, {"clip_coefficient": 1.0}),
        ("norm", {"max_norm": 1.0}, {"clip_coefficient": 1 / (3 + EPSILON)}),
        ("value", {"max_value": 1.0}, {}),
    ],
)
def test_a_row_has_what_was_done_to_its_own_step(kind, knobs, coefficient):
    outcome = SimpleNamespace(skipped=False, clipped=True, grad_norm=3.0, more={})
    one = rule(kind, [], **knobs)
    one.finished(outcome)
    assert one.row(None) == {"clip_fraction": 1.0} | coefficient
    outcome.skipped = True
    one.finished(outcome)
    assert one.row(None) == {}
