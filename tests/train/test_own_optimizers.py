"""Optimizers and models of one's own, tried before a run begins: what a run could not go on with is
refused, what it would leave untrained is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmexp.__main__ import run
from tests.conftest import Result, llmexp
from tests.tools import exact

CODE = '''
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


class Momentum(torch.optim.Optimizer):
    """Momentum that keeps what it knows in one of several places."""

    def __init__(self, parameters, lr, kind="state"):
        super().__init__(parameters, {"lr": lr})
        self.kind, self.kept, self.count = kind, {}, 0
        for group in self.param_groups:
            group["count"] = 0

    def state_dict(self):
        return super().state_dict() | {"kept": self.kept, "count": self.count}

    @torch.no_grad()
    def step(self, closure=None):
        self.count += 1
        for group in self.param_groups:
            group["count"] += 1
            for p in group["params"]:
                if p.grad is None:
                    continue
                if self.kind == "attribute":
                    m = self.kept.setdefault(id(p), torch.zeros_like(p))
                elif self.kind == "by text":
                    m = self.state.setdefault("all", {}).setdefault(id(p), torch.zeros_like(p))
                else:
                    m = self.state[p].setdefault("m", torch.zeros_like(p))
                m.mul_(0.9).add_(p.grad)
                rate = group["lr"]
                if self.kind == "number":
                    rate /= self.count
                elif self.kind == "counter":
                    rate /= group["count"]
                if self.kind == "gradient":
                    p.grad = p.grad / 2
                if self.kind == "precise":
                    self.state[p]["m"] = m = m.to(torch.complex128)
                    m = m.real.to(p.dtype)
                if self.kind == "random":
                    m = m + 1e-3 * torch.randn(m.shape)
                p.sub_(rate * m)


def momentum(model, lr, kind):
    return Momentum(model.parameters(), lr, kind)


def faulty(model, lr, kind):
    given = list(model.parameters())
    if kind == "left out":
        given = given[:-1]
    elif kind == "twice in a group":
        given = [*given, given[0]]
    elif kind == "unknown":
        given = [*given, nn.Parameter(torch.zeros(3))]
    elif kind == "copied":
        given = [nn.Parameter(p.detach().clone()) for p in given]
    elif kind == "added":
        model.scale = nn.Parameter(torch.ones(1))
    elif kind == "frozen":
        given[0].requires_grad_(False)
    elif kind == "rate":
        lr = float("nan")
    elif kind == "no rate":
        return torch.optim.SGD([{"params": given, "initial_lr": None}], lr=lr)
    elif kind == "closure":
        return torch.optim.LBFGS(given, lr=lr)
    found = [torch.optim.SGD(given, lr=lr)]
    return found + [torch.optim.SGD(given[1:2], lr=lr)] * (kind == "twice in two")


def sized(model, lr):
    """One that asks for the true sizes of a large matrix."""
    assert max(p.shape[0] for p in model.parameters()) > 256
    return torch.optim.SGD(model.parameters(), lr=lr)


class Bigram(nn.Module):
    def __init__(self, vocab_size, width, kind=""):
        super().__init__()
        self.kind, self.embed = kind, nn.Embedding(vocab_size, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.head = nn.Linear(width, vocab_size)
        if kind in ("spare", "frozen"):
            self.spare = nn.Linear(2, 2).requires_grad_(kind == "spare")
        if kind == "bad weights":
            nn.init.constant_(self.layers[1].bias, float("inf"))

    def forward(self, tokens):
        x = self.embed(tokens)
        for number, layer in enumerate(self.layers):
            if self.kind == "dropped" and self.training and number:
                continue
            if self.kind == "never" and number:
                continue
            hidden = self.kind in ("hidden", "shown")
            x = checkpoint(layer, x, use_reentrant=self.kind == "hidden") if hidden else layer(x)
        logits = self.head(x)
        return logits * (float("nan") if self.kind == "bad logits" else 1)


class ByFeatures(nn.Module):
    """Whose forward pass uses more than its features, which the loss takes."""

    def __init__(self, vocab_size, width, kind=""):
        super().__init__()
        self.embed, self.head = nn.Embedding(vocab_size, width), nn.Linear(width, vocab_size, False)
        self.gate = nn.Parameter(torch.ones(width))

    @property
    def head_weight(self):
        return self.head.weight

    def features(self, tokens):
        return self.embed(tokens)

    def forward(self, tokens):
        return self.head(self.features(tokens) * self.gate)
'''
BASE = [
    "--config-dir=conf", "--allow=own_optimizers", "model=own", "data=synthetic",
    "data.n_tokens=3000", "batch.sequence_length=12", "batch.micro_batch_size=2", "tracker=none",
    "train.sample_tokens=0", "train.log_every=1", "metrics.picture=false", "precision=fp32",
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("own_optimizers")
    (made / "own_optimizers.py").write_text(CODE)
    for kind, text in {
        "optimizer/momentum": "_target_: own_optimizers.momentum\nlr: 0.01\nkind: state",
        "optimizer/faulty": "_target_: own_optimizers.faulty\nlr: 0.01\nkind: none",
        "optimizer/sized": "_target_: own_optimizers.sized\nlr: 0.01",
        "model/own": "_target_: own_optimizers.Bigram\nvocab_size: null\nwidth: 8\nkind: none",
    }.items():
        (made / f"conf/{kind}.yaml").parent.mkdir(parents=True, exist_ok=True)
        (made / f"conf/{kind}.yaml").write_text(text)
    return made


@pytest.fixture
def planned(folder, monkeypatch, capsys):
    """What `plan` prints and refuses, in the folder."""
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))

    def plan(*more: str) -> tuple[int, str, str]:
        code = run(["plan", *BASE, *more])
        out, err = capsys.readouterr()
        return code, " ".join(out.split()), err

    return plan


DDP = ["parallelism=ddp", "parallelism.nproc_per_node=2"]
OUTSIDE = "does not go on from a checkpoint as if it had not stopped"


@pytest.mark.parametrize(
    ("kind", "more", "says"),
    [
        ("state", [], ""),
        ("counter", [], ""),
        ("attribute", [], OUTSIDE),
        ("number", [], OUTSIDE),
        ("by text", [], "keeps a state that is of no parameter"),
        ("gradient", [], "puts other tensors in the place of the gradients"),
        ("precise", [], "keeps m as torch.complex128, which no checkpoint can hold"),
        ("random", [], ""),
        ("random", DDP, "draws random numbers, other ones on each rank"),
    ],
)
def test_a_state_that_a_checkpoint_does_not_hold_is_found(planned, kind, more, says):
    code, out, err = planned("optimizer=momentum", f"optimizer.kind={kind}", *more)
    assert code == (2 if says else 0), err
    if says:
        assert f"optimizer._target_=own_optimizers.momentum: {says}" in err
    else:
        assert "warning" not in out


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("twice in a group", "would update embed.weight more than once in a step"),
        ("twice in two", "would update layers.0.weight more than once in a step"),
        ("unknown", "holds 1 that are no parameters of the model"),
        ("copied", "holds 7 that are no parameters of the model"),
        ("added", "other parameters are trained than before its function was called: scale"),
        ("frozen", "other parameters are trained than before its function was called: embed"),
        ("rate", "the base rate `initial_lr` of its group 0 is nan"),
        ("no rate", "the base rate `initial_lr` of its group 0 is None"),
        ("closure", "the step of LBFGS needs `closure`, where a run calls it once a step, with"),
    ],
)
def test_what_an_optimizer_may_not_hold_is_refused_by_name(planned, folder, kind, says):
    code, _, err = planned("optimizer=faulty", f"optimizer.kind='{kind}'")
    assert code == 2
    assert f"optimizer: {says}" in err
    assert f"{folder / 'own_optimizers.py'}:" in err


def test_parameters_that_no_optimizer_has_are_named(planned):
    code, out, _ = planned("optimizer=faulty", "optimizer.kind='left out'")
    assert code == 0
    assert "own_optimizers.faulty leaves out 1 of the parameters" in out
    assert "as they are: head.bias" in out
    assert "warning" not in planned("optimizer=faulty")[1]


def test_one_that_cannot_be_tried_on_small_tensors_is_warned_of(planned):
    code, out, _ = planned("optimizer=sized")
    assert code == 0
    assert "own_optimizers.sized could not be tried on small tensors" in out


def test_what_steps_change_in_a_group_goes_on_in_a_resumed_run_and_in_a_fork(folder, tmp_path):
    own = ["optimizer=momentum", "optimizer.kind=counter", "schedule=constant"]
    own += ["schedule.warmup_steps=0", "checkpoint.every=3", "train.max_steps=6"]
    whole = llmexp("train", *BASE, *own, f"hydra.run.dir={tmp_path / 'whole'}", cwd=folder)
    assert whole.code == 0, whole.err
    rows = exact(Result(0, "", "", tmp_path / "whole"))
    stopped = llmexp(
        "train", *BASE, *own, "train.stop_step=3", f"hydra.run.dir={tmp_path / 'cut'}", cwd=folder
    )
    assert stopped.code == 75, stopped.err
    given = ["train.stop_step=null", "--allow=own_optimizers"]
    again = llmexp("resume", str(tmp_path / "cut"), *given, cwd=folder)
    assert again.code == 0, again.err
    losses = [row["train/loss"] for row in exact(Result(0, "", "", tmp_path / "cut"))]
    assert losses == [row["train/loss"] for row in rows]
    fork = llmexp(
        "train", f"fork.run={tmp_path / 'whole'}", "fork.step=3", "--allow=own_optimizers",
        f"hydra.run.dir={tmp_path / 'fork'}", cwd=folder,
    )  # fmt: skip
    assert fork.code == 0, fork.err
    assert [r["train/loss"] for r in exact(Result(0, "", "", tmp_path / "fork"))] == losses[3:]


@pytest.mark.parametrize(
    ("target", "kind", "named"),
    [
        ("Bigram", "spare", "spare.weight, spare.bias"),
        ("Bigram", "never", "layers.1.weight, layers.1.bias"),
        ("ByFeatures", "", "gate"),
        ("Bigram", "frozen", ""),  # nobody trains them
        ("Bigram", "dropped", ""),  # used in evaluation
        ("Bigram", "hidden", ""),  # beneath torch's older checkpoint, which hides them
        ("Bigram", "shown", ""),
    ],
)
def test_a_parameter_without_a_part_in_the_loss_is_named_in_the_plan(planned, target, kind, named):
    code, out, err = planned(f"model._target_=own_optimizers.{target}", f"model.kind='{kind}'")
    assert code == 0, err
    assert ("had no part in the logits of a trial" in out) == bool(named)
    assert named in out


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("bad weights", "its first weights are not finite: layers.1.bias"),
        ("bad logits", "gives values that are not finite (NaN)"),
    ],
)
def test_a_model_that_begins_with_values_that_are_not_finite_is_refused(planned, kind, says):
    code, _, err = planned(f"model.kind='{kind}'")
    assert code == 2
    assert says in err
