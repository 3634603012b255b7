"""What a crash or a reboot leaves on the disk: damaged checkpoints, old locks, a status that is not
true any more. All checkpoints damaged, and another format: tests/refusals/checkpoints.yaml."""

import json
import os
import shutil
import socket
from pathlib import Path
from typing import Any

import pytest

from llmexp.__main__ import run as command
from llmexp.checkpoint import loading
from llmexp.compare.reading import read
from llmexp.folders import ending, rundir
from llmexp.folders.find import find
from llmexp.metrics.keys import TIMINGS
from tests.conftest import TINY, Result, llmexp
from tests.faults.helpers import LAST, PLANNED, assert_as_undisturbed
from tests.tools import amend


@pytest.fixture
def copy(whole: Result, tmp_path: Path) -> Path:
    """A copy of the undisturbed run."""
    return Path(shutil.copytree(whole.folder, tmp_path / "run"))


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


def halve(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


FILES = ("model.safetensors", "optimizer.safetensors", "state.pt", "manifest.json")
DAMAGE = [(name, how) for name in FILES for how in (Path.unlink, halve, flip)]


# half of a manifest is for people
@pytest.mark.parametrize(("name", "how"), [one for one in DAMAGE if one != (FILES[-1], flip)])
def test_a_damaged_checkpoint_is_passed_over_and_named(copy, capsys, name, how):
    newest, older = (copy / f"checkpoints/step_{step:08d}" for step in (LAST, LAST - 2))
    how(newest / name)
    warnings: list[str] = []
    assert loading.newest_whole(copy / "checkpoints", warnings.append).path == older
    assert command(["sample", str(copy), "--tokens", "1"]) == 0
    err = capsys.readouterr().err
    unread = "optimizer" in name and how is not Path.unlink  # by a sample
    assert bool(err) != unread
    for found in filter(None, [warnings[0], err]):
        assert f"checkpoint {newest.name} is damaged and not used: " in found
        assert name in found


def cut(run: Path, **status: object) -> Path:
    """Leave a run as a power cut does: running by its status, its locks there and held by
    nobody."""
    shutil.rmtree(run / "checkpoints" / f"step_{LAST:08d}")
    here = {"pid": os.getpid(), "host": socket.gethostname()}
    amend(run / "status.json", state="running", exit_code=None, ended=None, **(here | status))
    for name in (".lock", ".lock-ranks"):
        (run / name).touch()
    return run


def shown(path: Path, capsys: pytest.CaptureFixture[str], key: str = "state") -> Any:
    assert command(["runs", "--json", str(path)]) == 0
    return json.loads(capsys.readouterr().out)["runs"][0][key]


def test_a_power_cut_is_seen_and_gone_on_from_under_a_clock_that_jumps(
    copy, whole, tmp_path, capsys
):
    run = Result(0, "", "", cut(copy))
    before = run.json("status.json")
    assert read(find([copy])[0])[0].state == shown(copy, capsys) == "crashed"
    assert shown(copy, capsys, "error") == ending.CUT_OFF
    assert run.json("status.json") == before  # a look changes nothing

    # from the start, so that there is time to jump
    shutil.rmtree(copy / "checkpoints" / f"step_{LAST - 2:08d}")
    plan = "step_start-16:back 3600"
    done = llmexp("resume", str(copy), *PLANNED, cwd=tmp_path, FAULT_PLAN=plan)
    assert done.code == 0, done.err
    assert_as_undisturbed(run, whole)
    for row in run.rows():
        assert all(row[key] > 0 for key in TIMINGS if key in row and key != "eta"), row
        assert row["eta"] >= 0
    assert run.json("status.json")["summary"]["train_time"] > 0
    assert shown(copy, capsys) == "finished"


def test_a_failure_under_a_clock_that_jumped_back_is_reported_by_its_rank(tmp_path):
    """The agent began an hour after the time at which the rank says that it failed."""
    run = [*TINY, "data=synthetic", "batch.micro_batch_size=2", "train.max_steps=20"]
    two = ["parallelism=ddp", "parallelism.nproc_per_node=2", "parallelism.max_restarts=2"]
    plan = "step_start-16:back 3600; step_start-17@1:raise late"
    hooks = [*PLANNED, "hydra.run.dir=run"]
    done = llmexp("train", *run, *two, *hooks, cwd=tmp_path, FAULT_PLAN=plan)
    assert done.code == 3
    assert "(rank 1, " in done.err
    error = done.json("status.json")["error"]
    assert "the hook own.faults.act failed at step_start of step 17: RuntimeError('late')" in error
    assert "start again" not in done.err  # it would only fail again


def test_a_run_is_running_while_it_may_be_alive(copy, capsys):
    """It is on another host and wrote a moment ago, or its lock or that of its ranks is held."""
    cut(copy)
    for name in (".lock", ".lock-ranks"):
        with rundir.locked(copy, name):
            assert shown(copy, capsys) == "running"
    amend(copy / "status.json", host="elsewhere")
    (copy / "metrics.jsonl").touch()
    assert shown(copy, capsys) == "running"
    (copy / "status.json").unlink()
    assert shown(copy, capsys) == "crashed"
    assert not (copy / "status.json").exists()
