"""Twins: runs that differ in the rounding of their initial weights only."""

from __future__ import annotations

import pytest
import torch

from llmexp import precision
from tests.conftest import TINY, llmexp, train
from tests.test_invariance import weights

SETTINGS = [
    "data=synthetic", "data.n_tokens=5000", "batch.micro_batch_size=4", "batch.gradient_accumulation_steps=2",
    "train.max_steps=4", "model.dropout=0.1", "train.log_every=1", "train.eval_every=null", "checkpoint.every=2",
    "checkpoint.keep=null", "checkpoint.save_initial=true", "train.data_digest=true", "precision=fp64",
    "optimizer.lr=0.01", "train.twin=1",
]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_twin_is_one_unit_in_the_last_place_away(dtype):
    model = torch.nn.Sequential(torch.nn.Linear(40, 50), torch.nn.LayerNorm(50)).to(dtype)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    state = torch.get_rng_state()
    precision.nudge(model, 7, 0)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    precision.nudge(model, 7, 1)
    assert torch.equal(torch.get_rng_state(), state)
    for name, p in model.named_parameters():
        up, down = (torch.nextafter(before[name], torch.tensor(s, dtype=dtype)) for s in (torch.inf, -torch.inf))
        shares = [float((p == w).double().mean()) for w in (up, before[name], down)]
        assert sum(shares) == 1
        assert min(shares) > (0.3 if p.numel() > 1000 else 0.1), (name, shares)
    other = torch.nn.Sequential(torch.nn.Linear(40, 50), torch.nn.LayerNorm(50)).to(dtype)
    other.load_state_dict(before)
    precision.nudge(other, 7, 2)
    assert not torch.equal(other[0].weight, model[0].weight)


def test_a_twin_is_the_same_on_any_layout_and_after_a_resume(tmp_path):
    first = train(tmp_path, "first", *SETTINGS, "train.twin=0")
    twin = train(tmp_path, "twin", *SETTINGS)
    sharded = train(tmp_path, "sharded", *SETTINGS, "batch.micro_batch_size=2", "parallelism=fsdp",
                    "parallelism.nproc_per_node=2")  # fmt: skip
    initial, moved, split = (weights(run, 0) for run in (first, twin, sharded))
    assert not all(torch.equal(initial[name], moved[name]) for name in initial)
    assert all(torch.equal(moved[name], split[name]) for name in moved)
    digests = [[row["data_digest"] for row in run.rows()] for run in (first, twin, sharded)]
    assert digests[0] == digests[1] == digests[2]
    losses = [[row["train/loss"] for row in run.rows()] for run in (first, twin)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-9)  # dropout drew the same
    ends = weights(first, 4), weights(twin, 4)
    assert not all(torch.equal(ends[0][name], ends[1][name]) for name in initial)

    cut = llmexp("train", *TINY, *SETTINGS, "train.stop_step=2", "hydra.run.dir=cut", cwd=tmp_path)
    assert cut.code == 75, cut.err
    assert llmexp("resume", "cut", cwd=tmp_path).code == 0
    assert all(torch.equal(w, weights(twin, 4)[name]) for name, w in weights(cut, 4).items())
