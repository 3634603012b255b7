"""Averages of weights: beside the training (train.ema), and of checkpoints (llmexp average)."""

import json

import numpy as np
import pytest
import torch

import llmexp as library
from llmexp.__main__ import run as command
from llmexp.folders.find import find
from llmexp.hf import average as averaging
from llmexp.hf.reading import open_source
from tests.conftest import Result, train
from tests.tools import exact, weights
from tests.train.resumed import goes_on

DECAY, STEPS = 0.9, 12
SETTINGS = [
    "data=tokens", "data.val_ratio=0.1", "batch.real_batch_size=8", f"train.max_steps={STEPS}",
    "train.log_every=1", "train.eval_every=4", "checkpoint.every=1", "checkpoint.keep=null",
    "optimizer.lr=0.01",
]  # fmt: skip
EMA = [f"train.ema={DECAY}", "checkpoint.save_initial=true"]
# The scale grows until a window overflows: its update is skipped.
HALF = ["precision=fp16", "precision.init_scale=1e7", "precision.growth_interval=4"]
ROUNDING = {"fp64": 2.0**-53, "fp16": 2.0**-24}  # of weights, which are fp32 in fp16


@pytest.fixture(scope="module")
def settings(tokens) -> list[str]:
    return [*SETTINGS, f"data.train_files=[{tokens}]"]


@pytest.fixture(scope="module")
def double(runs, settings) -> Result:
    return runs(*settings, *EMA, "precision=fp64")


def recomputed(run: Result, rounding: float) -> int:
    """Compare the saved averages with those of the saved weights, in float64; return how many
    updates were skipped.

    One update is average + w x (weight - average): a rounding of the result and three of w x the
    difference, where w = 1 - decay = 0.1 and no number is above the largest, m: at most
    (1 + 3 x 0.1 x 2) u m, below 2 u m. Later updates shrink it.
    """
    average = {name: w.numpy() for name, w in weights(run, 0).items()}
    assert all(np.array_equal(weights(run, 0, "ema")[n].numpy(), average[n]) for n in average)
    skipped = 0
    for row in run.rows():
        step = row["step"]
        saved, before = (
            {n: t.numpy() for n, t in weights(run, at, "ema").items()} for at in (step, step - 1)
        )
        assert saved.keys() == average.keys()
        if row["skipped"]:
            skipped += 1
            assert all(np.array_equal(saved[n], before[n]) for n in saved)
            continue
        for name, new in weights(run, step).items():
            average[name] = DECAY * average[name] + (1 - DECAY) * new.numpy()
            largest = max(np.abs(average[name]).max(), np.abs(new.numpy()).max())
            most = step * 2 * rounding * largest
            assert np.abs(saved[name] - average[name]).max() <= most, (step, name)
        assert any(not np.array_equal(saved[n], before[n]) for n in saved)
    return skipped


def evaluated(run: Result, capsys) -> float:
    """The loss that `llmexp evaluate` finds for the newest average."""
    assert command(["evaluate", str(run.folder), "--weights", "ema", "--json"]) == 0
    return json.loads(capsys.readouterr().out)["sets"][0]["loss"]


def test_ema_equals_float64_and_leaves_training_as_it_is(double, settings, runs, capsys):
    assert recomputed(double, ROUNDING["fp64"]) == 0
    assert double.rows()[-1]["val/ema/loss"] == pytest.approx(evaluated(double, capsys), rel=1e-12)
    plain = exact(runs(*settings, "precision=fp64"))
    without = [{k: v for k, v in row.items() if "ema" not in k} for row in exact(double)]
    assert without == plain
    assert [row["step"] for row in double.rows() if "val/ema/loss" in row] == [4, 8, 12]
    assert "final val/ema/loss" in double.json("status.json")["summary"]


def test_a_skipped_update_leaves_it_and_a_resumed_run_has_the_same(settings, runs, tmp_path):
    run = runs(*settings, *EMA, *HALF)
    assert 0 < recomputed(run, ROUNDING["fp16"]) < STEPS
    cut = runs.copy(tmp_path / "cut", *settings, *EMA, *HALF, step=5)
    goes_on(cut, run)
    model = library.load(cut.folder).model(weights="ema")
    wanted = weights(run, STEPS, "ema")["token_embedding.weight"].float()
    assert torch.equal(model.head_weight, wanted)


