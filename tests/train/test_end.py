"""What a run says of its end, and what becomes then of a checkpoint that is on its way."""

import errno
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from llmexp.config.values import ConfigError
from llmexp.data.stream import DataChanged
from llmexp.folders import rundir
from llmexp.folders.rows import Figures
from llmexp.metrics.meter import Meter
from llmexp.run.stages import Begin
from llmexp.system.fileio import Unwritable
from llmexp.train import checkpointing, failing, worker
from llmexp.train.feature import Feature, Features
from llmexp.train.sampling import one_thread
from llmexp.train.state import Loop, Progress, Saving
from llmexp.train.step import TrainingFailed
from llmexp.train.summary import say_the_end, summarise, told
from tests.conftest import HANG_S, TINY
from tests.train.resumed import ends


class Place:
    """A console, a tracker and rows that note what they get; one may fail as it is closed."""

    def __init__(self, *rows: dict[str, Any], full: bool = False) -> None:
        self.lines: list[str] = []
        self.closed = 0
        self.figures, self.full = Figures(), full
        for found in rows:
            self.figures.count(found)

    def line(self, text: str) -> None:
        self.lines.append(text)

    def flush(self) -> bool:
        return False

    def close(self) -> None:
        self.closed += 1
        if self.full:
            raise OSError("no room")


def row(step: int, **more: Any) -> dict[str, Any]:
    fixed = {"tokens_seen": 96 * step, "train/loss": 3.0, "step_time": 0.5, "skipped_steps": 0}
    return {"step": step, **fixed, **more}


def made(*rows: dict, world_size: int = 1, path: Path = Path("run"), **counts: Any) -> Any:
    """A loop that stands at a step, without a model."""
    progress = Progress(**counts)
    mesh = SimpleNamespace(distributed=world_size > 1, world_size=world_size, rank=0)
    setup: Any = SimpleNamespace(mesh=mesh, features=Features())
    run = SimpleNamespace(parent=None, stages=(), begin=Begin(), first_step=0, max_steps=10)
    run.tokens_at = lambda step: 96 * step
    parts: Any = SimpleNamespace(config=SimpleNamespace(train=SimpleNamespace()), run=run)
    places: Any = path, True, Place(), Place(*rows)
    return Loop(parts, setup, *places, progress, timed(progress.step), {}, None)


def timed(step: int, *since_row: Any) -> Meter:
    return Meter(torch.device("cpu"), 96 * step, *since_row)


def test_times_are_of_the_whole_run(monkeypatch):
    """Also of steps that another attempt made, and of those after the last row."""
    rows = [row(10), row(20, step_time=0.7)]
    whole, loop, later = (made(*rows, step=step) for step in (20, 23, 24))
    for unknown in (loop, made()):  # of steps 21 to 23 no time is known
        assert not {"train_time", "mean tokens_per_sec"} & summarise(unknown).keys()
    # resumed between two rows: they took an earlier process 30 seconds
    loop.meter, later.meter = timed(23, 3, 30.0), timed(23, 3, 30.0)
    clock = iter((10.0, 10.25))
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    with later.meter.stepping():
        later.meter.add(torch.tensor(96))
    monkeypatch.undo()
    for at, steps, seconds in ((whole, 20, 12), (loop, 23, 42), (later, 24, 42.25)):
        found = summarise(at)
        assert found["train_time"] == pytest.approx(seconds)
        assert found["mean tokens_per_sec"] == pytest.approx(96 * steps / seconds)


@pytest.mark.parametrize(("step", "skipped", "name"), [(5, 1, "final"), (7, 3, "latest")])
def test_final_is_of_the_last_step_and_no_other(step, skipped, name):
    """A stop may lie between two rows."""
    rows = [row(4, **{"val/loss": 2.5}), row(5, **{"train/loss": 2.9})]
    found = summarise(made(*rows, step=step, best_val_loss=2.5, skipped_steps=skipped))
    losses = {key: value for key, value in found.items() if key.endswith("/loss")}
    assert losses == {f"{name} train/loss": 2.9, "latest val/loss": 2.5, "best val/loss": 2.5}
    assert found["skipped_steps"] == skipped


