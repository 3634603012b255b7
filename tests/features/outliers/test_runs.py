"""Measuring changes nothing, survives a resume, and an outlier is skipped as any skipped
update is."""

import numpy as np
import pytest

from tests.conftest import Result, train
from tests.tools import cut_after, equal, exact, weights
from tests.train.resumed import goes_on

SPIKES = (22, 27)  # steps whose sequences hold ids that the model has learnt never to expect
COMMON = [
    "data=tokens", "data.shuffle=false", "data.val_ratio=0", "train.log_every=1",
    "batch.real_batch_size=8", "optimizer.lr=0.01", "checkpoint.keep=null", "precision=fp32",
]  # fmt: skip
OFF = ["metrics.noise_scale_every=null", "metrics.outlier_sigma=null"]


def learnt(steps: int) -> np.ndarray:
    """Ids of steps of 8 sequences of 12 tokens."""
    count = steps * 8 * 12 + 1
    return np.arange(count) * 5 % 20 + np.random.default_rng(0).integers(0, 2, count)


@pytest.fixture(scope="module")
def spiked(tmp_path_factory) -> list[str]:
    ids = learnt(30)
    for step in SPIKES:
        ids[(step - 1) * 96 : step * 96] += 280
    path = tmp_path_factory.mktemp("spiked") / "train.npy"
    np.save(path, ids.astype(np.uint16))
    more = ["train.max_steps=30", "metrics.noise_scale_every=3", "model.dropout=0.1"]
    return [*COMMON, f"data.train_files=[{path}]", *more]


def without(rows: list[dict]) -> list[dict]:
    return [
        {k: v for k, v in row.items() if "noise" not in k and "outlier" not in k} for row in rows
    ]


def test_spikes_are_flagged_the_same_after_a_resume_and_measuring_changes_nothing(spiked, tmp_path):
    two = "batch.gradient_accumulation_steps=2"
    whole = train(
        tmp_path, "whole", *spiked, two, "metrics.outlier_window=12", "checkpoint.every=20",
        "metrics.outlier_sigma=4",  # the first one is in the window of the second
    )  # fmt: skip
    rows = whole.rows()
    assert [r["outlier_steps"] for r in rows] == [sum(s <= r["step"] for s in SPIKES) for r in rows]
    assert not any(r["skipped"] for r in rows)
    for step in SPIKES:
        assert f"step {step} is an outlier: loss" in whole.out
    assert whole.out.count("is an outlier") == len(SPIKES)
    status = whole.json("status.json")
    assert status["summary"]["outlier_steps"] == len(SPIKES)
    share = sum(r["clip_fraction"] for r in rows) / 30
    assert status["summary"]["clip_fraction"] == status["clip"]["share"] == share
    (known,) = [row for row in status["clip"]["table"] if row["limit"] == 1.0]
    assert known["share"] == share
    for row in rows:  # a row each step: the mean is that step's own
        wanted = min(1, 1 / (row["grad_norm"] + 1e-6))
        assert row["clip_coefficient"] == pytest.approx(wanted, rel=1e-12)
    assert status["noise"]["measurements"] == 10
    assert "real_batch_size 8" in status["noise"]["verdict"]
    assert "noise scale" in whole.out
    assert "steps clipped" in whole.out

    resumed = goes_on(Result(0, "", "", cut_after(whole, tmp_path, 20)), whole)
    for key in ("clip", "noise"):
        assert resumed.json("status.json")[key] == status[key]

    off = train(tmp_path, "off", *spiked, two, *OFF)
    assert without(exact(whole)) == exact(off)
    assert equal(weights(whole, 30), weights(off, 30))
    found = off.json("status.json")
    assert not {k for k in found["summary"] if "noise" in k or "outlier" in k}
    assert "noise" not in found


def test_two_ranks_skip_the_outliers_and_measuring_changes_nothing(spiked, tmp_path):
    """With one micro-batch a rank, where the small gradients are seen on their way to the
    reduction."""
    two = ["parallelism=ddp", "parallelism.nproc_per_node=2", "batch.gradient_accumulation_steps=1"]
    on = train(
        tmp_path, "on", *spiked, *two, "train.max_steps=23", "metrics.outlier_window=12",
        "metrics.skip_outliers=true", "checkpoint.every=1",
    )  # fmt: skip
    off = train(tmp_path, "off", *spiked, *two, "train.max_steps=23", *OFF)
    first = SPIKES[0]
    assert without(exact(on))[: first - 1] == exact(off)[: first - 1]
    assert [r["step"] for r in on.rows() if r["skipped"]] == [first]
    assert f"step {first} is an outlier: loss" in on.out
    assert "its update was skipped" in on.out
    skipped, after = on.rows()[first - 1], on.rows()[first]
    assert skipped["train/loss"] == off.rows()[first - 1]["train/loss"]
    assert "grad_norm" not in skipped
    assert (skipped["skipped_steps"], after["lr"]) == (1, skipped["lr"])
    for kind in ("model", "optimizer"):
        before, at, then = (weights(on, step, kind) for step in (first - 1, first, first + 1))
        assert equal(before, at)
        assert not equal(at, then)
    assert on.json("status.json")["noise"]["measurements"] == 7
    assert "noise_scale" not in off.rows()[-1]


def test_a_new_level_of_the_data_is_trained_on_after_four_steps(tmp_path):
    """A run resumed between the skipped ones is the same run."""
    ids = learnt(60)
    ids[50 * 96 :] += 280
    np.save(tmp_path / "train.npy", ids.astype(np.uint16))
    run = train(
        tmp_path, "jump", *COMMON, f"data.train_files=[{tmp_path / 'train.npy'}]",
        "train.max_steps=60", "checkpoint.every=26", "metrics.outlier_window=16",
        "metrics.skip_outliers=true", "train.max_consecutive_skips=0",
    )  # fmt: skip
    assert [row["step"] for row in run.rows() if row["skipped"]] == [51, 52, 53, 54]
    assert run.json("status.json")["summary"]["outlier_steps"] == 4
    assert "above" in run.out
    goes_on(Result(0, "", "", cut_after(run, tmp_path, 52)), run)
