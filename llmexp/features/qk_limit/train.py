from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from llmexp import mesh
from llmexp.checkpoint.slices import piece_of
from llmexp.config.sections import knobs_of
from llmexp.data.window import Window
from llmexp.features.qk_limit.config import Knobs
from llmexp.features.qk_limit.heads import attentions_of, keep_largest
from llmexp.models.operands import IGNORE_INDEX
from llmexp.train.assembly.assemble import Parts
from llmexp.train.limiting import Limiting, as_figures, on_ladder
from llmexp.train.step import Setup


def make(parts: Parts, setup: Setup) -> QkLimit:
    limit = knobs_of(parts.config, Knobs).qk_limit
    assert limit is not None
    return QkLimit(setup.mesh, setup.model, limit, parts.run.micro_batch_size)


class QkLimit(Limiting):
    """Scale queries and keys of heads whose largest logit of a window was above a limit.

    QK-Clip (Kimi K2, arXiv 2507.20534, algorithm 1): after an update each such head has the weights
    and biases of its queries and of its keys multiplied by sqrt(limit / largest). Where several
    query heads share the keys, these stay, and the queries are multiplied by limit / largest, as
    the paper does with the keys that its heads share.

    The largest logit is that of the forward pass of the window, before the update: over all its
    sequences with a valid target, and all ranks.
    """

    name = "qk_limit"

    def __init__(self, joined: mesh.Mesh, model: nn.Module, limit: float, rows: int) -> None:
        self._mesh, self._limit = joined, limit
        self.values, self.units = {"attention_logit_max": limit}, {"heads": limit}
        self._attentions = attentions_of(model)
        ranks = 1 if joined.tensor is None else joined.tensor.size()
        self._counted_b = torch.ones(rows, dtype=torch.bool, device=joined.device)
        for attention in self._attentions:
            heads = attention.q_proj.out_features // attention.head_dim // ranks
            dtype = torch.promote_types(attention.q_proj.weight.dtype, torch.float32)
            attention.largest_h = torch.zeros(heads, dtype=dtype, device=joined.device)
            attention.counted_b, attention.look = self._counted_b, keep_largest
        # now: FSDP shows whole parameters at times
        self._weights = [
            [[p for p in (m.weight, m.bias) if p is not None] for m in (a.q_proj, a.k_proj)]
            for a in self._attentions
        ]

    def backward_start(self, window: Window) -> None:
        for attention in self._attentions:
            attention.largest_h.fill_(-math.inf)

    def forward_start(self, targets_bt: Tensor) -> None:
        """Say which rows of the micro-batch count: those with a valid target."""
        self._counted_b.copy_((targets_bt != IGNORE_INDEX).any(1))

    @torch.no_grad()
    def updated(self, window: Window, skip: Tensor | bool) -> None:
        """Scale the heads, or none where `skip` is true."""
        largest_lh = mesh.largest_by_head(
            self._mesh, torch.stack([a.largest_h for a in self._attentions])
        )
        above = largest_lh > self._limit
        factors_lh = torch.where(above, self._limit / largest_lh, 1.0)
        factors_lh = torch.where(torch.as_tensor(skip, device=above.device), 1.0, factors_lh)
        heads = zip(self._attentions, self._weights, factors_lh, strict=True)
        for attention, weights, factors_h in heads:
            self._scale(attention, weights, factors_h)
        counted = on_ladder(largest_lh.clamp(min=0), self._limit).sum(0)
        self.found = {"attention_logit_max": largest_lh.max(), **as_figures("heads", counted)}

    def _scale(self, attention: Any, weights: list[list[Tensor]], factors_h: Tensor) -> None:
        queries, keys = weights
        shared = queries[0].shape[0] != keys[0].shape[0]
        rows = (factors_h if shared else factors_h.sqrt()).repeat_interleave(attention.head_dim)
        for weight in queries if shared else [*queries, *keys]:
            piece = piece_of(weight)
            first, size = piece.offset[0], piece.local.shape[0]
            own = rows[first : first + size].to(weight.dtype)
            piece.local.mul_(own.view(-1, *[1] * (weight.ndim - 1)))
