"""Hooks around the backward passes of a window: the gradient that they see is the window's, and is
what is applied."""

import numpy as np
import pytest
import torch
import yaml

from llmexp.data.order import sequence_index
from llmexp.data.sources.synthetic import synthetic
from tests.conftest import Result
from tests.tools import equal, weights

SETTINGS = [
    "data=synthetic", "data.n_tokens=3000", "batch.real_batch_size=8", "train.max_steps=2",
    "train.log_every=1", "train.eval_every=null", "checkpoint.every=null", "--allow=own",
]  # fmt: skip
DOUBLE = ["precision=fp64", "batch.gradient_accumulation_steps=2"]
TWO = [*DOUBLE, "parallelism.nproc_per_node=2"]
WAYS = {
    "whole": DOUBLE[:1],
    "accumulated": [*DOUBLE[:1], "batch.gradient_accumulation_steps=4"],
    "two ranks": [*TWO, "parallelism=ddp"],
    "two shards": [*TWO, "parallelism=fsdp"],
    "fp16": ["precision=fp16", "precision.init_scale=1024"],
}


def gradients(run: Result) -> list[torch.Tensor]:
    return [torch.load(run.folder.parent / f"gradient {step}.pt") for step in (1, 2)]


@pytest.mark.parametrize("way", WAYS)
def test_the_gradient_and_the_ids_are_those_of_the_window_however_it_is_cut(runs, way):
    """In fp16 to the precision of fp16: the loss scale of 1024 is not in it."""
    watched = [*SETTINGS, "clip.max_norm=0.01", "hooks=[own.hooks.look]"]
    run, whole = (runs(*watched, *WAYS[one]) for one in (way, "whole"))
    tolerance = 0.02 if way == "fp16" else 1e-10
    for mine, wanted, row in zip(*map(gradients, (run, whole)), run.rows(), strict=True):
        assert float((mine - wanted).norm() / wanted.norm()) < tolerance
        assert row["mine/norm"] == pytest.approx(row["grad_norm"], rel=1e-5)  # before clipping
        assert row["grad_norm_post_clip"] < row["grad_norm"]
        assert row["mine/before"] == 0  # the gradients of the window before are gone
    config = yaml.safe_load((run.folder / "config.yaml").read_text())
    stream = synthetic(
        pattern="markov", n_tokens=3000, n_ids=64, val_ratio=config["data"]["val_ratio"], seed=0,
        vocab_size=64,
    ).train  # fmt: skip
    index = sequence_index(config["train"]["seed"], np.arange(16), (len(stream) - 1) // 12, True)
    windows = torch.from_numpy(stream.gather(index * 12, 13)).view(2, 8, 13)
    for step, rows in enumerate(windows, 1):
        kept = sorted(run.folder.parent.glob(f"window {step} of *.pt"))
        inputs, targets = (torch.cat(some) for some in zip(*map(torch.load, kept), strict=True))
        assert torch.equal(inputs, rows[:, :-1])
        assert torch.equal(targets, rows[:, 1:])


def test_what_a_hook_makes_of_the_gradient_is_measured_and_applied(runs):
    plain = [*SETTINGS, "precision=fp64", "optimizer=sgd", "optimizer.momentum=0", "clip=none"]
    plain += ["train.max_steps=1"]
    halved = runs(*plain, "hooks=[own.hooks.halve]", "optimizer.lr=0.2")
    as_it_is = runs(*plain, "optimizer.lr=0.1")
    assert halved.rows()[0]["grad_norm"] == as_it_is.rows()[0]["grad_norm"] / 2
    assert equal(weights(halved, 1), weights(as_it_is, 1))
