"""Experts, a loop over tokens in float64, as the papers have them: DeepSeek-V3 (arXiv 2412.19437,
equations 12 to 20), loss-free balancing (arXiv 2408.15664, algorithm 1), ST-MoE (arXiv 2202.08906,
equation 5). It shares no code with llmexp but the model around the experts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Loop(nn.Module):
    """Experts by loops over sequences, tokens and experts, on the same parameters."""

    def __init__(self, of: Any, router: str, per_token: int, norm_topk: bool) -> None:
        super().__init__()
        self.router, self.gate_proj = of.router, of.gate_proj
        self.up_proj, self.down_proj, self.shared = of.up_proj, of.down_proj, of.shared
        self.kind, self.k, self.norm = router, per_token, norm_topk
        self.losses: list[tuple[Tensor, Tensor]] = []  # of each sequence: balance, z
        self.loads: list[list[int]] = []  # of each sequence: tokens of each expert
        self.entropies: list[float] = []

    def forward(self, x_btd: Tensor) -> Tensor:
        return torch.stack([self.sequence(x_td) for x_td in x_btd])

    def sequence(self, x_td: Tensor) -> Tensor:
        experts = len(self.router.weight)
        load, shares, squares, out = [0] * experts, [0.0] * experts, [], []
        entropy = 0.0
        for x_d in x_td:
            logits = self.router.weight @ x_d
            if self.router.bias is not None:
                logits = logits + self.router.bias
            if self.kind == "sigmoid":
                scores = [1 / (1 + (-z).exp()) for z in logits]
            else:
                total = sum(z.exp() for z in logits)
                scores = [z.exp() / total for z in logits]
            bias = self.router.balance_bias
            bias = [0.0] * experts if bias is None else bias.tolist()
            order = sorted(range(experts), key=lambda e: (-(scores[e].item() + bias[e]), e))
            chosen = order[: self.k]
            norm = sum(scores[e] for e in chosen) if self.norm else 1.0
            y_d = 0.0 if self.shared is None else self.shared(x_d)
            for e in chosen:
                gate, up = self.gate_proj.weight[e] @ x_d, self.up_proj.weight[e] @ x_d
                hidden = gate / (1 + (-gate).exp()) * up
                y_d = y_d + scores[e] / norm * (self.down_proj.weight[e] @ hidden)
                load[e] += 1
            whole = sum(scores)
            shares = [share + score / whole for share, score in zip(shares, scores, strict=True)]
            entropy -= sum((s / whole).item() * math.log((s / whole).item()) for s in scores)
            squares.append(sum(z.exp() for z in logits).log() ** 2)
            out.append(y_d)
        t = len(x_td)
        balance = sum(load[e] * experts / (self.k * t) * (shares[e] / t) for e in range(experts))
        self.losses.append((balance, sum(squares) / t))
        self.loads.append(load)
        self.entropies.append(entropy / t)
        return torch.stack(out)


def loops_in(model: Any, **how: Any) -> list[Loop]:
    """Put loops in place of the experts of a model; return them."""
    found = []
    for block in model.blocks:
        if hasattr(block.mlp, "router"):
            block.mlp = Loop(block.mlp, **how)
            found.append(block.mlp)
    return found


def window_loss(
    model: nn.Module,
    loops: Sequence[Loop],
    tokens: Tensor,
    targets: Tensor,
    alpha: float,
    z_factor: float,
) -> tuple[Tensor, float]:
    """What a step's gradient is that of, and the mean cross-entropy alone."""
    for loop in loops:
        loop.losses, loop.loads, loop.entropies = [], [], []
    logits = model(tokens)
    nll = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    counts = (targets != -100).sum(1).tolist()
    added: Any = 0.0
    for loop in loops:
        for count, (balance, z) in zip(counts, loop.losses, strict=True):
            added = added + count * (alpha * balance + z_factor * z)
    return (nll + added) / sum(counts), float(nll.detach()) / sum(counts)


def moved(bias: Tensor, loads: Sequence[Sequence[int]], counts: Sequence[int], rate: float) -> None:
    """Move a bias by the loads of the sequences with a valid target."""
    own = [load for load, count in zip(loads, counts, strict=True) if count]
    total = [sum(column) for column in zip(*own, strict=True)]
    mean = sum(total) / len(total)
    for e, load in enumerate(total):
        bias[e] += rate * ((mean > load) - (mean < load))
