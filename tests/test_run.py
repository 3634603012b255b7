"""The arithmetic of a run: whatever is given, the equation holds or the refusal names what
would."""

import dataclasses
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmexp.run.batch import solve_batch
from llmexp.run.budget import solve_budget
from llmexp.run.stages import stages_of
from llmexp.settings.config import Batch, Train
from llmexp.settings.values import ConfigError

pytestmark = pytest.mark.usefixtures("suggestions_are_read")

small = st.integers(1, 40)


def batch(micro=None, accum=None, real=None):
    return Batch(
        micro_batch_size=micro,
        gradient_accumulation_steps=accum,
        real_batch_size=real,
        sequence_length=8,
    )


@given(
    small,
    small,
    st.integers(1, 8),
    st.sets(st.sampled_from(["micro", "accum", "real"]), max_size=1),
)
def test_any_two_of_three_give_the_third(micro, accum, dp, missing):
    given_values = {"micro": micro, "accum": accum, "real": micro * accum * dp}
    for name in missing:
        given_values[name] = None
    solved = solve_batch(batch(**given_values), dp)
    assert (solved.micro_batch_size, solved.gradient_accumulation_steps) == (micro, accum)
    assert solved.real_batch_size == micro * accum * dp


@given(st.integers(1, 500), small, st.integers(1, 8))
def test_what_does_not_divide_is_refused_with_the_nearest_totals(real, accum, dp):
    try:
        solved = solve_batch(batch(accum=accum, real=real), dp)
    except ConfigError as error:
        near = [
            int(n) for n in re.findall(r"\d+", str(error).split("nearest are")[1].split(";")[0])
        ]
        assert real % (accum * dp)
        assert all(solve_batch(batch(accum=accum, real=n), dp) for n in near)
        assert all(abs(n - real) < accum * dp for n in near)
    else:
        assert solved.micro_batch_size * accum * dp == real


def test_a_contradiction_shows_the_product():
    with pytest.raises(ConfigError, match=r"batch.real_batch_size=10.*= 16"):
        solve_batch(batch(4, 2, 10), 2)


BASE = dict(
    max_steps=None, max_epochs=None, max_tokens=None, tail="keep", seed=0, twin=0, device="cpu",
    log_every=1,
    eval_every=1, eval_tokens=1, sample_every=None, sample_tokens=0, compile=False,
    data_digest=False,
    max_consecutive_skips=1, stop_step=None, profile_start=None, profile_steps=1,
)  # fmt: skip


def budget(real=4, length=10, sequences=30, **more):
    stages = stages_of({0: real}, length, 1, (0, 0, 0))
    return solve_budget(Train(**{**BASE, **more}), stages, length, sequences)


def test_budgets():
    assert dataclasses.astuple(budget(max_steps=7)) == (28, 7, 0, 0)
    assert dataclasses.astuple(budget(max_epochs=1)) == (30, 8, 2, 0)  # a tail window of 2
    assert dataclasses.astuple(budget(max_epochs=1, tail="drop")) == (28, 7, 0, 2)
    assert dataclasses.astuple(budget(max_epochs=2.5)) == (75, 19, 3, 0)
    assert dataclasses.astuple(budget(max_epochs=0.1, real=1)) == (
        3,
        3,
        0,
        0,
    )  # 0.1 x 30 is 3, not 2.999
    assert dataclasses.astuple(budget(max_tokens=125)) == (12, 3, 0, 0)
    assert budget().max_steps == 300


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"max_steps": 3, "max_tokens": 5}, "train.max_steps=3, train.max_tokens=5: one budget"),
        ({"max_tokens": 9}, "train.max_tokens=9: is less than one sequence"),
        (
            {"max_epochs": 0.1, "tail": "drop"},
            "train.max_epochs=0.1: with train.tail=drop no window",
        ),
    ],
)
def test_bad_budgets_are_refused(more, words):
    with pytest.raises(ConfigError, match=re.escape(words)):
        budget(**more)
