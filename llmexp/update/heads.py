"""Limit the logits of attention by the weights of its queries and keys."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from llmexp import mesh
from llmexp.models.logits import attentions_of, watch_heads
from llmexp.models.operands import IGNORE_INDEX
from llmexp.settings.values import ConfigError, refuse
from llmexp.update.clip import on_ladder


class HeadLimit:
    """Scale queries and keys of heads whose largest logit of a window was above a limit.

    QK-Clip (Kimi K2, arXiv 2507.20534, algorithm 1): after an update each such head has the weights
    and biases of its queries and of its keys multiplied by sqrt(limit / largest). Where several
    query heads share the keys, these stay, and the queries are multiplied by limit / largest, as
    the paper does with the keys that its heads share.

    The largest logit is that of the forward pass of the window, before the update: over all its
    sequences with a valid target, and all ranks.
    """

    def __init__(
        self,
        joined: mesh.Mesh,
        model: nn.Module,
        limit: float,
        rows: int,
        piece_of: Callable[[Tensor], Any],
    ) -> None:
        self._mesh, self._limit, self._piece_of = joined, limit, piece_of
        self._attentions = attentions_of(model)
        ranks = 1 if joined.tensor is None else joined.tensor.size()
        self._counted_b = watch_heads(self._attentions, rows, ranks, joined.device)
        # now: FSDP shows whole parameters at times
        self._weights = [
            [[p for p in (m.weight, m.bias) if p is not None] for m in (a.q_proj, a.k_proj)]
            for a in self._attentions
        ]

    def begin(self) -> None:
        """Begin a window."""
        for attention in self._attentions:
            attention.largest_h.fill_(-math.inf)

    def count(self, targets_bt: Tensor) -> None:
        """Say which rows of the next micro-batch count: those with a valid target."""
        self._counted_b.copy_((targets_bt != IGNORE_INDEX).any(1))

    @torch.no_grad()
    def after(self, skip: Tensor | bool) -> tuple[Tensor, Tensor]:
        """Scale the heads, or none where `skip` is true: its update was not made.

        Return (the largest logit of all heads, the sum of `on_ladder` of each head's).
        """
        largest_lh = mesh.largest_by_head(
            self._mesh, torch.stack([a.largest_h for a in self._attentions])
        )
        above = largest_lh > self._limit
        factors_lh = torch.where(above, self._limit / largest_lh, 1.0)
        factors_lh = torch.where(torch.as_tensor(skip, device=above.device), 1.0, factors_lh)
        heads = zip(self._attentions, self._weights, factors_lh, strict=True)
        for attention, weights, factors_h in heads:
            self._scale(attention, weights, factors_h)
        return largest_lh.max(), on_ladder(largest_lh.clamp(min=0), self._limit).sum(0)

    def _scale(self, attention: Any, weights: list[list[Tensor]], factors_h: Tensor) -> None:
        queries, keys = weights
        shared = queries[0].shape[0] != keys[0].shape[0]
        rows = (factors_h if shared else factors_h.sqrt()).repeat_interleave(attention.head_dim)
        for weight in queries if shared else [*queries, *keys]:
            piece = self._piece_of(weight)
            first, size = piece.offset[0], piece.local.shape[0]
            own = rows[first : first + size].to(weight.dtype)
            piece.local.mul_(own.view(-1, *[1] * (weight.ndim - 1)))


def check_heads(model: nn.Module, limit: float) -> None:
    """Raise ConfigError for a model whose heads `HeadLimit` cannot scale."""
    attentions = attentions_of(model)
    if not attentions:
        text = "the model has no heads of attention that llmexp knows, as GPT2 and Llama have"
        raise refuse("clip.qk_limit", limit, f"{text}; leave it out")
    if any(getattr(one, "qk_norm", "none") != "none" for one in attentions):
        raise ConfigError(
            f"clip.qk_limit={limit}: model.qk_norm normalizes queries and keys, so that scaling "
            "their weights changes no logit; leave it out, or give model.qk_norm=none",
            "clip.qk_limit",
        )
