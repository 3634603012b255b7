"""Sweeps that give their settings seeds until it is decided which is best (`sweep.decide`)."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example
from hypothesis import given as drawn
from hypothesis import settings as sampled
from hypothesis import strategies as st
from scipy import stats

from llmexp.compare.alpha_spending import ALPHA, RESERVE, expected_runs, following, level_of
from llmexp.compare.comparing import findings
from llmexp.compare.records import Record, Verdict
from llmexp.config.values import ConfigError
from llmexp.folders import ledger as ledgers
from llmexp.folders.ledger import LedgerEntry, Look
from llmexp.sweep.deciding import Deciding, seeded
from llmexp.sweep.planning import seeds_in_words
from llmexp.sweep.section import build_sweep
from llmexp.sweep.show import values_of
from tests.compare.made import trained
from tests.conftest import TINY, llmexp, start
from tests.sweep.running import DEFAULTS, current_sweep
from tests.tools import run_here, session, wait_for

FULL = 8


@pytest.fixture
def unsaved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulated sweeps print and write nothing."""
    monkeypatch.setattr("llmexp.sweep.deciding.say", lambda text: None)
    monkeypatch.setattr(ledgers.Ledger, "save", lambda self: None)


simulations = pytest.mark.usefixtures("unsaved")


class Simulated(Deciding):
    """A sweep whose training is a draw: everything else is that of a real one."""

    def __init__(self, folder: Path, losses: np.ndarray, **knobs) -> None:
        self.current = current_sweep(folder, decide=True, **knobs)
        self.current.seeds = [1, 2]
        self.settings = {frozenset([str(i)]): {} for i in range(len(losses))}
        self.losses, self.made = losses, dict[tuple[int, int], Record]()

    def train(self, going, count):
        for setting in going:
            for seed in self.seeds(count):
                i = int(next(iter(setting)))
                loss = float(self.losses[i, seed - 1])
                self.made[i, seed] = trained(i, seed, loss, min_effect=0.0)

    def records(self):
        return list(self.made.values())

    def failed(self, setting):
        return False

    def name(self, setting):
        return next(iter(setting))

    def setting_of(self, r):
        return frozenset([r.runs[0].path.name.partition("-")[0]])

    def worse(self) -> set[int]:
        """The settings that `compare` calls worse when the sweep has stopped."""
        looks = self.current.ledger.looks
        return called_worse([replace(r, looks=looks) for r in self.records()])


def called_worse(records: list[Record]) -> set[int]:
    found = findings(records, min_effect=0.0).those(Verdict.WORSE)
    return {int(r.runs[0].path.name.partition("-")[0]) for r in found}


def draw(rng, means, seeds: int = FULL) -> np.ndarray:
    """Losses of settings over seeds: noise of one, and what a seed does to all of them."""
    size = len(means), seeds
    return np.asarray(means)[:, None] + rng.normal(size=size) + rng.normal(size=seeds) + 100


def simulated(tmp_path, means, sweeps: int):
    """Mean shares over sweeps: with a false alarm, found of full power, and runs of all seeds."""
    rng = np.random.default_rng(len(means))
    alarms = found = of_full = runs = 0
    for _ in range(sweeps):
        losses = draw(rng, means)
        sweep = Simulated(tmp_path, losses)
        sweep.run()
        worse = sweep.worse()
        # A setting is worse that is not the best one.
        alarms += bool(worse if len(set(means)) == 1 else 0 in worse)
        runs += len(sweep.made)
        found += len(worse - {0})
        places = np.ndenumerate(losses)
        whole = [trained(i, j + 1, float(x), min_effect=0.0) for (i, j), x in places]
        of_full += len(called_worse(whole) - {0}) if len(set(means)) > 1 else 0
    return alarms / sweeps, found / max(1, of_full), runs / (sweeps * len(means) * FULL)


