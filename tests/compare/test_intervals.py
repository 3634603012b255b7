"""Figures are the same to the bit for every interval of rows, stop, kill and extension."""

from __future__ import annotations

import json
import math
import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmexp.compare.comparing import compare
from llmexp.compare.figures import TAIL
from llmexp.compare.page import page
from llmexp.compare.reading import read
from llmexp.laws.points import decayed, law_points
from llmexp.runs.find import find
from llmexp.runs.rows import read_rows
from llmexp.runs.steps import FIELDS
from llmexp.sweep.running import score
from tests.compare.synthetic import make_run, write_steps
from tests.conftest import TINY, llmexp

STEPS = 24
KNOBS = [*TINY, "data=synthetic", "optimizer.lr=0.02", "train.seed=3", "hydra.run.dir=run"]
DYING = """
import os, signal

def hook(event, context):
    if (event, context.step) == ("step_start", int(os.environ["DIES_AT"])):
        os.kill(os.getpid(), signal.SIGKILL)
"""
# What differs between runs that compute the same: times, the machine, places, how they were made.
APART = re.compile(
    r"time|per_sec|outside|mfu|memory|eta|path|folder|started|ended|updated|pid|host|hours|cost"
)


def plain(found: Any) -> Any:
    if isinstance(found, dict):
        return {k: plain(v) for k, v in found.items() if not APART.search(k)}
    return [plain(v) for v in found] if isinstance(found, list) else found


def trained(where: Path, *commands: list[str], **env: str) -> Path:
    """The run that the commands leave, the last of which ends it."""
    where.mkdir()
    (where / "dying.py").write_text(DYING)
    done = [llmexp(*command, cwd=where, **env) for command in commands]
    assert done[-1].code == 0, done[-1].err + done[-1].out
    return where / "run"


def ways(chance: random.Random, given: list[str]) -> dict[str, list[list[str]]]:
    """Commands that train one run in several ways, with intervals and places by chance."""

    def every() -> str:
        return f"train.log_every={chance.randint(1, 11)}"

    train, resume = ["train", *KNOBS, *given], ["resume", "run"]
    whole = f"train.max_steps={STEPS}"
    keys = ("train.stop_step", "train.max_steps")
    stop, end = (f"{key}={chance.randint(2, STEPS - 1)}" for key in keys)
    kill = ["--allow", "dying", "hooks=[dying.hook]", "checkpoint.every=3"]
    return {
        "rare": [[*train, whole, f"train.log_every={2 * STEPS}"]],
        "each": [[*train, whole, "train.log_every=1"]],
        "stopped": [[*train, whole, every(), stop], [*resume, every()]],
        "killed": [[*train, whole, every(), *kill], [*resume, "--allow", "dying", "hooks=[]"]],
        "extended": [[*train, every(), end], [*resume, whole]],
    }  # fmt: skip


@pytest.mark.parametrize("seed", [1, 2])
def test_one_run_in_several_ways_is_one_run_in_every_figure(tmp_path, seed):
    chance = random.Random(seed)
    given = [
        "schedule=constant",
        "schedule.warmup_steps=2",
        f"train.eval_every={chance.choice([5, 8])}",
    ]
    given += ["data.val_ratio=0"] if seed == 2 else []
    runs = {
        name: trained(tmp_path / name, *commands, DIES_AT=str(chance.randint(5, STEPS)))
        for name, commands in ways(chance, given).items()
    }
    read_as = {}
    for name, run in runs.items():
        printed = [
            json.loads(llmexp(command, "run", "--json", cwd=run.parent).out)
            for command in ("compare", "next")
        ]
        status = json.loads((run / "status.json").read_text())
        row = {k: v for k, v in read_rows(run / "metrics.jsonl")[-1].items() if k != "off_interval"}
        read_as[name] = plain([printed, status["summary"], status.get("clip"), row])
        assert (run / "steps.bin").read_bytes() == (runs["each"] / "steps.bin").read_bytes()
    for name, found in read_as.items():
        assert found == read_as["each"], name
    records = read(find(list(runs.values()))[0])
    points, _ = law_points(records)
    assert len({(p.loss, p.tokens, p.flops) for p in points.values()}) == (seed == 1)
    assert len(set(map(decayed, records))) == 1
    for more in ([], ["--sort", "best val/loss"] if seed == 1 else []):
        all_of_them = llmexp("compare", *map(str, runs.values()), *more, cwd=tmp_path).out
        assert "the same to the last bit." in all_of_them.splitlines()[0]
    if seed == 1:
        reached = llmexp("compare", *map(str, runs.values()), "--target", "val/loss=5", "--json",
                         cwd=tmp_path)  # fmt: skip
        assert len({str(r.get("target/tokens")) for r in json.loads(reached.out)["runs"]}) == 1


