"""Disks that are full, read-only or limited, under a run and under a sweep."""

from __future__ import annotations

import json
import os
import stat
import subprocess
from pathlib import Path

import pytest

from llmexp.checkpoint import loading
from llmexp.checkpoint.folders import checkpoint_folders
from llmexp.runs import ledger
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

# A user's hook that takes the disk away and gives it back, by step.
HOOKS = """
import os, resource, signal, subprocess

WHERE = os.environ.get("FAULT_DISK", "")
PLAN = dict(pair.split(":") for pair in os.environ.get("FAULT_PLAN", "").split(",") if pair)

def fill():
    with open(os.path.join(WHERE, "ballast"), "ab", buffering=0) as f:
        for size in (65536, 4096, 1):
            try:
                while f.write(b"x" * size):
                    pass
            except OSError:
                pass

def act(word):
    if word == "full":
        fill()
    elif word == "room":
        os.unlink(os.path.join(WHERE, "ballast"))
    elif word in ("ro", "rw"):
        subprocess.run(["mount", "-o", "remount," + word, WHERE], check=True)
    else:  # what the shell sets with `ulimit -f`
        hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(word) if word != "unlimited" else hard, hard))

def disk(event, context):
    word = PLAN.get(f"{event}-{context.step}")
    if word and os.environ.get("RANK", "0") == os.environ.get("FAULT_RANK", "0"):
        act(word)
"""  # noqa: E501
HOOKED = ["--allow", "faulty", "hooks=[faulty.disk]"]


@pytest.fixture
def here(tmp_path: Path) -> Path:
    (tmp_path / "faulty.py").write_text(HOOKS)
    return tmp_path


def test_saves_fail_and_recover_and_the_last_may_not(here, settings, whole):
    """A full disk for two saves (2 of 2 failures), a save, a read-only folder, a limit on the size
    of files, and a disk that is full at the end. The log is on a full disk all the time, and the
    lines go to none."""
    run = here / "run"
    run.mkdir()
    os.mknod(run / "train.log", stat.S_IFCHR | 0o666, os.stat("/dev/full").st_rdev)
    plan = ("step_start-3:full,step_start-7:room,step_start-9:ro,step_start-11:rw,step_start-13:20000,"  # noqa: E501
            "step_start-15:unlimited,step_start-23:full")  # fmt: skip
    with small_disk(run / "checkpoints", "2m") as disk:
        failed = llmexp(
            "train", *settings, "hydra.run.dir=run", *HOOKED, "checkpoint.max_failures=2", cwd=here,
            FAULT_DISK=str(disk), FAULT_PLAN=plan,
        )  # fmt: skip
        assert failed.code == 3, failed.err
        # 4, 6 and then, as 8 was saved in between, 10 are counted from one again.
        for step, count, newest, why in (
            (4, 1, 2, "No space left"),
            (6, 2, 2, "No space left"),
            (10, 1, 8, "Read-only"),
            (14, 1, 12, "File too large"),
        ):
            (line,) = [
                text
                for text in failed.out.splitlines()
                if f"the checkpoint of step {step} " in text
            ]
            assert line.startswith("WARNING: ")
            assert why in line
            assert (
                f"); the newest is of step {newest}; failure {count} of at most 2 in a row" in line
            )
        assert failed.out.count("could not be saved") == 4
        assert (
            failed.out.count(
                "train.log cannot be written (No space left on device); the run goes on"
            )
            == 1
        )
        assert_says(
            failed.err, what="No space left on device", where="the checkpoint of step 24",
            intact="the last checkpoint is step_00000022", command="llmexp resume run --allow "
                                                                   "faulty",
        )  # fmt: skip
        assert_status(failed, "failed", 3, "the checkpoint of step 24")
        assert sorted(p.name for p in disk.iterdir()) == [
            "ballast",
            "step_00000020",
            "step_00000022",
        ]
        assert all(loading.read_checkpoint(path).step for path in checkpoint_folders(disk))
        assert_whole_files(run)
        (disk / "ballast").unlink()
        (run / "train.log").unlink()  # nothing is gone on with in a folder that holds a device
        done = go_on(failed.err, here)
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
def test_a_failure_too_many(here, settings, more, step):
    """In the background. With `checkpoint.max_failures=1` the second one in a row ends the run; the
    save of a stop must not fail at all."""
    with small_disk(here / "run" / "checkpoints", "2m") as disk:
        failed = llmexp(
            "train", *settings, "hydra.run.dir=run", *HOOKED, more, "checkpoint.async=true",
            cwd=here, FAULT_DISK=str(disk), FAULT_PLAN="saved-6:ro",
        )  # fmt: skip
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


def test_a_save_that_fails_while_steps_overflow_is_not_passed_over(here, settings):
    """In the background, and found to have failed at a step whose update is skipped."""
    (here / "late.py").write_text(
        "from llmexp.checkpoint import saving\n"
        "import time\n"
        "def write(*arguments):\n"
        "    time.sleep(0.3)\n"
        "    raise OSError('no room')\n"
        "saving.write_pieces = write\n"
        "def hook(event, context): pass\n"
    )
    failed = llmexp(
        "train", *settings, "hydra.run.dir=run", "--allow", "late", "hooks=[late.hook]",
        "checkpoint.async=true",
        "checkpoint.max_failures=0", "precision.init_scale=1e30", "train.max_consecutive_skips=100",
        cwd=here,
    )  # fmt: skip
    assert failed.code == 3, failed.out
    assert (
        "the checkpoint of step 2 could not be saved (no room); checkpoint.max_failures=0 in a row"
        in failed.err
    )
    assert "no checkpoint yet" in failed.err


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_disk_that_is_full_from_the_start(here, settings, ranks):
    two = ["parallelism=ddp", "parallelism.nproc_per_node=2", "batch.gradient_accumulation_steps=1"]
    with small_disk(here / "full", "100k") as disk:
        (disk / "ballast").write_bytes(b"x" * 100 * 1024)
        failed = llmexp(
            "train", *settings, *(two if ranks == 2 else ()), "hydra.run.dir=full/run", cwd=here
        )
        assert failed.code == 3, failed.err
        assert "Traceback" not in failed.err
        assert_says(
            failed.err,
            what="No space left on device",
            where="full/run/config.yaml",
            intact="no checkpoint yet",
            command="the same command",
        )


