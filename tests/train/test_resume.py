"""Stopped, killed, resumed: the same rows, the same parameters, bit for bit."""

import os
import signal

import pytest
import yaml

from llmexp.compare.reading import elapsed, read_columns
from llmexp.folders import rundir
from llmexp.folders.rows import read_rows
from llmexp.train import folder
from tests.conftest import HANG_S, TINY, Result, start
from tests.tools import amend, contents, exact, run_here, wait_for
from tests.train.resumed import ends, goes_on

# 50 sequences, 8 a step: an epoch ends inside step 7. 20 steps, dropout, rows and evaluation on
# different beats.
SETTINGS = [
    "data=tokens", "data.val_ratio=0", "batch.micro_batch_size=4",
    "batch.gradient_accumulation_steps=2", "train.max_steps=20", "model.dropout=0.1",
    "train.log_every=1", "train.eval_every=null", "checkpoint.keep=null", "checkpoint.every=5",
    "optimizer.lr=0.01",
]  # fmt: skip
SHORT = ["data=synthetic", "data.n_tokens=4000", "train.max_steps=9"]
TWO = ["parallelism=ddp", "parallelism.nproc_per_node=2"]


@pytest.fixture(scope="module")
def settings(tokens) -> list[str]:
    return [*SETTINGS, f"data.train_files=[{tokens}]"]


@pytest.fixture(scope="module")
def whole(runs, settings) -> Result:
    return runs(*settings)


def test_resumed_where_an_epoch_ends_it_is_bit_equal(runs, settings, tmp_path):
    """Its times are those of the whole run. fp16: tests/train/test_clip_rules.py."""
    settings = [*settings, "batch.micro_batch_size=5", "train.max_steps=15"]
    made, cut = runs(*settings), runs.copy(tmp_path / "cut", *settings, step=5)
    assert made.rows()[4]["epoch"] == 1.0
    with open(cut.folder / "metrics.jsonl", "a") as f:
        f.write('{"step": 99, "torn')  # what a kill in mid-write leaves
    resumed = goes_on(cut, made)
    summary = resumed.json("status.json")["summary"]
    assert summary["train_time"] == pytest.approx(sum(r["step_time"] for r in resumed.rows()))
    speed = summary["tokens_seen"] / summary["train_time"]
    assert summary["mean tokens_per_sec"] == pytest.approx(speed)


def test_a_stop_between_two_rows_keeps_the_time_of_the_steps_before_it(runs, tmp_path):
    """Of two steps that took 1000 s before a stop, the next row and the end have the time."""
    settings = [*SHORT, "train.log_every=5", "train.eval_every=null", "checkpoint.every=1"]
    cut = runs.copy(tmp_path / "cut", *settings, "checkpoint.keep=null", step=7)
    assert "since_row" not in cut.json("checkpoints/step_00000005/manifest.json")
    timed = cut.json("checkpoints/step_00000007/manifest.json")["since_row"]
    assert timed["steps"] == 2
    assert 0 < timed["data_time"] < timed["step_time"] < timed["wall"]
    slow = {"step_time": 1000.0, "wall": 4000.0}
    amend(cut.checkpoint(7) / "manifest.json", since_row=slow)
    ends(tmp_path, "resume", "cut", "train.log_every=4")
    rows = cut.rows()
    assert [row["step"] for row in rows] == [5, 8, 9]
    assert 1000 < 3 * rows[1]["step_time"] < 1000 + HANG_S
    assert rows[1]["overhead_share"] == pytest.approx(0.75, abs=0.1)
    tokens = cut.json("run.json")["tokens_per_step"]
    assert rows[1]["tokens_per_sec"] * rows[1]["step_time"] == pytest.approx(tokens)
    seconds = sum(n * row["step_time"] for n, row in zip((5, 3, 1), rows, strict=True))
    assert cut.json("status.json")["summary"]["train_time"] == pytest.approx(seconds)
    assert elapsed(read_columns(cut.folder / "metrics.jsonl")[0])[-1] == pytest.approx(seconds)


@pytest.mark.parametrize(("number", "more"), [(signal.SIGKILL, []), (signal.SIGTERM, TWO)])
def test_a_signal_in_mid_run(runs, settings, tmp_path, number, more):
    """TERM saves and exits 75, both ranks at one step; KILL does neither. Either way the resumed
    run is the undisturbed one. INT, and TERM on one rank: tests/faults/test_kills.py."""
    more = [*more, "batch.gradient_accumulation_steps=1"] if more else []
    made = runs(*settings, *more)
    held = [*settings, *more, "--allow=own", "hooks=[own.faults.act]", "hydra.run.dir=run"]
    process = start("train", *TINY, *held, cwd=tmp_path, FAULT_PLAN="step_start-12:hold go")
    run = Result(0, "", "", tmp_path / "run")
    wait_for(lambda: len(read_rows(run.folder / "metrics.jsonl")) >= 7, process)
    if number == signal.SIGKILL:
        os.killpg(process.pid, signal.SIGKILL)  # the parent dies; the worker has to die with it
    else:
        process.send_signal(number)
    out, err = process.communicate(timeout=HANG_S)
    if number == signal.SIGTERM:
        assert process.returncode == 75, err
        assert run.json("status.json")["state"] == "preempted"
        assert "llmexp resume run" in out
    goes_on(run, made, "hooks=[]")