def at_most(share: float, limit: float, sweeps: int) -> bool:
    """Whether so many of the sweeps are no more than chance makes of this limit."""
    return share * sweeps <= stats.binom.ppf(0.999, sweeps, limit)


EQUAL, SPREAD = [0.0] * 8, list(np.linspace(0, 4, 8))
ONE = [0.0] + [4.0] * 7


@simulations
def test_a_sweep_that_stops_by_itself_errs_seldom_and_costs_less(tmp_path):
    alarms, _, _ = simulated(tmp_path, EQUAL[:4], 12)
    assert at_most(alarms, 0.05, 12)
    _, power, runs = simulated(tmp_path, SPREAD, 6)
    # Over six sweeps the ratio of two counts near thirty has an sd of some 0.07.
    assert power > 0.75
    assert runs < 0.9
    _, power, runs = simulated(tmp_path, ONE, 2)
    assert runs < 0.65


@pytest.mark.slow
@simulations
@pytest.mark.parametrize(
    ("means", "least", "most"),
    [(EQUAL[:2], 0, 1), (EQUAL[:4], 0, 1), (EQUAL, 0, 1), (SPREAD, 0.9, 0.88), (ONE, 0.9, 0.6)],
)
def test_false_alarms_power_and_cost_beside_all_seeds_for_all(tmp_path, means, least, most):
    alarms, power, runs = simulated(tmp_path, means, 1000)
    print(f"means {means}: false alarms {alarms:.1%}, power {power:.3f}, runs {runs:.3f}")
    assert at_most(alarms, 0.05, 1000)
    assert power >= least
    assert runs <= most


@simulations
@pytest.mark.parametrize(
    ("count", "sweeps"), [(2, 6), *(pytest.param(n, 500, marks=pytest.mark.slow) for n in (2, 4))]
)
def test_sweeps_that_are_extended_again_and_again_err_as_seldom(tmp_path, count, sweeps):
    """To 13, 20 and 30 seeds, as long as nobody is worse."""
    rng, alarms = np.random.default_rng(10 + count), 0
    for _ in range(sweeps):
        losses, looks, worse = draw(rng, [0.0] * count, 30), list[Look](), set[int]()
        for most in (8, 13, 20, 30):
            if worse:
                break
            sweep = Simulated(tmp_path, losses, max_seeds=most)
            sweep.current.ledger.looks = looks
            sweep.run()
            looks, worse = sweep.current.ledger.looks, sweep.worse()
            assert worse or (len(looks[-1].seeds), looks[-1].level > 0) == (most, True), looks
        alarms += bool(worse)
    print(f"{count} settings, extended: false alarms {alarms / sweeps:.1%}")
    assert at_most(alarms / sweeps, 0.05, sweeps)


@example([2, 43, 44], 2)
@example([16], 3)
@drawn(st.lists(st.integers(2, 60), min_size=1, max_size=8), st.integers(2, 4))
@sampled(max_examples=200, deadline=None)
def test_a_sweep_can_always_be_extended_and_all_looks_are_5_percent_together(limits, first):
    """Whatever sweep.max_seeds is raised to, and whatever it was lowered to before. Seeds whose
    part is below 1e-6 have no level, as a single one behind 43: it is kept for later looks."""
    looks = list[Look]()
    for most in limits:
        count = len(looks[-1].seeds) if looks else 0
        while count < most:
            count = following(count, most) if count else min(first, most)
            level = level_of(count, most, looks)
            looks.append(Look(["1"] * count, level, most, [], [], ""))
            assert level > 0 or limits[0] > 16 or most != limits[0]
        spent = math.fsum(look.level for look in looks)
        kept = ALPHA * (1 - RESERVE / (count / limits[0]) ** 2) - spent
        assert -1e-12 < kept <= 1e-6
        assert spent < ALPHA
        assert level_of(count, count, looks) == 0
        further = 2 * max(count, most)
        assert level_of(further, further, looks) > 0