@pytest.mark.parametrize("kind", [pytest.param("ddp", marks=pytest.mark.slow), "fsdp"])
def test_ranks_hold_parts_of_the_same_average(double, settings, runs, capsys, kind):
    """Evaluating the average leaves nothing of it gathered for the next step."""
    two = [f"parallelism={kind}", "parallelism.nproc_per_node=2", "precision=fp64"]
    run = runs(*settings, *EMA, *two)
    assert recomputed(run, ROUNDING["fp64"]) == 0
    row = run.rows()[-1]
    assert row["val/ema/loss"] == pytest.approx(evaluated(run, capsys), rel=1e-12)
    for key in ("train/loss", "val/loss", "val/ema/loss"):
        assert row[key] == pytest.approx(double.rows()[-1][key], rel=1e-9)


def test_mean_of_checkpoints_equals_float64_and_serves_as_weights(
    double, tmp_path, monkeypatch, capsys
):
    """Summed in order and divided once, as numpy does: not a bit differs. Nor where each part is of
    a file, and some rows are summed at a time."""
    folder = tmp_path / "mean"

    monkeypatch.chdir(tmp_path)

    def average(out: str, *arguments: str) -> tuple[int, str]:
        code = command(["average", *arguments, "--out", out])
        return code, "".join(capsys.readouterr())

    assert average("mean", str(double.folder), "--last", "5")[0] == 0
    sums = [weights(double, step) for step in range(STEPS - 4, STEPS + 1)]
    found = weights(Result(0, "", "", folder), STEPS)
    for name, tensor in found.items():
        expected = sum(one[name].numpy() for one in sums) / 5
        assert np.array_equal(tensor.numpy(), expected), name
    record = json.loads((folder / "average.json").read_text())
    assert [one["step"] for one in record["checkpoints"]] == [8, 9, 10, 11, 12]
    model = library.load(folder).model()
    assert torch.equal(model.head_weight, found["token_embedding.weight"])
    begun = open_source(str(folder)).read("token_embedding.weight", None)
    assert torch.equal(begun, model.head_weight)
    for going_on in (["resume", str(folder)], ["plan", f"fork.run={folder}"]):
        assert command(going_on) == 2
        assert "is an average of checkpoints" in capsys.readouterr().err
    assert command(["evaluate", str(folder)]) == 0
    assert f"\nmean of {record['mean_of']}\n" in capsys.readouterr().out
    assert find([tmp_path])[0] == []  # no run for compare and runs
    code, said = average("again", str(folder), str(double.folder))
    assert code == 2
    assert f"{folder}: is an average; name the checkpoints themselves: " in said
    assert average("ema", str(double.folder), "--last", "2", "--weights", "ema")[0] == 0
    assert averaging.facts_of(tmp_path / "ema")["mean_of"].startswith("the ema of ")
    code, said = average("again", "ema", str(double.folder))
    assert f"name the checkpoints themselves: {double.folder.name}@11" in said

    monkeypatch.setattr(averaging, "PART_BYTES", 5000)
    monkeypatch.setattr(averaging, "ELEMENTS", 100)
    names = [f"{double.folder}@{step}" for step in range(STEPS - 4, STEPS + 1)]
    library.average(*names, out=str(tmp_path / "parts"))
    parts = weights(Result(0, "", "", tmp_path / "parts"), STEPS)
    assert parts.keys() == found.keys()
    assert all(torch.equal(parts[name], found[name]) for name in parts)
    files = list((tmp_path / "parts" / "checkpoints" / "step_00000012").iterdir())
    assert len(files) > len(list((folder / "checkpoints" / "step_00000012").iterdir())) + 2


def test_averages_of_two_runs_need_a_folder_and_one_model(double, settings, tmp_path, capsys):
    """All else that cannot be averaged: tests/refusals/train.yaml."""
    other = str(train(tmp_path, "other", *settings, "train.max_steps=1", "model.d_ff=32").folder)
    before = sorted(tmp_path.rglob("*"))
    for more, why in (([], "name the folder"), (["--out", "mean"], "model.d_ff (24 and 32)")):
        assert command(["average", str(double.folder), other, *more]) == 2
        assert why in "".join(capsys.readouterr())
    assert sorted(tmp_path.rglob("*")) == before
