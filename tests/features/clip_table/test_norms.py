"""The counterfactual table against the norms themselves."""

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmexp.features.clip_table.norms import PER_OCTAVE, Norms, clip_line
from llmexp.train.clipping import EPSILON

NORMS = st.lists(st.floats(0, 1e9, allow_nan=False), min_size=1, max_size=60)
EDGES = st.integers(-19 * PER_OCTAVE, 19 * PER_OCTAVE).map(lambda k: 2.0 ** (k / PER_OCTAVE))


def counted(norms: list[float], limit: float | None = None) -> Norms:
    found, most = Norms(limit), math.inf if limit is None else limit
    for norm in norms:
        found.add(norm, norm + EPSILON > most, min(1.0, most / (norm + EPSILON)))
    return found


@given(NORMS, EDGES)
def test_a_limit_on_an_edge_is_exact(norms, limit):
    share, coefficient = counted(norms).at(limit)
    factors = np.minimum(1, limit / (np.array(norms) + EPSILON))
    # An edge computed in float64 is off by an ulp or two: a norm on it may count on either side,
    # with a factor of 1.
    near = np.isclose(np.array(norms) + EPSILON, limit, rtol=1e-12)
    assert np.isclose(share, (factors < 1).mean(), rtol=0, atol=1e-12 + near.mean())
    np.testing.assert_allclose(coefficient, factors.mean(), rtol=1e-12)


@given(NORMS, st.floats(1e-3, 1e3))
def test_any_other_limit_is_off_by_its_bin_alone(norms, limit):
    share, coefficient = counted(norms).at(limit)
    padded = np.array(norms) + EPSILON
    width = 2 ** (1 / PER_OCTAVE)
    in_bin = (np.abs(np.log2(padded / limit)) < 1 / PER_OCTAVE + 1e-12).mean()
    factors = np.minimum(1, limit / padded)
    assert abs(share - (factors < 1).mean()) <= in_bin + 1e-12
    assert abs(coefficient - factors.mean()) <= in_bin * (width - 1) + 1e-12


@given(NORMS, st.sampled_from([50, 90, 99]))
def test_quantiles_lie_in_their_bin(norms, percent):
    norms = [min(n, 1e5) for n in norms]
    wanted = np.quantile(norms, percent / 100, method="inverted_cdf") + EPSILON
    found = counted(norms).quantile(percent)
    assert wanted * (1 - 1e-12) <= found <= wanted * 2 ** (1 / PER_OCTAVE) * (1 + 1e-12)


def test_the_runs_own_limit_is_its_own_count():
    norms = [0.1, 0.5, 0.9, 2.0, 4.0]
    found = counted(norms, limit=0.3)
    coefficient = np.minimum(1, 0.3 / (np.array(norms) + EPSILON)).mean()
    assert found.at(0.3) == (0.8, pytest.approx(coefficient, rel=1e-14))
    summary = found.summary()
    assert (summary["steps"], summary["share"]) == (5, 0.8)
    assert {"limit": 0.3, "share": 0.8, "coefficient": found.at(0.3)[1]} in summary["table"]
    limits = [row["limit"] for row in summary["table"]]
    assert limits == sorted(set(limits))
    json.dumps(summary, allow_nan=False)
    line = clip_line(summary, 0.3)
    assert line.startswith(f"80 % of steps clipped at 0.3, mean coefficient {coefficient:.3f}; ")
    assert line.endswith(f"99 % {summary['quantiles']['99']:.4g}")
    assert Norms(1.0).summary() == {}  # nothing counted is nothing printed
    assert counted([3.0]).at(1.0)[0] == 1.0  # without a limit it is measured all the same


@given(NORMS, NORMS)
def test_a_state_in_the_middle_changes_nothing(before, after):
    whole, first, second = (Norms(1.0) for _ in range(3))
    for norm in before:
        whole.add(norm, norm > 1)
        first.add(norm, norm > 1)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    for norm in after:
        whole.add(norm, norm > 1)
        second.add(norm, norm > 1)
    assert second.summary() == whole.summary()


def test_the_order_of_the_norms_changes_no_bit_of_the_table():
    """A resumed run meets its bins in another order than the unbroken one did."""
    norms = np.exp(np.random.default_rng(0).standard_normal((20, 60))).tolist()
    for some in norms:
        one, other = counted(some), counted(sorted(some))
        assert all(one.at(limit) == other.at(limit) for limit in (0.05, 0.25, 1.0))
