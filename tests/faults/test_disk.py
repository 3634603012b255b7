"""Disks that are full, read-only or limited, under a run and under a sweep."""

import json
import os
import stat
import subprocess
from dataclasses import replace

import pytest

from llmexp.checkpoint import loading
from llmexp.checkpoint.folders import checkpoint_folders
from llmexp.folders import ledger
from llmexp.train import worker
from tests.conftest import llmexp
from tests.faults.helpers import (
    PLANNED,
    TWO,
    assert_as_undisturbed,
    assert_whole_files,
    fails,
    goes_on,
    small_disk,
    without_scale,
)

RUN = ["hydra.run.dir=run", *PLANNED]


def test_saves_fail_and_recover_and_the_last_may_not(tmp_path, settings, whole):
    """A full disk for two saves (2 of 2 failures), a save, a read-only folder, a limit on the size
    of files, and a disk that is full at the end. The log is on a full disk all the time, and the
    lines go to none."""
    run = tmp_path / "run"
    run.mkdir()
    os.mknod(run / "train.log", stat.S_IFCHR | 0o666, os.stat("/dev/full").st_rdev)
    plan = (
        "step_start-3:full run/checkpoints; step_start-7:room run/checkpoints; "
        "step_start-9:ro run/checkpoints; step_start-11:rw run/checkpoints; "
        "step_start-13:limit 20000; step_start-15:limit unlimited; "
        "step_start-23:full run/checkpoints"
    )
    with small_disk(run / "checkpoints", "2m") as disk:
        failed = fails(
            tmp_path, "train", *settings, *RUN, "checkpoint.max_failures=2", FAULT_PLAN=plan,
            says=["No space left on device", "the checkpoint of step 24"], step=22,
            then="to continue: llmexp resume run --allow own",
        )  # fmt: skip
        warnings = [line for line in failed.out.splitlines() if "could not be saved" in line]
        # 4, 6 and then, as 8 was saved in between, 10 are counted from one again.
        expected = [
            (4, 1, 2, "No space left"), (6, 2, 2, "No space left"), (10, 1, 8, "Read-only"),
            (14, 1, 12, "File too large"),
        ]  # fmt: skip
        for line, (step, count, newest, why) in zip(warnings, expected, strict=True):
            assert line.startswith(f"WARNING: the checkpoint of step {step} "), line
            assert why in line
            assert f"step {newest}; failure {count} of at most 2 " in line
        assert failed.out.count("train.log cannot be written (No space left on device)") == 1
        left = {path.name for path in disk.iterdir()}
        assert left == {"ballast", "step_00000020", "step_00000022"}
        assert all(loading.read_checkpoint(path).step for path in checkpoint_folders(disk))
        assert_whole_files(run)
        (disk / "ballast").unlink()
        (run / "train.log").unlink()  # nothing is gone on with in a folder that holds a device
        assert "resumed from step_00000022" in goes_on(failed, whole).out


OVERFLOWS = ["precision.init_scale=1e30", "train.max_consecutive_skips=100"]


@pytest.mark.parametrize(
    ("more", "step"),
    [
        (["checkpoint.max_failures=1"], 10),
        (["checkpoint.max_failures=0", *OVERFLOWS], 8),  # found at a step that is skipped
        pytest.param(["train.stop_step=9"], 9, marks=pytest.mark.slow),  # which must be saved
    ],
)
def test_a_failure_too_many_in_the_background(tmp_path, settings, more, step):
    with small_disk(tmp_path / "run" / "checkpoints", "2m") as disk:
        failed = fails(
            tmp_path, "train", *settings, *RUN, *more, "checkpoint.async=true",
            FAULT_PLAN="saved-6:ro run/checkpoints",
            says=["Read-only file system", f"the checkpoint of step {step} "], step=6,
        )  # fmt: skip
        assert ("the checkpoint of step 8 could not be saved" in failed.out) == (step > 8)
        assert len(failed.rows()) < 20
        assert loading.read_checkpoint(disk / "step_00000006").step == 6
        assert not list(disk.glob(".step*"))


