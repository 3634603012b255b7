"""A screen: the design, what it finds, and how often it errs."""

from __future__ import annotations

import itertools
import json
import math

import numpy as np
import pytest

from llmexp.cli.next import proposed
from llmexp.compare.comparing import compare
from llmexp.compare.screening import design, discoveries, screen
from llmexp.compare.table import to_json
from llmexp.sweep.main import size_of
from tests.conftest import TINY, llmexp
from tests.tools import printed, run_here


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
    mixed = any(
        abs(int((rows[:, a] * rows[:, b] * rows[:, c]).sum())) == runs
        for a, b, c in itertools.combinations(range(factors), 3)
    )
    assert mixed == (factors > runs // 2)  # resolution III only where IV does not exist


def test_the_design_is_that_of_a_library():
    other = pytest.importorskip("pyDOE3")
    ours = {tuple(row) for row in (1 - 2 * np.array(design(8, 16))).tolist()}
    theirs = other.fracfact("a b c d abc abd acd bcd")
    assert {tuple(row) for row in theirs.astype(int).tolist()} == ours


def simulated(
    keys: int, runs: int, active: int, seeds: int, sweeps: int, pairs: int = 0
) -> tuple[float, float]:
    """Return the shares of false ones among what is found, and of effects of 2 sd that are found.

    `pairs`: interactions of 2 sd between two of the keys.
    """
    random, false, found = np.random.default_rng([keys, runs, active]), [], []
    levels = np.array(design(keys, runs))
    names = [f"k{i}" for i in range(keys)]
    settings = [dict(zip(names, row, strict=True)) for row in levels.tolist()]
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
    """With -s this prints the table of docs/sweeps.md."""
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
    s = screen(
        [dict(zip("abcde", row, strict=True)) for row in levels.tolist()],
        [{str(j): float(y[j, i]) for j in range(3)} for i in range(16)],
    )
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
def test_knobs_that_do_nothing_at_all_are_not_found():
    settings = [dict(zip("abcd", row, strict=True)) for row in design(4, 16)]
    assert screen(settings, [{"1": 2.5}] * 16).found == []
    s = screen(settings, [{"1": 2.5 - one["b"]} for one in settings])
    assert (s.found, s.knobs["b"].effect) == (["b"], -1.0)
    full = [dict(zip("abcdefg", row, strict=True)) for row in design(7, 8)]  # no contrast is left
    assert screen(full, [{"1": 2.5}] * 8).found == []
    s = screen(full, [{"1": 2.5 - one["b"]} for one in full])
    assert (s.found, s.knobs["b"].effect) == (["b"], -1.0)


QUICK = [*TINY, "data=synthetic", "data.n_tokens=5000", "train.max_steps=3",
         "train.eval_tokens=600"]  # fmt: skip
KEYS = ["optimizer.lr=1e-4,3e-2", "clip.max_norm=0.5,1.0", "optimizer.beta2=0.95,0.99",
        "schedule.warmup_steps=1,2"]  # fmt: skip


def test_a_trained_screen_finds_the_rate_and_proposes_its_confirmation(tmp_path):
    words = ["--screen", "sweep.screen=8", *QUICK, *KEYS, "hydra.sweep.dir=s"]
    done = llmexp("train", *words, cwd=tmp_path)
    assert done.code == 0, done.err + done.out
    found = printed("compare", to_json(compare([tmp_path / "s"])))
    assert (found["screen"]["runs"], found["screen"]["resolution"]) == (8, 4)
    first = found["screen"]["effects"][0]
    assert (first["key"], first["levels"], first["found"]) == ("optimizer.lr", [1e-4, 3e-2], True)
    losses = {r["optimizer.lr"]: [] for r in found["runs"]}
    for r in found["runs"]:
        losses[r["optimizer.lr"]].append(r["val/loss"])
    assert first["effect"] == pytest.approx(np.mean(losses[3e-2]) - np.mean(losses[1e-4]))
    assert "lr=0.03 instead of 0.0001 lowers val loss by" in found["headline"]
    start = "Resolution IV: no effect is that of a pair"
    assert any(note.startswith(start) for note in found["notes"])
    assert "Only more seeds" not in " ".join(found["why"])  # the screen tells from one
    page = (tmp_path / "s" / "compare.html").read_text()
    assert all(name in page for name in ("half-normal quantile", "Effects on "))
    step = proposed([tmp_path / "s"])
    assert step.rule == "screen"
    assert "optimizer.lr=0.03,0.0001" in step.words
    assert step.words[-1] == "sweep.decide=true"
    # One run fewer, and nothing is judged.
    (run,) = (tmp_path / "s").glob("3-*")
    (run / "status.json").write_text(json.dumps({"state": "failed"}))
    c = compare([tmp_path / "s"])
    assert c.screen is None
    assert "A screen is judged once all of its runs are there, over the same seeds." in c.notes
    again = llmexp("resume", "s", cwd=tmp_path)
    assert again.code == 0, again.err
    assert compare([tmp_path / "s"]).screen is not None


def test_auto_takes_as_many_runs_as_find_something():
    assert [size_of(keys, "auto") for keys in (3, 4, 8, 9, 31)] == [8, 16, 16, 32, 32]


@pytest.mark.parametrize(("words", "says"), [
    (KEYS[:2], "sweep.screen=auto: a screen takes 3 to 31 keys with two values each, and there are "
     "2; all combinations are trained by -m in place of --screen, without sweep.screen; for "
     "example llmexp train -m "),
    ([*KEYS, "train.log_every=1,2,3"], "train.log_every=1,2,3: a screen takes two values "
     "of each key; for example train.log_every=1,2"),
    ([*KEYS, "clip=norm,value,none"], "for example clip=norm,value\n"),
    ([*KEYS, "train.seed=1,2", "batch.z=interval(1,2)"], "for example batch.z=1e-3,3e-3"),
    ([*KEYS, "sweep.screen=12"], "sweep.screen=12: must be 8, 16, 32 or auto"),
    ([*KEYS, "sweep.screen=32"], "sweep.screen=32: does not fit 4 keys, which take 8 or 16 runs"),
    ([*KEYS, "sweep.decide=true"], "sweep.decide=true: does not go with a screen"),
    ([*KEYS, "sweep.halving=0.5"], "sweep.halving=0.5: does not go with a screen"),
])  # fmt: skip
def test_what_cannot_be_a_screen_is_refused(tmp_path, monkeypatch, capfd, words, says):
    monkeypatch.chdir(tmp_path)
    refused = run_here(capfd, "plan", "--screen", *QUICK, *words)
    assert refused.code == 2
    assert says in refused.err


def test_a_knob_whose_values_are_lists_is_screened_as_others_are():
    """Such as data.files of which a screen chooses."""
    values = [([1], [2]), ("a", "b"), (0.1, 0.2)]
    settings = [{str(i): values[i][level] for i, level in enumerate(row)} for row in design(3, 8)]
    found = screen(settings, [{"1": 1.0 + (s["0"] == [2])} for s in settings])
    assert found.levels["0"] == ([1], [2])
    assert found.knobs["0"].effect == pytest.approx(1.0)
