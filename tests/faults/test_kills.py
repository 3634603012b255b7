"""Killed, stopped and starved at bad moments: what is left is whole, and the way to the end is the
undisturbed one."""

import contextlib
import os
import random
import signal
import subprocess
import time
from pathlib import Path

import pytest

from llmexp.checkpoint import loading
from llmexp.checkpoint.folders import checkpoint_folders
from llmexp.folders import rundir
from llmexp.folders.rows import read_rows
from tests.conftest import HANG_S, Result, llmexp, start
from tests.faults.helpers import LAST, assert_as_undisturbed, fails, goes_on
from tests.tools import session, wait_for

ALLOW = ["--allow", "own"]
# A step takes 0.02 s and a save 0.2 s, over all its stages, so that they can be met.
SLOW = [*ALLOW, "hooks=[own.faults.act,{_target_:own.hooks.slow_disk,seconds:0.04}]"]
SLOW_STEPS = {"FAULT_PLAN": "step_start-*:sleep 0.02"}
WHOM = ["worker", "launcher", "tree"]


def rows_of(run: Result) -> int:
    rows = run.folder / "metrics.jsonl"
    return rows.read_bytes().count(b"\n") if rows.exists() else 0


def is_saving(run: Result) -> bool:
    return any((run.folder / "checkpoints").glob(".step_*.tmp"))


def came_to(process: subprocess.Popen[str], run: Result, rows: int, saving: bool) -> bool:
    """Whether it has that many rows, and saves, before it ends."""

    def is_there() -> bool:
        return rows_of(run) >= rows and (is_saving(run) or not saving)

    wait_for(lambda: process.poll() is not None or is_there())
    return process.poll() is None


@pytest.mark.parametrize(
    ("count", "more"),
    [(2, []), pytest.param(20, ["checkpoint.async=true"], marks=pytest.mark.slow)],
)
def test_killed_in_a_row(tmp_path, settings, whole, count, more):
    """The worker inside a save; of more kills, whom and when is random. LLMEXP_TEST_KILLS=20 for as
    many. A whole tree that is killed between saves goes on in tests/train/test_resume.py.

    A run that gets to its end between two kills is compared there, and another one takes its place.
    """
    seed = random.randrange(10**6)
    rng, number = random.Random(seed), 0
    count = int(os.environ.get("LLMEXP_TEST_KILLS", count))
    kills = [(rng.choice(WHOM), rng.random() < 0.5) for _ in range(count)]
    kills = kills if count > 2 else [("worker", True)] * count
    while kills:
        whom, saving = kills[0]
        run = Result(0, "", "", tmp_path / f"run{number}")
        before, command = rows_of(run), ["resume", run.folder.name, *ALLOW]
        if not before or rng.random() < 0.5:
            place = [f"hydra.run.dir=run{number}", "checkpoint.resume=auto"]
            command = ["train", *settings, *more, *SLOW, *place]
        process = start(*command, cwd=tmp_path, **SLOW_STEPS)
        came_to(process, run, min(LAST, before + rng.randint(1, 4)), saving)
        time.sleep(rng.uniform(0, 0.2 if saving else 0.06))
        for pid in session(process.pid):
            if whom == "tree" or (pid == process.pid) == (whom == "launcher"):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        _, err = process.communicate(timeout=HANG_S)
        assert "Traceback" not in err
        # a worker whose parent was killed may have to save
        wait_for(lambda run=run: not rundir.is_locked(run.folder))
        *older, newest = checkpoint_folders(run.folder / "checkpoints") or [None]
        # one that was being removed when the kill came lost its manifest first
        whole_ones = [path for path in older if (path / "manifest.json").exists()]
        for path in [*whole_ones, *filter(None, [newest])]:
            assert loading.read_checkpoint(path).step == int(path.name[5:])
        steps = [row["step"] for row in read_rows(run.folder / "metrics.jsonl")]
        assert steps == list(range(1, len(steps) + 1)), seed
        if process.returncode == 0:
            assert_as_undisturbed(run, whole)
            number += 1
            assert number <= count + 8, "runs are over before they can be killed"
            continue
        assert process.returncode == (3 if whom == "worker" else -signal.SIGKILL), (seed, err)
        if whom == "worker":
            status = run.json("status.json")
            assert (status["state"], status["exit_code"]) == ("failed", 3)
            assert "the worker was ended by signal 9 (SIGKILL" in status["error"]
            assert f"to continue: llmexp resume {run.folder.name}" in err
        kills.pop(0)
    done = llmexp("resume", run.folder.name, *ALLOW, cwd=tmp_path)
    assert done.code == 0, (seed, done.err)
    assert_as_undisturbed(run, whole)


def test_asked_to_stop_twice_while_it_saves(tmp_path, settings, whole):
    """SIGTERM twice in a background save, SIGINT twice in a save that the step waits for: each time
    the checkpoint of the step it was at is saved, and the command that is printed goes on from
    there."""
    run = Result(0, "", "", tmp_path / "run")
    command = ["train", *settings, *SLOW, "hydra.run.dir=run"]
    for number, in_background in ((signal.SIGTERM, "true"), (signal.SIGINT, "false")):
        before = rows_of(run)
        asked = f"checkpoint.async={in_background}"
        process = start(*command, asked, cwd=tmp_path, **SLOW_STEPS)
        assert came_to(process, run, before + 3, saving=True)
        process.send_signal(number)
        time.sleep(1.1)  # one that comes sooner is taken for the same one
        if process.poll() is None:
            process.send_signal(number)
        out, err = process.communicate(timeout=HANG_S)
        assert process.returncode == 75, (out, err)
        assert f"llmexp: {number.name}: finishing this step, then saving" in err
        assert "llmexp resume run --allow own" in out
        status = run.json("status.json")
        assert [status[k] for k in ("state", "exit_code", "error")] == ["preempted", 75, None]
        reached = rows_of(run)
        assert loading.read_checkpoint(run.checkpoint(reached)).step == reached < LAST
        assert not is_saving(run)
        command = ["resume", "run", *ALLOW]
    done = llmexp(*command, cwd=tmp_path)
    assert done.code == 0, done.err
    assert_as_undisturbed(run, whole)


@pytest.fixture
def memory_group() -> Path:
    group = Path(f"/sys/fs/cgroup/memory/llmexp-test-{os.getpid()}")
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(100 * 2**20))
    except OSError as error:
        pytest.skip(f"no memory cgroup can be made here: {error}")
    yield group
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            return group.rmdir()
        except OSError:  # the process is about to go
            time.sleep(0.05)


def test_out_of_memory(tmp_path, settings, whole, memory_group):
    """By the limit of a process (an exception), by the kernel (SIGKILL), and then with enough of it
    to the end."""
    train = ["train", *settings, "hydra.run.dir=run", *ALLOW, "hooks=[own.faults.hungry]"]
    says = ["out of memory with micro_batch_size 4 x 12 tokens", "a smaller batch.micro_batch_size"]
    then = "to continue: llmexp resume run --allow own"
    fails(tmp_path, *train, FAULT_MEMORY="ulimit", says=says, step=6, then=then)
    failed = fails(
        tmp_path, "resume", "run", *ALLOW, FAULT_MEMORY=str(memory_group), step=6,
        says=["the worker", "signal 9 (SIGKILL; out of memory?)"],
    )  # fmt: skip
    assert "oom_kill 1" in (memory_group / "memory.oom_control").read_text()
    goes_on(failed, whole, *ALLOW)
