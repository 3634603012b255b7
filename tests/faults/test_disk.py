"""Disks that are full, read-only or limited, under a run and under a sweep."""

import json
import os
import stat
import subprocess

import pytest

from llmexp.checkpoint import loading
from llmexp.checkpoint.folders import checkpoint_folders
from llmexp.folders import ledger
from llmexp.train import worker
from tests.conftest import Result, llmexp
from tests.faults.helpers import (
    assert_as_undisturbed,
    assert_says,
    assert_status,
    assert_whole_files,
    go_on,
    small_disk,
    without_scale,
)

HOOKED = ["--allow", "own", "hooks=[own.faults.act]"]
RUN = ["hydra.run.dir=run", *HOOKED]
TWO = ["parallelism.nproc_per_node=2", "batch.gradient_accumulation_steps=1"]


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
        more = ["checkpoint.max_failures=2"]
        failed = llmexp("train", *settings, *RUN, *more, cwd=tmp_path, FAULT_PLAN=plan)
        assert failed.code == 3, failed.err
        # 4, 6 and then, as 8 was saved in between, 10 are counted from one again.
        for step, count, newest, why in (
            (4, 1, 2, "No space left"),
            (6, 2, 2, "No space left"),
            (10, 1, 8, "Read-only"),
            (14, 1, 12, "File too large"),
        ):
            (line,) = (t for t in failed.out.splitlines() if f"the checkpoint of step {step} " in t)
            assert line.startswith("WARNING: ")
            assert why in line
            assert f"step {newest}; failure {count} of at most 2 " in line
        assert failed.out.count("could not be saved") == 4
        assert failed.out.count("train.log cannot be written (No space left on device)") == 1
        assert_says(
            failed.err, what="No space left on device", where="the checkpoint of step 24",
            intact="the last checkpoint is step_00000022", command="llmexp resume run --allow own",
        )  # fmt: skip
        assert_status(failed, "failed", 3, "the checkpoint of step 24")
        left = {path.name for path in disk.iterdir()}
        assert left == {"ballast", "step_00000020", "step_00000022"}
        assert all(loading.read_checkpoint(path).step for path in checkpoint_folders(disk))
        assert_whole_files(run)
        (disk / "ballast").unlink()
        (run / "train.log").unlink()  # nothing is gone on with in a folder that holds a device
        done = go_on(failed.err, tmp_path)
        assert done.code == 0, done.err
        assert "resumed from step_00000022" in done.out
        assert_as_undisturbed(done, whole)


@pytest.mark.parametrize(
    ("more", "step"),
    [
        ("checkpoint.max_failures=1", 10),
        pytest.param("train.stop_step=9", 9, marks=pytest.mark.slow),
    ],
)
def test_a_failure_too_many(tmp_path, settings, more, step):
    """In the background. With `checkpoint.max_failures=1` the second one in a row ends the run; the
    save of a stop must not fail at all."""
    with small_disk(tmp_path / "run" / "checkpoints", "2m") as disk:
        more = [more, "checkpoint.async=true"]
        plan = "saved-6:ro run/checkpoints"
        failed = llmexp("train", *settings, *RUN, *more, cwd=tmp_path, FAULT_PLAN=plan)
        assert failed.code == 3, failed.err
        assert "the checkpoint of step 8 could not be saved" in failed.out
        assert_says(
            failed.err, what="Read-only file system", where=f"the checkpoint of step {step} ",
            intact="the last checkpoint is step_00000006", command="llmexp resume run",
        )  # fmt: skip
        assert_status(failed, "failed", 3, f"the checkpoint of step {step} ")
        assert len(failed.rows()) < 20
        assert loading.read_checkpoint(disk / "step_00000006").step == 6
        assert not list(disk.glob(".step*"))


