"""Points of a sweep as forks of one process (sweep.warm): the same runs as in processes of their
own. What a fork has of its own is in tests/test_workers.py."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from llmexp.folders.ledger import read_ledger
from llmexp.folders.rundir import read_status
from tests.conftest import HANG_S, TINY, Result, llmexp, start
from tests.sweep.running import RUN
from tests.tools import exact, same_state, session, wait_for

FRESH_PROCESSES = True
SHORT = [*RUN, "train.max_steps=4", "train.eval_every=2", "checkpoint.every=null"]
ONE = ["optimizer=adamw,muon", "precision=fp32,fp64"]
TWO = ["parallelism=ddp", "parallelism.nproc_per_node=2", "optimizer.lr=0.01,0.02"]


@pytest.mark.parametrize("points", [ONE, TWO], ids=["a rank", "two ranks"])
def test_points_are_bit_for_bit_those_of_processes_of_their_own(tmp_path, points):
    """One template is killed on the way; own parts draw random numbers as they are imported."""
    hook = ["hooks=[own.points.lose_template]", "--allow", "own"]
    for warm in ("true", "false"):
        words = [*SHORT, *points, *hook, f"sweep.warm={warm}", f"hydra.sweep.dir={warm}"]
        done = llmexp("train", "-m", *TINY, *words, cwd=tmp_path)
        assert done.code == 0, done.err + done.out
    assert (tmp_path / "template").exists()
    for entry in read_ledger(tmp_path / "true").points:
        assert (entry.forked, entry.fresh, entry.attempts) == (True, None, 1)
        forked, fresh = (Result(0, "", "", tmp_path / w / entry.folder) for w in ("true", "false"))
        assert len(exact(forked)) == 4
        assert exact(forked) == exact(fresh)
        assert steps(forked.folder) == steps(fresh.folder)
        same_state(*(run.folder / "checkpoints" / "step_00000004" for run in (forked, fresh)))
    points = read_ledger(tmp_path / "false").points
    assert {(entry.forked, entry.fresh) for entry in points} == {(False, "sweep.warm=false")}


@pytest.mark.slow
def test_two_hundred_runs_end_right_and_leave_nothing(tmp_path):
    """Their own parts kill the template, and freeze one run."""
    hooks = ["hooks=[own.points.lose_template,own.faults.act]", "--allow", "own"]
    grid = ["optimizer.lr=0.01,0.02", "train.seed=range(1,101)"]
    more = ["sweep.max_parallel=2", "sweep.hang_timeout_s=60", "sweep.max_retries=1"]
    words = ["-m", *TINY, *SHORT, *grid, *hooks, *more, "hydra.sweep.dir=s"]
    shared = set(os.listdir("/dev/shm"))
    process = start("train", *words, cwd=tmp_path, FAULT_PLAN="step_start-3:freeze once")
    out, err = process.communicate(timeout=5 * HANG_S)
    assert process.returncode == 0, err + out
    assert "no output for 60 s (sweep.hang_timeout_s): killed" in out
    assert (tmp_path / "template").exists()
    points = read_ledger(tmp_path / "s").points
    assert sorted(point.attempts for point in points) == [1] * 199 + [2]
    assert {point.forked for point in points} == {True}
    assert all(read_status(tmp_path / "s" / p.folder)["state"] == "finished" for p in points)
    wait_for(lambda: not session(process.pid))
    assert set(os.listdir("/dev/shm")) <= shared


def steps(run: Path) -> bytes:
    return (run / "steps.bin").read_bytes()
