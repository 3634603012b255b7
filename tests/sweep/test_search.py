"""A search: Optuna chooses points by the results so far, and fresh seeds confirm the best."""

import json
import math
import signal
from pathlib import Path

import numpy as np
import pytest

from llmexp.compare.comparing import compare
from llmexp.compare.screening import importances
from llmexp.folders import ledger
from tests.conftest import HANG_S, TINY, llmexp, start
from tests.tools import wait_for

optuna = pytest.importorskip("optuna")

from llmexp.sweep.search import Trial, suggest  # noqa: E402

RATE = optuna.distributions.FloatDistribution(1e-3, 1e-1, log=True)
DROPOUT = optuna.distributions.FloatDistribution(0.0, 0.5)
SPACES = {
    "tpe": {"lr": RATE, "kind": optuna.distributions.CategoricalDistribution(["adamw", "sgd"])},
    "gp": {"lr": RATE, "n": optuna.distributions.IntDistribution(1, 6)},
    "cmaes": {"lr": RATE, "dropout": DROPOUT},
    "qmc": {"lr": RATE, "n": optuna.distributions.IntDistribution(1, 64, log=True)},
}
SMALL = [*TINY, "data=synthetic", "data.n_tokens=5000", "train.eval_tokens=600"]
SEARCH = [*SMALL, "train.max_steps=4", "optimizer.lr=tag(log,interval(1e-3,1e-1))",
          "sweep.search.trials=3", "sweep.search.rerun_top=1", "sweep.search.seeds=2"]  # fmt: skip


def loss_of(params: dict[str, str]) -> float:
    """A bowl, with its lowest point at a rate of 0.02."""
    more = float(params.get("dropout", 0)) + 0.3 * (params.get("kind") == "sgd")
    return (math.log(float(params["lr"]) / 0.02)) ** 2 + more


def searched(sampler: str, batches: int, size: int) -> list[Trial]:
    found: list[Trial] = []
    for _ in range(batches):
        batch = suggest(SPACES[sampler], found, sampler, size)
        found += [Trial(params, "COMPLETE", loss_of(params)) for params in batch]
    return found


@pytest.mark.parametrize(("sampler", "batches"), [("tpe", 10), ("gp", 2), ("cmaes", 6), ("qmc", 6)])
def test_points_follow_from_the_trials_alone_and_none_is_asked_for_twice(sampler, batches):
    found = searched(sampler, batches, 3)
    asked = [tuple(trial.params.values()) for trial in found]
    assert len(set(asked)) == len(asked)
    assert all(1e-3 <= float(trial.params["lr"]) <= 1e-1 for trial in found)
    # An interrupted search knows what an unbroken one knew.
    again = [suggest(SPACES[sampler], found[:n], sampler, 3) for n in (3, 3)]
    assert again[0] == again[1] == [trial.params for trial in found[3:6]]
    assert sampler != "tpe" or min(trial.value for trial in found) < 0.05


def test_cma_es_goes_on_from_its_trials_as_optuna_does_in_one_process():
    study = optuna.create_study(sampler=optuna.samplers.CmaEsSampler(seed=0))
    for _ in range(40):
        trial = study.ask(SPACES["cmaes"])
        study.tell(trial, loss_of(trial.params))
    own = [float(trial.params["lr"]) for trial in searched("cmaes", 40, 1)]
    theirs = [trial.params["lr"] for trial in study.trials]
    # Ours are written with four digits, which the next generations feel.
    assert own[:7] == pytest.approx(theirs[:7], rel=1e-3)
    assert np.log(own) == pytest.approx(np.log(theirs), abs=0.1)


def test_a_space_that_was_tried_whole_gives_no_more():
    space = {
        "n": optuna.distributions.IntDistribution(1, 3),
        "kind": optuna.distributions.CategoricalDistribution(["a", "null"]),
    }
    assert len(suggest(space, [], "tpe", 9)) == 6


def points(path: Path) -> list[ledger.LedgerEntry]:
    return ledger.read_ledger(path).points


