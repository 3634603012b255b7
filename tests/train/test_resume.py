"""Stopped, killed, resumed: the same rows, the same parameters, bit for bit."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
from pathlib import Path

import pytest
import yaml

from llmexp.compose.overrides import parsed
from llmexp.runs import rundir
from llmexp.runs.rows import read_rows
from llmexp.settings.values import typed
from llmexp.train import folder
from tests.conftest import HANG_S, TINY, Result, llmexp, start, train
from tests.tools import contents, cut_after, exact, run_here, same_state, wait_for

# 50 sequences, 8 a step: an epoch ends inside step 7. 20 steps, dropout, rows and evaluation on
# different beats.
SETTINGS = [
    "data=tokens", "data.val_ratio=0", "batch.micro_batch_size=4",
    "batch.gradient_accumulation_steps=2",
    "train.max_steps=20", "model.dropout=0.1", "train.log_every=1", "train.eval_every=null",
    "checkpoint.keep=null",
    "checkpoint.every=5", "optimizer.lr=0.01",
]  # fmt: skip
# A signal has to find the run under way, however late it comes.
HOLD = """
import time
from llmexp.system.child import STOP

def hold(event, context):
    if event == "step_start" and context.step == 12:
        end = time.monotonic() + 1200
        while not STOP.requested and time.monotonic() < end:
            time.sleep(0.02)
