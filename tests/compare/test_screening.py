"""A screen: the design, what it finds, and how often it errs."""

import itertools
import json
import math

import numpy as np
import pytest

import llmexp
from llmexp.compare.screening import design, discoveries, screen
from llmexp.sweep.grid import size_of
from tests.conftest import llmexp as command
from tests.tools import printed


@pytest.mark.parametrize(("factors", "runs"), [
    (3, 8), (4, 8), (7, 8), (4, 16), (5, 16), (7, 16), (8, 16), (15, 16), (6, 32), (16, 32),
    (31, 32),
])  # fmt: skip
def test_effects_are_orthogonal_and_as_little_confounded_as_can_be(factors, runs):
    rows = 2 * np.array(design(factors, runs)) - 1
    assert rows.shape == (runs, factors)
    assert len({tuple(row) for row in rows.tolist()}) == runs
    assert set(rows[0].tolist()) == {-1}
    assert (rows.T @ rows == runs * np.eye(factors)).all()
    threes = itertools.combinations(range(factors), 3)
    mixed = any(abs(int(rows[:, three].prod(axis=1).sum())) == runs for three in threes)
    assert mixed == (factors > runs // 2)  # resolution III only where IV does not exist


def test_the_design_is_that_of_a_library():
    other = pytest.importorskip("pyDOE3")
    ours = {tuple(row) for row in (1 - 2 * np.array(design(8, 16))).tolist()}
    theirs = other.fracfact("a b c d abc abd acd bcd")
    assert {tuple(row) for row in theirs.astype(int).tolist()} == ours


def settings_of(keys: int, runs: int) -> list[dict[str, int]]:
    names = [chr(ord("a") + i) for i in range(keys)]
    return [dict(zip(names, row, strict=True)) for row in design(keys, runs)]


def simulated(
    keys: int, runs: int, active: int, seeds: int, sweeps: int, pairs: int = 0
) -> tuple[float, float]:
    """Return the shares of false ones among what is found, and of effects of 2 sd that are found.

    `pairs`: interactions of 2 sd between two of the keys.
    """
    random, false, found = np.random.default_rng([keys, runs, active]), [], []
    levels, settings = np.array(design(keys, runs)), settings_of(keys, runs)
    names = list(settings[0])
    for _ in range(sweeps):
        effects = np.zeros(keys)
        chosen = random.choice(keys, active, replace=False)
        effects[chosen] = 2 * random.choice([-1, 1], active)
        y = (levels @ effects)[:, None] + random.standard_normal((runs, seeds))
        y += random.standard_normal(seeds)
        for _ in range(pairs):
            a, b = random.choice(keys, 2, replace=False)
            y += 2 * (levels[:, a] ^ levels[:, b])[:, None]
        s = screen(settings, [{str(j): float(x) for j, x in enumerate(row)} for row in y])
        assert s is not None
        told, true = set(s.found), {names[i] for i in chosen}
        false.append(len(told - true) / max(1, len(told)))
        found.append(len(told & true) / max(1, active))
    return float(np.mean(false)), float(np.mean(found))


def at_most(limit: float, sweeps: int) -> float:
    """Return 5 % and three standard deviations of its mean over so many screens."""
    return limit + 3 * math.sqrt(limit * (1 - limit) / sweeps)


@pytest.mark.parametrize(("active", "seeds", "pairs", "least"), [
    (0, 1, 0, 0), (2, 1, 0, 0.65), (4, 1, 0, 0.76), (7, 1, 0, 0.8), (2, 1, 1, 0.35), (3, 2, 0, 0.9),
])  # fmt: skip
def test_few_discoveries_are_false_and_large_effects_are_found(active, seeds, pairs, least):
    false, found = simulated(7, 16, active, seeds, 150, pairs)
    assert false <= at_most(0.05, 150)
    assert found >= least


@pytest.mark.slow
@pytest.mark.parametrize("pairs", [0, 1, 2])
@pytest.mark.parametrize("active", range(8))
def test_what_16_runs_of_7_knobs_find(active, pairs):
    """With -s this prints the table of benchmarks/results/statistics.md."""
    false, found = simulated(7, 16, active, 1, 4000, pairs)
    print(f"{active} knobs, {pairs} pairs: false {false:.1%}, found {found:.0%}")
    assert false <= at_most(0.05, 4000)
    assert pairs or active < 3 or found >= 0.8


@pytest.mark.slow
@pytest.mark.parametrize(
    ("keys", "runs"), [(3, 8), (4, 16), (7, 8), (8, 16), (11, 16), (15, 16), (12, 32)]
)
@pytest.mark.parametrize("seeds", [1, 2])
def test_false_discoveries_at_every_size(keys, runs, seeds):
    for active in (0, 1, 2, 3):
        false, found = simulated(keys, runs, active, seeds, 1000)
        print(f"{active} of {keys} knobs, {runs} runs, {seeds}: {false:.1%}, found {found:.0%}")
        assert false <= at_most(0.05, 1000)


def test_an_effect_and_its_interval_are_those_of_least_squares():
    random = np.random.default_rng(0)
    levels = np.array(design(5, 16))
    y = levels @ [0.3, 0, -0.2, 0, 0] + random.standard_normal((3, 16))
    s = screen(settings_of(5, 16), [{str(j): float(y[j, i]) for j in range(3)} for i in range(16)])
    assert s is not None
    x = np.column_stack([np.ones(48), np.tile(levels, (3, 1))])
    expected = np.linalg.lstsq(x, y.ravel(), rcond=None)[0][1:]
    assert [s.knobs[key].effect for key in "abcde"] == pytest.approx(expected.tolist())
    # settings and seeds as factors: 15 x 2 degrees of freedom; t of 30 at 0.975 is 2.0423
    left = (y - y.mean(axis=0) - y.mean(axis=1, keepdims=True) + y.mean()) ** 2
    half = 2.0423 * 2 * math.sqrt(left.sum() / 30 / 48)
    assert s.knobs["a"].half == pytest.approx(half, rel=1e-4)


def test_two_steps_find_more_where_much_is_there():
    p = [0.0001, 0.0004, 0.0019, 0.0095, 0.0201, 0.0278, 0.0298, 0.0344, 0.0459, 0.324,
         0.4262, 0.5719, 0.6528, 0.759, 1.0]  # fmt: skip
    # Benjamini and Hochberg 1995, section 4, find 4 at 5 %, and so at 5 / 105: of 11 that are left
    # the eighth is below 8 / 11 x 5 / 105 = 0.0346, the ninth is not below 0.0390.
    assert sum(discoveries(p)) == 8
    assert discoveries([0.5, 0.9]) == [False, False]
    assert discoveries([0.01, 0.02]) == [True, True]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(("keys", "runs"), [(4, 16), (7, 8)])  # in the second no contrast is left
def test_knobs_that_do_nothing_at_all_are_not_found(keys, runs):
    settings = settings_of(keys, runs)
    assert screen(settings, [{"1": 2.5}] * runs).found == []
    s = screen(settings, [{"1": 2.5 - one["b"]} for one in settings])
    assert (s.found, s.knobs["b"].effect) == (["b"], -1.0)


def test_a_knob_whose_values_are_lists_is_screened_as_others_are():
    """Such as data.files of which a screen chooses."""
    values = {"a": [[1], [2]], "b": "xy", "c": [0.1, 0.2]}
    settings = [{key: values[key][level] for key, level in one.items()}
                for one in settings_of(3, 8)]  # fmt: skip
    found = screen(settings, [{"1": 1.0 + (s["a"] == [2])} for s in settings])
    assert found.levels["a"] == ([1], [2])
    assert found.knobs["a"].effect == pytest.approx(1.0)


def test_auto_takes_as_many_runs_as_find_something():
    assert [size_of(keys, "auto") for keys in (3, 4, 8, 9, 31)] == [8, 16, 16, 32, 32]


def test_a_trained_screen_finds_the_rate_and_proposes_its_confirmation(runs, tmp_path):
    quick = ["data=synthetic", "data.n_tokens=5000", "train.max_steps=3", "train.eval_tokens=600"]
    keys = ["optimizer.lr=1e-4,3e-2", "clip.max_norm=0.5,1.0", "optimizer.beta2=0.95,0.99",
            "schedule.warmup_steps=1,2"]  # fmt: skip
    sweep = runs.copy(tmp_path / "s", "--screen", "sweep.screen=8", *quick, *keys).folder
    found = printed("compare", json.dumps(llmexp.compare(sweep).data))
    assert (found["screen"]["runs"], found["screen"]["resolution"]) == (8, 4)
    first = found["screen"]["effects"][0]
    assert (first["key"], first["levels"], first["found"]) == ("optimizer.lr", [1e-4, 3e-2], True)
    means = [np.mean([r["val/loss"] for r in found["runs"] if r["optimizer.lr"] == lr])
             for lr in (1e-4, 3e-2)]  # fmt: skip
    assert first["effect"] == pytest.approx(means[1] - means[0])
    assert "lr=0.03 instead of 0.0001 lowers val loss by" in found["headline"]
    start = "Resolution IV: no effect is that of a pair"
    assert any(note.startswith(start) for note in found["notes"])
    assert "Few seeds" not in " ".join(found["why"])  # the screen tells from one
    page = (sweep / "compare.html").read_text()
    assert "Effects on " in page
    step = llmexp.next_step(sweep)
    assert step.rule == "screen"
    assert "optimizer.lr=0.03,0.0001" in step.words
    assert step.words[-1] == "sweep.decide=true"
    # One run fewer, and nothing is judged.
    (run,) = sweep.glob("3-*")
    (run / "status.json").write_text(json.dumps({"state": "failed"}))
    found = llmexp.compare(sweep).data
    assert found["screen"] is None
    assert (
        "Screen: it is judged when all of its runs have finished, over the same seeds."
        in found["notes"]
    )
    again = command("resume", str(sweep), cwd=tmp_path)
    assert again.code == 0, again.err
    assert llmexp.compare(sweep).data["screen"] is not None
