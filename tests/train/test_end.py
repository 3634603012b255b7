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
from llmexp.train.checkpointing import finish_alone
from llmexp.train.feature import Feature, Features
from llmexp.train.sampling import one_thread
from llmexp.train.state import Loop, Progress, Saving
from llmexp.train.step import TrainingFailed
from llmexp.train.summary import say_the_end, summarise, told
from tests.conftest import HANG_S, TINY, llmexp


class Place:
    """A console, a tracker and rows that note what they get; one may fail as it is closed."""

    def __init__(self, *rows: dict[str, Any], full: bool = False) -> None:
        self.lines: list[str] = []
        self.ended: list[tuple] = []
        self.figures, self.full = Figures(), full
        for found in rows:
            self.figures.count(found)

    def line(self, text: str) -> None:
        self.lines.append(text)

    def flush(self) -> bool:
        return False

    def finish(self, *given: Any) -> None:
        self.ended.append(given)

    def close(self) -> None:
        self.ended.append(())
        if self.full:
            raise OSError("no room")


def row(step: int, **more: Any) -> dict[str, Any]:
    fixed = {"tokens_seen": 96 * step, "train/loss": 3.0, "step_time": 0.5, "skipped_steps": 0}
    return {"step": step, **fixed, **more}


def made(*rows: dict, world_size: int = 1, path: Path = Path("run"), **counts: Any) -> Any:
    """A loop that stands at a step, without a model."""
    progress = Progress(**counts)
    setup: Any = SimpleNamespace(
        mesh=SimpleNamespace(distributed=world_size > 1, world_size=world_size, rank=0),
        features=Features(),
    )
    run: Any = SimpleNamespace(parent=None, stages=(), begin=Begin(), first_step=0, max_steps=10)
    run.tokens_at = lambda step: 96 * step
    config = SimpleNamespace(train=SimpleNamespace(stop_step=3))
    parts: Any = SimpleNamespace(config=config, run=run)
    console: Any = Place()
    places: Any = path, True, console, Place(*rows)
    meter = Meter(torch.device("cpu"), 96 * progress.step)
    return Loop(parts, setup, *places, progress, meter, {}, None)


def test_times_are_of_the_whole_run(monkeypatch):
    """Also of steps that another attempt made, and of those after the last row."""
    rows = [row(10), row(20, step_time=0.7)]
    found = summarise(made(*rows, step=20))
    assert found["train_time"] == pytest.approx(10 * 0.5 + 10 * 0.7)
    assert found["mean tokens_per_sec"] == pytest.approx(96 * 20 / 12)
    loop = made(*rows, step=23)  # of steps 21 to 23 no time is known
    assert not {"train_time", "mean tokens_per_sec"} & summarise(loop).keys()
    # resumed between two rows: they took an earlier process 30 seconds
    loop.meter = Meter(torch.device("cpu"), 96 * 23, 3, 30.0)
    assert summarise(loop)["train_time"] == pytest.approx(12 + 30)
    clock = iter((10.0, 10.25))
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    with loop.meter.stepping():
        loop.meter.add(torch.tensor(96))
    monkeypatch.undo()
    loop.progress.step += 1
    found = summarise(loop)
    assert found["train_time"] == pytest.approx(12 + 30 + 0.25)
    assert found["mean tokens_per_sec"] == pytest.approx(96 * 24 / 42.25)
    assert "train_time" not in summarise(made())


def test_final_is_of_the_last_step_and_no_other():
    rows = [row(4, **{"val/loss": 2.5}), row(5, **{"train/loss": 2.9})]
    found = summarise(made(*rows, step=5, best_val_loss=2.5, skipped_steps=1))
    assert (found["final train/loss"], found["latest val/loss"]) == (2.9, 2.5)
    assert not {"latest train/loss", "final val/loss"} & found.keys()
    # a stop between two rows
    found = summarise(made(*rows, step=7, best_val_loss=2.5, skipped_steps=3))
    assert (found["latest train/loss"], found["latest val/loss"]) == (2.9, 2.5)
    assert found["skipped_steps"] == 3