class Noting(Feature):
    """Note that it is told of the end."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def close(self) -> None:
        self.seen.append("close")

    def closed(self, summary: Any, code: int) -> None:
        self.seen.append(code)

    def files(self) -> list[tuple[str, str]]:
        return [("picture", "run/loss.png")]

    def commands(self) -> list[tuple[str, str]]:
        return [("upload", "llmexp sync run")]


class Broken(Feature):
    """Fail wherever it speaks at the end."""

    def close(self) -> None:
        raise OSError("no room")

    def closed(self, summary: Any, code: int) -> None:
        raise ZeroDivisionError

    def commands(self) -> list[tuple[str, str]]:
        raise ZeroDivisionError

    words = last_words = commands


@pytest.mark.parametrize(("stop_step", "cause"), [(3, "train.stop_step"), (6, "another rank")])
def test_a_run_that_is_past_its_stop_says_why_it_stops_whatever_else_fails(
    tmp_path, stop_step, cause
):
    """What a run has measured is shown after its end is recorded: that it cannot be is a line."""
    loop = made(row(5), step=5, path=tmp_path)
    loop.config.train.stop_step = stop_step
    loop.features.extend([Broken(), Noting()])
    say_the_end(loop, "preempted", {"steps": 5}, [])
    text, *last = loop.console.lines
    assert f"preempted by {cause} at step 5 of 10" in text
    assert "a part of this report: ZeroDivisionError" in text
    assert [line.split()[0] for line in last] == ["picture", "folder", "missing", "upload", "next"]


@pytest.mark.parametrize("broken", ["feature", "feature, rank 1", "device", "disk", "device, disk"])
def test_a_run_that_ends_closes_all_it_has_open_whatever_fails(tmp_path, broken):
    """A feature, the device, as after a CUDA error, or the disk; on each rank, whether or not it
    writes rows."""
    loop = made(row(2), step=3, path=tmp_path)
    loop.main, rows = "rank 1" not in broken, Place(row(2), full="disk" in broken)
    loop.rows = rows if loop.main else None
    first, last = Noting(), Noting()
    loop.features.extend([first, *([Broken()] if "feature" in broken else []), last])
    if "device" in broken:
        lost = RuntimeError("CUDA error: an illegal memory access was encountered")
        loop.meter.tokens_seen = lambda: (_ for _ in ()).throw(lost)
    if broken == "disk":
        with pytest.raises(OSError, match="no room"):
            worker.finish_run(loop, "finished", 0)
    else:  # the run has failed: its own error is the one that counts
        found = worker.finish_run(loop, "failed", 3)
        assert (found["steps"], "tokens_seen" in found) == (3, "device" not in broken)
    assert first.seen == last.seen == ["close", 3]
    assert (rows.closed, loop.console.closed) == (loop.main, 1)
    # the rows may not all be there
    told_of = ["rows may not", "end of Broken failed: ZeroDivisionError"]
    wanted = told_of if "feature" in broken else told_of[: broken == "device, disk"]
    assert len(loop.console.lines) == len(wanted)
    assert all(text in line for text, line in zip(wanted, loop.console.lines, strict=True))
    upload = ("upload", "llmexp sync run")
    missing = [("missing", "a part of this report: ZeroDivisionError()")] * ("feature" in broken)
    assert told(loop, "commands") == [upload, *missing, upload]


def test_a_status_of_a_run_that_goes_on_has_no_figures_of_its_end(tmp_path):
    figures = {"summary": {"steps": 10}, "clip": {"share": 0.5}, "noise": {"measurements": 3}}
    rundir.write_status(tmp_path, "preempted", exit_code=75, **figures)
    rundir.write_status(tmp_path, "queued")
    assert rundir.read_status(tmp_path).keys() > figures.keys()
    rundir.write_status(tmp_path, "running", exit_code=None)
    assert rundir.read_status(tmp_path).keys() == {"state", "updated", "exit_code"}
    rundir.write_status(tmp_path, "finished", **figures)
    assert rundir.read_status(tmp_path)["summary"] == {"steps": 10}


WAYS = [
    "alone", "alone, full disk", "alone, unwritten", "committing", "written", "written later",
    "not written",
]  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
def test_one_rank_alone_finishes_only_a_save_that_all_have_written(tmp_path, monkeypatch, way):
    """That of step 2, when the loop is at step 3."""
    monkeypatch.setattr(checkpointing, "OTHERS_S", 0.0 if way == "not written" else HANG_S)
    loop = made(step=3, world_size=1 if "alone" in way else 2, path=tmp_path)
    files = tmp_path / "checkpoints/.step_00000002.tmp"
    files.mkdir(parents=True)
    if way == "written later":
        threading.Timer(0.3, (files / "written-00001.json").touch).start()
    elif way == "written":
        (files / "written-00001.json").touch()
    committed = Place(full="full" in way)
    write = committed.close if way == "committing" else lambda: time.sleep(0.05)
    task = loop.writer.submit(Place(full=True).close if way == "alone, unwritten" else write)
    checkpointing.finish_alone(loop, Saving(2, committed.close, task, way == "committing"))
    no_room = dict.fromkeys(("alone, full disk", "alone, unwritten"), "no room")
    lost = ({"not written": "rank 1"} | no_room).get(way)
    assert committed.closed == (way not in ("not written", "alone, unwritten"))
    assert loop.saved == ([] if lost else [2])
    assert loop.saving is None
    assert len(loop.console.lines) == bool(lost)
    assert not lost or f"step 2 was not finished: {lost}" in loop.console.lines[0]


STALE = OSError(errno.ESTALE, "Stale file handle", "data.bin")


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (ConfigError("busy", "x"), "busy", "x"),
        (TrainingFailed("x"), "failed", "x"),
        (Unwritable("x"), "disk", "x"),
        (DataChanged("x"), "bad_data", "x"),
        (RuntimeError("x"), "failed", "RuntimeError: x"),
        (STALE, "disk", f"OSError: [Errno {errno.ESTALE}] Stale file handle: 'data.bin'"),
    ],
)
def test_a_failure_is_recorded_with_its_kind_and_only_known_errors_are_final(
    tmp_path, error, kind, text
):
    """What a file server or a user's code raises gets its trace, and a restart."""
    try:
        raise error
    except Exception as raised:
        found = failing.failure_of(raised)
    known = text == "x"
    assert (found.text, found.final, bool(found.trace)) == (text, known, not known)
    assert found.exit_code == (2 if kind == "busy" else 3)
    failing.record_failure(tmp_path, found, ours=True)
    assert rundir.read_status(tmp_path)["kind"] == kind
    rundir.write_status(tmp_path, "running")
    assert "kind" not in rundir.read_status(tmp_path)


def test_a_hook_that_raises_loses_no_checkpoint(tmp_path):
    """Its files are being written by then."""
    more = ["data=synthetic", "data.n_tokens=4000", "train.max_steps=5", "checkpoint.every=2"]
    hooks = ["checkpoint.async=true", "--allow=own", "hooks=[own.hooks.slow_disk,own.faults.act]"]
    words = ["train", *TINY, *more, *hooks, "hydra.run.dir=run"]
    failed = ends(tmp_path, *words, code=3, FAULT_PLAN="step_start-4:raise late")
    assert "the hook own.faults.act failed at step_start of step 4" in failed.err
    assert "the last checkpoint is step_00000002" in failed.err
    assert rundir.saved_steps(tmp_path / "run") == [2]


def test_a_small_model_samples_with_one_thread(monkeypatch):
    chosen: list[int] = []
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    with one_thread(small=False):
        assert chosen == []
    with one_thread(small=True):
        assert chosen == [1]
    assert chosen == [1, 4]
