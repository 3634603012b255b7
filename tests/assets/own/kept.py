"""Models that keep more than parameters: modes, buffers of any type, random numbers, blocks that
only some ranks use."""

import os
import random

import numpy as np
import torch
from torch import nn

from .nets import Bigram


class Restless(Bigram):
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


class Mixture(Bigram):
    def __init__(self, vocab_size, width):
        super().__init__(vocab_size, width)
        self.blocks = nn.ModuleList(Experts(width) for _ in range(2))

    def forward(self, tokens):
        h = self.embed(tokens)
        for block in self.blocks:
            h = block(h, tokens)
        return self.head(h)


class Dropped(Bigram):
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


class Kept(Bigram):
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


class Grown(Bigram):
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


class Complex(Bigram):
    def __init__(self, vocab_size, width):
        super().__init__(vocab_size, width)
        self.turn = nn.Parameter(torch.ones(1, dtype=torch.complex128), requires_grad=False)

    def forward(self, tokens):
        return self.head(self.embed(tokens) * self.turn.real.float())
