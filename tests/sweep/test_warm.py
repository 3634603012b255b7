"""Points of a sweep as forks of one process (sweep.warm): the same runs as in processes of their
own. What a fork has of its own is in tests/test_workers.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmexp.runs.ledger import read_ledger
from tests.conftest import TINY, Result, llmexp
from tests.sweep.running import RUN
from tests.tools import exact, same_state

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
        assert (entry.forked, entry.attempts) == (True, 1)
        forked, fresh = (Result(0, "", "", tmp_path / w / entry.folder) for w in ("true", "false"))
        assert len(exact(forked)) == 4
        assert exact(forked) == exact(fresh)
        assert steps(forked.folder) == steps(fresh.folder)
        same_state(*(run.folder / "checkpoints" / "step_00000004" for run in (forked, fresh)))
    assert {entry.forked for entry in read_ledger(tmp_path / "false").points} == {False}


def steps(run: Path) -> bytes:
    return (run / "steps.bin").read_bytes()
