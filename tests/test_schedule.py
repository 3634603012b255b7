"""Schedules against the definition: warm-up (u+1)/W, the end value on the last update."""

import itertools
import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmexp.optim import schedule

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


# What is left of the rate when the share t of the decay is done.
LEFT = {
    "linear": lambda t: 1 - t,
    "sqrt": lambda t: (1 - t) ** 0.5,
    "one_minus_sqrt": lambda t: 1 - t**0.5,
    "cosine": lambda t: math.cos(math.pi * t / 2) ** 2,  # = (1 + cos(pi t)) / 2
}
shapes = st.sampled_from([*LEFT])
FLOAT = 1e-14  # a few roundings of numbers up to 1; powers of numbers up to 500


@st.composite
def spans(draw):
    """(updates, of the warm-up, before the decay) of a run in which all three parts fit."""
    total = draw(st.integers(2, 500))
    start = draw(st.integers(0, total - 1))
    return total, draw(st.integers(0, start)), start


@given(spans(), shapes, ends)
def test_a_decay_has_its_shape_between_the_stable_rate_and_the_end_value(span, shape, end):
    total, warmup, start = span
    for u in range(start, total):
        t = Fraction(u + 1 - start, total - start)
        factor = schedule.cooldown(
            u, total, warmup_steps=warmup, decay_start=start, decay_shape=shape, end_ratio=end
        )
        assert factor == pytest.approx(end + (1 - end) * LEFT[shape](float(t)), abs=FLOAT)
    assert factor == pytest.approx(end, abs=FLOAT)


@given(spans(), shapes, ends)
def test_the_shape_of_a_decay_changes_nothing_before_it(span, shape, end):
    total, warmup, start = span
    for u in range(start):
        line, other = (
            schedule.cooldown(u, total, warmup, decay_start=start, decay_shape=s, end_ratio=end)
            for s in ("linear", shape)
        )
        assert line == other


def test_the_line_of_a_decay_keeps_the_bits_of_recorded_runs():
    """Runs of before are resumed and compared bit by bit; their rate was this expression."""
    for total, end in itertools.product((7, 50, 333), (0.0, 0.1, 1 / 3)):
        length = round(0.2 * total)
        for done in range(1, length + 1):
            factor = schedule.wsd(total - length + done - 1, total, end_ratio=end)
            assert factor == 1 + (end - 1) * done / length


@given(spans(), shapes, ends, st.none() | st.integers(1, 600), st.floats(0.1, 2))
def test_power_is_the_equation_of_its_paper(span, shape, end, bound, exponent):
    """Shen et al. 2024, equations 7 and 8, in tokens: min(max_lr, batch x a x n^b)."""
    total, warmup, start = span
    tokens, max_lr, batch = 4096 * 8, 0.02, 8
    b = -exponent
    first = (warmup or 1) if bound is None else bound
    a = max_lr / batch / (first * tokens) ** b  # where batch x a x n^b is max_lr

    def eta(updates):
        return min(max_lr, batch * a * (updates * tokens) ** b)

    for u in range(total):
        n = u + 1
        if n < warmup:
            rate = n / warmup * eta(warmup)
        elif n <= start:
            rate = eta(n)
        else:
            left = LEFT[shape]((n - start) / (total - start))
            rate = (end + (1 - end) * left) * eta(max(start, 1))
        factor = schedule.power(
            u, total, warmup_steps=warmup, power_start=bound, exponent=exponent,
            decay_start=start, decay_shape=shape, end_ratio=end,
        )  # fmt: skip
        assert max_lr * factor == pytest.approx(rate, rel=1e-12, abs=max_lr * FLOAT)


@given(st.integers(1, 500), st.integers(1, 600), st.floats(1e-4, 1e4))
def test_inverse_sqrt_is_the_formula_of_its_paper(total, warmup, d_model):
    """Vaswani et al. 2017, equation 3; the base rate is its rate at the end of the warm-up."""
    base = d_model**-0.5 * warmup**-0.5
    for u in range(total):
        step = u + 1
        rate = d_model**-0.5 * min(step**-0.5, step * warmup**-1.5)
        factor = schedule.inverse_sqrt(u, total, warmup_steps=warmup)
        assert base * factor == pytest.approx(rate, rel=1e-13)


@given(
    spans(), shapes, ends, st.sampled_from([schedule.wsd, schedule.power, schedule.inverse_sqrt])
)
def test_rates_have_no_jumps_at_the_joints_and_end_at_the_floor(span, shape, end, f):
    """After the warm-up the rate never rises; the last update has the share end_ratio of the rate
    before the decay, which no earlier update undercuts."""
    total, warmup, start = span
    knobs = {"warmup_steps": warmup, "decay_start": start, "decay_shape": shape, "end_ratio": end}
    factors = [f(u, total, **knobs) for u in range(total)]
    peak = max(warmup - 1, 0)
    assert factors[:peak] == sorted(factors[:peak])
    assert all(a >= b - FLOAT for a, b in itertools.pairwise(factors[peak:]))
    if warmup:
        assert factors[peak] == pytest.approx(factors[peak - 1] + 1 / warmup if peak else 1)
    before = factors[start - 1] if start else 1.0
    assert factors[-1] == pytest.approx(end * before, abs=FLOAT)
    # the decay's first update falls by what the shape takes in one part, from the rate before
    t = 1 / (total - start)
    fallen = before * (1 - end) * (1 - LEFT[shape](t))
    assert before - factors[start] == pytest.approx(fallen, abs=FLOAT)


def test_a_short_decay_holds_its_end_value():
    knobs = {"decay_start": 4, "decay_steps": 2, "decay_shape": "sqrt", "end_ratio": 0.25}
    root = 4**-0.5
    factors = [schedule.inverse_sqrt(u, 10, warmup_steps=1, **knobs) for u in range(10)]
    assert factors[5:] == pytest.approx([0.25 * root] * 5, rel=1e-14)
    assert factors[4] == pytest.approx((0.25 + 0.75 * 0.5**0.5) * root, rel=1e-14)


def test_a_decay_that_is_longer_than_what_is_left_ends_with_the_run():
    for f in (schedule.cooldown, schedule.power, schedule.inverse_sqrt):
        for start in (None, 4):
            knobs = {"decay_start": start, "end_ratio": 0.0}
            long, all_left = (
                [f(u, 10, decay_steps=steps, **knobs) for u in range(10)]
                for steps in (20, 10 - (start or 0))
            )
            assert long == all_left
            assert long[-1] == 0


def test_power_and_inverse_sqrt_refuse_a_warmup_that_reaches_into_the_decay():
    for f in (schedule.power, schedule.inverse_sqrt):
        with pytest.raises(ValueError, match=r"schedule.warmup_steps=9: .* reaches into the decay"):
            f(0, 10, warmup_steps=9, decay_ratio=0.2)
