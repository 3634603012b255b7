"""Buffers of a model of the user's, and parameters that no checkpoint can hold: in resumed runs and
forks, under other names, where blocks run again, and where they differ between ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from llmexp.checkpoint import loading, saving
from llmexp.train.assembly.opening import open_run
from tests.conftest import llmexp
from tests.tools import cut_after, exact
from tests.train.test_own_state import SMALL, TWO, written

CODE = '''
import os

import torch
from torch import nn


class Base(nn.Module):
    def __init__(self, vocab_size, width):
        super().__init__()
        self.vocab_size = vocab_size
        self.embed, self.head = nn.Embedding(vocab_size, width), nn.Linear(width, vocab_size)


class Counts(nn.Module):
    """A block that counts its passes, in a buffer that its output depends on."""

    def __init__(self, width, shared):
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.register_buffer("count", torch.ones(1))
        self.register_buffer("shared", shared, persistent=False)

    def forward(self, h):
        out = h + torch.tanh(self.linear(h)) * self.count * self.shared.clone()
        if self.training:
            self.count = self.count + 1
            self.shared.add_(1)
        return out


class Kept(Base):
    """Blocks that share a buffer, which the model also knows by another name; a table."""

    def __init__(self, vocab_size, width, theta):
        super().__init__(vocab_size, width)
        shared = torch.ones(1)
        self.blocks = nn.ModuleList(Counts(width, shared) for _ in range(2))
        self.register_buffer("freq", torch.full((width,), float(theta)), persistent=False)
        self.register_buffer("steps", torch.zeros((), dtype=torch.uint16))
        self.x = nn.Buffer(torch.zeros(1), persistent=False)
        self.original_x = self.x

    def forward(self, tokens):
        h = self.embed(tokens) + self.freq.log() + self.original_x
        for block in self.blocks:
            h = block(h)
        if self.training:
            self.x.add_(0.5)
            self.steps = (self.steps.int() + 1).to(torch.uint16)
        return self.head(h)


class Grown(Base):
    """A cache whose shape goes by the rank and the pass, and one that only rank 1 has."""

    def __init__(self, vocab_size, width, old):
        super().__init__(vocab_size, width)
        self.register_buffer("cache", torch.zeros(2), persistent=False)
        self.register_buffer("own", None, persistent=False)
        self.register_buffer("mean", torch.zeros(width))
        from torch.distributed.fsdp import FSDPModule

        if old and hasattr(FSDPModule, "set_reduce_scatter_unused_params"):
            del FSDPModule.set_reduce_scatter_unused_params

    def forward(self, tokens):
        h = self.embed(tokens)
        if self.training:
            rank = int(os.environ.get("RANK", 0))
            self.cache = torch.zeros(3 + rank)
            self.own = torch.ones(1) if rank else None
            self.mean.lerp_(h.detach().mean((0, 1)), 0.5)
        return self.head(h + self.mean)


class Complex(Base):
    def __init__(self, vocab_size, width):
        super().__init__(vocab_size, width)
        self.turn = nn.Parameter(torch.ones(1, dtype=torch.complex128), requires_grad=False)

    def forward(self, tokens):
        return self.head(self.embed(tokens) * self.turn.real.float())
'''
FILES = {
    "buffered.py": CODE,
    "conf/model/kept.yaml": "_target_: buffered.Kept\nvocab_size: null\nwidth: 8\ntheta: 2\n",
    "conf/model/grown.yaml": "_target_: buffered.Grown\nvocab_size: null\nwidth: 8\nold: false\n",
    "conf/model/complex.yaml": "_target_: buffered.Complex\nvocab_size: null\nwidth: 8\n",
}
BASE = ["--allow=buffered", *SMALL]
KEPT = ["model=kept", "train.max_steps=4", "precision=fp32", "checkpoint.every=2"]


@pytest.fixture(scope="module")
def own(tmp_path_factory) -> Path:
    return written(tmp_path_factory.mktemp("own"), FILES)


def trained(own: Path, name: str, *overrides: str):
    done = llmexp("train", *BASE, *overrides, f"hydra.run.dir={name}", cwd=own)
    assert done.code == 0, done.err
    return done


def opened(own: Path, run: Path, monkeypatch) -> nn.Module:
    monkeypatch.chdir(own)
    monkeypatch.setenv("LLMEXP_ALLOW", "buffered")
    monkeypatch.syspath_prepend(str(own))
    return open_run(run, None).model


@pytest.fixture(scope="module")
def kept(own):
    return trained(own, "kept", *KEPT)


@pytest.mark.parametrize("kind", ["full", "selective"])
def test_a_block_that_runs_again_moves_its_buffers_once(own, kept, monkeypatch, kind):
    again = trained(own, f"kept_{kind}", *KEPT, f"parallelism.activation_checkpointing={kind}")
    assert exact(again) == exact(kept)
    two = [opened(own, run.folder, monkeypatch) for run in (kept, again)]
    assert two[0].blocks[0].count > 4
    assert all(map(torch.equal, two[0].buffers(), two[1].buffers()))


def test_other_names_of_a_buffer_are_restored_too(own, kept, tmp_path, monkeypatch):
    copy = cut_after(kept, tmp_path, 2)
    again = llmexp("resume", str(copy), "--allow=buffered", cwd=own)
    assert again.code == 0, again.err
    assert exact(type(kept)(0, "", "", copy)) == exact(kept)
    model = opened(own, kept.folder, monkeypatch)
    assert model.original_x is model.x
    assert model.x > 1
    assert model.blocks[0].shared is model.blocks[1].shared
    assert "steps" in model.state_dict()


def test_names_that_parted_stay_apart(tmp_path):
    """And names of one tensor have one again, though each was another at first."""
    models = []
    for _ in range(2):
        model = nn.ModuleDict({name: nn.Linear(1, 1) for name in "abcd"})
        shared = torch.zeros(1)
        for name in "abcd":
            start = shared if name in "ab" else torch.zeros(1)
            model[name].register_buffer("x", start, persistent=False)
        models.append(model)
    saved, model = models
    saved["b"].x = torch.ones(1)
    saved["c"].x = saved["d"].x = torch.full((2,), 2.0)
    pieces = saving.snapshot(saved, [], 0, 1, False)
    saving.write_pieces(tmp_path, 1, pieces)
    path = saving.commit_checkpoint(tmp_path, 1, pieces, {}, {}, None)
    loading.restore_model(loading.read_checkpoint(path), model)
    assert [model[name].x.tolist() for name in "abcd"] == [[0], [1], [2, 2], [2, 2]]
    assert model["c"].x is model["d"].x


@pytest.mark.parametrize("theta", [2, 99])
def test_a_fork_with_another_model_section_computes_its_own_buffers(own, kept, monkeypatch, theta):
    given = [*KEPT, "fork.run=kept", "fork.step=2", f"model.theta={theta}"]
    fork = trained(own, f"fork_{theta}", *given)
    model = opened(own, fork.folder, monkeypatch)
    assert model.freq.tolist() == [theta] * 8
    assert model.steps.int() == opened(own, kept.folder, monkeypatch).steps.int()
    assert (model.x > 1) == (theta == 2)


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_a_cache_that_differs_between_ranks_is_not_shared(own, kind):
    run = trained(
        own, f"grown_{kind}", "model=grown", "train.max_steps=3", f"parallelism={kind}", TWO
    )
    assert [row["step"] for row in run.rows()] == [1, 2, 3]


def test_torch_that_mixes_gradients_of_unused_parameters_is_refused(own):
    given = [*BASE, "model=grown", "model.old=true", "train.max_steps=2", TWO, "parallelism=fsdp"]
    done = llmexp("train", *given, "hydra.run.dir=old", cwd=own)
    assert done.code == 2, done.err
    assert "install torch 2.13" in done.err
    assert "Traceback" not in done.err


def test_a_parameter_that_no_checkpoint_holds_is_refused(own):
    done = llmexp("train", *BASE, "model=complex", "hydra.run.dir=complex", cwd=own)
    assert done.code == 2, done.err
    assert "no checkpoint can hold its parameter turn, of type torch.complex128" in done.err
    assert not (own / "complex").exists()