def test_a_run_on_a_read_only_disk_goes_on_in_a_copy(here, settings, monkeypatch, capfd):
    with small_disk(here / "disk", "2m") as disk:
        stopped = ["train.stop_step=4", "hydra.run.dir=disk/run"]
        assert llmexp("train", *settings, *stopped, cwd=here).code == 75
        subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
        refused = llmexp("resume", "disk/run", cwd=here)
        assert refused.code == 2
        assert refused.err.startswith("llmexp: disk/run: this folder cannot be written; copy it")
        command = refused.err.strip().rpartition("go on there: ")[2]
        assert command == "cp -r --no-preserve=mode disk/run /tmp/run && llmexp resume /tmp/run"
        assert "Traceback" not in refused.err
        monkeypatch.chdir(here)
        monkeypatch.setattr(worker.STOP, "importing", True)
        assert worker.main("disk/run") == 2  # as python -m llmexp.train
        assert capfd.readouterr().err == refused.err


@pytest.mark.slow
def test_one_rank_of_two_cannot_write(here, settings):
    """Both go on, and the log of the one has its reason."""
    done = llmexp(
        "train", *without_scale(settings), "hydra.run.dir=run", *HOOKED, "precision=fp32",
        "parallelism=fsdp",
        "parallelism.nproc_per_node=2", "batch.gradient_accumulation_steps=1", cwd=here,
        FAULT_RANK="1",
        FAULT_PLAN="step_start-3:4000,step_start-5:unlimited",
    )  # fmt: skip
    assert done.code == 0, done.err
    assert (
        "the checkpoint of step 4 could not be saved (rank 1 could not write; its log says why)"
        in done.out
    )
    assert done.out.count("could not be saved") == 1
    logs = "".join(p.read_text() for p in (done.folder / "logs").rglob("*") if p.is_file())
    assert "the checkpoint of step 4 could not be saved: " in logs
    assert "File too large" in logs
    assert_status(done, "finished", 0, None)
    assert_whole_files(done.folder)


def test_a_full_disk_under_the_rows_and_under_the_last_status(here, settings, whole):
    """A row that cannot be written ends the run, and leaves no part of it. On the way to the end of
    the resumed run the disk is full once more, after the last checkpoint: its status is true all
    the same."""
    with small_disk(here / "run", "2m") as disk:
        failed = llmexp(
            "train", *settings, "hydra.run.dir=run", *HOOKED, cwd=here, FAULT_DISK=str(disk),
            FAULT_PLAN="step_start-7:full",
        )  # fmt: skip
        assert failed.code == 3, failed.err
        assert_says(
            failed.err, what="No space left on device", where="metrics.jsonl: the row of step",
            intact="the last checkpoint is step_00000006", command="llmexp resume run",
        )  # fmt: skip
        assert_status(failed, "failed", 3, "metrics.jsonl: the row of step")
        assert_whole_files(disk)
        (disk / "ballast").unlink()
        again = llmexp(
            "resume",
            "run",
            "--allow",
            "faulty",
            cwd=here,
            FAULT_DISK=str(disk),
            FAULT_PLAN="saved-24:full",
        )
        assert again.code == 0, again.err
        assert (disk / "ballast").exists()
        assert_as_undisturbed(Result(0, "", "", disk), whole)


def test_a_full_disk_under_the_ledger_of_a_sweep(here, settings, whole):
    """The run that was at its end is finished by its own record; the sweep says what it could not
    write, and goes on once there is room."""
    with small_disk(here / "disk", "3m") as disk:
        command = [
            "train",
            "-m",
            *settings,
            "train.seed=1,1234",
            "hydra.sweep.dir=disk/sweep",
            *HOOKED,
        ]
        failed = llmexp(*command, cwd=here, FAULT_DISK=str(disk), FAULT_PLAN="saved-24:full")
        assert failed.code == 1, failed.err
        (line,) = [text for text in failed.err.splitlines() if text.startswith("llmexp: ")]
        assert (
            "disk/sweep/sweep.json: could not be written: No space left on device; its runs are "
            "intact" in line
        )
        first, second = (
            Result(0, "", "", disk / "sweep" / name) for name in ("0-seed_1", "1-seed_1234")
        )
        assert_status(first, "finished", 0, None)
        assert json.loads((disk / "sweep" / "sweep.json").read_text())["points"]
        assert not list(disk.rglob("*.tmp"))
        rows = first.rows()
        (disk / "ballast").unlink()
        done = go_on(failed.err, here)
        assert done.code == 0, done.err
        assert first.rows() == rows  # it was not run again
        assert_as_undisturbed(second, whole)
        points = ledger.read_ledger(disk / "sweep").points
        assert [point.state for point in points] == ["finished", "finished"]
