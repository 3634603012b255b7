"""What a model of the user's keeps beside its parameters: modes, buffers of any type, random
numbers; and parameters and blocks that only some ranks use."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from llmexp import mesh
from llmexp.compose.app import compose, hydra_app, typed_config
from llmexp.models.loss import looking
from llmexp.train.assembly.assemble import assemble
from llmexp.train.assembly.opening import open_run
from llmexp.train.assembly.parts import left_in_evaluation
from llmexp.train.evaluation import score_tasks, validate
from llmexp.train.sampling import sample
from llmexp.train.set_up import set_up
from llmexp.train.windows import read_ahead
from llmexp.update.precision import settings_kept
from tests.conftest import llmexp
from tests.tools import cut_after, exact

CODE = '''
import os
import random

import numpy as np
import torch
from torch import nn


class Base(nn.Module):
    def __init__(self, vocab_size, width):
        super().__init__()
        self.vocab_size = vocab_size
        self.embed, self.head = nn.Embedding(vocab_size, width), nn.Linear(width, vocab_size)


class Restless(Base):
    """Whatever a model may keep beside its parameters, so that each bit of it is in the loss.

    With `looked` its state also moves, and it also draws random numbers, where it is evaluated.
    """

    def __init__(self, vocab_size, width, looked):
        super().__init__(vocab_size, width)
        self.looked = looked
        self.drop, self.off, self.norm = nn.Dropout(0.2), nn.Dropout(0.9), nn.BatchNorm1d(width)
        self.still = nn.BatchNorm1d(width)
        self.off.eval()
        self.scale = nn.Parameter(torch.tensor([np.random.rand() + random.random()]))
        for name, start, kept in (
            ("count", torch.zeros((), dtype=torch.int64), True),
            ("flag", torch.zeros(3, dtype=torch.bool), True),
            ("turn", torch.ones(2, dtype=torch.complex64), True),
            ("wide", torch.ones(1, dtype=torch.complex128), True),
            ("mean", torch.zeros(width), False),
            ("short", torch.zeros(5, dtype=torch.uint16), False),
            ("cache", None, False),
        ):
            self.register_buffer(name, start, persistent=kept)

    def train(self, mode=True):
        super().train(mode)
        self.still.eval()
        return self

    @torch.no_grad()
    def move(self, tokens, h):
        self.count += tokens.sum()
        self.flag = ~self.flag  # another tensor in its place
        self.turn *= torch.polar(torch.tensor(1.0), tokens.float().mean()).to(self.turn.dtype)
        self.wide = self.wide * 1j
        self.mean.lerp_(h.mean((0, 1)).to(self.mean.dtype), 0.5)
        self.short = (self.short.int() + 1).to(torch.uint16)
        self.cache = tokens.new_ones(tokens.shape[1])

    def forward(self, tokens):
        h = self.off(self.drop(self.embed(tokens)))
        h = self.still(self.norm(h.mT)).mT
        if self.training or self.looked:
            self.move(tokens, h)
        kept = self.count % 97 + self.flag.sum() + self.turn.imag.sum() + self.wide.imag.sum()
        h = h + self.mean + (kept + self.short.int().sum()) / 50
        if self.looked:
            h = h + torch.rand(()) / 9 + np.random.rand() / 9 + random.random() / 9
        return self.head(h * self.scale)


class Experts(nn.Module):
    """A sequence goes to one of three experts by its first token, and to none of the fourth."""

    def __init__(self, width):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(4))

    def forward(self, h, tokens):
        new = torch.zeros_like(h)
        for number, expert in enumerate(self.experts):
            part = tokens[:, 0] % 3 == number
            if part.any():
                new = new.masked_scatter(part[:, None, None], expert(h[part]))
        return h + new.tanh()


class Mixture(Base):
    def __init__(self, vocab_size, width):
        super().__init__(vocab_size, width)
        self.blocks = nn.ModuleList(Experts(width) for _ in range(2))

    def forward(self, tokens):
        h = self.embed(tokens)
        for block in self.blocks:
            h = block(h, tokens)
        return self.head(h)


class Dropped(Base):
    """One of two ranks drops a block, from a pass on."""

    def __init__(self, vocab_size, width, since):
        super().__init__(vocab_size, width)
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.since, self.passes = since, 0

    def forward(self, tokens):
        h = self.embed(tokens)
        drops = self.training and self.passes >= self.since and os.environ.get("RANK") == "1"
        self.passes += 1
        for number, block in enumerate(self.blocks):
            h = h if drops and number == 1 else h + block(h)
        return self.head(h)
'''
FILES = {
    "mine.py": CODE,
    "conf/model/restless.yaml": "_target_: mine.Restless\nvocab_size: null\nwidth: 8\n"
    "looked: true\n",
    "conf/model/mixture.yaml": "_target_: mine.Mixture\nvocab_size: null\nwidth: 200\n",
    "conf/model/dropped.yaml": "_target_: mine.Dropped\nvocab_size: null\nwidth: 8\nsince: 0\n",
}
SMALL = [
    "--config-dir=conf", "batch.sequence_length=12", "tracker=none", "train.sample_tokens=0",
    "metrics.picture=false", "data=synthetic", "data.n_tokens=3000", "train.log_every=1",
]  # fmt: skip
BASE = ["--allow=mine", *SMALL]
TWO = "parallelism.nproc_per_node=2"


def written(folder: Path, files: dict[str, str]) -> Path:
    """A package of own parts, with the options that choose them."""
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


@pytest.fixture(scope="module")
def own(tmp_path_factory) -> Path:
    return written(tmp_path_factory.mktemp("own"), FILES)


def trained(own: Path, name: str, *overrides: str):
    done = llmexp("train", *BASE, *overrides, f"hydra.run.dir={name}", cwd=own)
    assert done.code == 0, done.err
    return done


def evaluated(own: Path, run: str) -> float:
    done = llmexp("evaluate", run, "--allow=mine", "--json", cwd=own)
    assert done.code == 0, done.err
    return json.loads(done.out)["sets"][0]["loss"]


RESTLESS = ["model=restless", "train.max_steps=5", "precision=fp64"]


@pytest.fixture(scope="module")
def unseen(own):
    """A run at which nobody looks before its end."""
    return trained(own, "unseen", *RESTLESS, "train.eval_every=null", "checkpoint.last=true")


@pytest.mark.parametrize(
    "looks",
    [
        ("train.eval_every=1", "train.ema=0.5", "train.tasks=[tiny_facts]", "train.tasks_every=2"),
        ("train.sample_every=1", "train.sample_tokens=3", "checkpoint.every=1"),
        ("metrics.layers_every=2", "metrics.spikes=true", "metrics.noise_scale_every=1"),
    ],
)
def test_a_run_does_not_depend_on_who_looks(own, unseen, looks):
    name = looks[0].partition("=")[0].replace(".", "_")
    seen = trained(own, name, *RESTLESS, *looks, "batch.sequence_length=64")
    whole = trained(own, f"{name}_not", *RESTLESS, "batch.sequence_length=64")
    keys = ("train/loss", "grad_norm", "step")
    rows = [[[row[key] for key in keys] for row in run.rows()] for run in (seen, whole)]
    assert rows[0] == rows[1]
    assert seen.rows()[-1]["val/loss"] == whole.rows()[-1]["val/loss"]


def test_evaluate_finds_the_loss_of_the_row(own, unseen):
    """Drawn numbers and moved buffers included; float64 sums in another order."""
    assert evaluated(own, "unseen") == pytest.approx(unseen.rows()[-1]["val/loss"], rel=1e-12)


def test_modules_stay_in_the_mode_that_their_code_chose(own, unseen):
    assert "model: off, still stay in evaluation, as its code says" in " ".join(unseen.out.split())
    assert "dropout 0.2 in training" in " ".join(unseen.out.split())


LAYOUTS = {"single": (), "ddp": (TWO,), "fsdp": (TWO,)}


@pytest.mark.parametrize("kind", LAYOUTS)
def test_a_resumed_run_has_the_buffers_of_an_unbroken_one(own, tmp_path, kind):
    """On several ranks those of rank 0, in the next step, in evaluations and in checkpoints."""
    run = trained(
        own, f"buffers_{kind}", "model=restless", "model.looked=false", "precision=fp64",
        "train.max_steps=4", "train.eval_every=2", "checkpoint.every=2", f"parallelism={kind}",
        "batch.gradient_accumulation_steps=2", *LAYOUTS[kind],
    )  # fmt: skip
    assert evaluated(own, run.folder.name) == pytest.approx(run.rows()[-1]["val/loss"], rel=1e-12)
    copy = cut_after(run, tmp_path, 2)
    again = llmexp("resume", str(copy), "--allow=mine", cwd=own)
    assert again.code == 0, again.err
    assert [json.loads(line) for line in (copy / "metrics.jsonl").open()][-1]["val/loss"]
    resumed = type(run)(0, "", "", copy)
    assert exact(resumed) == exact(run)


@pytest.fixture
def parts(own, monkeypatch):
    monkeypatch.chdir(own)
    monkeypatch.setenv("LLMEXP_ALLOW", "mine")
    monkeypatch.syspath_prepend(str(own))
    overrides = [o for o in BASE if not o.startswith("--")]
    overrides += [*RESTLESS, "batch.sequence_length=64", "train.tasks=[tiny_facts]"]
    with hydra_app("conf", overrides) as hydra:
        return assemble(typed_config(compose(hydra, overrides)[0]))


def random_states() -> list[str]:
    return [repr(f()) for f in (torch.get_rng_state, np.random.get_state, random.getstate)]


def state_of(model: nn.Module) -> dict[str, object]:
    found: dict[str, object] = {f"{n} mode": m.training for n, m in model.named_modules()}
    found |= {f"{n} hooks": len(m._forward_hooks) for n, m in model.named_modules()}
    named = dict([*model.named_parameters(), *model.named_buffers()])
    named.pop("cache", None)  # it goes by the length of the last tokens, and stays
    for name, t in named.items():
        shown = t if t.dtype != torch.uint16 else t.int()
        grad = None if t.grad is None else t.grad.tolist()
        found[name] = (str(t.dtype), shown.tolist(), grad, t.requires_grad)
    return found


@settings_kept()
def test_nothing_that_is_looked_at_changes(parts):
    """Each looker alone, at a model in the middle of training."""
    setup = set_up(parts, mesh.join("cpu", "single", 1, 1, 1))
    window = next(read_ahead(parts, setup.mesh, 0))
    setup.module(*window.micro_batches[0]).backward()
    assert not setup.model.still.training
    for look in (
        lambda: validate(parts, setup),
        lambda: score_tasks(parts, setup),
        lambda: sample(parts.tokenizer, setup.model, 64, "fp64", "a", 3),
        parts.new_model,
        lambda: assemble(parts.config),
    ):
        before = state_of(setup.model), random_states()
        look()
        after = state_of(setup.model), random_states()
        assert [k for k in before[0] if before[0][k] != after[0][k]] == []
        assert after[1] == before[1]


def test_the_first_weights_and_types_of_a_model_are_those_of_its_seed(parts):
    """Also where its code draws from numpy and Python; complex numbers stay complex."""
    one = state_of(parts.new_model())
    np.random.rand(), random.random()
    assert state_of(parts.new_model()) == one
    model = parts.new_model()
    assert (model.turn.dtype, model.wide.dtype) == (torch.complex64, torch.complex128)
    assert model.mean.dtype == torch.float64


def test_a_checkpoint_opens_with_all_buffers(own, unseen, parts):
    model = open_run(unseen.folder, 5).model
    fresh = parts.new_model()
    assert {n: b.dtype for n, b in model.named_buffers() if n != "cache"} == {
        n: b.dtype for n, b in fresh.named_buffers()
    }
    assert model.count > 0
    assert model.short.tolist() == [5] * 5
    assert model.wide.tolist() == [1j**5]
    assert "mean" not in model.state_dict()


def test_a_cache_that_grew_while_somebody_looked_stays():
    model = nn.Linear(1, 1)
    model.register_buffer("cache", torch.zeros(2))
    model.register_buffer("later", None)
    with looking(model):
        model.cache, model.later = torch.ones(3), torch.ones(1)
    assert (len(model.cache), len(model.later)) == (3, 1)


@pytest.mark.parametrize("micro", [1, 2])
def test_ranks_need_not_use_the_same_parameters(own, micro):
    """An expert without a sequence on a rank, and one that nobody uses: as on one rank."""
    rows = {}
    for kind, two in LAYOUTS.items():
        size = [f"batch.micro_batch_size={micro}", "batch.real_batch_size=4"]
        run = trained(
            own, f"experts_{kind}_{micro}", "model=mixture", "train.max_steps=4", "precision=fp64",
            "train.eval_every=1", f"parallelism={kind}", *size, *two,
        )  # fmt: skip
        rows[kind] = run.rows()
    for kind in ("ddp", "fsdp"):
        for key in ("train/loss", "grad_norm", "weight_norm", "val/loss"):
            found = [row[key] for row in rows[kind]]
            assert found == pytest.approx([row[key] for row in rows["single"]], rel=1e-11), key


@pytest.mark.parametrize("since", [0, 2])
def test_ranks_that_share_a_model_run_the_same_blocks(own, since):
    """A block that one of them drops ends the run in words, at once; replicas may."""
    shared = [*BASE, "model=dropped", f"model.since={since}", "train.max_steps=4", TWO]
    done = llmexp("train", *shared, "parallelism=fsdp", f"name=fsdp{since}", cwd=own)
    assert done.code == 3, done.err
    assert "the same blocks in the same order on all ranks" in done.err
    assert "Traceback" not in done.err
    trained(own, f"dropped_{since}", *shared[len(BASE) :], "parallelism=ddp")


def test_a_model_that_is_in_evaluation_as_a_whole_is_named_once():
    (said,) = left_in_evaluation(nn.Sequential(nn.Dropout(), nn.Linear(1, 1)).eval())
    assert said.startswith("model: all of it stays in evaluation, as its code says")
