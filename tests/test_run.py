"""The arithmetic of a run: whatever is given, the equation holds or the refusal names what
would."""

import dataclasses
import re
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmexp.config.sections import Batch, Train
from llmexp.config.values import ConfigError
from llmexp.run.batch import solve_batch, too_large
from llmexp.run.budget import TokenCost, solve_budget, spent_of
from llmexp.run.stages import Begin, stages_of
from tests.suggestions import PARSER, suggested

pytestmark = pytest.mark.usefixtures("suggestions_are_read")

small = st.integers(1, 40)


def batch(micro=None, accum=None, real=None, tokens=None):
    return Batch(
        micro_batch_size=micro, gradient_accumulation_steps=accum, real_batch_size=real,
        tokens_per_step=tokens, sequence_length=8,
    )  # fmt: skip


RANKS = st.integers(1, 8)


@given(small, small, RANKS, st.sampled_from(["", "micro", "accum", "real"]))
def test_any_two_of_three_give_the_third(micro, accum, dp, missing):
    known = {"micro": micro, "accum": accum, "real": micro * accum * dp}
    solved = solve_batch(batch(**{k: v for k, v in known.items() if k != missing}), dp)
    assert (solved.micro_batch_size, solved.gradient_accumulation_steps) == (micro, accum)
    assert solved.real_batch_size == micro * accum * dp


@given(small, small, RANKS, st.sets(st.sampled_from(["micro", "accum"])))
def test_a_batch_in_tokens_is_one_in_sequences(micro, accum, dp, named):
    values = {k: v for k, v in {"micro": micro, "accum": accum}.items() if k in named}
    real = micro * accum * dp
    solved = solve_batch(batch(**values, tokens=8 * real), dp)
    in_sequences = solve_batch(batch(**values, real=real), dp)
    assert dataclasses.replace(solved, tokens_per_step=None) == in_sequences
    assert solve_batch(solved, dp) == solved  # written back, it is solved again into itself


@pytest.mark.parametrize(
    ("key", "beside", "length"), [("real", "accum", 1), ("tokens", "micro", 8)]
)
@given(st.integers(1, 5000), small, RANKS)
def test_what_does_not_divide_is_refused_with_the_nearest_that_do(
    key, beside, length, total, size, dp
):
    def solved(total: int) -> Batch:
        return solve_batch(batch(**{key: total, beside: size}), dp)

    unit = length * size * dp
    try:
        assert solved(total).real_batch_size * length == total
    except ConfigError as error:
        assert total % unit
        near = str(error).split("nearest are")[1].split(";")[0]
        for n in map(int, re.findall(r"\d+", near)):
            assert abs(n - total) < unit
            assert solved(n).real_batch_size * length == n
    else:
        assert total % unit == 0


@given(
    st.integers(1, 60), st.integers(1, 4), st.none() | st.integers(1, 9),
    st.none() | st.integers(1, 4), st.integers(1, 5),
    st.sampled_from(["", "real_batch_size", "tokens_per_step", "ramp"]),
)  # fmt: skip
def test_a_batch_larger_than_the_data_is_refused_with_one_that_fits(n, dp, micro, accum, more, key):
    """No example is given where no value of this key fits."""
    unit = (micro or 1) * (accum or 1) * dp
    size = unit if micro and accum else unit * more
    values = {"real_batch_size": size, "tokens_per_step": 8 * size}
    if key == "ramp":  # its accumulation follows
        accum, values["ramp"] = None, {0: (micro or 1) * dp, 99: (micro or 1) * dp * more}
    asked = dataclasses.replace(batch(micro, accum), **({key: values[key]} if key else {}))

    def most_sequences(asked: Batch) -> int:
        """Those of the largest step."""
        solved = solve_batch(asked, dp)
        return max(solved.ramp.values()) if solved.ramp else solved.real_batch_size

    if most_sequences(asked) <= n:
        return
    error = too_large(asked, solve_batch(asked, dp), dp, n)
    name = str(error.key).removeprefix("batch.")

    def fits(value: object) -> bool:
        try:
            return most_sequences(dataclasses.replace(asked, **{name: value})) <= n
        except ConfigError:
            return False

    examples = [PARSER.parse_override(word).value() for word in suggested(str(error))]
    assert all(map(fits, examples)), str(error)
    if not examples:
        every = [value if name != "ramp" else {0: value} for value in range(1, 8 * n + 1)]
        assert not any(map(fits, every))


BASE = dict.fromkeys(("max_steps", "max_epochs", "max_tokens", "sample_every", "stop_step"))
BASE |= dict.fromkeys(("log_every", "eval_every", "eval_tokens", "max_consecutive_skips"), 1)
BASE |= {"tail": "keep", "seed": 0, "twin": 0, "device": "cpu", "sample_tokens": 0}
BASE |= {"compile": False, "data_digest": False, "profile_start": None, "profile_steps": 1}


