"""Stopped, killed, resumed: the same rows, the same parameters, bit for bit."""

import os
import signal
from pathlib import Path

import pytest
import yaml

from llmexp.compare.reading import elapsed, read_columns
from llmexp.folders import rundir
from llmexp.folders.rows import read_rows
from llmexp.train import folder
from tests.conftest import HANG_S, TINY, Result, llmexp, start
from tests.tools import amend, contents, exact, run_here, wait_for
from tests.train.resumed import goes_on

# 50 sequences, 8 a step: an epoch ends inside step 7. 20 steps, dropout, rows and evaluation on
# different beats.
SETTINGS = [
    "data=tokens", "data.val_ratio=0", "batch.micro_batch_size=4",
    "batch.gradient_accumulation_steps=2", "train.max_steps=20", "model.dropout=0.1",
    "train.log_every=1", "train.eval_every=null", "checkpoint.keep=null", "checkpoint.every=5",
    "optimizer.lr=0.01",
]  # fmt: skip
HALF = ["precision=fp16", "precision.init_scale=1e7", "precision.growth_interval=4"]
SHORT = ["data=synthetic", "data.n_tokens=4000", "train.max_steps=9"]
TWO = ["parallelism=ddp", "parallelism.nproc_per_node=2"]


@pytest.fixture(scope="module")
def settings(tokens) -> list[str]:
    return [*SETTINGS, f"data.train_files=[{tokens}]"]


@pytest.fixture(scope="module")
def whole(runs, settings) -> Result:
    return runs(*settings)


@pytest.mark.parametrize(
    ("more", "step"),
    [
        ([], 5),
        (HALF, 15),  # the scale grows on the way, and its overflows are skipped
        (["batch.micro_batch_size=5", "train.max_steps=15"], 5),  # where an epoch ends
    ],
)
def test_resumed_from_a_checkpoint_is_bit_equal(runs, settings, tmp_path, more, step):
    made = runs(*settings, *more)
    if more == HALF:
        assert 0 < made.rows()[-1]["skipped_steps"] < 15
        assert len({r["loss_scale"] for r in made.rows()}) > 2
    assert more in ([], HALF) or made.rows()[4]["epoch"] == 1.0
    cut = runs.copy(tmp_path / "cut", *settings, *more, step=step)
    with open(cut.folder / "metrics.jsonl", "a") as f:
        f.write('{"step": 99, "torn')  # what a kill in mid-write leaves
    resumed = goes_on(cut, made)
    summary = resumed.json("status.json")["summary"]  # its times are those of the whole run
    assert summary["train_time"] == pytest.approx(sum(r["step_time"] for r in resumed.rows()))
    speed = summary["tokens_seen"] / summary["train_time"]
    assert summary["mean tokens_per_sec"] == pytest.approx(speed)


@pytest.mark.parametrize("log_every", [5, 4])
def test_a_stop_between_two_rows_keeps_the_time_of_the_steps_before_it(runs, tmp_path, log_every):
    """Of two steps that took 1000 s before a stop, the next row and the end have the time."""
    settings = [*SHORT, "train.log_every=5", "train.eval_every=null", "checkpoint.every=1"]
    cut = runs.copy(tmp_path / "cut", *settings, "checkpoint.keep=null", step=7)
    assert "since_row" not in cut.json("checkpoints/step_00000005/manifest.json")
    timed = cut.json("checkpoints/step_00000007/manifest.json")["since_row"]
    assert timed["steps"] == 2
    assert 0 < timed["data_time"] < timed["step_time"] < timed["wall"]
    slow = {"step_time": 1000.0, "wall": 4000.0}
    amend(cut.checkpoint(7) / "manifest.json", since_row=slow)
    done = llmexp("resume", "cut", f"train.log_every={log_every}", cwd=tmp_path)
    assert done.code == 0, done.err
    first, next_, *_ = rows = cut.rows()
    assert (first["step"], next_["step"]) == (5, {5: 9, 4: 8}[log_every])
    assert 1000 < (next_["step"] - 5) * next_["step_time"] < 1000 + HANG_S
    assert next_["overhead_share"] == pytest.approx(0.75, abs=0.1)
    tokens = cut.json("run.json")["tokens_per_step"]
    assert next_["tokens_per_sec"] * next_["step_time"] == pytest.approx(tokens)
    lengths = (after["step"] - before for before, after in zip([0, 5, 8], rows, strict=False))
    seconds = sum(n * row["step_time"] for n, row in zip(lengths, rows, strict=True))
    assert cut.json("status.json")["summary"]["train_time"] == pytest.approx(seconds)
    assert elapsed(read_columns(cut.folder / "metrics.jsonl")[0])[-1] == pytest.approx(seconds)


