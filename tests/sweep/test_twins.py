"""Twins: runs that differ in the rounding of their initial weights only."""

from pathlib import Path

import pytest
import torch
import yaml

from llmexp.folders import ledger
from llmexp.optim.twin import perturb
from llmexp.sweep.grid import leading
from tests.compare.synthetic import make_sweep, parent_in
from tests.conftest import TINY, llmexp, train
from tests.tools import weights

SETTINGS = [
    "data=synthetic", "data.n_tokens=5000", "batch.micro_batch_size=4",
    "batch.gradient_accumulation_steps=2", "train.max_steps=4", "model.dropout=0.1",
    "train.log_every=1", "train.eval_every=null", "checkpoint.every=2", "checkpoint.keep=null",
    "checkpoint.save_initial=true", "train.data_digest=true", "precision=fp64",
    "optimizer.lr=0.01", "train.twin=1",
]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_twin_is_one_unit_in_the_last_place_away(dtype):
    model = torch.nn.Sequential(torch.nn.Linear(40, 50), torch.nn.LayerNorm(50)).to(dtype)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    state = torch.get_rng_state()
    perturb(model, 7, 1)
    assert torch.equal(torch.get_rng_state(), state)
    for name, p in model.named_parameters():
        ends = torch.tensor([torch.inf, -torch.inf], dtype=dtype)
        up, down = (torch.nextafter(before[name], end) for end in ends)
        shares = [float((p == w).double().mean()) for w in (up, before[name], down)]
        assert sum(shares) == 1
        assert min(shares) > (0.3 if p.numel() > 1000 else 0.1), (name, shares)
    other = torch.nn.Sequential(torch.nn.Linear(40, 50), torch.nn.LayerNorm(50)).to(dtype)
    other.load_state_dict(before)
    perturb(other, 7, 2)
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


POINTS = [*TINY, "data=synthetic", "data.n_tokens=5000", "train.max_steps=4",
          "train.eval_every=null", "batch.micro_batch_size=2"]  # fmt: skip


def ledger_of(folder: Path) -> dict[str, tuple[str, int]]:
    return {p.label: (p.state, p.attempts) for p in ledger.read_ledger(folder).points}


def test_a_sweep_ends_with_twins_of_its_leading_setting(tmp_path):
    grid = [*POINTS, "optimizer.lr=1e-5,1e-2", "hydra.sweep.dir=s", "sweep.twins=2"]
    plan = llmexp("plan", "-m", *grid, cwd=tmp_path)
    assert "2 runs, then 2 twins of the leading setting: 4 runs in all" in plan.out
    done = llmexp("train", "-m", *grid, cwd=tmp_path)
    assert done.code == 0, done.err + done.out
    before = ledger_of(tmp_path / "s")
    assert list(before) == ["lr_1e-05", "lr_0.01", "lr_0.01+twin_1", "lr_0.01+twin_2"]
    assert set(before.values()) == {("finished", 1)}
    files = sorted((tmp_path / "s").glob("[0-9]-*/config.yaml"))
    read = [yaml.safe_load(path.read_text()) for path in files]
    assert [c["train"]["twin"] for c in read] == [0, 0, 1, 2]
    read[1]["train"]["twin"] = 1
    assert read[1] == read[2]
    # Twins that are done are not done again, whatever else is; where another setting leads, it gets
    # its own.
    assert llmexp("resume", "s", cwd=tmp_path).code == 0
    assert ledger_of(tmp_path / "s") == before
    wider = ["optimizer.lr=1e-5,2e-2", "sweep.twins=1", "sweep.resume=s"]
    done = llmexp("train", "-m", *POINTS, *wider, cwd=tmp_path)
    assert done.code == 0, done.err + done.out
    after = ledger_of(tmp_path / "s")
    assert list(after)[4:] == ["lr_0.02", "lr_0.02+twin_1"]
    assert {label: after[label] for label in before} == before


def test_the_setting_leads_that_the_answer_names_also_where_each_seed_has_a_trunk(tmp_path):
    """One run of the second setting has the lowest loss, but the first one has the lower mean."""
    points = {}
    for i, losses in enumerate(([0.1, 0.1], [0.0, 0.5])):
        for seed, offset in enumerate(losses, 1):
            rate, trunk = 1e-3 * (1 + i), f"trunk{seed}"
            parent = parent_in(trunk, step=10, tokens=10, setting="same")
            points[f"{i}{seed}"] = dict(
                offset=offset, seed=seed, optimizer__lr=rate, fork__run=trunk,
                facts={"parent": parent}, wobble=1e-4,
                point={"overrides": [f"optimizer.lr={rate}", f"fork.run={trunk}"]},
            )  # fmt: skip
    path = make_sweep(tmp_path / "s", points, ["optimizer.lr", "fork.run"])
    assert leading(ledger.read_ledger(path)).label == "01"
