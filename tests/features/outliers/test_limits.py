"""The trailing window against numpy, and what enters it."""

import itertools
import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from llmexp import mesh
from llmexp.features.outliers.limits import ENOUGH, LASTING, Judge, Limits, describe
from llmexp.features.outliers.train import Outliers, judged
from llmexp.train.step import OK, SKIPPED, Outcome, must_skip

FIGURES = st.tuples(st.floats(0.1, 10), st.floats(0.1, 10))


def fed(entries: list[tuple[float, float]], sigma: float = 6.0, window: int = 64) -> Judge:
    found = Judge(sigma, window)
    for entry in entries:
        found.add(*entry)
    return found


def noisy(count: int, seed: int = 0) -> list[tuple[float, float]]:
    rng = np.random.default_rng(seed)
    return [(3 + 0.1 * a, 1 + 0.05 * b) for a, b in rng.standard_normal((count, 2))]


@given(
    st.integers(0, 2**32 - 1), st.integers(0, 70), st.integers(0, 150),
    st.sampled_from([8, 31, 64]),
)  # fmt: skip
def test_limits_are_sigma_deviations_about_the_mean_of_the_window(seed, far, count, window):
    """What has left the window leaves no trace; with such a sigma nothing is clamped."""
    entries = [(1000.0, 1000.0)] * far + noisy(count, seed)
    limits = fed(entries, 1e9, window).limits
    assert (limits is None) == (len(entries) < min(window, ENOUGH))
    if limits is not None and np.ptp(entries[-window:], axis=0).all():
        kept = zip((limits.loss, limits.norm), np.array(entries)[-window:].T, strict=True)
        for found, values in kept:
            reach = 1e9 * values.std(ddof=1)
            wanted = values.mean() - reach, values.mean() + reach
            np.testing.assert_allclose(found, wanted, rtol=1e-11)


def test_a_spike_does_not_blind_the_window():
    """It enters at 6 deviations: that adds no more than 36/64 to the variance, and so the next
    spike is seen too."""
    found = fed(noisy(64))
    before = found.limits.loss
    text = describe(found.limits, 9.25, 1.0)
    assert text.startswith("loss 9.25, above 3.")
    assert text.endswith("gradient norm 1")
    found.add(1e6, 1.0)
    after = found.limits.loss
    assert after[1] - after[0] < (before[1] - before[0]) * math.sqrt(1 + 37 / 63)
    assert after[1] < 5


def test_a_level_that_lasts_is_learned():
    found = fed(noisy(64))
    flagged = 0
    for loss, norm in noisy(64, seed=1):
        flagged += not found.limits.loss[0] <= loss + 20 <= found.limits.loss[1]
        found.add(loss + 20, norm)
    assert 1 <= flagged < 32
    assert found.limits.loss[0] < 23 < found.limits.loss[1]


@given(st.lists(st.sampled_from([math.nan, math.inf, -math.inf]), max_size=5))
def test_what_is_not_finite_never_enters(bad):
    found = fed(noisy(40))
    before = found.limits, found.state_dict()
    for value in bad:
        found.add(value, 1.0)
        found.add(1.0, value)
    assert (found.limits, found.state_dict()) == before


def test_a_loss_that_stands_still_has_no_outliers_by_rounding():
    found = fed([(2.0, 1.0)] * 40)
    low, high = found.limits.loss
    assert low < 2 - 2**-22 < 2 + 2**-22 < high
    assert high < 2.0001


LEVELS = st.lists(st.tuples(*[st.integers(0, 100)] * 2, st.integers(1, 12)), max_size=12)


@given(LEVELS, st.floats(0.1, 6), st.integers(0, 60))
def test_only_what_is_above_is_skipped_and_a_new_level_is_skipped_four_times(levels, sigma, cut):
    """Levels of loss and norm that last for some steps, the updates of all outliers skipped; a
    resume in the middle changes nothing."""
    steps = noisy(40) + [(loss, norm) for loss, norm, times in levels for _ in range(times)]
    found, resumed, skips = Judge(sigma, 16), Judge(sigma, 16), []
    for number, (loss, norm) in enumerate(steps):
        limits = found.limits
        skips.append(limits is not None and not limits.hold(loss, norm))
        if limits is not None and skips[-1]:
            means = np.mean(found.state_dict()["window"], axis=0)
            assert loss > means[0] or norm > means[1]
        found.add(loss, norm, skipped=skips[-1])
        if number == cut:
            resumed.load_state_dict(json.loads(json.dumps(found.state_dict())))
        elif number > cut:
            resumed.add(loss, norm, skipped=skips[-1])
            assert (resumed.limits, resumed.state_dict()) == (found.limits, found.state_dict())
    lengths = [len(list(same)) for skipped, same in itertools.groupby(skips) if skipped]
    assert max(lengths, default=0) <= LASTING


@given(st.lists(st.floats(0, 10), min_size=40, max_size=90), st.integers(0, 19))
def test_robust_limits_are_about_the_median_and_early_heights_do_not_widen_them(values, high):
    outliers = Judge(6.0, 64)
    for number, value in enumerate(values):
        outliers.add(1e6 * (number < high) + value, value)
    kept = np.array(values[-64:])
    median = np.median(kept)
    reach = 6 * max(1.4826 * np.median(abs(kept - median)), 1e-6 * abs(median))
    limits = outliers.robust()
    assert limits.norm == pytest.approx((median - reach, median + reach), rel=1e-12, abs=1e-12)
    if len(kept) > 2 * high:
        assert limits.loss[1] <= 10 + 6 * 1.4826 * 10


@pytest.mark.parametrize("device", [False, True])
def test_the_step_on_the_device_and_its_outcome_on_the_host_agree(device):
    """`must_skip` and `judged` skip what `Outcome.code` has a reason for, and no more."""
    joined = mesh.join("cpu", "single", 1, 1, 1)
    limits = Limits((1.0, 3.0), (0.5, 2.0))
    edges = (math.nan, math.inf, -math.inf, 0.5, 1.0, 2.0, 3.0, math.nextafter(3.0, 4.0), 4.0)
    for loss, norm, count in itertools.product(edges, edges, (0.0, 5.0)):
        given = [torch.tensor(x, dtype=torch.float64) if device else x for x in (loss, norm, count)]
        bad = must_skip(*given)
        skip = judged(joined, bad, given[0], torch.tensor(norm).double(), limits)
        outlying = bool(skip) and not bad
        assert outlying == (not bad and not limits.hold(loss, norm))
        seen = Outcome(count, bool(skip), loss, norm, norm, False, 1.0)
        assert (seen.code == OK, seen.code == SKIPPED) == (not skip, outlying)
        assert seen.is_finite == (not bad)


def test_ordinary_steps_that_another_feature_skips_are_no_new_level():
    lines: list[str] = []
    outliers = Outliers(None, fed([(2.0, 1.0)] * 40), True)  # type: ignore[arg-type]
    outliers.loop = SimpleNamespace(  # type: ignore[assignment]
        progress=SimpleNamespace(step=41),
        run=SimpleNamespace(stages=()),
        console=SimpleNamespace(line=lines.append),
    )
    for _ in range(LASTING):
        outliers.finished(Outcome(96.0, True, 2.0, 1.0, 1.0, False, 1.0))
    assert (outliers.count, lines) == (0, [])
    assert outliers._judge.limits is not None