@pytest.mark.parametrize(("stop_step", "cause"), [(3, "train.stop_step"), (6, "another rank")])
def test_a_run_that_is_past_its_stop_says_why_it_stops_whatever_else_fails(
    tmp_path, stop_step, cause
):
    """What a run has measured is shown after its end is recorded: that it cannot be is a line."""
    loop = made(row(5), step=5, path=tmp_path)
    loop.config.train.stop_step = stop_step
    loop.features.extend([Broken(), Noting()])
    say_the_end(loop, "preempted", {"steps": 5}, [])
    text = loop.console.lines[0]
    assert f"preempted by {cause} at step 5 of 10" in text
    assert "a part of this report: ZeroDivisionError" in text
    last = [line.split()[0] for line in loop.console.lines[1:]]
    assert last == ["picture", "folder", "missing", "upload", "next"]


class Broken(Feature):
    """Fail wherever it speaks at the end."""

    def close(self) -> None:
        raise OSError("no room")

    def closed(self, summary: Any, code: int) -> None:
        raise ZeroDivisionError

    def commands(self) -> list[tuple[str, str]]:
        raise ZeroDivisionError

    words = last_words = commands


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


@pytest.mark.parametrize("main", [True, False])
def test_a_feature_that_fails_at_the_end_keeps_no_other_from_it(tmp_path, main):
    """On each rank, whether or not it writes rows; how the run ended stays."""
    loop = made(row(5), step=5, path=tmp_path)
    loop.main, loop.rows = main, loop.rows if main else None
    loop.features.extend([(before := Noting()), Broken(), (after := Noting())])
    assert worker.finish_run(loop, "failed", 3)["steps"] == 5
    assert before.seen == after.seen == ["close", 3]
    lines = " ".join(loop.console.lines)  # type: ignore[attr-defined]
    assert "the end of Broken failed: ZeroDivisionError" in lines
    assert told(loop, "commands") == [
        ("upload", "llmexp sync run"),
        ("missing", "a part of this report: ZeroDivisionError()"),
        ("upload", "llmexp sync run"),
    ]


def test_a_status_of_a_run_that_goes_on_has_no_figures_of_its_end(tmp_path):
    figures = {"summary": {"steps": 10}, "clip": {"share": 0.5}, "noise": {"measurements": 3}}
    rundir.write_status(tmp_path, "preempted", exit_code=75, **figures)
    rundir.write_status(tmp_path, "queued")
    assert rundir.read_status(tmp_path).keys() > figures.keys()
    rundir.write_status(tmp_path, "running", exit_code=None)
    assert rundir.read_status(tmp_path).keys() == {"state", "updated", "exit_code"}
    rundir.write_status(tmp_path, "finished", **figures)
    assert rundir.read_status(tmp_path)["summary"] == {"steps": 10}


def on_its_way(loop: Any, tmp_path: Path, *, committing: bool = False) -> None:
    """Step 2 of a loop that is at step 3."""

    def commit() -> Path:
        (tmp_path / "committed").touch()
        return tmp_path

    stage = loop.writer.submit(commit if committing else (lambda: time.sleep(0.05)))
    loop.saving = Saving(2, commit, stage, committing)


def test_a_save_on_its_way_is_finished_before_a_run_fails(tmp_path):
    loop = made(step=3)
    on_its_way(loop, tmp_path)
    finish_alone(loop, loop.saving)
    assert (tmp_path / "committed").exists()
    assert (loop.saving, loop.saved) == (None, [2])
    loop.saving = Saving(2, lambda: tmp_path, loop.writer.submit(Place(full=True).close))
    finish_alone(loop, loop.saving)
    assert loop.console.lines[-1].endswith("step 2 was not finished: no room")


