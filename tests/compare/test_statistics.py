"""Quantiles, intervals and tests against references of their own, and their errors over many
synthetic runs."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmexp.compare.statistics import (
    Difference,
    autocorrelated,
    mean_interval,
    paired_seeds,
    seeds_needed,
    series_difference,
    t_quantile,
    unpaired_seeds,
    welch,
)
from tests.compare.synthetic import ar1


def t_cdf(t: float, df: float) -> float:
    """By the trapezoidal rule over the density: with x = sinh-free substitution x = sqrt(df) tan(a)
    the integrand is cos(a)^(df-1), smooth on a closed interval; 20,001 points give an error of
    h^2/12 * max|f''| * range < 1e-6."""
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
    # Closed forms: df 1 is Cauchy, df 2 is (2p-1) sqrt(2/(4p(1-p))); the rest as printed to three
    # decimals.
    assert t_quantile(0.975, 1) == pytest.approx(math.tan(math.pi * 0.475), rel=1e-9)
    assert t_quantile(0.975, 2) == pytest.approx(
        0.95 * math.sqrt(2 / (4 * 0.975 * 0.025)), rel=1e-9
    )
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


INVERSE = np.linspace(1, 1e-3, 200)  # of degrees of freedom


def halves(error: np.ndarray, df: np.ndarray) -> np.ndarray:
    """The half widths of 95 % intervals: t between exact quantiles, to about 1e-3."""
    exact = [t_quantile(0.975, 1 / x) for x in INVERSE]
    return error * np.interp(-1 / np.asarray(df), -INVERSE, exact)


def few(alarms: np.ndarray) -> bool:
    """Whether so many false alarms agree with a rate of at most 5 %: three standard deviations of a
    binomial count."""
    draws = len(alarms)
    return alarms.sum() <= 0.05 * draws + 3 * math.sqrt(draws * 0.05 * 0.95)


@pytest.mark.parametrize("n", [20, 40, 100, 450])
@pytest.mark.parametrize("r", [0.0, 0.3, 0.6, 0.8, 0.9])
def test_a_series_without_a_difference_is_rarely_called_one(n, r):
    series = ar1(np.random.default_rng([2, n]), n, r, 2000)
    mean, error, independent = autocorrelated(series)
    told = independent >= 4
    found = np.abs(mean[told]) > halves(error[told], independent[told] - 1)
    assert few(np.concatenate([found, np.zeros(np.sum(~told), bool)]))
    if (n, r) == (20, 0.8):
        assert np.mean(~told) > 0.8  # short ones that resemble themselves get no interval
    for k in range(3):
        d = series_difference(series[k])
        assert (d is not None) == told[k]
        if d is not None:
            half = halves(error[k], independent[k] - 1)
            assert d.mean == pytest.approx(mean[k], rel=1e-9)
            assert d.half == pytest.approx(float(half), rel=2e-3)


@pytest.mark.parametrize("seeds", [2, 3, 5, 10])
@pytest.mark.parametrize("spread", [1.0, 10.0])
def test_seeds_without_a_difference_are_rarely_called_one(seeds, spread):
    """2,000 pairs of settings of which nothing differs but, with `spread`, how far their seeds
    scatter."""
    rng = np.random.default_rng([7, seeds])
    a, b = rng.standard_normal((2, 2000, seeds)) * np.array([1.0, spread])[:, None, None]
    common = 3 * rng.standard_normal((2000, seeds))
    assert few(np.array([paired_seeds(list(d)).real for d in (b + common) - (a + common)]))
    if seeds > 2:
        difference, error, df = welch(a, b)
        assert few(np.abs(difference) > halves(error, df))


def test_a_known_difference_is_found():
    # The mean of 450 values of AR(1), r = 0.5, deviation 1 has the standard error sqrt(3/450) =
    # 0.082. A difference of 5 of these is beyond an interval of at most 1.5 x 1.98 of them in over
    # 97 % of cases.
    mean, error, independent = autocorrelated(ar1(np.random.default_rng(4), 450, 0.5, 300) + 0.41)
    half = halves(error, independent - 1)
    assert np.mean(mean > half) > 0.93
    assert np.mean(mean) == pytest.approx(0.41, abs=4 * 0.082 / math.sqrt(300))
    # The interval is at least that of the true correlation, 1.98 standard errors, and not twice as
    # wide.
    assert 1.98 * 0.082 < np.mean(half) < 1.5 * 1.98 * 0.082


def test_too_little_to_say_anything_and_gaps():
    assert series_difference(np.ones(19)) is None
    d = series_difference(np.where(np.arange(100) % 2, np.nan, 1.0))
    assert (d.mean, d.half) == (1.0, 0.0)


@pytest.mark.parametrize(
    ("mean", "half", "real"),
    [
        (0.0030, 0.0030, False),
        (0.00304, 0.00301, False),
        (0.0031, 0.0030, True),
        (0.1, 0.0, True),
        (0.0, 0.0, False),
    ],
)
def test_an_interval_that_touches_zero_as_printed_is_not_real(mean, half, real):
    assert Difference(mean, half, "3 seeds").real is real
    assert Difference(-mean, half, "3 seeds").real is real


def test_seeds_paired_and_unpaired_against_the_formulas():
    d = paired_seeds([0.1, 0.2, 0.3])
    assert (d.mean, d.half) == (
        pytest.approx(0.2),
        pytest.approx(4.30265 * 0.1 / math.sqrt(3), rel=1e-5),
    )
    assert (d.pairs, d.spread) == (3, pytest.approx(0.1))
    d = unpaired_seeds([1.0, 1.2], [2.0, 2.2])  # equal spreads: df = 2 (n - 1) = 2
    assert (d.mean, d.half) == (
        pytest.approx(1.0),
        pytest.approx(4.30265 * math.sqrt(0.02 / 2 + 0.02 / 2), rel=1e-5),
    )
    assert d.spread == pytest.approx(0.2)


@pytest.mark.parametrize("size", [0.3, 1.0, 2.0])
def test_as_many_seeds_as_are_named_find_a_difference_four_times_in_five(size):
    n = seeds_needed(1.0, size)
    rng = np.random.default_rng(8)
    found = np.mean([paired_seeds(list(size + rng.standard_normal(n))).real for _ in range(1000)])
    assert (
        found > 0.8 - 3 * math.sqrt(0.8 * 0.2 / 1000) - 0.03
    )  # the margins add up to 80 % for many seeds
    fewer = np.mean(
        [paired_seeds(list(size + rng.standard_normal(max(2, n // 2)))).real for _ in range(1000)]
    )
    assert fewer < 0.75
    assert seeds_needed(1.0, 1e-6) is None
