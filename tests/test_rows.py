"""metrics.jsonl as it is written: some rows at a time, whole after a kill, in constant memory."""

import json
import pickle
import resource
from types import SimpleNamespace

import pytest

from llmexp.folders import rows as module
from llmexp.folders.rows import Rows, read_rows
from tests.conftest import TINY, llmexp
from tests.tools import wait_for


def row(step: int, **more: float) -> dict:
    return {"step": step, "train/loss": 5.0 - step / 1000, "step_time": 0.5, **more}


def test_rows_are_whole_up_to_the_last_ten_after_a_kill(tmp_path):
    knobs = ["data=synthetic", "train.log_every=1", "train.eval_every=null", "train.max_steps=50"]
    hook = ["--allow", "own", "hooks=[own.faults.act]", "hydra.run.dir=run", "checkpoint.every=3"]
    plan = "step_start-36:kill"
    died = llmexp("train", *TINY, *knobs, *hook, cwd=tmp_path, FAULT_PLAN=plan)
    assert died.code == 3, died.err
    file = tmp_path / "run" / "metrics.jsonl"
    assert file.read_bytes().endswith(b"\n")
    kept = read_rows(file)
    # a checkpoint does not wait for rows, and step 35 is after that of step 33
    assert [r["step"] for r in kept] == list(range(1, len(kept) + 1))
    assert 33 <= len(kept) <= 35
    assert [r["step"] for r in kept if "weight_norm" in r] == [10, 20, 30]
    resumed = llmexp("resume", "--allow", "own", "run", "hooks=[]", cwd=tmp_path)
    assert resumed.code == 0, resumed.err
    assert [r["step"] for r in read_rows(file)] == list(range(1, 51))


def test_rows_wait_for_ten_or_a_second(tmp_path, monkeypatch):
    now = 100.0
    rows = Rows(tmp_path / "rows", 0).open()
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now))
    rows.add(row(1))
    assert rows.due  # the first one
    assert rows.flush()
    for step in range(2, 12):
        assert not rows.due
        rows.add(row(step))
    assert rows.due
    assert rows.flush()
    assert not rows.flush()
    rows.add(row(12))
    now = 100.9
    assert not rows.due
    now = 101.0
    assert rows.due
    rows.close()
    assert [r["step"] for r in read_rows(rows.path)] == list(range(1, 13))


def test_rows_are_written_while_the_loop_is_held_up(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "LONGEST_WAIT_S", 0.05)
    rows = Rows(tmp_path / "rows", 0).open()
    for step in (1, 2, 3):
        rows.add(row(step))
    wait_for(lambda: len(read_rows(rows.path)) == 3)
    assert rows.flush()  # there are new ones to show
    rows.close()
    assert len(read_rows(rows.path)) == 3


def test_a_resume_cuts_the_file_in_place_and_keeps_figures_alone(tmp_path):
    path = tmp_path / "rows"
    made = [row(step, **({"val/loss": step} if step % 4 == 0 else {})) for step in range(1, 2001)]
    path.write_text("".join(json.dumps(r) + "\n" for r in made) + '{"step": 2001, "tra')
    place = path.stat().st_ino
    rows = Rows(path, 1999).open()
    assert read_rows(path) == made[:1999]
    assert path.stat().st_ino == place
    assert rows.figures.newest["val/loss"] == (1996, 1996)
    assert rows.figures.train_time == pytest.approx(1999 * 0.5)
    assert len(pickle.dumps(rows.figures)) < 1000
    rows.close()


def test_of_a_disk_that_becomes_full_the_first_lost_row_is_named(tmp_path):
    rows, made = Rows(tmp_path / "rows", 0).open(), [row(step) for step in (1, 2, 3)]
    room = sum(len(module.ROW.encode(r)) + 1 for r in made[:2]) + 7
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, old[1]))
    try:
        for each in made:
            rows.add(each)
        with pytest.raises(OSError, match="the row of step 3 could not be written: File too large"):
            rows.flush()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
    assert rows.path.read_bytes().endswith(b"}\n")
    assert read_rows(rows.path) == made[:2]