NO_COST, NO_BEGIN = TokenCost(), Begin()


def budget(real=4, length=10, sequences=30, token_cost=NO_COST, begin=NO_BEGIN, **more):
    stages = stages_of({0: real}, length, 1, begin)
    return solve_budget(Train(**{**BASE, **more}), stages, length, sequences, begin, token_cost)


FORK = Begin(step=3, sequences=12, tokens=120)


@pytest.mark.parametrize(
    ("given_values", "solved"),
    [
        ({"max_steps": 7}, (28, 7, 0, 0)),
        ({"max_epochs": 1}, (30, 8, 2, 0)),  # a tail window of 2
        ({"max_epochs": 1, "tail": "drop"}, (28, 7, 0, 2)),
        ({"max_epochs": 2.5}, (75, 19, 3, 0)),
        ({"max_epochs": 0.1, "real": 1}, (3, 3, 0, 0)),  # 0.1 x 30 is 3, not 2.999
        ({"max_tokens": 125}, (12, 3, 0, 0)),
        ({}, (1200, 300, 0, 0)),
        # its parent has spent 120 tokens
        ({"begin": FORK, "max_flops": 1200.0, "token_cost": TokenCost(6, 5)}, (20, 5, 0, 0)),
    ],
)
def test_budgets(given_values, solved):
    assert dataclasses.astuple(budget(**given_values)) == solved


@given(
    st.integers(1, 10**7), st.integers(1, 10**7), st.floats(1, 9e15), st.integers(1, 40),
    st.sampled_from(["keep", "drop"]),
)  # fmt: skip
def test_a_budget_of_the_model_is_spent_to_less_than_a_step(flops, n, budget_in_tokens, real, tail):
    """To a sequence where the last window may be short; and it is the budget in tokens."""
    token_cost, length = TokenCost(flops, n), 10
    for name, unit in (("max_flops", flops), ("tokens_per_parameter", Fraction(1, n))):
        value = float(f"{float(budget_in_tokens * unit):.9g}")
        exact = Fraction(str(value)) / unit  # the budget in tokens
        if exact < real * length:
            continue
        found = budget(real, length, 10**6, token_cost, tail=tail, **{name: value})
        tokens = found.total_sequences * length
        assert tokens <= exact < tokens + length * (real if tail == "drop" else 1)
        assert found == budget(real, length, max_tokens=int(exact), tail=tail)


@pytest.mark.parametrize(
    ("given_values", "tokens", "text"),
    [
        ({"max_flops": 1000.0}, 160, "max_flops=1000; the run ends 40 FLOPs (4%) before"),
        (
            {"tokens_per_parameter": 20.0},
            992,
            "tokens_per_parameter=20 x 50 parameters; the run ends 8 tokens (0.8%) before",
        ),
        (
            {"tokens_per_parameter": 20.0},
            1000,
            "tokens_per_parameter=20 x 50 parameters, met exactly",
        ),
    ],
)
def test_what_a_budget_of_the_model_leaves_is_printed(given_values, tokens, text):
    assert spent_of(Train(**BASE | given_values), TokenCost(6, 50), tokens) == f"train.{text}"
    assert spent_of(Train(**BASE | {"max_tokens": 7}), TokenCost(6, 50), 7) is None


@given(
    st.integers(1, 10**6), st.integers(1, 100), st.booleans(), st.integers(1, 10**8),
    st.sampled_from(["keep", "drop"]),
    st.sampled_from(["max_steps", "max_tokens", "max_epochs", "max_flops", "tokens_per_parameter"]),
)  # fmt: skip
def test_a_spent_budget_is_refused_with_one_that_leaves_a_fork_a_window(
    step, real, anew, sequences, tail, key
):
    """The parent may have trained on a small part of the data; the data may begin anew."""
    begin = Begin(step, 0 if anew else step * real, 10 * step * real)
    known = {"token_cost": TokenCost(6, 5), "begin": begin, "tail": tail}
    spent = {"max_steps": step, "max_epochs": begin.sequences / sequences}.get(key, 1)
    with pytest.raises(ConfigError, match=f"train.{key}=.*nothing is left") as refused:
        budget(real, 10, sequences, **known, **{key: spent})
    *_, example = suggested(str(refused.value))
    enough = PARSER.parse_override(example).value()
    found = budget(real, 10, sequences, **known, **{key: enough})
    assert found.max_steps > step
    assert found.total_sequences - begin.sequences <= 0.3 * step * real + 2 * real
