"""Quantiles, intervals and tests against references of their own, and their errors over many synthetic runs."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmexp.compare.statistics import (
    detrended_deviation,
    mean_interval,
    paired_seeds,
    pooled_seeds,
    series_difference,
    t_quantile,
)
from tests.compare.synthetic import ar1


def t_cdf(t: float, df: float) -> float:
    """By the trapezoidal rule over the density: with x = sinh-free substitution x = sqrt(df) tan(a) the integrand is
    cos(a)^(df-1), smooth on a closed interval; 20,001 points give an error of h^2/12 * max|f''| * range < 1e-6."""
    constant = math.exp(math.lgamma((df + 1) / 2) - math.lgamma(df / 2)) / math.sqrt(math.pi)
    a = np.linspace(0, math.atan(t / math.sqrt(df)), 20_001)
    y = np.cos(a) ** (df - 1)
    return 0.5 + constant * float(np.sum((y[1:] + y[:-1]) / 2 * np.diff(a)))


@settings(max_examples=40)
@given(p=st.floats(0.5, 0.9999), df=st.integers(1, 200))
def test_a_t_quantile_is_the_inverse_of_the_distribution(p, df):
    assert t_cdf(t_quantile(p, df), df) == pytest.approx(p, abs=2e-6)
    assert t_quantile(1 - p, df) == pytest.approx(-t_quantile(p, df), rel=1e-6, abs=1e-9)


def test_quantiles_of_the_printed_tables():
    # Closed forms: df 1 is Cauchy, df 2 is (2p-1) sqrt(2/(4p(1-p))); the rest as printed to three decimals.
    assert t_quantile(0.975, 1) == pytest.approx(math.tan(math.pi * 0.475), rel=1e-9)
    assert t_quantile(0.975, 2) == pytest.approx(0.95 * math.sqrt(2 / (4 * 0.975 * 0.025)), rel=1e-9)
    for df, value in ((4, 2.776), (9, 2.262), (30, 2.042)):
        assert t_quantile(0.975, df) == pytest.approx(value, abs=5e-4)
    assert t_quantile(0.975, 1e6) == pytest.approx(1.959966, abs=1e-5)


def test_the_interval_of_a_mean_covers_it_as_often_as_it_says():
    rng = np.random.default_rng(1)
    hits = 0
    for _ in range(2000):
        interval = mean_interval(list(rng.standard_normal(4) + 3))[1]
        hits += interval[0] <= 3 <= interval[1]
    # 95 % of 2000, whose standard deviation is sqrt(2000 * .95 * .05) = 9.7: within four of them.
    assert abs(hits - 1900) < 39
    assert mean_interval([2.5]) == (2.5, None)


@pytest.mark.parametrize(("r", "most"), [(0.0, 0.05), (0.5, 0.055), (0.8, 0.10)])
def test_no_difference_is_rarely_called_one(r, most):
    rng = np.random.default_rng(2)
    runs = 1000
    # A stretch is 45 steps: five correlation times (1+r)/(1-r) at r = 0.8.
    false = sum(series_difference(d).real for d in ar1(rng, 450, r, runs))
    share, error = false / runs, math.sqrt(most * (1 - most) / runs)
    assert share < most + 3.5 * error
    assert share > 0.02  # nor is the test blind: at 5 % its count has a standard deviation of 0.7 %


def test_plain_errors_would_be_wrong_where_batch_means_are_right():
    rng = np.random.default_rng(3)
    false = 0
    for x in ar1(rng, 450, 0.8, 300):
        false += abs(x.mean()) > 1.96 * x.std() / math.sqrt(len(x))
    assert false / 300 > 0.3  # the series is as hard as it is meant to be


def test_a_known_difference_is_found():
    # The mean of 450 values of AR(1), r = 0.5, deviation 1 has the standard error sqrt(3/450) = 0.082. A difference
    # of 5 of these is beyond the 5 % limit of t with 9 degrees of freedom (2.26) in over 95 % of cases.
    rng = np.random.default_rng(4)
    found = [series_difference(d + 0.41) for d in ar1(rng, 450, 0.5, 300)]
    assert sum(d.real and d.mean > 0 for d in found) > 0.93 * 300
    assert np.mean([d.mean for d in found]) == pytest.approx(0.41, abs=4 * 0.082 / math.sqrt(300))
    # With a half width of 2.26 standard errors, of which 9 degrees of freedom give 97 % on average.
    assert np.mean([d.half for d in found]) == pytest.approx(2.26 * 0.082 * 0.97, rel=0.06)


def test_too_little_to_say_anything_and_gaps():
    assert series_difference(np.ones(19)) is None
    d = series_difference(np.where(np.arange(100) % 2, np.nan, 1.0))
    assert d.mean == 1.0
    assert d.half == 0.0


def test_a_difference_that_rounding_makes_is_none():
    assert not series_difference(np.full(100, 5e-5)).real
    assert series_difference(np.full(100, 5e-4)).real


def test_seeds_paired_and_pooled_against_the_formulas():
    d = paired_seeds([0.1, 0.2, 0.3])
    assert (d.mean, d.half) == (pytest.approx(0.2), pytest.approx(4.30265 * 0.1 / math.sqrt(3), rel=1e-5))
    a, b = [1.0, 1.2, 1.1], [2.0]
    d = pooled_seeds(a, b, [a, b, [5.0, 5.2]], 0.95)
    variance = (0.02 + 0.0 + 0.02) / 3  # sums of squares within, over (3-1) + (1-1) + (2-1)
    assert d.mean == pytest.approx(0.9)
    assert d.half == pytest.approx(3.18245 * math.sqrt(variance * (1 / 3 + 1)), rel=1e-5)


def test_scatter_about_a_trend():
    rng = np.random.default_rng(5)
    x = np.linspace(5, 2, 4000) + 0.1 * rng.standard_normal(4000)
    # Var of the estimate for second differences: relative standard deviation sqrt(35/18/n)/2 + ... under 2 % here.
    assert detrended_deviation(x) == pytest.approx(0.1, rel=0.06)
    assert detrended_deviation(np.ones(5)) is None
