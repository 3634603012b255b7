"""Figures are the same to the bit for every interval of rows, stop, kill and extension."""

import json
import math
import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import llmexp
from llmexp.compare.figures import TAIL
from llmexp.compare.reading import read
from llmexp.folders.find import find
from llmexp.folders.steps import FIELDS
from llmexp.scaling.ladders import decayed, law_points
from llmexp.sweep.running import score
from tests.compare.synthetic import make_case, make_run, read_rows, write_rows, write_steps
from tests.conftest import TINY
from tests.conftest import llmexp as command

STEPS = 24
KNOBS = [*TINY, "data=synthetic", "optimizer.lr=0.02", "train.seed=3", "hydra.run.dir=run"]
# What differs between runs that compute the same: times, the machine, places, how they were made.
APART = re.compile(
    r"time|per_sec|overhead|mfu|memory|eta|path|folder|started|ended|updated|pid|host|hours|cost"
)


def plain(found: Any) -> Any:
    if isinstance(found, dict):
        return {k: plain(v) for k, v in found.items() if not APART.search(k)}
    return [plain(v) for v in found] if isinstance(found, list) else found


def ways(chance: random.Random, given: list[str]) -> dict[str, list[list[str]]]:
    """Commands that train one run in several ways, with intervals and places by chance."""

    def every() -> str:
        return f"train.log_every={chance.randint(1, 11)}"

    train, resume = ["train", *KNOBS, *given], ["resume", "run"]
    whole = f"train.max_steps={STEPS}"
    keys = ("train.stop_step", "train.max_steps")
    stop, end = (f"{key}={chance.randint(2, STEPS - 1)}" for key in keys)
    kill = ["--allow", "own", "hooks=[own.faults.act]", "checkpoint.every=3"]
    return {
        "rare": [[*train, whole, f"train.log_every={2 * STEPS}"]],
        "each": [[*train, whole, "train.log_every=1"]],
        "stopped": [[*train, whole, every(), stop], [*resume, every()]],
        "killed": [[*train, whole, every(), *kill], [*resume, "--allow", "own", "hooks=[]"]],
        "extended": [[*train, every(), end], [*resume, whole]],
    }  # fmt: skip


def trained(where: Path, commands: list[list[str]], plan: str) -> Path:
    """The run that the commands leave, the last of which ends it."""
    where.mkdir()
    done = [command(*words, cwd=where, FAULT_PLAN=plan) for words in commands]
    assert done[-1].code == 0, done[-1].err + done[-1].out
    return where / "run"


@pytest.mark.parametrize("seed", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_one_run_in_several_ways_is_one_run_in_every_figure(tmp_path, seed):
    """The second has no validation data."""
    chance = random.Random(seed)
    given = ["schedule=constant", "schedule.warmup_steps=2"]
    given += ["train.eval_every=8", "data.val_ratio=0"] if seed == 2 else ["train.eval_every=5"]
    plan = f"step_start-{chance.randint(5, STEPS)}:kill"
    runs = {name: trained(tmp_path / name, commands, plan)
            for name, commands in ways(chance, given).items()}  # fmt: skip
    read_as = {}
    for name, run in runs.items():
        answers = [llmexp.compare(run).data, llmexp.next_step(run).data]
        status = json.loads((run / "status.json").read_text())
        row = {k: v for k, v in read_rows(run)[-1].items() if k != "off_interval"}
        read_as[name] = plain([answers, status["summary"], status.get("clip"), row])
        assert (run / "steps.bin").read_bytes() == (runs["each"] / "steps.bin").read_bytes()
    for name, found in read_as.items():
        assert found == read_as["each"], name
    records = read(find(list(runs.values()))[0])
    points, _ = law_points(records)
    assert len({(p.loss, p.tokens, p.flops) for p in points.values()}) == (seed == 1)
    assert len(set(map(decayed, records))) == 1
    sorts = [None, "best val/loss"] if seed == 1 else [None]
    for sort in sorts:
        whole = llmexp.compare(*runs.values(), sort=sort)
        assert {run["mark"] for run in whole.data["runs"][1:]} == {"same"}
        assert whole.headline.endswith("the same to the last bit.")
    if seed == 1:
        last = read_rows(runs["each"])[-1]  # evaluated as it is the end
        assert last["off_interval"]
        assert {run["final val/loss"] for run in whole.data["runs"]} == {last["val/loss"]}
        reached = llmexp.compare(*runs.values(), target="val/loss=5").data["runs"]
        assert len({str(run.get("target/tokens")) for run in reached}) == 1


def test_the_train_loss_is_that_of_all_targets_of_the_last_steps(tmp_path):
    """Against a sum in another order; a step without a target, or with a loss that is not finite,
    has no part in it."""
    rng = np.random.default_rng(0)
    run = make_run(tmp_path / "a", steps=400)
    losses, targets = rng.random(400) + 2, rng.integers(1, 900, 400).astype(float)
    losses[390], targets[390] = np.nan, 0
    losses[395] = np.nan
    write_steps(run, losses.tolist(), targets.tolist())
    tail = slice(400 - round(TAIL * 400), 400)
    known = np.isfinite(losses[tail])
    wanted = np.average(losses[tail][known], weights=targets[tail][known])
    assert llmexp.compare(run).data["runs"][0]["train/loss"] == pytest.approx(wanted, rel=1e-14)


def test_runs_that_are_evaluated_unlike_are_read_where_all_were(tmp_path):
    """More looks find a lower loss, and a closer place of a target."""
    folder = make_case(tmp_path / "s", [
        {"max_norm": 1.0, "val_every": 1, "offset": -1.0}, {"max_norm": 50.0, "val_every": 50},
    ])  # fmt: skip
    rows = read_rows(folder / "0")
    rows[170]["val/loss"] = 0.5  # at step 171, where the other one was not evaluated
    write_rows(folder / "0", rows)
    for found in llmexp.compare(folder, sort="best val/loss").data["runs"]:
        assert found["best val/loss"] == found["final val/loss"]
    reached = llmexp.compare(folder, target="val/loss=3.1", align="steps").data["runs"]
    between = [(run["target/after"], run["target/by"]) for run in reached]
    assert between == [(50.0, 100.0), (100.0, 150.0)]


@pytest.mark.parametrize("log_every", [1, 10, 50])
def test_halving_goes_by_what_was_evaluated_else_by_the_step(tmp_path, log_every):
    """A row that only train.log_every makes is no evaluation, and no run needs one."""
    run = make_run(tmp_path / "a", steps=100, val_every=50)
    rows = [row for row in read_rows(run) if row["step"] % log_every == 0]
    at_end = next(row["val/bits_per_byte"] for row in rows if row["step"] == 50)
    losses = np.fromfile(run / "steps.bin")[:: len(FIELDS)]
    for keys in ((), ("val/loss", "val/ppl", "val/bits_per_byte")):
        write_rows(run, [{k: v for k, v in row.items() if k not in keys} for row in rows])
        for step, byte in ((14, math.inf), (50, at_end)):
            assert score(run, step) == (losses[step - 1] if keys else byte)
        assert score(run, 101) == math.inf
