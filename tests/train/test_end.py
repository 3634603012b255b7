"""What a run says of its end, and what becomes then of a checkpoint that is on its way."""

from __future__ import annotations

import dataclasses
import errno
import functools
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from llmexp import mesh
from llmexp.data.stream import DataChanged
from llmexp.metrics.meter import Meter
from llmexp.metrics.noise import NoiseScale
from llmexp.metrics.norms import Norms
from llmexp.metrics.rules import Measures
from llmexp.run import Run
from llmexp.run.stages import BatchStage, Begin
from llmexp.runs import rundir
from llmexp.runs.rows import Figures
from llmexp.settings.values import ConfigError
from llmexp.system.fileio import Unwritable
from llmexp.train import checkpointing, failing, verdicts, worker
from llmexp.train.checkpointing import finish_alone
from llmexp.train.loop import take_step
from llmexp.train.sampling import one_thread
from llmexp.train.state import Loop, Outputs, Progress, Saving
from llmexp.train.step import Outcome, TrainingFailed
from llmexp.train.summary import details, say_the_end, summarise
from tests.conftest import HANG_S, TINY, llmexp
from tests.tools import SLOW_WRITES


def row(step: int, **more: Any) -> dict[str, Any]:
    return {
        "step": step,
        "tokens_seen": 96 * step,
        "train/loss": 3.0,
        "step_time": 0.5,
        "skipped_steps": 0,
        **more,
    }


def counted(rows: list[dict[str, Any]]) -> Figures:
    figures = Figures()
    for found in rows:
        figures.count(found)
    return figures


def made(
    rows: list[dict] | None = None,
    *,
    world_size: int = 1,
    said: list[str] | None = None,
    **counts: Any,
) -> Any:
    """A loop that stands at a step, without a model."""
    progress = Progress(**counts)
    return Loop(
        setup=SimpleNamespace(  # type: ignore[arg-type]
            mesh=SimpleNamespace(distributed=world_size > 1, world_size=world_size, rank=0),
            layers=None,
            clipping=SimpleNamespace(
                measures=Measures({}, {}, range(1)), limit=SimpleNamespace(add=lambda *norms: None)
            ),
            outliers=SimpleNamespace(sigma=None, add=lambda *figures, skipped: None, skipped=0),
            scaler=SimpleNamespace(enabled=True, value=4.0),
        ),
        parts=SimpleNamespace(  # type: ignore[arg-type]
            config=SimpleNamespace(
                train=SimpleNamespace(max_consecutive_skips=1),
                metrics=SimpleNamespace(spikes=False),
            ),
            run=SimpleNamespace(
                parent=None, stages=(), begin=Begin(), first_step=0,
                tokens_at=lambda step: 96 * step,
            ),
        ),
        out=Outputs(
            Path("run"), True, SimpleNamespace(line=[].append if said is None else said.append),
            # type: ignore[arg-type]
            SimpleNamespace(),
            SimpleNamespace(figures=counted(rows or []), add_step=lambda *figures: None), None,  # type: ignore[arg-type]
        ),
        progress=progress,
        meter=Meter(torch.device("cpu"), 96 * progress.step),
        norms=Norms("none", None),
        noise=NoiseScale(12),
        fixed={}, peak_flops=None,
    )  # fmt: skip