def test_a_run_whose_config_lacks_keys_takes_their_defaults(runs, settings, whole, tmp_path):
    cut = runs.copy(tmp_path / "cut", *settings, step=15)
    path = cut.folder / "config.yaml"
    config = yaml.safe_load(path.read_text())
    del config["train"]["twin"], config["tracker"]["entity"], config["user"]
    path.write_text(yaml.safe_dump(config))
    goes_on(cut, whole)


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
    assert llmexp(*command, cwd=tmp_path).code == 0
    assert exact(cut) == exact(whole)
    before = {p: p.stat().st_mtime_ns for p in cut.folder.rglob("*") if p.is_file()}
    for again in (command, ["resume", str(cut.folder)]):
        done = run_here(capfd, *again)
        assert (done.code, "nothing to do" in done.out) == (0, True)
    assert {p: p.stat().st_mtime_ns for p in cut.folder.rglob("*") if p.is_file()} == before


def test_another_cut_may_resume(runs, settings, tmp_path):
    """Another model may not: tests/refusals/train.yaml."""
    cut = runs.copy(tmp_path / "cut", *settings, step=10)
    moved = llmexp("resume", "cut", "batch.micro_batch_size=8", cwd=tmp_path)
    assert moved.code == 0, moved.err
    assert cut.json("run.json")["gradient_accumulation_steps"] == 1


def test_a_damaged_checkpoint_falls_back(runs, settings, whole, tmp_path):
    cut = runs.copy(tmp_path / "cut", *settings, step=15)
    newest = cut.checkpoint(15) / "model.safetensors"
    data = bytearray(newest.read_bytes())
    data[-3] ^= 16  # one flipped bit, which no loader notices
    newest.write_bytes(data)
    out = goes_on(cut, whole, "checkpoint.keep=2", "checkpoint.every=null").out
    assert rundir.saved_steps(cut.folder) == [10, 15, 20]  # two are whole
    assert "step_00000015 is damaged" in out
    assert "resumed from step_00000010" in out


def test_a_lost_run_json_is_written_anew(runs, settings, whole, tmp_path):
    cut = runs.copy(tmp_path / "cut", *settings, step=15)
    before = cut.json("run.json")
    (cut.folder / "run.json").unlink()
    assert "run.json: is missing and is rebuilt" in goes_on(cut, whole).err
    anew = cut.json("run.json")
    assert {k: v for k, v in before.items() if anew.get(k) != v}.keys() <= {"overrides", "place"}


@pytest.mark.parametrize(("name", "more"), [("metrics.jsonl", []), ("layers.jsonl", TWO)])
def test_a_refusal_by_one_file_of_rows_changes_no_file(runs, settings, tmp_path, name, more):
    """Several ranks read the changed config from the folder; it is put back."""
    copy = runs.copy(tmp_path / "cut", *settings, step=15).folder
    (copy / name).write_text("no row\n{}\n")
    before = contents(copy)
    refused = llmexp("resume", "cut", "train.eval_every=7", *more, cwd=tmp_path)
    assert refused.code == 2
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


def stopped(cwd: Path, command: list[str], *steps: int) -> list[int]:
    """The checkpoints of cwd/run after stops at these steps."""
    for step in steps:
        done = llmexp(*command, f"train.stop_step={step}", cwd=cwd)
        assert done.code == 75, done.err
    return rundir.saved_steps(cwd / "run")


def test_milestones_stay_beside_the_newest_checkpoints(tmp_path):
    saving = ["checkpoint.every=2", "checkpoint.keep=2", "checkpoint.keep_every=3"]
    new = ["train", *TINY, *SHORT, *saving, "hydra.run.dir=run"]
    assert stopped(tmp_path, new, 7) == [3, 6, 7]
    assert llmexp("resume", "run", cwd=tmp_path).code == 0
    assert rundir.saved_steps(tmp_path / "run") == [3, 6, 8, 9]


def test_a_run_that_is_stopped_again_and_again_keeps_as_many_checkpoints(tmp_path):
    new = ["train", *TINY, *SHORT, "checkpoint.keep=3", "hydra.run.dir=run"]
    assert stopped(tmp_path, new, 1) == [1]
    assert stopped(tmp_path, ["resume", "run"], 2, 3, 4, 5) == [3, 4, 5]
    # one that is passed over is none of them, nor later
    (tmp_path / "run/checkpoints/step_00000005/state.pt").write_bytes(b"x")
    assert stopped(tmp_path, ["resume", "run"], 6, 7) == [4, 5, 6, 7]