def test_a_save_that_fails_while_steps_overflow_is_not_passed_over(tmp_path, settings):
    """In the background, and found to have failed at a step whose update is skipped."""
    (tmp_path / "late.py").write_text(
        "from llmexp.checkpoint import saving\n"
        "import time\n"
        "def write(*arguments):\n"
        "    time.sleep(0.3)\n"
        "    raise OSError('no room')\n"
        "saving.write_pieces = write\n"
        "def hook(event, context): pass\n"
    )
    more = ["--allow", "late", "hooks=[late.hook]", "precision.init_scale=1e30"]
    more += ["checkpoint.async=true", "checkpoint.max_failures=0", "hydra.run.dir=run"]
    more += ["train.max_consecutive_skips=100"]
    failed = llmexp("train", *settings, *more, cwd=tmp_path)
    assert failed.code == 3, failed.out
    assert "the checkpoint of step 2 could not be saved (no room)" in failed.err
    assert "no checkpoint yet" in failed.err


@pytest.mark.parametrize("more", [[], ["parallelism=ddp", *TWO]], ids=["one", "two"])
def test_a_disk_that_is_full_from_the_start(tmp_path, settings, more):
    with small_disk(tmp_path / "full", "100k") as disk:
        (disk / "ballast").write_bytes(b"x" * 100 * 1024)
        failed = llmexp("train", *settings, *more, "hydra.run.dir=full/run", cwd=tmp_path)
        assert failed.code == 3, failed.err
        assert_says(
            failed.err, what="No space left on device", where="full/run/config.yaml",
            intact="no checkpoint yet", command="the same command",
        )  # fmt: skip


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
    assert_status(done, "finished", 0, None)
    assert_whole_files(done.folder)


def test_a_full_disk_under_the_rows_and_under_the_last_status(tmp_path, settings, whole):
    """A row that cannot be written ends the run, and leaves no part of it. On the way to the end of
    the resumed run the disk is full once more, after the last checkpoint: its status is true all
    the same."""
    with small_disk(tmp_path / "run", "2m") as disk:
        failed = llmexp("train", *settings, *RUN, cwd=tmp_path, FAULT_PLAN="step_start-7:full run")
        assert failed.code == 3, failed.err
        assert_says(
            failed.err, what="No space left on device", where="metrics.jsonl: the row of step",
            intact="the last checkpoint is step_00000006", command="llmexp resume run",
        )  # fmt: skip
        assert_status(failed, "failed", 3, "metrics.jsonl: the row of step")
        assert_whole_files(disk)
        (disk / "ballast").unlink()
        resume = ["resume", "run", "--allow", "own"]
        again = llmexp(*resume, cwd=tmp_path, FAULT_PLAN="saved-24:full run")
        assert again.code == 0, again.err
        assert (disk / "ballast").exists()
        assert_as_undisturbed(Result(0, "", "", disk), whole)


def test_a_full_disk_under_the_ledger_of_a_sweep(tmp_path, settings, whole):
    """The run that was at its end is finished by its own record; the sweep says what it could not
    write, and goes on once there is room."""
    with small_disk(tmp_path / "disk", "3m") as disk:
        command = ["train", "-m", *settings, "train.seed=1,1234", "hydra.sweep.dir=disk/sweep"]
        failed = llmexp(*command, *HOOKED, cwd=tmp_path, FAULT_PLAN="saved-24:full disk")
        assert failed.code == 1, failed.err
        (line,) = (text for text in failed.err.splitlines() if text.startswith("llmexp: "))
        assert "disk/sweep/sweep.json: could not be written: No space left on device" in line
        folders = [disk / "sweep" / name for name in ("0-seed_1", "1-seed_1234")]
        first, second = (Result(0, "", "", folder) for folder in folders)
        assert_status(first, "finished", 0, None)
        assert json.loads((disk / "sweep" / "sweep.json").read_text())["points"]
        assert not list(disk.rglob("*.tmp"))
        rows = first.rows()
        (disk / "ballast").unlink()
        done = go_on(failed.err, tmp_path)
        assert done.code == 0, done.err
        assert first.rows() == rows  # it was not run again
        assert_as_undisturbed(second, whole)
        points = ledger.read_ledger(disk / "sweep").points
        assert [point.state for point in points] == ["finished", "finished"]