def test_the_expected_cost_lies_between_the_least_and_the_most():
    assert 2 * 16 < expected_runs(16, 2, 8) < 8 * 16
    assert expected_runs(2, 2, 2) == 4
    assert 2 * 4 < expected_runs(4, 2, 1000) < 100 * 4  # whose first look has no level


@simulations
def test_hours_and_tokens_end_a_sweep_and_cut_the_next_look_short(tmp_path):
    """Sixteen runs of four settings: behind 2 and 3 seeds there is a look at 4, not at 5."""
    sweep = Simulated(tmp_path, draw(np.random.default_rng(0), [0.0] * 4))
    limit = "sweep.max_tokens=16"
    sweep.beyond = lambda more, runs, count: limit if runs + more > 16 else None
    sweep.run()
    looks = sweep.current.ledger.looks
    assert [len(look.seeds) for look in looks] == [2, 3, 4]
    assert looks[-1].why.endswith(limit)
    assert math.fsum(look.level for look in looks) == pytest.approx(ALPHA * (1 - RESERVE) / 8)


@simulations
def test_a_sweep_whose_other_settings_all_failed_is_not_told_that_losses_do_not_compare(tmp_path):
    class Broken(Simulated):
        def records(self):
            state = {True: "finished", False: "failed"}
            return [replace(r, state=state[at[0] == 0]) for at, r in self.made.items()]

    sweep = Broken(tmp_path, draw(np.random.default_rng(0), [0.0] * 3))
    sweep.run()
    (look,) = sweep.current.ledger.looks
    assert look.why == "no other setting has a loss to compare with"


def test_values_are_shown_as_typed_without_their_escapes():
    shown = values_of(LedgerEntry(0, "", "0", None, ["fork.run=tr\\ 2@5"]), ["fork.run"])
    assert shown == {"fork.run": "tr 2@5"}


@simulations
def test_error_that_was_spent_stays_spent_under_a_lower_limit_of_seeds(tmp_path):
    """Of 8 seeds, cut short at 5, then of 3, then of 8: no look is forgotten or paid for twice."""
    losses = draw(np.random.default_rng(0), [0.0] * 3)
    found: list[list[Look]] = [[]]
    for most, runs_allowed in ((8, 15), (3, 24), (8, 24)):
        sweep = Simulated(tmp_path, losses, max_seeds=most)
        sweep.beyond = lambda more, runs, count, n=runs_allowed: "n" if runs + more > n else None
        sweep.current.ledger.looks = found[-1]
        sweep.run()
        found.append(sweep.current.ledger.looks)
    first, lower, last = ([(len(x.seeds), x.level) for x in looks] for looks in found[1:])
    assert [count for count, _ in first] == [2, 3, 5]
    assert lower == first == last[:3]
    assert [x.why for x in found[2]][-1] == "all 3 seeds are trained (sweep.max_seeds)"
    assert math.fsum(level for _, level in last) == pytest.approx(ALPHA * (1 - RESERVE))
    between = Simulated(tmp_path, losses, max_seeds=4)  # a limit that looks have gone beyond
    between.current.ledger.looks = found[1]
    between.run()
    assert between.current.ledger.looks[-1].why == "all 5 seeds are trained (sweep.max_seeds)"


RUN = [
    "data=synthetic", "data.n_tokens=5000", "train.max_steps=4", "train.eval_every=null",
    "train.eval_tokens=500", "checkpoint.every=2", "train.log_every=1",
]  # fmt: skip
GRID = ["optimizer.lr=1e-4,1e-2,1.2e-2"]  # the last two are alike at the first look


def looks_of(folder: Path) -> list[dict]:
    return json.loads((folder / "sweep.json").read_text())["looks"]


def losses_of(folder: Path) -> dict[str, float]:
    return {
        p.parent.name: json.loads(p.read_text())["summary"]["final val/loss"]
        for p in folder.glob("*/status.json")
    }