def step_of(loop: Any, seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter((10.0, 10.0 + seconds))
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    with loop.meter.stepping():
        loop.meter.add(torch.tensor(96))
    monkeypatch.undo()
    loop.progress.step += 1


def test_times_are_of_the_whole_run(monkeypatch):
    """Also of steps that another attempt made, and of those after the last row."""
    rows = [row(10), row(20, step_time=0.7)]
    found = summarise(made(rows, step=20))
    assert found["train_time"] == pytest.approx(10 * 0.5 + 10 * 0.7)
    assert found["mean tokens_per_sec"] == pytest.approx(96 * 20 / 12)
    loop = made(rows, step=23)  # resumed between two rows
    assert (
        not {"train_time", "mean tokens_per_sec"} & summarise(loop).keys()
    )  # of steps 21 to 23 no time is known
    step_of(loop, 0.25, monkeypatch)
    found = summarise(loop)
    assert found["train_time"] == pytest.approx(12 + 4 * 0.25)
    assert found["mean tokens_per_sec"] == pytest.approx(96 * 24 / 13)
    assert "train_time" not in summarise(made())


def test_final_is_of_the_last_step_and_no_other():
    rows = [row(4, **{"val/loss": 2.5}), row(5, **{"train/loss": 2.9})]
    found = summarise(made(rows, step=5, best_val_loss=2.5, skipped_steps=1))
    assert (found["final train/loss"], found["latest val/loss"]) == (2.9, 2.5)
    assert not {"latest train/loss", "final val/loss"} & found.keys()
    # a stop between two rows
    found = summarise(made(rows, step=7, best_val_loss=2.5, skipped_steps=3))
    assert (found["latest train/loss"], found["latest val/loss"], found["skipped_steps"]) == (
        2.9,
        2.5,
        3,
    )


def test_a_fork_that_stops_before_its_first_step_sums_up_its_parents_noise_scale():
    loop = made(step=4)
    loop.noise.add(2.0, 12, 1.0, 48)
    run = SimpleNamespace(
        ramp="0: 4, 400: 8",
        first_step=4,
        sequence_length=12,
        total_sequences=100,
        begin=Begin(step=4, sequences=16, tokens=192, tokens_seen=180),
        stages=(BatchStage(0, 4, 16, 4, 1), BatchStage(400, 9, 36, 8, 2)),
    )
    for name in ("stage_at", "sequences_at", "tokens_at"):
        setattr(run, name, functools.partial(getattr(Run, name), run))
    loop.parts.run = run
    assert details(loop)["noise"]["verdict"].startswith("whether real_batch_size 4 is large")


@pytest.mark.parametrize(("stop_step", "cause"), [(3, "train.stop_step"), (6, "another rank")])
def test_a_run_that_is_past_its_stop_says_why_it_stops_whatever_else_fails(
    tmp_path, monkeypatch, stop_step, cause
):
    """What a run has measured is shown after its end is recorded: that it cannot be is a line."""
    said: list[str] = []
    loop = made([row(5)], step=5, said=said)
    loop.out = dataclasses.replace(loop.out, path=tmp_path)
    loop.run.max_steps = 10
    chosen = SimpleNamespace(stop_step=stop_step)
    loop.parts.config = SimpleNamespace(train=chosen, metrics=SimpleNamespace(picture=False))
    monkeypatch.setattr("llmexp.train.summary.measured_sections", lambda loop: 1 / 0)
    say_the_end(loop, "preempted", {"steps": 5}, None)
    (text,) = said[:1]
    assert f"preempted by {cause} at step 5 of 10" in text
    assert "the end of this report: ZeroDivisionError" in text


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


def overflow() -> Any:
    seen = Outcome(96.0, True, 3.0, float("inf"), 1.0, False, 4.0)
    return SimpleNamespace(read=lambda: seen, lr=0.1)


def test_a_skipped_step_does_not_wait_for_a_save(tmp_path, monkeypatch):
    loop = made(step=3)
    on_its_way(loop, tmp_path)
    loop.pending = overflow()
    monkeypatch.setattr(verdicts, "save_what_can_be", lambda loop: pytest.fail("waited"))
    assert verdicts.finish_previous(loop) == 0
    assert loop.saving is not None
    monkeypatch.undo()
    monkeypatch.setattr("llmexp.train.checkpointing.call_hooks", lambda *arguments: {})
    loop.pending = overflow()
    with pytest.raises(TrainingFailed, match="2 updates in a row were skipped"):
        verdicts.finish_previous(loop)
    assert (tmp_path / "committed").exists()  # the run ends here


def test_no_rank_waits_for_the_others_where_it_alone_may_have_been_refused(tmp_path, monkeypatch):
    def refused(*arguments: object) -> None:
        raise ConfigError("optimizer: no rate")

    for name, way in {"train_step": refused, "call_hooks": lambda *_, **__: None}.items():
        monkeypatch.setattr(f"llmexp.train.loop.{name}", way)
    monkeypatch.setattr(mesh, "any_rank", lambda *_: pytest.fail("met the others"))
    loop = made(step=3, world_size=2)
    loop.seed = lambda step: None
    on_its_way(loop, tmp_path, committing=True)
    with pytest.raises(TrainingFailed, match="step 4 is refused: optimizer: no rate"):
        take_step(loop, iter([SimpleNamespace()]), SimpleNamespace(row=False))
    finish_alone(loop)  # as the end of the run does
    assert loop.saved == [2]


def test_a_save_on_its_way_is_finished_before_a_run_fails(tmp_path):
    loop = made(step=3)
    finish_alone(loop)
    on_its_way(loop, tmp_path)
    finish_alone(loop)
    assert (tmp_path / "committed").exists()
    assert (loop.saving, loop.saved) == (None, [2])


@pytest.mark.parametrize("way", ["committing", "written", "written later", "not written"])
def test_of_several_ranks_one_alone_finishes_only_what_all_have_written(tmp_path, monkeypatch, way):
    monkeypatch.setattr(checkpointing, "OTHERS_S", 0.0 if way == "not written" else HANG_S)
    said: list[str] = []
    loop = made(step=3, world_size=2, said=said)
    on_its_way(loop, tmp_path, committing=way == "committing")
    loop.out = dataclasses.replace(loop.out, path=tmp_path)
    files = tmp_path / "checkpoints/.step_00000002.tmp"
    files.mkdir(parents=True)
    if way == "written later":
        threading.Timer(0.3, (files / "written-00001.json").touch).start()
    elif way == "written":
        (files / "written-00001.json").touch()
    finish_alone(loop)
    lost = way == "not written"
    assert (tmp_path / "committed").exists() == (not lost)
    warning = "WARNING: the checkpoint of step 2 was not finished: rank 1 has not written its part"
    assert said == [warning] * lost


def test_a_save_that_fails_then_is_reported(tmp_path):
    said: list[str] = []
    loop = made(step=3, said=said)

    def full() -> None:
        raise OSError("no room")

    loop.saving = Saving(2, lambda: tmp_path, loop.writer.submit(full))
    finish_alone(loop)
    assert said == ["WARNING: the checkpoint of step 2 was not finished: no room"]


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
    said: list[str] = []
    loop, ended = made([row(2)], step=3), []
    lost = RuntimeError("CUDA error: an illegal memory access was encountered")

    def close(name: str, *arguments: Any) -> None:
        ended.append((name, *arguments))
        if name == "rows" and broken != "device":
            raise OSError("no room")

    def tokens_seen() -> Any:
        raise lost

    parts = {
        "rows": SimpleNamespace(
            figures=counted([row(2)]), flush=lambda: False, close=lambda: close("rows")
        )
    }
    parts["tracker"] = SimpleNamespace(finish=lambda *found: close("tracker", *found))
    parts["console"] = SimpleNamespace(close=lambda: close("console"), line=said.append)
    loop.out = dataclasses.replace(loop.out, path=tmp_path, **parts)
    if broken != "disk":  # the run has failed: its own error is the one that counts
        loop.meter.tokens_seen = tokens_seen
        found = worker.finish_run(loop, "failed", 3)
        assert found["steps"] == 3
        assert "tokens_seen" not in found
    else:
        with pytest.raises(OSError, match="no room"):
            worker.finish_run(loop, "finished", 0)
    assert said == (
        ["WARNING: the rows may not all be on the disk: no room"] if broken == "both" else []
    )
    assert [name for name, *_ in ended] == ["rows", "tracker", "console"]
    assert ended[1][2] == 3
    assert failing.failure_of(lost).exit_code == 3


LATE = """
def hook(event, context):
    if (event, context.step) == ("step_start", 4):
        raise RuntimeError("late")
"""


def test_a_hook_that_raises_loses_no_checkpoint(tmp_path):
    (tmp_path / "late.py").write_text(SLOW_WRITES + LATE)
    failed = llmexp(
        "train", *TINY, "data=synthetic", "data.n_tokens=4000", "train.max_steps=5",
        "checkpoint.every=2",
        "checkpoint.async=true", "--allow", "late", "hooks=[late.hook]", "hydra.run.dir=run",
        cwd=tmp_path,
    )  # fmt: skip
    assert failed.code == 3, failed.out
    assert "the hook late.hook failed at step_start of step 4" in failed.err
    assert "the last checkpoint is step_00000002" in failed.err
    assert [p.name for p in (tmp_path / "run" / "checkpoints").iterdir()] == ["step_00000002"]


def test_a_small_model_samples_with_one_thread(monkeypatch):
    chosen: list[int] = []
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    with one_thread(small=False):
        assert chosen == []
    with one_thread(small=True):
        assert chosen == [1]
    assert chosen == [1, 4]
