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
        tokens_per_step=tokens,
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


@given(small, small, st.integers(1, 8), st.sampled_from(["micro", "accum", "both", "neither"]))
def test_a_batch_in_tokens_is_one_in_sequences(micro, accum, dp, given_too):
    values = {
        "micro": {"micro": micro},
        "accum": {"accum": accum},
        "both": {"micro": micro, "accum": accum},
        "neither": {},
    }[given_too]
    real = micro * accum * dp
    solved = solve_batch(batch(**values, tokens=8 * real), dp)
    in_sequences = solve_batch(batch(**values, real=real), dp)
    assert dataclasses.replace(solved, tokens_per_step=None) == in_sequences
    assert solve_batch(solved, dp) == solved  # written back, it is solved again into itself


@given(st.integers(1, 5000), small, st.integers(1, 8))
def test_tokens_that_do_not_divide_are_refused_with_the_nearest_that_do(tokens, micro, dp):
    unit = 8 * micro * dp
    try:
        solved = solve_batch(batch(micro=micro, tokens=tokens), dp)
    except ConfigError as error:
        assert tokens % unit
        near = str(error).split("nearest are")[1].split(";")[0]
        for n in map(int, re.findall(r"\d+", near)):
            assert abs(n - tokens) < unit
            assert solve_batch(batch(micro=micro, tokens=n), dp).real_batch_size * 8 == n
    else:
        assert solved.real_batch_size * 8 == tokens


@pytest.mark.parametrize(
    ("known", "words"),
    [
        ({"micro": 4, "accum": 2, "real": 10}, "batch.real_batch_size=10.*= 16"),
        ({"real": 10, "tokens": 64}, "tokens_per_step=64: batch.real_batch_size=10 .*80"),
        (
            {"micro": 4, "accum": 2, "tokens": 64},
            "tokens_per_step=64.*_size 4 x.*= 128 tok",
        ),
    ],
)
def test_a_contradiction_shows_the_product(known, words):
    with pytest.raises(ConfigError, match=words):
        solve_batch(batch(**known), 2)


@given(
    st.integers(1, 60),
    st.integers(1, 4),
    st.none() | st.integers(1, 9),
    st.none() | st.integers(1, 4),
    st.sampled_from(["", "real_batch_size", "tokens_per_step", "ramp"]),
    st.integers(1, 5),
)
def test_a_batch_larger_than_the_data_is_refused_with_one_that_fits(n, dp, micro, accum, key, more):
    """No example is given where no value of this key fits."""
    unit = (micro or 1) * (accum or 1) * dp
    size = unit if micro and accum else unit * more
    values = {"real_batch_size": size, "tokens_per_step": 8 * size, "ramp": {0: dp, 99: size}}
    if key == "ramp":  # its accumulation follows
        accum, values["ramp"] = None, {0: (micro or 1) * dp, 99: (micro or 1) * dp * more}
    asked = dataclasses.replace(batch(micro, accum), **({key: values[key]} if key else {}))
    solved = solve_batch(asked, dp)
    if most_sequences(solved) <= n:
        return
    error = too_large(asked, solved, dp, n)
    name = str(error.key).removeprefix("batch.")

    def fits(value):
        try:
            found = solve_batch(dataclasses.replace(asked, **{name: value}), dp)
        except ConfigError:
            return False
        return most_sequences(found) <= n

    examples = [PARSER.parse_override(word).value() for word in suggested(str(error))]
    assert all(map(fits, examples)), str(error)
    if not examples:
        every = [value if name != "ramp" else {0: value} for value in range(1, 8 * n + 1)]
        assert not any(map(fits, every))


def most_sequences(solved):
    """The sequences of the largest step."""
    return max(solved.ramp.values()) if solved.ramp else solved.real_batch_size