def test_a_search_that_is_killed_makes_the_same_trials_as_an_unbroken_one(tmp_path):
    whole = llmexp("train", "-m", *SEARCH, "hydra.sweep.dir=whole", cwd=tmp_path)
    assert whole.code == 0, whole.err + whole.out
    process = start("train", "-m", *SEARCH, "hydra.sweep.dir=cut", cwd=tmp_path)
    runs = tmp_path / "cut"
    wait_for(lambda: list(runs.glob("1-*/metrics.jsonl")), process)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=HANG_S)
    wait_for(lambda: all(p.state != "running" for p in points(runs)))
    proposed = json.loads(llmexp("next", "cut", "--json", cwd=tmp_path).out)
    assert (proposed["rule"], proposed["words"]) == ("rest", ["resume", "cut"])
    there = sum(p.state == "finished" for p in points(runs))  # of three trials and two fresh seeds
    assert proposed["cost"]["runs"] == 3 + 2 - there
    done = llmexp("resume", "cut", cwd=tmp_path)
    assert done.code == 0, done.err + done.out
    assert [p.overrides for p in points(runs)] == [p.overrides for p in points(tmp_path / "whole")]
    assert [p.folder for p in points(runs)] == [p.folder for p in points(tmp_path / "whole")]
    assert {p.state for p in points(runs)} == {"finished"}

    # The headline has the fresh seeds' figure; the search's own stands once, and is called low.
    c = compare([runs])
    best = c.settings[0]
    trial, *fresh = sorted(best.runs, key=lambda r: r.seed != "1234")
    assert [r.seed for r in best.taking_part] == ["1", "2"] == [r.seed for r in fresh]
    values = [r.figures["val/loss"] for r in fresh]
    assert best.figures["val/loss"] == pytest.approx(sum(values) / 2)
    assert f" ({min(values):.5} and {max(values):.5}; two seeds have no interval)" in c.headline
    assert [e.mark for e in c.settings[1:]] == ["trial"] * 2
    others = [e.figures["val/loss"] for e in c.settings[1:]]
    assert trial.figures["val/loss"] < min(others)
    (note,) = (note for note in c.notes if "low by chance too" in note)
    assert f"{trial.figures['val/loss']:.5}" in note
    assert json.loads(llmexp("next", "cut", "--json", cwd=tmp_path).out)["rule"] != "confirm"

    # Of another space nothing is tried in silence; more trials and seeds are added.
    other = llmexp("resume", "cut", "optimizer.lr=tag(log,interval(1e-5,1e-4))", cwd=tmp_path)
    assert "3 of 3 trials lie outside of what is searched now" in other.out
    before = points(runs)
    more = ["sweep.search.trials=4", "sweep.max_parallel=2", SEARCH[-4]]
    wider = llmexp("resume", "cut", *more, cwd=tmp_path)
    assert wider.code == 0, wider.err
    assert [p.attempts for p in points(runs)[:5]] == [p.attempts for p in before[:5]]
    now = ledger.read_ledger(runs)
    assert sum(not now.is_fresh(p) for p in now.points) == 4
    grid = ["train", "-m", *SMALL, "optimizer.lr=1e-3,1e-2", "sweep.resume=cut"]
    for words, says in (
        (["resume", "cut", "clip.max_norm=0.5,1.0"], "clip.max_norm: all trials of a search"),
        (["resume", "cut", "train.seed=7"], "train.seed=7: all trials of a search have one seed"),
        (grid, "sweep.resume=cut: is a search, which cannot continue as a grid"),
    ):
        refused = llmexp(*words, cwd=tmp_path)
        assert (refused.code, says in refused.err) == (2, True), refused.err


