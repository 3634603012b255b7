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
from tests.faults.helpers import LAST, assert_as_undisturbed, assert_says, assert_status, go_on
from tests.tools import session, wait_for

HOOKS = '''
import os, resource, time
import torch

def slow(event, context):
    if event == "step_start":
        time.sleep(0.02)

def slow_disk(event, context, fsync=os.fsync):
    """A save takes 0.2 s, over all its stages, so that it can be met."""
    os.fsync = lambda file: (time.sleep(0.04), fsync(file))[1]

def hungry(event, context):
    """From step 7 on the model asks for 400 MiB, under what `ulimit -v` sets, or in a memory cgroup of 100 MiB."""
    where = os.environ.get("FAULT_MEMORY")
    if not where or (event, context.step) != ("step_start", 7):
        return
    if where == "ulimit":
        pages = int(open("/proc/self/statm").read().split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + 100 * 2**20, -1))
    else:
        with open(os.path.join(where, "cgroup.procs"), "w") as f:
            f.write(str(os.getpid()))
    context.model.register_forward_pre_hook(lambda module, inputs: [torch.ones(100 * 2**20), None][1])
'''  # noqa: E501
HOOKED = ["--allow", "faulty"]
SLOW_DISK = "hooks=[faulty.slow,faulty.slow_disk]"


@pytest.fixture
def here(tmp_path: Path) -> Path:
    (tmp_path / "faulty.py").write_text(HOOKS)
    return tmp_path


def rows_of(run: Path) -> int:
    rows = run / "metrics.jsonl"
    return rows.read_bytes().count(b"\n") if rows.exists() else 0


def is_saving(run: Path) -> bool:
    return any((run / "checkpoints").glob(".step_*.tmp"))


def came_to(process: subprocess.Popen[str], run: Path, rows: int, saving: bool) -> bool:
    """Whether it has that many rows, and saves, before it ends."""

    def is_there() -> bool:
        return rows_of(run) >= rows and (is_saving(run) or not saving)

    wait_for(lambda: process.poll() is not None or is_there())
    return process.poll() is None


def kill_in_a_row(
    here: Path, settings: list[str], whole: Result, kills: list[tuple[str, str]], seed: int
) -> None:
    """`kills`: whom (worker, launcher, tree) and when (save: inside one; row: anywhere). Then the
    run to its end.

    A run that gets to its end between two kills is compared there, and another one takes its place.
    """
    rng, left, number = random.Random(seed), list(kills), 0
    while left:
        run = Result(0, "", "", here / f"run{number}")
        command = ["train", *settings, f"hydra.run.dir=run{number}", "checkpoint.resume=auto"]
        before = rows_of(run.folder)
        again = rng.choice([command, ["resume", f"run{number}"]]) if before else command
        whom, when = left[0]
        hooks = SLOW_DISK if when == "save" else "hooks=[faulty.slow]"
        process = start(*again, hooks, *HOOKED, cwd=here)
        seen = min(LAST, before + rng.randint(1, 4))
        alive = came_to(process, run.folder, seen, when == "save")
        time.sleep(rng.uniform(0, 0.2 if when == "save" else 0.06))
        for pid in session(process.pid) if alive else []:
            if whom == "tree" or (pid == process.pid) == (whom == "launcher"):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        out, err = process.communicate(timeout=HANG_S)
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
            assert number <= len(kills) + 8, "runs are over before they can be killed"
            continue
        assert process.returncode == (3 if whom == "worker" else -signal.SIGKILL), (seed, out, err)
        if whom == "worker":
            assert_status(run, "failed", 3, "the worker was ended by signal 9 (SIGKILL")
            assert f"to continue: llmexp resume {run.folder.name}" in err
        left.pop(0)
    done = llmexp("resume", f"run{number}", *HOOKED, cwd=here)
    assert done.code == 0, (seed, done.err)
    assert_as_undisturbed(run, whole)


