"""Schedules against the definition: warm-up (u+1)/W, the end value on the last update."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmexp.update import schedule

totals = st.integers(1, 500)
ends = st.floats(0, 1)


@given(
    totals,
    st.integers(0, 600),
    ends,
    st.sampled_from([schedule.linear, schedule.cosine, schedule.wsd]),
)
def test_warmup_rises_linearly_and_the_end_value_is_reached_on_the_last_update(
    total, warmup, end, f
):
    if f is schedule.wsd and total - round(0.2 * total) < warmup < total:
        with pytest.raises(
            ValueError, match=f"schedule.warmup_steps={warmup}: .* reaches into the decay"
        ):
            f(0, total, warmup_steps=warmup, end_ratio=end)
        return
    factors = [f(u, total, warmup_steps=warmup, end_ratio=end) for u in range(total)]
    for u in range(min(warmup, total)):
        assert factors[u] == (u + 1) / warmup
    decays = f is not schedule.wsd or round(0.2 * total) > 0
    if total > max(warmup, 1) and decays:
        assert factors[-1] == pytest.approx(end, abs=1e-12)
    assert all(0 <= x <= 1 for x in factors)
    after = factors[max(warmup - 1, 0) :]
    assert all(a >= b - 1e-12 for a, b in itertools.pairwise(after))  # never rises after the peak


def test_cosine_is_half_a_cosine():
    # 11 updates, no warm-up: update 5 is half-way, where the cosine is zero.
    assert schedule.cosine(5, 11, end_ratio=0.2) == pytest.approx(0.6, abs=1e-15)
    assert schedule.cosine(2, 11, end_ratio=0.0) == pytest.approx(
        0.5 * (1 + math.cos(0.2 * math.pi)), abs=1e-15
    )


def test_wsd_is_stable_then_a_line():
    factors = [schedule.wsd(u, 10, decay_ratio=0.4, end_ratio=0.0) for u in range(10)]
    assert factors == pytest.approx([1, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25, 0.0])


@given(totals, st.integers(0, 600), st.floats(0, 1))
def test_wsd_never_falls_faster_than_its_decay(total, warmup, ratio):
    """A warm-up that reaches into the decay would end in a fall from 1 to the end value in one
    step."""
    try:
        factors = [
            schedule.wsd(u, total, warmup_steps=warmup, decay_ratio=ratio) for u in range(total)
        ]
    except ValueError:
        return
    decay = round(ratio * total)
    assert all(a - b <= 1 / max(decay, 1) + 1e-12 for a, b in itertools.pairwise(factors))


def test_the_lr_used_not_the_next_one():
    # Warm-up 100, base 3e-4: the tenth update (u=9) uses 3.0e-5. The ancestor printed 3.3e-5, the
    # next one's.
    assert 3e-4 * schedule.cosine(9, 50, warmup_steps=100) == pytest.approx(3.0e-5, rel=1e-15)
    assert 3e-4 * schedule.cosine(49, 50, warmup_steps=100) == pytest.approx(1.5e-4, rel=1e-15)
