"""Optimizers of a user's own, most of which a run could not go on with, and models that leave
parameters untrained."""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from .nets import Bigram


class Momentum(torch.optim.Optimizer):
    """Keep momentum, and what else it knows, in one of several places."""

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
            counts = {"number": self.count, "counter": group["count"]}
            for p in group["params"]:
                if p.grad is None:
                    continue
                zero = torch.zeros_like(p)
                if self.kind == "attribute":
                    m = self.kept.setdefault(id(p), zero)
                elif self.kind == "by text":
                    m = self.state.setdefault("all", {}).setdefault(id(p), zero)
                else:
                    m = self.state[p].setdefault("m", zero)
                m.mul_(0.9).add_(p.grad)
                if self.kind == "gradient":
                    p.grad = p.grad / 2
                if self.kind == "precise":
                    self.state[p]["m"] = m = m.to(torch.complex128)
                    m = m.real.to(p.dtype)
                if self.kind == "random":
                    m = m + 1e-3 * torch.randn(m.shape)
                p.sub_(group["lr"] / counts.get(self.kind, 1) * m)


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
    """Ask for the true sizes of a large matrix."""
    assert max(p.shape[0] for p in model.parameters()) > 256
    return torch.optim.SGD(model.parameters(), lr=lr)


class Layered(Bigram):
    def __init__(self, vocab_size, width, kind=""):
        super().__init__(vocab_size, width)
        self.kind = kind
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        if kind in ("spare", "frozen"):
            self.spare = nn.Linear(2, 2).requires_grad_(kind == "spare")
        if kind == "bad weights":
            nn.init.constant_(self.layers[1].bias, float("inf"))

    def forward(self, tokens):
        x = self.embed(tokens)
        for number, layer in enumerate(self.layers):
            if number and (self.kind == "never" or (self.kind == "dropped" and self.training)):
                continue
            hidden = self.kind in ("hidden", "shown")
            x = checkpoint(layer, x, use_reentrant=self.kind == "hidden") if hidden else layer(x)
        logits = self.head(x)
        return logits * (float("nan") if self.kind == "bad logits" else 1)


class ByFeatures(Bigram):
    """Use more in the forward pass than its features, which the loss takes."""

    def __init__(self, vocab_size, width, kind=""):
        super().__init__(vocab_size, width)
        self.head = nn.Linear(width, vocab_size, False)
        self.gate = nn.Parameter(torch.ones(width))

    @property
    def head_weight(self):
        return self.head.weight

    def hidden(self, tokens):
        return self.embed(tokens)

    def forward(self, tokens):
        return self.head(self.hidden(tokens) * self.gate)