@pytest.mark.parametrize("kills", [pytest.param("each", marks=pytest.mark.slow), "last"])
def test_a_sweep_that_is_killed_at_any_look_takes_the_same_decisions(tmp_path, kills):
    """Killed while the seeds of each look train, or those of the last, behind looks that are
    recorded."""
    limits = ["sweep.decide=true", "sweep.max_seeds=4", "hydra.sweep.dir=s"]
    whole = llmexp(
        "train", "-m", *TINY, *RUN, *GRID, *limits[:2], "hydra.sweep.dir=w", cwd=tmp_path
    )
    assert whole.code == 0, whole.err + whole.out
    expected = looks_of(tmp_path / "w")
    assert len(expected) > 1
    assert "interim analysis 1, at 2 seeds: " in whole.out

    command, there = ["train", "-m", *TINY, *RUN, *GRID, *limits], tmp_path / "s"
    seeds = [look["seeds"][-1] for look in expected]
    for number, seed in list(enumerate(seeds))[0 if kills == "each" else -1 :]:
        process = start(*command, cwd=tmp_path)
        rows = f"*seed_{seed}/metrics.jsonl"
        wait_for(lambda rows=rows: list(there.glob(rows)), process)
        process.kill()
        process.communicate()
        wait_for(lambda p=process: not session(p.pid))
        assert number == 0 or looks_of(there)[:number] == expected[:number]
        command = ["resume", "s"]
    done = llmexp("resume", "s", cwd=tmp_path)
    assert done.code == 0, done.err + done.out
    assert looks_of(there) == expected
    assert losses_of(there) == losses_of(tmp_path / "w")
    again = llmexp("resume", "s", cwd=tmp_path)
    assert (again.code, looks_of(there)) == (0, expected)


@pytest.mark.slow
def test_a_grid_that_was_trained_before_is_decided_and_widened(tmp_path):
    constant = ["schedule=constant", "optimizer.lr=1e-4,2e-2", "hydra.sweep.dir=s"]
    plain = llmexp("train", "-m", *TINY, *RUN, *constant, cwd=tmp_path)
    assert plain.code == 0, plain.err + plain.out
    before = losses_of(tmp_path / "s")
    done = llmexp("resume", "s", "sweep.decide=true", "sweep.max_seeds=2", cwd=tmp_path)
    assert done.code == 0, done.err + done.out
    after = losses_of(tmp_path / "s")
    assert before.items() <= after.items()
    looks = looks_of(tmp_path / "s")
    assert [look["seeds"] for look in looks][:1] == [["1234", "1235"]]
    assert f"{len(after)} runs, " in done.out
    assert "all settings with 2 seeds are 4 runs" in " ".join(done.out.split())
    wider = llmexp("resume", "s", "optimizer.lr=1e-4,5e-2", cwd=tmp_path)
    assert wider.code == 0, wider.err + wider.out
    assert after.items() <= losses_of(tmp_path / "s").items()
    assert "all settings with 2 seeds are 6 runs" in " ".join(wider.out.split())
    *_, last = looks_of(tmp_path / "s")  # also where the sweep ended before it
    assert "lr=0.05" in last["going"] + last["worse"]
    for given in ("train.seed=7", "sweep.first_seeds=3"):
        refused = llmexp("resume", "s", given, cwd=tmp_path)
        says = f"{given}: this sweep beg"
        assert (refused.code, says in refused.err) == (2, True), refused.err
    assert json.loads((tmp_path / "s/sweep.json").read_text())["arguments"].count("-m") == 1
    # The last command names two of the three settings; a longer budget is for all.
    longer = llmexp("resume", "s", "train.max_steps=6", cwd=tmp_path)
    assert longer.code == 0, longer.err + longer.out
    assert {p.state for p in ledgers.read_ledger(tmp_path / "s").points} == {"finished"}
    steps = {json.loads(p.read_text())["max_steps"] for p in (tmp_path / "s").glob("*/run.json")}
    assert steps == {6}