@pytest.mark.usefixtures("forking")
def test_auto_resumes_in_place_and_a_finished_run_is_left_alone(
    runs, settings, whole, tmp_path, capfd
):
    cut = runs.copy(tmp_path / "cut", *settings, step=10)
    command = ["train", *TINY, *settings, f"hydra.run.dir={cut.folder}", "checkpoint.resume=auto"]
    ends(tmp_path, *command)
    assert exact(cut) == exact(whole)
    before = {p: p.stat().st_mtime_ns for p in cut.folder.rglob("*") if p.is_file()}
    for again in (command, ["resume", str(cut.folder)]):
        done = run_here(capfd, *again)
        assert (done.code, "nothing to do" in done.out) == (0, True)
    assert {p: p.stat().st_mtime_ns for p in cut.folder.rglob("*") if p.is_file()} == before


def test_a_damaged_checkpoint_a_lost_run_json_and_missing_keys_are_made_up_for(
    runs, settings, whole, tmp_path
):
    """By the checkpoint before, by building it anew, and by the defaults."""
    cut = runs.copy(tmp_path / "cut", *settings, step=15)
    newest = cut.checkpoint(15) / "model.safetensors"
    data = bytearray(newest.read_bytes())
    data[-3] ^= 16  # one flipped bit, which no loader notices
    newest.write_bytes(data)
    before = cut.json("run.json")
    (cut.folder / "run.json").unlink()
    path = cut.folder / "config.yaml"
    config = yaml.safe_load(path.read_text())
    del config["train"]["twin"], config["tracker"]["entity"], config["user"]
    path.write_text(yaml.safe_dump(config))
    done = goes_on(cut, whole, "checkpoint.keep=2", "checkpoint.every=null")
    assert rundir.saved_steps(cut.folder) == [10, 15, 20]  # two are whole
    assert "step_00000015 is damaged" in done.out
    assert "resumed from step_00000010" in done.out
    assert "run.json: is missing and is rebuilt" in done.err
    anew = cut.json("run.json")
    assert {k: v for k, v in before.items() if anew.get(k) != v}.keys() <= {"overrides", "place"}


@pytest.mark.parametrize(("name", "more"), [("metrics.jsonl", []), ("layers.jsonl", TWO)])
def test_a_refusal_by_one_file_of_rows_changes_no_file(runs, settings, tmp_path, name, more):
    """Several ranks read the changed config from the folder; it is put back."""
    copy = runs.copy(tmp_path / "cut", *settings, step=15).folder
    (copy / name).write_text("no row\n{}\n")
    before = contents(copy)
    refused = ends(tmp_path, "resume", "cut", "train.eval_every=7", *more, code=2)
    assert f"cut/{name}: line 1 is not a row" in refused.err
    assert "Traceback" not in refused.err
    after = contents(copy)
    assert {p: after.get(p) for p in before} == before
    added = {p.parent.name.partition("-")[0] for p in after.keys() - before.keys()}
    assert added <= {"logs", "provenance"}  # of the start that was refused


def test_a_run_that_is_refused_leaves_what_another_process_has_begun_there(
    runs, settings, tmp_path
):
    """Both found an empty folder; the other was faster."""
    copy = runs.copy(tmp_path / "cut", *settings, step=15).folder
    before = contents(copy)
    rundir.write_status(copy, "running", **rundir.NO_END)
    folder.forget_run(copy)
    assert contents(copy).keys() == before.keys()
    rundir.write_status(copy, "failed", exit_code=2)  # by its own refusal
    (copy / "lineage.jsonl").write_text('{"step": 1}\n')  # it was a fork
    folder.forget_run(copy)
    assert not any(file.exists() for file in folder.describing(copy))
    assert not (copy / "lineage.jsonl").exists()


def test_milestones_and_as_many_newest_stay_however_often_a_run_is_stopped(tmp_path):
    """Each stop has a checkpoint; one that is damaged is not counted. Another cut may go on;
    another model may not: tests/refusals/train.yaml."""
    run, saving = tmp_path / "run", ["checkpoint.every=2", "checkpoint.keep_every=3"]
    words = ["train", *TINY, *SHORT, *saving, "checkpoint.keep=2", "hydra.run.dir=run"]
    for step, kept in ((1, [1]), (2, [1, 2]), (4, [3, 4]), (5, [3, 4, 5]), (6, [3, 4, 5, 6])):
        ends(tmp_path, *words, f"train.stop_step={step}", code=75)
        assert rundir.saved_steps(run) == kept
        words = ["resume", "run"]
        if step == 5:
            (run / "checkpoints/step_00000005/state.pt").write_bytes(b"x")
    ends(tmp_path, *words, "batch.micro_batch_size=4")
    assert rundir.saved_steps(run) == [3, 6, 8, 9]
    assert rundir.read_run(run)["gradient_accumulation_steps"] == 2