@pytest.mark.parametrize("more", [[], ["parallelism=ddp", *TWO]], ids=["one", "two"])
def test_a_disk_that_is_full_from_the_start(tmp_path, settings, more):
    with small_disk(tmp_path / "full", "100k") as disk:
        (disk / "ballast").write_bytes(b"x" * 100 * 1024)
        failed = llmexp("train", *settings, *more, "hydra.run.dir=full/run", cwd=tmp_path)
        assert failed.code == 3, failed.err
        (line,) = (text for text in failed.err.splitlines() if "training failed: " in text)
        for part in ("No space left on device", "full/run/config.yaml"):
            assert part in line
        assert line.endswith("; no checkpoint yet; to continue: the same command")
        assert "Traceback" not in failed.err


def test_a_run_on_a_read_only_disk_goes_on_in_a_copy(tmp_path, settings, monkeypatch, capfd, words):
    with small_disk(tmp_path / "disk", "2m") as disk:
        stopped = ["train.stop_step=4", "hydra.run.dir=disk/run"]
        assert llmexp("train", *settings, *stopped, cwd=tmp_path).code == 75
        subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
        refused = llmexp("resume", "disk/run", cwd=tmp_path)
        assert refused.code == 2
        words("faults/read-only", refused.err)
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(worker.STOP, "importing", True)
        assert worker.main("disk/run") == 2  # as python -m llmexp.train
        assert capfd.readouterr().err == refused.err


@pytest.mark.slow
def test_one_rank_of_two_cannot_write(tmp_path, settings):
    """Both go on, and the log of the one has its reason."""
    two = ["precision=fp32", "parallelism=fsdp", *TWO]
    plan = "step_start-3@1:limit 4000; step_start-5@1:limit unlimited"
    done = llmexp("train", *without_scale(settings), *RUN, *two, cwd=tmp_path, FAULT_PLAN=plan)
    assert done.code == 0, done.err
    assert "the checkpoint of step 4 could not be saved (rank 1 could not write; " in done.out
    assert done.out.count("could not be saved") == 1
    logs = "".join(p.read_text() for p in (done.folder / "logs").rglob("*") if p.is_file())
    assert "the checkpoint of step 4 could not be saved: " in logs
    assert "File too large" in logs
    assert done.json("status.json")["state"] == "finished"
    assert_whole_files(done.folder)


def test_a_full_disk_under_the_rows_and_under_the_last_status(tmp_path, settings, whole):
    """A row that cannot be written ends the run, and leaves no part of it. On the way to the end of
    the resumed run the disk is full once more, after the last checkpoint: its status is true all
    the same."""
    with small_disk(tmp_path / "run", "2m") as disk:
        failed = fails(
            tmp_path, "train", *settings, *RUN, FAULT_PLAN="step_start-7:full run",
            says=["No space left on device", "metrics.jsonl: the row of step"], step=6,
        )  # fmt: skip
        assert_whole_files(disk)
        (disk / "ballast").unlink()
        resume = ["resume", "run", "--allow", "own"]
        again = llmexp(*resume, cwd=tmp_path, FAULT_PLAN="saved-24:full run")
        assert again.code == 0, again.err
        assert (disk / "ballast").exists()
        assert_as_undisturbed(failed, whole)


def test_a_full_disk_under_the_ledger_of_a_sweep(tmp_path, settings, whole):
    """The run that was at its end is finished by its own record; the sweep says what it could not
    write, and goes on once there is room."""
    with small_disk(tmp_path / "disk", "3m") as disk:
        command = ["train", "-m", *settings, "train.seed=1,1234", "hydra.sweep.dir=disk/sweep"]
        failed = llmexp(*command, *PLANNED, cwd=tmp_path, FAULT_PLAN="saved-24:full disk")
        assert failed.code == 1, failed.err
        (line,) = (text for text in failed.err.splitlines() if text.startswith("llmexp: "))
        assert "disk/sweep/sweep.json: could not be written: No space left on device" in line
        first = replace(failed, folder=disk / "sweep" / "0-seed_1")
        assert first.json("status.json")["state"] == "finished"
        assert json.loads((disk / "sweep" / "sweep.json").read_text())["points"]
        assert not list(disk.rglob("*.tmp"))
        rows = first.rows()
        (disk / "ballast").unlink()
        again = line.partition("to continue: llmexp ")[2].split()
        done = llmexp(*again, cwd=tmp_path)
        assert done.code == 0, done.err
        assert first.rows() == rows  # it was not run again
        assert_as_undisturbed(replace(first, folder=disk / "sweep" / "1-seed_1234"), whole)
        points = ledger.read_ledger(disk / "sweep").points
        assert [point.state for point in points] == ["finished", "finished"]