"""
HELD = ["--allow", "held", "hooks=[held.hold]"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory, tokens) -> tuple[Result, list[str]]:
    settings = [*SETTINGS, f"data.train_files=[{tokens}]", "precision=fp32"]
    return train(tmp_path_factory.mktemp("fp32"), "whole", *settings), settings


@pytest.fixture(scope="module")
def scaled(tmp_path_factory, tokens) -> Result:
    """fp16: the scale grows on the way and its overflows are skipped."""
    settings = [*SETTINGS, f"data.train_files=[{tokens}]", "precision=fp16"]
    settings += ["precision.init_scale=1e7", "precision.growth_interval=4"]
    result = train(tmp_path_factory.mktemp("fp16"), "whole", *settings)
    assert 0 < result.rows()[-1]["skipped_steps"] < 15
    assert len({r["loss_scale"] for r in result.rows()}) > 2
    return result


def test_saved_by_time_and_resumed_is_bit_equal(whole, tmp_path):
    result, settings = whole
    by_time = ["checkpoint.every=null", "train.max_steps=20", "checkpoint.every_minutes=1e-9"]
    run = train(tmp_path, "run", *settings, *by_time)
    found = sorted(int(p.name[5:]) for p in (run.folder / "checkpoints").iterdir())
    assert found == list(range(1, 21))
    cut = Result(0, "", "", cut_after(run, tmp_path, 13))
    again = llmexp("resume", str(cut.folder), "checkpoint.every_minutes=60", cwd=tmp_path)
    assert again.code == 0, again.err
    assert exact(cut) == exact(result)


def test_a_run_whose_config_lacks_keys_goes_on(whole, tmp_path):
    """They take their defaults."""
    old = Result(0, "", "", cut_after(whole[0], tmp_path, 15))
    path = old.folder / "config.yaml"
    config = yaml.safe_load(path.read_text())
    del config["train"]["twin"], config["tracker"]["entity"], config["user"]
    path.write_text(yaml.safe_dump(config))
    again = llmexp("resume", str(old.folder), cwd=tmp_path)
    assert again.code == 0, again.err
    assert exact(old) == exact(whole[0])


# in epoch 0, in epoch 1 (mid), in epoch 2: all at least 5 steps to go. The slow ones: the tests of
# a damaged checkpoint and of a config that lacks keys go on from 10 and 15.
@pytest.mark.parametrize(
    ("kind", "step"),
    [
        ("whole", 5),
        ("scaled", 15),
        *(pytest.param(*c, marks=pytest.mark.slow) for c in (("whole", 10), ("whole", 15))),
        pytest.param("scaled", 5, marks=pytest.mark.slow),
    ],
)
def test_resumed_from_a_checkpoint_is_bit_equal(request, tmp_path, kind, step):
    result = request.getfixturevalue(kind)
    result = result if kind == "scaled" else result[0]
    copy = cut_after(result, tmp_path, step)
    with open(copy / "metrics.jsonl", "a") as f:
        f.write('{"step": 99, "torn')  # what a kill in mid-write leaves
    again = llmexp("resume", str(copy), cwd=tmp_path)
    assert again.code == 0, again.err
    resumed = Result(0, again.out, again.err, copy)
    assert exact(resumed) == exact(result)
    same_state(resumed.checkpoint(20), result.checkpoint(20))
    summary = resumed.json("status.json")["summary"]  # its times are those of the whole run
    assert summary["train_time"] == pytest.approx(sum(row["step_time"] for row in resumed.rows()))
    assert summary["mean tokens_per_sec"] == pytest.approx(
        summary["tokens_seen"] / summary["train_time"]
    )


def test_resumed_at_an_epoch_boundary(tmp_path, tokens):
    """40 of 50 sequences would end mid-epoch; 10 a step end each epoch at a step, and the
    checkpoint lies on it."""
    settings = [
        *SETTINGS,
        f"data.train_files=[{tokens}]",
        "batch.micro_batch_size=5",
        "train.max_steps=15",
    ]
    result = train(tmp_path, "whole", *settings)
    assert result.rows()[4]["epoch"] == 1.0
    copy = cut_after(result, tmp_path, 5)
    assert llmexp("resume", str(copy), cwd=tmp_path).code == 0
    resumed = Result(0, "", "", copy)
    assert exact(resumed) == exact(result)
    same_state(resumed.checkpoint(15), result.checkpoint(15))


@pytest.mark.parametrize(("number", "ranks"), [(signal.SIGKILL, 1), (signal.SIGTERM, 2)])
def test_a_signal_in_mid_run(whole, tmp_path, number, ranks):
    """TERM saves and exits 75, both ranks at one step; KILL does neither. Either way the resumed
    run is the undisturbed one. INT, and TERM on one rank: tests/faults/test_kills.py."""
    result, settings = whole
    if ranks == 2:
        settings = [*settings, "parallelism=ddp", "parallelism.nproc_per_node=2"]
        settings += ["batch.gradient_accumulation_steps=1"]
        result = train(tmp_path, "whole", *settings)
    (tmp_path / "held.py").write_text(HOLD)
    process = start("train", *TINY, *settings, *HELD, "hydra.run.dir=run", cwd=tmp_path)
    run = Result(0, "", "", tmp_path / "run")
    wait_for(lambda: len(read_rows(run.folder / "metrics.jsonl")) >= 7, process)
    if number == signal.SIGKILL:
        os.killpg(process.pid, signal.SIGKILL)  # the parent dies; the worker has to die with it
    else:
        process.send_signal(number)
    out, err = process.communicate(timeout=HANG_S)
    if number != signal.SIGKILL:
        assert process.returncode == 75, err
        assert run.json("status.json")["state"] == "preempted"
        assert f"llmexp resume {Path('run')}" in out
    again = llmexp("resume", "run", "hooks=[]", cwd=tmp_path)
    assert again.code == 0, again.err
    assert exact(run) == exact(result)
    same_state(run.checkpoint(20), result.checkpoint(20))


@pytest.mark.usefixtures("forking")
def test_auto_resumes_in_place_and_a_finished_run_is_left_alone(whole, tmp_path, capfd):
    result, settings = whole
    copy = cut_after(result, tmp_path, 10)
    command = ["train", *TINY, *settings, f"hydra.run.dir={copy}", "checkpoint.resume=auto"]
    assert llmexp(*command, cwd=tmp_path).code == 0
    finished = Result(0, "", "", copy)
    assert exact(finished) == exact(result)
    before = {p: p.stat().st_mtime_ns for p in copy.rglob("*") if p.is_file()}
    for again in (command, ["resume", str(copy)]):
        done = run_here(capfd, *again)
        assert done.code == 0
        assert "nothing to do" in done.out
    changed = run_here(capfd, "resume", str(copy), "train.log_every=7")
    assert changed.code == 2
    assert "this run is finished, so train.log_every=7 would change nothing" in changed.err
    assert {p: p.stat().st_mtime_ns for p in copy.rglob("*") if p.is_file()} == before
    refused = run_here(capfd, "train", *TINY, *settings, f"hydra.run.dir={copy}")
    assert refused.code == 2
    assert "holds a run already (state: finished)" in refused.err


@pytest.mark.usefixtures("forking")
def test_commands_to_copy_hold_paths_with_spaces(whole, tmp_path, capfd):
    result, settings = whole
    path = tmp_path / "my runs" / "one (1), it's"
    shutil.copytree(result.folder, path)
    for command, code, pasted in (
        (["resume", str(path), "train.log_every=7"], 2, "llmexp train fork.run"),
        (["train", *TINY, *settings, f'hydra.run.dir="{path}"'], 2, "llmexp resume"),
        (["average", str(path), "--last", "2"], 0, "llmexp evaluate"),
    ):
        done = run_here(capfd, *command)
        assert done.code == code, done.err
        (line,) = re.findall(r"llmexp (?:train|resume|evaluate) .*", done.out + done.err)
        assert line.replace("'", "").startswith(pasted)
        _, name, word, *_ = shlex.split(line)
        given = parsed([word])[0].value() if name == "train" else word
        assert Path(given).is_relative_to(path)


@pytest.mark.parametrize(
    "path", ["a/b", "a b/c@3", "a  b", "it's", "a,b", "(1)", "a=b", "é", "a\\"]
)
def test_an_override_to_copy_is_what_hydra_reads(path):
    (word,) = shlex.split(typed("fork.run", path))
    assert parsed([word])[0].value() == path


@pytest.mark.usefixtures("forking")
def test_another_cut_may_resume_but_another_model_may_not(whole, tmp_path, capfd):
    result, settings = whole
    copy = cut_after(result, tmp_path, 10)
    command = ["train", *TINY, *settings, f"hydra.run.dir={copy}", "checkpoint.resume=auto"]
    refused = run_here(capfd, *command, "model.d_ff=32", "optimizer.lr=0.5", "train.eval_tokens=24")
    assert refused.code == 2
    assert (
        "train.eval_tokens (32768 there, 24 here)" in refused.err
    )  # the best loss is of one set of tokens
    assert "model.d_ff (24 there, 32 here)" in refused.err
    assert "optimizer.lr (0.01 there, 0.5 here)" in refused.err
    # the accumulation follows
    moved = llmexp("resume", str(copy), "batch.micro_batch_size=8", cwd=tmp_path)
    assert moved.code == 0, moved.err
    assert Result(0, "", "", copy).json("run.json")["gradient_accumulation_steps"] == 1


@pytest.mark.usefixtures("forking")
def test_a_config_that_was_edited_in_its_folder_is_refused(whole, tmp_path, capfd):
    """What changes results is also in each checkpoint; how the run is executed may be edited."""
    result, _ = whole
    copy = cut_after(result, tmp_path, 10)
    absent = run_here(capfd, "resume", str(copy), "optimizer.name=Lion")
    assert "optimizer.name: the optimizer that the run folder has takes no such" in absent.err
    config = copy / "config.yaml"
    config.write_text(
        config.read_text().replace("seed: 1234", "seed: 99").replace("lr: 0.01", "lr: 0.02")
    )
    refused = run_here(capfd, "resume", str(copy))
    assert refused.code == 2
    assert "step_00000010: is another run" in refused.err
    assert "optimizer.lr (0.01 there, 0.02 here), train.seed (1234 there, 99 here)" in refused.err
    # the rows of the steps to come are still there
    assert exact(Result(0, "", "", copy)) == exact(result)


def test_a_damaged_checkpoint_falls_back_and_all_damaged_refuses(whole, tmp_path):
    result, _ = whole
    copy = cut_after(result, tmp_path, 15)
    newest = copy / "checkpoints" / "step_00000015" / "model.safetensors"
    data = bytearray(newest.read_bytes())
    data[-3] ^= 16  # one flipped bit, which no loader notices
    newest.write_bytes(data)
    again = llmexp("resume", str(copy), "checkpoint.keep=2", "checkpoint.every=null", cwd=tmp_path)
    assert again.code == 0, again.err
    assert sorted(int(p.name[5:]) for p in (copy / "checkpoints").iterdir()) == [
        10,
        15,
        20,
    ]  # two are whole
    assert "step_00000015 is damaged" in again.out
    assert "resumed from step_00000010" in again.out
    resumed = Result(0, "", "", copy)
    assert exact(resumed) == exact(result)
    same_state(resumed.checkpoint(20), result.checkpoint(20))

    copy = cut_after(result, tmp_path, 5)
    (copy / "checkpoints" / "step_00000005" / "state.pt").write_bytes(b"")
    refused = llmexp("resume", str(copy), cwd=tmp_path)
    assert refused.code != 0
    assert "all 1 checkpoints are damaged" in refused.err


@pytest.mark.usefixtures("forking")
def test_a_refusal_changes_nothing_and_a_lost_run_json_is_written_anew(whole, tmp_path, capfd):
    result, _ = whole
    copy = cut_after(result, tmp_path, 15)
    status = {
        "state": "preempted",
        "exit_code": 75,
        "error": None,
        "ended": 1.0,
        "summary": {"steps": 15},
    }
    (copy / "status.json").write_text(json.dumps(status))
    metrics = copy / "metrics.jsonl"
    rows = metrics.read_bytes()
    metrics.write_bytes(b"no row\n" + rows)
    (copy / "run.json").rename(tmp_path / "run.json")
    (copy / "run.json").write_text("{")
    for name, good in (("run.json", None), ("metrics.jsonl", rows)):
        before = contents(copy)
        refused = run_here(capfd, "resume", str(copy), "train.eval_every=7")
        assert refused.code == 2
        assert f"{copy / name}" in refused.err
        assert "Traceback" not in refused.err
        assert contents(copy) == before
        (copy / name).unlink()
        if good:
            metrics.write_bytes(good)
    again = llmexp("resume", str(copy), cwd=tmp_path)
    assert again.code == 0, again.err
    assert "run.json: is not there and is written anew" in again.err
    resumed = Result(0, "", "", copy)
    assert exact(resumed) == exact(result)
    anew, before = (json.loads(p.read_text()) for p in (copy / "run.json", tmp_path / "run.json"))
    assert {k: v for k, v in before.items() if anew.get(k) != v}.keys() <= {"overrides", "place"}


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_refusal_by_one_file_of_rows_leaves_the_others(whole, tmp_path, ranks):
    """Several ranks read the changed config from the folder; it is put back."""
    result, _ = whole
    copy = cut_after(result, tmp_path, 15)
    (copy / "layers.jsonl").write_text("no row\n")
    before = contents(copy)
    more = ["train.eval_every=7"]
    more += ["parallelism=ddp", "parallelism.nproc_per_node=2"] if ranks == 2 else []
    refused = llmexp("resume", str(copy), *more, cwd=tmp_path)
    assert refused.code == 2
    assert f"{copy / 'layers.jsonl'}: line 1 is not a row" in refused.err
    after = contents(copy)
    assert {p: after.get(p) for p in before} == before
    added = {p.parent.name.partition("-")[0] for p in after.keys() - before.keys()}
    assert added <= {"logs", "provenance"}  # of the start that was refused


def test_a_run_that_is_refused_leaves_what_another_process_has_begun_there(whole, tmp_path):
    """Both found an empty folder; the other was faster."""
    copy = cut_after(whole[0], tmp_path, 15)
    before = contents(copy)
    rundir.write_status(copy, "running", **rundir.NO_END)
    folder.forget_run(copy)
    assert contents(copy).keys() == before.keys()
    rundir.write_status(copy, "failed", exit_code=2)  # by its own refusal
    (copy / "lineage.jsonl").write_text('{"step": 1}\n')  # it was a fork
    folder.forget_run(copy)
    assert not any(file.exists() for file in folder.describing(copy))
    assert not (copy / "lineage.jsonl").exists()


def test_resume_of_nothing(tmp_path):
    assert llmexp("resume", "nowhere", cwd=tmp_path).code == 2
    given = ["data=synthetic", "hydra.run.dir=new", "checkpoint.resume=must"]
    refused = llmexp("train", *TINY, *given, cwd=tmp_path)
    assert refused.code == 2
    assert "no run to resume" in refused.err
    assert not (tmp_path / "new").exists()


def test_milestones_stay_beside_the_newest_checkpoints(tmp_path):
    data = ["data=synthetic", "data.n_tokens=4000", "train.max_steps=9"]
    saving = ["checkpoint.every=2", "checkpoint.keep=2", "checkpoint.keep_every=3"]
    chosen = [*TINY, *data, *saving, "train.stop_step=7", "hydra.run.dir=run"]
    done = llmexp("train", *chosen, cwd=tmp_path)
    assert done.code == 75, done.err
    found = sorted(p.name[-2:] for p in (done.folder / "checkpoints").iterdir())
    assert found == ["03", "06", "07"]
    assert llmexp("resume", "run", cwd=tmp_path).code == 0
    found = sorted(p.name[-2:] for p in (done.folder / "checkpoints").iterdir())
    assert found == ["03", "06", "08", "09"]


def test_a_run_that_is_stopped_again_and_again_keeps_as_many_checkpoints(tmp_path):
    data = ["data=synthetic", "data.n_tokens=4000", "train.max_steps=9", "checkpoint.keep=3"]
    run = tmp_path / "run"

    def stopped(command: list[str], *steps: int) -> list[int]:
        for step in steps:
            done = llmexp(*command, f"train.stop_step={step}", cwd=tmp_path)
            assert done.code == 75, done.err
        return rundir.saved_steps(run)

    assert stopped(["train", *TINY, *data, "hydra.run.dir=run"], 1) == [1]
    assert stopped(["resume", "run"], 2, 3, 4, 5) == [3, 4, 5]
    # one that is passed over is none of them, nor later
    (run / "checkpoints/step_00000005/state.pt").write_bytes(b"x")
    assert stopped(["resume", "run"], 6, 7) == [4, 5, 6, 7]
