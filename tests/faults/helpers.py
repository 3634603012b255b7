"""What the tests of faults share: the undisturbed run, a small file system, how a run fails and
goes on."""

import contextlib
import json
import re
import shlex
import subprocess
from collections.abc import Iterator
from dataclasses import replace
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
TWO = ["parallelism.nproc_per_node=2", "batch.gradient_accumulation_steps=1"]
PLANNED = ["--allow", "own", "hooks=[own.faults.act]"]
AGAIN = "if its weights are still good, from there with other settings: llmexp train fork.run=run"


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


def fails(
    cwd: Path,
    *arguments: str,
    says: list[str],
    step: int | None,
    then: str = "to continue: llmexp resume run",
    **env: str,
) -> Result:
    """The run in the folder `run`, which fails: its status says why, and one line the same, its
    last checkpoint (any, without `step`) and what to do then."""
    failed = replace(llmexp(*arguments, cwd=cwd, **env), folder=cwd / "run")
    assert failed.code == 3, failed.err
    status = failed.json("status.json")
    assert (status["state"], status["exit_code"]) == ("failed", 3)
    assert not [part for part in says if part not in status["error"]], status["error"]
    last = r"\d{8}" if step is None else f"{step:08d}"
    line = f"llmexp: training failed: {re.escape(status['error'])}; the last checkpoint is "
    line += f"step_{last}; {re.escape(then)}"
    assert len(re.findall(f"^{line}", failed.err, re.M)) == 1, (line, failed.err)
    assert "Traceback" not in failed.err
    return failed


def goes_on(failed: Result, whole: Result, *more: str) -> Result:
    """Run the command that a message ends with, to the end of the undisturbed run."""
    found = re.search(r"to continue: llmexp (.*)$", failed.err, re.M)
    assert found, failed.err
    done = llmexp(*shlex.split(found[1]), *more, cwd=failed.folder.parent)
    assert done.code == 0, done.err
    assert_as_undisturbed(failed, whole)
    return done


def assert_whole_files(folder: Path) -> None:
    """No temporary is left, every row can be read."""
    assert not [p for p in folder.rglob("*") if re.search(r"\.(tmp|part)$|\.tmp\.", p.name)]
    text = (folder / "metrics.jsonl").read_text()
    assert text.endswith("\n")
    assert all(json.loads(line)["step"] for line in text.splitlines())


def assert_as_undisturbed(run: Result, whole: Result) -> None:
    status = run.json("status.json")
    assert [status[key] for key in ("state", "exit_code", "error")] == ["finished", 0, None]
    assert [row["step"] for row in run.rows()] == list(range(1, LAST + 1))  # each step once
    assert exact(run) == exact(whole)
    same_state(run.checkpoint(LAST), whole.checkpoint(LAST))
    assert_whole_files(run.folder)
