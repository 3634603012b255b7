"""What the tests of faults share: the undisturbed run, a small file system, what a failure message
must hold."""

import contextlib
import json
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import Result, llmexp
from tests.tools import exact, same_state

# 50 sequences, 8 a step: an epoch ends inside step 7. The fp16 scale overflows at first and grows
# later; dropout.
SETTINGS = [
    "data=tokens", "data.val_ratio=0", "batch.micro_batch_size=4",
    "batch.gradient_accumulation_steps=2",
    "train.max_steps=24", "model.dropout=0.1", "train.log_every=1", "train.eval_every=null",
    "checkpoint.every=2",
    "optimizer.lr=0.01", "precision=fp16", "precision.init_scale=1e7",
    "precision.growth_interval=4",
]  # fmt: skip
LAST = 24


def without_scale(settings: list[str]) -> list[str]:
    """For another precision than fp16, the only one with a loss scale."""
    return [s for s in settings if not s.startswith("precision.")]


@contextlib.contextmanager
def small_disk(path: Path, size: str) -> Iterator[Path]:
    """A file system of its own at `path`; skips where this may not be mounted."""
    path.mkdir(parents=True)
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", path],
        capture_output=True,
        text=True,
    )
    if done.returncode:
        pytest.skip(f"a tmpfs cannot be mounted here: {done.stderr.strip()}")
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", path], check=True)


def assert_says(err: str, *, what: str, where: str, intact: str, command: str) -> str:
    """The one line of a failure, with all that it must hold; returns the line."""
    lines = [line for line in err.splitlines() if line.startswith("llmexp: training failed: ")]
    assert len(lines) == 1, err
    for part in (what, where, intact, f": {command}"):
        assert part in lines[0], (part, lines[0])
    assert "Traceback" not in err
    return lines[0]


def go_on(err: str, cwd: Path) -> Result:
    """Runs the command that a message ends with."""
    found = re.search(r"to continue: (llmexp .*)$", err, re.M)
    assert found, err
    command = shlex.split(found.group(1))
    done = llmexp(*command[1:], cwd=cwd)
    return Result(done.code, done.out, done.err, cwd / command[2])


def assert_status(run: Result, state: str, code: int | None, error: str | None) -> None:
    """`error`: a part of it, or None where there must be none."""
    status = run.json("status.json")
    assert (status["state"], status["exit_code"]) == (state, code), status
    assert status["error"] is None if error is None else error in status["error"], status


def assert_whole_files(folder: Path) -> None:
    """No temporary is left, every file can be read as what it is."""
    left = [p for p in folder.rglob("*") if p.name.endswith((".tmp", ".part")) or ".tmp." in p.name]
    assert left == []
    text = (folder / "metrics.jsonl").read_text()
    assert text.endswith("\n")
    assert all(json.loads(line)["step"] for line in text.splitlines())


def assert_as_undisturbed(run: Result, whole: Result) -> None:
    assert_status(run, "finished", 0, None)
    assert [row["step"] for row in run.rows()] == list(range(1, LAST + 1))  # each step once
    assert exact(run) == exact(whole)
    same_state(run.checkpoint(LAST), whole.checkpoint(LAST))
    assert_whole_files(run.folder)
