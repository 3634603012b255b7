"""Intervals, and how many seeds are needed, against references of their own."""

import math

import numpy as np
import pytest
from scipy import stats

from llmexp.compare.inference import Difference, fit_model
from llmexp.compare.statistics import mean_interval, quantile, seeds_needed, tail


def test_the_interval_of_a_mean_covers_it_as_often_as_it_says():
    rng = np.random.default_rng(1)
    hits = 0
    for _ in range(2000):
        low, high = mean_interval(list(rng.standard_normal(4) + 3))[1]
        hits += low <= 3 <= high
    # 95 % of 2000, whose standard deviation is sqrt(2000 * .95 * .05) = 9.7: within four of them.
    assert abs(hits - 1900) < 39
    assert mean_interval([2.5]) == (2.5, None)
    values = [2.61, 2.62, 2.632]
    mean, (low, high) = mean_interval(values)
    half = 4.302653 * np.std(values, ddof=1) / math.sqrt(3)
    assert (mean - low, high - mean) == pytest.approx((half, half), rel=1e-6)


@pytest.mark.parametrize(
    ("mean", "half", "real"),
    [(0.00299, 0.0030, False), (0.00304, 0.00301, True), (0.0031, 0.0030, True), (0.1, 0.0, True),
     (0.0, 0.0, False)],
)  # fmt: skip
def test_an_interval_is_real_by_its_own_ends_and_printed_so_that_they_show_it(mean, half, real):
    error = half / stats.t.ppf(0.975, 2)
    for size in (mean, -mean):
        d = Difference(size, error, df=2, seeds=3, most=3)
        assert d.real is real
        shown = [float(part) for part in d.text.split(" ± ")]
        assert (shown[0] > shown[1]) is real, d.text


def test_a_difference_and_its_interval_against_the_formula():
    model = fit_model([{"1": 0.0, "2": 0.0, "3": 0.0}, {"1": 0.1, "2": 0.2, "3": 0.3}])
    d = model.contrast(np.array([-1.0, 1.0]))
    half = stats.t.ppf(0.975, 2) * 0.1 / math.sqrt(3)
    assert (d.mean, d.half) == (pytest.approx(0.2), pytest.approx(half, rel=1e-5))
    assert (d.basis, d.seeds, d.error) == ("3 seeds", 3, pytest.approx(0.1 / math.sqrt(3)))


@pytest.mark.parametrize("size", [0.3, 1.0, 2.0])
def test_as_many_seeds_as_are_named_find_a_difference_four_times_in_five(size):
    n = seeds_needed(1.0, size)
    rng = np.random.default_rng(8)

    def found(seeds: int) -> float:
        d = size + rng.standard_normal((1000, seeds))
        t = d.mean(1) / (d.std(1, ddof=1) / math.sqrt(seeds))
        return float(np.mean(t > stats.t.ppf(0.975, seeds - 1)))

    # the margins add up to 80 % for many seeds
    assert found(n) > 0.8 - 3 * math.sqrt(0.8 * 0.2 / 1000) - 0.03
    assert found(max(2, n // 2)) < 0.75
    assert seeds_needed(1.0, 1e-6) is None


@pytest.mark.parametrize(("count", "df"), [(2, 4.0), (3, 2.5), (12, 22.0), (40, 90.0)])
def test_the_studentized_range_is_scipys(count, df):
    q = quantile(count, df)
    assert q == pytest.approx(stats.studentized_range.ppf(0.95, count, df), rel=1e-5)
    assert tail(q, count, df) == pytest.approx(0.05, abs=1e-6)