def chosen(count: int, rng: random.Random) -> list[tuple[str, str]]:
    whom, when = ["worker", "launcher", "tree"], ["save", "row"]
    return [(rng.choice(whom), rng.choice(when)) for _ in range(count)]


def test_killed_in_a_row(here, settings, whole):
    """LLMEXP_TEST_KILLS=20 for as many. A whole tree that is killed between saves goes on in
    tests/train/test_resume.py."""
    asked = int(os.environ.get("LLMEXP_TEST_KILLS", "0"))
    seed = random.randrange(10**6)
    kills = chosen(asked, random.Random(seed)) if asked else [("worker", "save")] * 2
    kill_in_a_row(here, settings, whole, kills, seed)


@pytest.mark.slow
def test_killed_twenty_times(here, settings, whole):
    seed = random.randrange(10**6)
    more = ["checkpoint.async=true"]
    kill_in_a_row(here, [*settings, *more], whole, chosen(20, random.Random(seed)), seed)


def test_asked_to_stop_twice_while_it_saves(here, settings, whole):
    """SIGTERM twice in a background save, SIGINT twice in a save that the step waits for: each time
    the checkpoint of the step it was at is saved, and the command that is printed goes on from
    there."""
    run = Result(0, "", "", here / "run")
    (here / "steps").mkdir()
    for number, more in (
        (signal.SIGTERM, "checkpoint.async=true"),
        (signal.SIGINT, "checkpoint.async=false"),
    ):
        before = rows_of(run.folder)
        command = ["resume", "run"] if before else ["train", *settings, "hydra.run.dir=run"]
        process = start(*command, SLOW_DISK, *HOOKED, more, cwd=here)
        assert came_to(process, run.folder, before + 3, saving=True)
        process.send_signal(number)
        time.sleep(1.1)  # one that comes sooner is taken for the same one
        if process.poll() is None:
            process.send_signal(number)
        out, err = process.communicate(timeout=HANG_S)
        assert process.returncode == 75, (out, err)
        assert f"llmexp: {number.name}: finishing this step, then saving" in err
        assert "llmexp resume run --allow faulty" in out
        assert_status(run, "preempted", 75, None)
        reached = rows_of(run.folder)
        assert loading.read_checkpoint(run.checkpoint(reached)).step == reached < LAST
        assert not is_saving(run.folder)
    done = llmexp("resume", "run", *HOOKED, cwd=here)
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


def test_out_of_memory(here, settings, whole, memory_group):
    """By the limit of a process (an exception), by the kernel (SIGKILL), and then with enough of it
    to the end."""
    hooked = ["hooks=[faulty.hungry]", *HOOKED]
    run = Result(0, "", "", here / "run")
    train = ["train", *settings, "hydra.run.dir=run", *hooked]
    failed = llmexp(*train, cwd=here, FAULT_MEMORY="ulimit")
    assert failed.code == 3, failed.err
    assert_says(
        failed.err, what="out of memory with micro_batch_size 4 x 12 tokens",
        where="a smaller batch.micro_batch_size", intact="the last checkpoint is step_00000006",
        command="llmexp resume run --allow faulty",
    )  # fmt: skip
    assert_status(run, "failed", 3, "out of memory with micro_batch_size 4 x 12 tokens")

    failed = llmexp("resume", "run", *hooked, cwd=here, FAULT_MEMORY=str(memory_group))
    assert failed.code == 3, failed.err
    assert "oom_kill 1" in (memory_group / "memory.oom_control").read_text()
    assert_says(
        failed.err, what="signal 9 (SIGKILL; out of memory?)", where="the worker", intact="",
        command="llmexp resume run",
    )  # fmt: skip
    assert_status(run, "failed", 3, "signal 9 (SIGKILL; out of memory?)")
    done = go_on(failed.err.rstrip() + ("" if "--allow" in failed.err else " --allow faulty"), here)
    assert done.code == 0, done.err
    assert_as_undisturbed(run, whole)