@pytest.mark.parametrize("way", ["committing", "written", "written later", "not written"])
def test_of_several_ranks_one_alone_finishes_only_what_all_have_written(tmp_path, monkeypatch, way):
    monkeypatch.setattr(checkpointing, "OTHERS_S", 0.0 if way == "not written" else HANG_S)
    loop = made(step=3, world_size=2, path=tmp_path)
    on_its_way(loop, tmp_path, committing=way == "committing")
    files = tmp_path / "checkpoints/.step_00000002.tmp"
    files.mkdir(parents=True)
    if way == "written later":
        threading.Timer(0.3, (files / "written-00001.json").touch).start()
    elif way == "written":
        (files / "written-00001.json").touch()
    finish_alone(loop, loop.saving)
    lost = way == "not written"
    assert (tmp_path / "committed").exists() == (not lost)
    assert len(loop.console.lines) == lost
    assert not lost or "step 2 was not finished: rank 1" in loop.console.lines[0]


def test_a_failure_is_recorded_with_its_kind(tmp_path):
    errors = ConfigError("busy", "x"), Unwritable("x"), DataChanged("x"), RuntimeError("x")
    for error, kind in zip(errors, ("busy", "disk", "bad_data", "failed"), strict=True):
        failing.record_failure(tmp_path, failing.failure_of(error), ours=True)
        assert rundir.read_status(tmp_path)["kind"] == kind
    rundir.write_status(tmp_path, "running")
    assert "kind" not in rundir.read_status(tmp_path)


def test_only_known_errors_of_files_are_final():
    """What a file server or a user's code raises gets its trace, and a restart."""
    for error in (TrainingFailed("x"), Unwritable("x"), DataChanged("x")):
        found = failing.failure_of(error)
        assert (found.text, found.final, found.trace, found.exit_code) == ("x", True, "", 3)
    try:
        raise OSError(errno.ESTALE, "Stale file handle", "data.bin")
    except OSError as error:
        found = failing.failure_of(error)
    assert found.text == f"OSError: [Errno {errno.ESTALE}] Stale file handle: 'data.bin'"
    assert not found.final
    assert "Traceback" in found.trace


@pytest.mark.parametrize("broken", ["device", "disk", "both"])
def test_a_run_that_fails_closes_all_it_has_open(tmp_path, broken):
    """Also where the device answers no more, as after a CUDA error, or the disk does not."""
    loop = made(row(2), step=3, path=tmp_path)
    rows = Place(row(2), full=broken != "device")
    loop.rows = rows
    loop.features.append(told_last := Noting())
    if broken == "disk":
        with pytest.raises(OSError, match="no room"):
            worker.finish_run(loop, "finished", 0)
    else:  # the run has failed: its own error is the one that counts
        lost = RuntimeError("CUDA error: an illegal memory access was encountered")
        loop.meter.tokens_seen = lambda: (_ for _ in ()).throw(lost)
        found = worker.finish_run(loop, "failed", 3)
        assert (found["steps"], "tokens_seen" in found) == (3, False)
        assert failing.failure_of(lost).exit_code == 3
    assert len(loop.console.lines) == (broken == "both")  # the rows may not all be there
    assert [len(place.ended) for place in (rows, loop.console)] == [1, 1]
    assert told_last.seen == ["close", 3]


def test_a_hook_that_raises_loses_no_checkpoint(tmp_path):
    """Its files are being written by then."""
    more = ["data=synthetic", "data.n_tokens=4000", "train.max_steps=5", "checkpoint.every=2"]
    hooks = ["checkpoint.async=true", "--allow=own", "hooks=[own.hooks.slow_disk,own.faults.act]"]
    chosen = [*TINY, *more, *hooks, "hydra.run.dir=run"]
    failed = llmexp("train", *chosen, cwd=tmp_path, FAULT_PLAN="step_start-4:raise late")
    assert failed.code == 3, failed.out
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