BASE = dict.fromkeys(("max_steps", "max_epochs", "max_tokens", "sample_every", "stop_step"))
BASE |= dict.fromkeys(("log_every", "eval_every", "eval_tokens", "max_consecutive_skips"), 1)
BASE |= {"tail": "keep", "seed": 0, "twin": 0, "device": "cpu", "sample_tokens": 0}
BASE |= {"compile": False, "data_digest": False, "profile_start": None, "profile_steps": 1}


NO_COST, NO_BEGIN = TokenCost(), Begin()


def budget(real=4, length=10, sequences=30, token_cost=NO_COST, begin=NO_BEGIN, **more):
    stages = stages_of({0: real}, length, 1, begin)
    return solve_budget(Train(**{**BASE, **more}), stages, length, sequences, begin, token_cost)


@pytest.mark.parametrize(
    ("given_values", "solved"),
    [
        ({"max_steps": 7}, (28, 7, 0, 0)),
        ({"max_epochs": 1}, (30, 8, 2, 0)),  # a tail window of 2
        ({"max_epochs": 1, "tail": "drop"}, (28, 7, 0, 2)),
        ({"max_epochs": 2.5}, (75, 19, 3, 0)),
        ({"max_epochs": 0.1, "real": 1}, (3, 3, 0, 0)),  # 0.1 x 30 is 3, not 2.999
        ({"max_tokens": 125}, (12, 3, 0, 0)),
    ],
)
def test_budgets(given_values, solved):
    assert dataclasses.astuple(budget(**given_values)) == solved
    assert budget().max_steps == 300


@given(
    st.integers(1, 10**7),
    st.integers(1, 10**7),
    st.floats(1, 1e18),
    st.integers(1, 40),
    st.sampled_from(["keep", "drop"]),
)
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


def test_what_a_budget_of_the_model_leaves_is_printed():
    flops = Train(**{**BASE, "max_flops": 1000.0})
    text = "train.max_flops=1000; the run ends 40 FLOPs (4%) before"
    assert spent_of(flops, TokenCost(6), 160) == text
    parameters = Train(**{**BASE, "tokens_per_parameter": 20.0})
    text = "train.tokens_per_parameter=20 x 50 parameters; the run ends 8 tokens (0.8%) before"
    assert spent_of(parameters, TokenCost(6, 50), 992) == text
    text = "train.tokens_per_parameter=20 x 50 parameters, met exactly"
    assert spent_of(parameters, TokenCost(6, 50), 1000) == text
    assert spent_of(Train(**{**BASE, "max_tokens": 7}), TokenCost(6, 50), 7) is None


def test_a_fork_counts_what_its_parent_has_spent():
    begin = Begin(step=3, sequences=12, tokens=120)
    found = budget(token_cost=TokenCost(6, 5), begin=begin, max_flops=6 * 200.0)
    assert (found.total_sequences, found.max_steps) == (12 + 8, 3 + 2)


@given(
    st.integers(1, 10**6),
    st.integers(1, 100),
    st.booleans(),
    st.integers(1, 10**8),
    st.sampled_from(["keep", "drop"]),
    st.sampled_from(["max_steps", "max_tokens", "max_epochs", "max_flops", "tokens_per_parameter"]),
)
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


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"max_steps": 3, "max_flops": 5}, "train.max_steps=3, train.max_flops=5: one budget"),
        ({"max_flops": 59.0}, "train.max_flops=59.0: is less than one sequence of 10 tokens; for"),
        ({"max_steps": 3, "max_tokens": 5}, "train.max_steps=3, train.max_tokens=5: one budget"),
        ({"max_tokens": 9}, "train.max_tokens=9: is less than one sequence"),
        ({"max_epochs": 0.1, "tail": "drop"}, "max_epochs=0.1: with train.tail=drop no step"),
        ({"max_flops": 5.0, "token_cost": NO_COST}, "max_flops=5.0: the model does not count"),
    ],
)
def test_bad_budgets_are_refused(more, words):
    with pytest.raises(ConfigError, match=re.escape(words)):
        budget(**{"token_cost": TokenCost(6, 1), **more})
