"""Schedules against the definition: warm-up (u+1)/W, the end value on the last update."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmexp.optim import schedule

ends = st.floats(0, 1)
FLOAT = 1e-14  # a few roundings of numbers up to 1; powers of numbers up to 500
# What is left of the rate when the share t of the decay is done.
LEFT = {
    "linear": lambda t: 1 - t,
    "sqrt": lambda t: (1 - t) ** 0.5,
    "one_minus_sqrt": lambda t: 1 - t**0.5,
    "cosine": lambda t: math.cos(math.pi * t / 2) ** 2,  # = (1 + cos(pi t)) / 2
}


@pytest.mark.parametrize("f", [schedule.constant, schedule.linear, schedule.cosine])
@given(total=st.integers(1, 500), warmup=st.integers(0, 600), end=ends)
def test_warmup_rises_linearly_and_then_all_is_the_decay(f, total, warmup, end):
    knobs = {} if f is schedule.constant else {"end_ratio": end}
    peak = max(warmup - 1, 0)
    for u in range(total):
        factor = f(u, total, warmup_steps=warmup, **knobs)
        if u < warmup:
            assert factor == (u + 1) / warmup
        elif f is schedule.constant:
            assert factor == 1
        else:
            left = LEFT[f.__name__]((u - peak) / max(1, total - 1 - peak))
            assert factor == pytest.approx(end + (1 - end) * left, abs=FLOAT)


@st.composite
def decays(draw):
    """(updates, of the warm-up, before the decay, of the decay, the knobs that say so) of a run in
    which all three parts fit, or which ends in its warm-up."""
    total = draw(st.integers(2, 500))
    start = draw(st.integers(0, total - 1))
    warmup, left = draw(st.integers(0, start) | st.integers(total, 600)), total - start
    if draw(st.booleans()):  # no decay, as inverse_sqrt is shipped
        return total, warmup, total, 1, {"decay_ratio": 0.0}
    more = draw(st.integers(0, 9))  # updates for which the run has no room
    steps = draw(st.integers(1, left) | st.just(left + more))
    length, knobs = draw(
        st.sampled_from([
            (left, {"decay_start": start}),
            (left, {"decay_ratio": left / total}),
            (left, {"decay_steps": left if start else left + more}),
            (min(steps, left), {"decay_start": start, "decay_steps": steps}),
        ])
    )  # fmt: skip
    return total, warmup, start, length, knobs


def of_power(warmup, bound, exponent):
    """Shen et al. 2024, equation 7, in tokens, as a share of max_lr: min(max_lr, batch x a x n^b).
    `bound`: where batch x a x n^b is max_lr."""
    tokens, max_lr, batch, b = 4096 * 8, 0.02, 8, -exponent
    a = max_lr / batch / ((bound or warmup or 1) * tokens) ** b
    return lambda n: min(max_lr, batch * a * (n * tokens) ** b) / max_lr


def of_inverse_sqrt(warmup, d_model):
    """Vaswani et al. 2017, equation 3; the base rate is its rate at the end of the warm-up."""
    warmup = warmup or 1
    base = d_model**-0.5 * warmup**-0.5
    return lambda n: d_model**-0.5 * min(n**-0.5, n * warmup**-1.5) / base


@pytest.mark.parametrize("f", [schedule.wsd, schedule.power, schedule.inverse_sqrt])
@given(
    run=decays(),
    shape=st.sampled_from([*LEFT]),
    end=ends,
    bound=st.none() | st.integers(1, 600),
    exponent=st.floats(0.1, 2),
    d_model=st.floats(1e-4, 1e4),
)
def test_rates_are_the_law_of_the_paper_and_then_its_decay(
    f, run, shape, end, bound, exponent, d_model
):
    """Warm-up to the law, the law, and from its last rate a decay in its shape to the share
    `end_ratio` of that rate."""
    total, warmup, start, length, knobs = run
    law = {
        schedule.wsd: lambda n: 1.0,
        schedule.power: of_power(warmup, bound, exponent),
        schedule.inverse_sqrt: of_inverse_sqrt(warmup, d_model),
    }[f]
    if f is schedule.power:
        knobs = knobs | {"power_start": bound, "exponent": exponent}
    for u in range(total):
        n = u + 1
        if n <= warmup:
            wanted = n / warmup * law(warmup)
        elif n <= start:
            wanted = law(n)
        else:
            left = LEFT[shape](min(1.0, (n - start) / length))
            wanted = (end + (1 - end) * left) * law(max(start, 1))
        factor = f(u, total, warmup_steps=warmup, decay_shape=shape, end_ratio=end, **knobs)
        assert factor == pytest.approx(wanted, rel=1e-12, abs=FLOAT)
        if n <= start and f is schedule.wsd:
            assert factor == (n / warmup if n < warmup else 1)


def test_the_line_of_a_decay_keeps_the_bits_of_recorded_runs():
    """Runs of before are resumed and compared bit by bit; their rate was this expression."""
    for total, end in itertools.product((7, 50, 333), (0.0, 0.1, 1 / 3)):
        length = round(0.2 * total)
        for done in range(1, length + 1):
            factor = schedule.wsd(total - length + done - 1, total, end_ratio=end)
            assert factor == 1 + (end - 1) * done / length


@pytest.mark.parametrize("f", [schedule.wsd, schedule.power, schedule.inverse_sqrt])
@given(total=st.integers(2, 500), data=st.data())
def test_a_warmup_that_reaches_into_the_decay_is_refused(f, total, data):
    start = data.draw(st.integers(0, total - 1))
    warmup = data.draw(st.integers(start, total))
    call = {"warmup_steps": warmup, "decay_start": start}
    if warmup in (start, total):
        f(0, total, **call)
    else:
        with pytest.raises(ValueError, match=rf"warmup_steps={warmup}: .* reaches into the decay"):
            f(0, total, **call)