def test_a_trial_that_fails_after_a_rung_is_tried_again(tmp_path):
    words = [*SEARCH[:-3], "train.max_steps=8", "sweep.halving=0.5",
             "sweep.search.trials=2", "sweep.search.rerun_top=0", "hydra.sweep.dir=s",
             "hooks=[own.faults.act]", "--allow", "own"]  # fmt: skip
    failed = llmexp("train", "-m", *words, cwd=tmp_path, FAULT_PLAN="step_start-6:raise once")
    assert failed.code == 1, failed.out
    done = llmexp("resume", "s", "--allow", "own", cwd=tmp_path)
    assert done.code == 0, done.out + done.err
    assert {p.state for p in points(tmp_path / "s")} == {"finished", "preempted"}


def test_rungs_leave_trials_out_as_halving_does(tmp_path):
    halving = ["sweep.halving=0.25", "sweep.search.trials=4", "sweep.search.rerun_top=0"]
    more = ["train.max_steps=8", "hydra.sweep.dir=s"]
    done = llmexp("train", "-m", *SEARCH, *halving, *more, cwd=tmp_path)
    assert done.code == 0, done.err + done.out
    found = ledger.read_ledger(tmp_path / "s")
    trials = [p for p in found.points if not found.is_fresh(p)]
    assert {p.rung for p in trials} & {0.25, 0.5}
    scores: list[float] = []
    for point in trials:  # each goes on where it is in the better half of those before it
        rows = (tmp_path / "s" / point.folder / "metrics.jsonl").read_text().splitlines()
        by_step = {row["step"]: row for row in map(json.loads, rows)}
        scores.append(by_step[2]["val/loss"])
        ahead = sum(score < scores[-1] for score in scores)
        assert (point.rung == 0.25) == (ahead >= math.ceil(len(scores) / 2)), point
        assert point.rung is None or 8 not in by_step


@pytest.mark.slow
def test_a_trial_that_fails_counts_as_the_worst(tmp_path):
    own = ["--allow", "own", "hooks=[own.points.fast_fails]", "schedule=constant"]
    more = ["sweep.search.trials=4", "hydra.sweep.dir=s"]
    done = llmexp("train", "-m", *SEARCH, *own, *more, cwd=tmp_path)
    assert done.code == 1, done.err + done.out
    assert "Traceback" not in done.err
    assert {p.state for p in points(tmp_path / "s")} == {"failed", "finished"}
    assert "llmexp resume s" in done.out


def test_a_search_ends_where_all_it_can_propose_is_there(tmp_path):
    """Both values of the accumulation are one run."""
    same = ["batch.gradient_accumulation_steps=null,1", "batch.micro_batch_size=8",
            "batch.real_batch_size=8", "sweep.search.trials=2"]  # fmt: skip
    more = ["sweep.search.rerun_top=0", "hydra.sweep.dir=s"]
    done = llmexp("train", "-m", *SMALL, *same, *more, cwd=tmp_path)
    assert done.code == 0, done.err
    assert "stopping after 1 trial" in done.out + done.err


def told(count: int, effect: float, seed: int) -> dict[str, tuple[float, float, float]]:
    """The importances that are told of trials at random points, whose loss depends on the rate by
    `effect` sd, on no other knob."""
    random = np.random.default_rng(seed)
    points, losses = [], []
    for _ in range(count):
        points.append(
            {
                "optimizer.lr": float(10 ** random.uniform(-3, -1)),
                "clip.max_norm": float(random.choice([0.5, 1.0])),
                "model.tied": bool(random.integers(2)),
            }
        )
        bowl = effect * (math.log10(points[-1]["optimizer.lr"]) + 2) ** 2
        losses.append(bowl + random.standard_normal())
    return importances(points, [*points[0]], losses)


def test_importance_is_told_where_there_is_one_and_seldom_where_there_is_none():
    found = told(40, 8.0, 0)
    share, low, high = found["optimizer.lr"]
    assert 0.3 < low < share < high < 1.0
    assert "clip.max_norm" not in found
    alarms = [bool(told(20, 0.0, seed)) for seed in range(1, 11)]
    assert sum(alarms) <= 2  # 5 % of 10, and three standard deviations
    assert told(7, 8.0, 0) == {}
