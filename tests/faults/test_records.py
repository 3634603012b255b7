"""What a crash or a reboot leaves on the disk: damaged checkpoints, old locks, a status that is not
true any more."""

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
from tests.faults.helpers import LAST, assert_as_undisturbed
from tests.tools import amend


def copy_of(whole: Result, to: Path) -> Path:
    shutil.copytree(whole.folder, to)
    return to


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


@pytest.mark.parametrize("how", [Path.unlink, truncate, flip])
@pytest.mark.parametrize(
    "name", ["model.safetensors", "optimizer.safetensors", "state.pt", "manifest.json"]
)
def test_a_damaged_checkpoint_is_passed_over_and_named(whole, tmp_path, capsys, how, name):
    if (how, name) == (flip, "manifest.json"):
        return  # half of it is for people
    run = copy_of(whole, tmp_path / "run")
    newest, older = (run / f"checkpoints/step_{step:08d}" for step in (LAST, LAST - 2))
    how(newest / name)
    text, warnings = f"checkpoint {newest.name} is damaged and not used: ", []
    assert loading.newest_whole(run / "checkpoints", warnings.append).path == older
    assert text in warnings[0]
    assert name in warnings[0]
    assert command(["sample", str(run), "--tokens", "1"]) == 0
    err = capsys.readouterr().err
    if "optimizer" in name and how is not Path.unlink:
        assert err == ""  # a sample does not read it
        return
    assert text in err
    assert name in err
    how(older / name)
    assert command(["sample", str(run), "--tokens", "1"]) == 2
    err = capsys.readouterr().err
    assert "all 2 checkpoints are damaged" in err
    assert "Traceback" not in err


def test_another_format_is_refused_not_passed_over(whole, tmp_path, capsys):
    run = copy_of(whole, tmp_path / "run")
    manifest = run / "checkpoints" / f"step_{LAST:08d}" / "manifest.json"
    ours = loading.CHECKPOINT_FORMAT
    amend(manifest, format=ours + 1)
    assert command(["sample", str(run), "--tokens", "1"]) == 2
    err = capsys.readouterr().err
    text = f"format={ours + 1}: this version of llmexp reads format {ours}; use the"
    assert f"{manifest}: {text}" in err
    assert "Traceback" not in err


HOOKS = """
import time

def jump(event, context):
    if (event, context.step) == ("step_start", 16):
        real = time.time
        time.time = lambda: real() - 3600  # the clock of the wall; the monotonic ones never jump
"""


FAILING = """
import os

def fail(event, context):
    where = (event, context.step, context.run.world_size > 1, os.environ.get("RANK"))
    if where == ("step_start", 17, True, "1"):
        raise RuntimeError("late")
"""


def cut_run(whole: Result, to: Path, **status: object) -> Path:
    """A run as a power cut leaves it: running by its status, its locks there and held by nobody."""
    run = copy_of(whole, to)
    shutil.rmtree(run / "checkpoints" / f"step_{LAST:08d}")
    here = {"pid": os.getpid(), "host": socket.gethostname()}
    about = {"state": "running", "exit_code": None, "ended": None, **here, **status}
    amend(run / "status.json", **about)
    for name in (".lock", ".lock-ranks"):
        (run / name).touch()
    return run


def shown(path: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert command(["runs", "--json", str(path)]) == 0
    return json.loads(capsys.readouterr().out)["runs"][0]


def state_shown(path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    return shown(path, capsys)["state"]


def test_a_power_cut_is_seen_and_gone_on_from_under_a_clock_that_jumps(whole, tmp_path, capsys):
    run = Result(0, "", "", cut_run(whole, tmp_path / "run"))
    before = run.json("status.json")
    assert read(find([run.folder])[0])[0].state == "crashed"
    assert shown(run.folder, capsys)["error"] == ending.CUT_OFF
    assert state_shown(run.folder, capsys) == "crashed"
    assert run.json("status.json") == before  # a look changes nothing

    # from the start, so that there is time to jump
    shutil.rmtree(run.folder / "checkpoints" / f"step_{LAST - 2:08d}")
    (tmp_path / "faulty.py").write_text(HOOKS)
    hooks = ["hooks=[faulty.jump]", "--allow", "faulty"]
    done = llmexp("resume", str(run.folder), *hooks, cwd=tmp_path)
    assert done.code == 0, done.err
    assert_as_undisturbed(run, whole)
    for row in run.rows():
        assert all(row[key] > 0 for key in TIMINGS if key in row and key != "eta"), row
        assert row["eta"] >= 0
    assert run.json("status.json")["summary"]["train_time"] > 0
    assert state_shown(run.folder, capsys) == "finished"


def test_a_run_that_lost_its_status_is_cut(whole, tmp_path, capsys):
    run = cut_run(whole, tmp_path / "run")
    (run / "status.json").unlink()
    assert state_shown(run, capsys) == "crashed"
    assert not (run / "status.json").exists()


def test_a_failure_under_a_clock_that_jumped_back_is_reported_by_its_rank(tmp_path):
    """The agent began an hour after the time at which the rank says that it failed."""
    (tmp_path / "faulty.py").write_text(HOOKS + FAILING)
    run = [*TINY, "data=synthetic", "batch.micro_batch_size=2", "train.max_steps=20"]
    two = ["parallelism=ddp", "parallelism.nproc_per_node=2", "parallelism.max_restarts=2"]
    hooks = ["hooks=[faulty.jump,faulty.fail]", "--allow", "faulty", "hydra.run.dir=run"]
    done = llmexp("train", *run, *two, *hooks, cwd=tmp_path)
    assert done.code == 3
    assert "(rank 1, " in done.err
    error = done.json("status.json")["error"]
    assert "the hook faulty.fail failed at step_start of step 17: RuntimeError('late')" in error
    assert "start again" not in done.err  # it would only fail again


def test_a_run_that_may_be_alive_is_running(whole, tmp_path, capsys):
    """It is on another host and wrote a moment ago, or its lock or that of its ranks is held."""
    other = cut_run(whole, tmp_path / "other", host="elsewhere")
    (other / "metrics.jsonl").touch()
    assert state_shown(other, capsys) == "running"
    for name in (".lock", ".lock-ranks"):
        run = cut_run(whole, tmp_path / name)
        with rundir.locked(run, name):
            assert state_shown(run, capsys) == "running"