def test_the_train_loss_is_that_of_all_targets_of_the_last_steps(tmp_path):
    """Against a sum in another order; a step without a target, or with a loss that is not finite,
    has no part in it."""
    rng = np.random.default_rng(0)
    run = make_run(tmp_path / "a", steps=400)
    losses, targets = rng.random(400) + 2, rng.integers(1, 900, 400).astype(float)
    losses[390], targets[390] = np.nan, 0
    losses[395] = np.nan
    write_steps(run, losses.tolist(), targets.tolist())
    (setting,) = compare([run]).settings
    tail = slice(400 - round(TAIL * 400), 400)
    known = np.isfinite(losses[tail])
    wanted = np.average(losses[tail][known], weights=targets[tail][known])
    assert setting.figures["train/loss"] == pytest.approx(wanted, rel=1e-14)


def test_runs_that_are_evaluated_unlike_are_read_where_all_were(tmp_path):
    """More looks find a lower loss, and a closer place of a target."""
    for every in (1, 50):
        wobble = {"offset": -1.0 * (every == 1)}
        make_run(tmp_path / str(every), val_every=every, max_norm=float(every), **wobble)
    rows = tmp_path / "1/metrics.jsonl"
    lines = [json.loads(line) for line in rows.read_text().splitlines()]
    lines[170]["val/loss"] = 0.5  # at step 171, where the other one was not evaluated
    rows.write_text("".join(json.dumps(line) + "\n" for line in lines))
    c = compare([tmp_path], sort="best val/loss")
    assert [e.figures["best val/loss"] for e in c.settings] == [
        e.figures["final val/loss"] for e in c.settings
    ]
    reached = compare([tmp_path], target="val/loss=3.1", align="steps").settings
    between = [(e.figures["target/after"], e.figures["target/by"]) for e in reached]
    assert between == [(50.0, 100.0), (100.0, 150.0)]


@pytest.mark.parametrize("log_every", [1, 10, 50])
def test_halving_goes_by_what_was_evaluated_else_by_the_step(tmp_path, log_every):
    """A row that only train.log_every makes is no evaluation, and no run needs one."""
    run = make_run(tmp_path / "a", steps=100, val_every=50)
    rows = [row for row in read_rows(run / "metrics.jsonl") if row["step"] % log_every == 0]
    own = {row["step"]: row for row in rows}
    for keys in ((), ("val/loss", "val/ppl", "val/bits_per_byte")):
        kept = [{k: v for k, v in row.items() if k not in keys} for row in rows]
        (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in kept))
        losses = np.fromfile(run / "steps.bin")[:: len(FIELDS)]
        for step in (14, 50):
            byte = own[50]["val/bits_per_byte"] if 50 in own and step == 50 else math.inf
            assert score(run, step) == (losses[step - 1] if keys else byte)
        assert score(run, 101) == math.inf


def damaged(data: bytes) -> dict[str, bytes]:
    record = 8 * len(FIELDS)
    return {
        "gone": b"",
        "cut": data[: -3 * record],
        "a hole": data[:record] + bytes(record) + data[2 * record :],
        "negative": (-np.frombuffer(data)).tobytes(),
        "huge": b"\x7f" * len(data),
    }


@pytest.mark.parametrize("kind", ["gone", "cut", "a hole", "negative", "huge"])
def test_a_run_whose_steps_are_lost_is_not_compared(tmp_path, kind):
    for name in ("a", "b", "bad"):
        make_run(tmp_path / name, max_norm=float(ord(name[0])), offset=-1.0 * (name == "bad"))
    file = tmp_path / "bad/steps.bin"
    file.write_bytes(damaged(file.read_bytes())[kind])
    if kind == "gone":
        file.unlink()
    c = compare([tmp_path])
    page(c)  # it still has its rows
    assert sum("steps.bin" in p for p in c.problems) == 1
    assert [e.out for e in c.settings] == ["", "", "rows lost"]
    assert "train/loss" not in c.settings[-1].figures
