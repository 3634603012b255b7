"""Norm and clipping by it against numpy in float64."""

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmexp.train.clipping import EPSILON, clip_norm
from tests.clipping import flat, global_norm, gradients, parameters, rule


@given(st.integers(0, 50), st.floats(0.01, 100))
def test_by_norm(seed, limit):
    made = parameters(seed)
    before = flat(made)
    norm = global_norm(made)
    left = clip_norm(gradients(made), norm, limit, by_update=True)
    np.testing.assert_array_equal(flat(made), before)
    after, clipped, none = clip_norm(gradients(made), norm, limit)
    assert none is None
    factor = min(1.0, limit / (np.linalg.norm(before) + 1e-6))
    assert left[:2] == (after, clipped)
    assert float(left[2]) == pytest.approx(factor, rel=1e-14)
    assert float(norm) == pytest.approx(np.linalg.norm(before), rel=1e-14)
    np.testing.assert_allclose(flat(made), before * factor, rtol=1e-14)
    assert float(after) == pytest.approx(np.linalg.norm(flat(made)), rel=1e-13)
    assert float(after) <= limit
    assert bool(clipped) == (factor < 1)


def test_no_limit_measures_and_leaves_alone():
    made = parameters(1)
    before = flat(made)
    for none in (rule("none", made), rule("norm", made, max_norm=None)):
        after, clipped, _ = none.clip(gradients(made), global_norm(made))
        np.testing.assert_array_equal(flat(made), before)
        assert float(after) == pytest.approx(np.linalg.norm(before), rel=1e-14)
        assert not clipped


def test_a_row_has_what_was_done_to_its_own_step():
    outcome = SimpleNamespace(skipped=False, clipped=True, grad_norm=3.0, more={})
    rows = {}
    for name, one in {
        "none": rule("none", []),
        "no limit": rule("norm", [], max_norm=None),
        "limit": rule("norm", [], max_norm=1.0),
        "value": rule("value", [], max_value=1.0),
    }.items():
        one.finished(outcome)
        rows[name] = one.row(None)
    clipped = {"clip_fraction": 1.0}
    assert rows["none"] == rows["no limit"] == clipped | {"clip_coefficient": 1.0}
    assert rows["limit"] == clipped | {"clip_coefficient": 1 / (3 + EPSILON)}
    assert rows["value"] == clipped
    outcome.skipped = True
    one.finished(outcome)
    assert one.row(None) == {}