def test_forks_in_deeper_folders_are_decided_on_their_own_tokens(tmp_path):
    """The last parts of their folders are equal; a limit is that of what they train themselves."""
    trunk = ["train.max_steps=4", "hydra.run.dir=trunk", "schedule=constant"]
    assert llmexp("train", *TINY, *RUN, *trunk, cwd=tmp_path).code == 0
    grid = ["fork.run=trunk", "train.max_steps=8", "optimizer.lr=1e-4,2e-2", "hydra.sweep.dir=s"]
    each = 4 * 8 * 12  # steps, sequences, tokens
    limits = ["sweep.decide=true", "sweep.max_seeds=3", f"sweep.max_tokens={4 * each}"]
    nested = "hydra.sweep.subdir=${hydra.job.num}/x"
    words = ["tracker=none", *grid, *limits, nested]
    done = llmexp("train", "-m", *words, cwd=tmp_path)
    assert done.code == 0, done.err + done.out
    (look,) = looks_of(tmp_path / "s")
    assert len(look["going"]) + len(look["worse"]) == 2
    assert look["why"] in ("decided", f"further seeds would go beyond {limits[2]}")
    assert len(list((tmp_path / "s").glob("*/x/status.json"))) == 4
    less = llmexp("train", "-m", *words, f"sweep.max_tokens={4 * each - 1}",
                  "hydra.sweep.dir=t", cwd=tmp_path)  # fmt: skip
    assert f"take; for example sweep.max_tokens={4 * each}" in less.err
    step = json.loads(llmexp("next", "s", "--json", cwd=tmp_path).out)
    assert step["cost"]["tokens"] == step["cost"]["runs"] * each


SEEDS = [[f"optimizer.lr={rate}", f"train.seed={s}"] for rate in (1, 2) for s in (1, 2, 3)]
FORKS = [["fork.run=a", "optimizer.lr=1"], ["fork.run=b", "optimizer.lr=1"]]


@pytest.mark.parametrize(
    ("given", "grid", "says"),
    [
        ({"first_seeds": 2, "resume": "s"}, SEEDS, "first_seeds=2.* begins with 3"),
        ({"first_seeds": 4, "resume": "s"}, SEEDS, "first_seeds=4.* begins with 3"),
        ({}, FORKS, "fork.run=a,b: are several parents"),
    ],
)
def test_what_are_seeds_already_is_refused(tmp_path, given, grid, says):
    """Those of a grid that was trained, also beside the default number, and forks of trunks."""
    knobs = current_sweep(tmp_path, decide=True, **given).knobs
    typed = [f"sweep.{key}={value}" for key, value in given.items() if key != "resume"]
    with pytest.raises(ConfigError, match=says):
        seeded(knobs, None, None, typed, grid)


def test_a_plan_says_the_least_the_most_and_the_expected_cost(tmp_path, capfd):
    asked = run_here(capfd, "plan", "-m", "--json", *TINY, *RUN, *GRID, "sweep.decide=true")
    found = json.loads(asked.out)["total"]["sweep.decide"]
    assert [found[kind]["runs"] for kind in ("least", "most")] == [6, 24]
    assert [found[kind]["tokens"] for kind in ("least", "most")] == [2304, 9216]
    assert 6 <= found["expected"]["runs"] <= 24
    bad = run_here(capfd, "plan", "-m", *TINY, *RUN, "optimizer.lr=1e-3,-1", "sweep.decide=true")
    assert (bad.code, "sweep.decide" in bad.out) == (2, False)
    limits = {"decide": True, "max_tokens": 1234567, "max_hours": 0.5}
    within = seeds_in_words(found, build_sweep(DEFAULTS | limits))
    assert ", within sweep.max_hours=0.5 and sweep.max_tokens=1234567; about" in within
