"""Names end in their dimensions: b batch, t time (tokens), l layers with experts, e experts."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from llmexp import mesh
from llmexp.data.window import Window
from llmexp.features.moe.config import BY_LAYER
from llmexp.models.experts import experts_of
from llmexp.models.operands import IGNORE_INDEX
from llmexp.train.assembly.assemble import Parts
from llmexp.train.feature import Feature
from llmexp.train.step import Outcome, Setup

_MEANS = ("entropy", "balance_loss", "z_loss")  # over sequences, by their valid targets


def make(parts: Parts, setup: Setup) -> Feature:
    # a model of the user's own may call something else n_experts
    return Load(setup) if experts_of(setup.model) else Feature()


class Load(Feature):
    """Count the tokens of each expert in a window, over its micro-batches and ranks.

    They are those of all sequences with a valid target. With model.balance=bias each applied update
    moves the bias of an expert by model.balance_rate, up where its load was below the mean and down
    where it was above (Wang et al. 2024, arXiv 2408.15664, algorithm 1).
    """

    name = "moe"

    def __init__(self, setup: Setup) -> None:
        named = experts_of(setup.model)
        self._mesh, self._experts = setup.mesh, list[Any](named.values())
        self._blocks = [name.rpartition(".")[0] for name in named]
        self._n_experts = self._experts[0].routing.n_experts
        size = len(named), self._n_experts + len(_MEANS) + 1
        self._sums, self._last = torch.zeros(
            (2, *size), dtype=torch.float64, device=setup.mesh.device
        )
        self._by_layer: dict[str, Tensor] = {}
        self._row: dict[str, Any] = {}
        for one, last in zip(self._experts, self._last, strict=True):
            one.look, one.last = self._keep, last

    @torch.no_grad()
    def _keep(
        self, one: Any, share_bte: Tensor, load_be: Tensor, balance_b: Tensor, z_b: Tensor
    ) -> None:
        """Keep what a micro-batch brings; a forward pass that runs again brings the same."""
        counted_b1 = (self._targets_b > 0)[:, None]
        entropy_b = -torch.xlogy(share_bte, share_bte).sum(-1).mean(1)
        of_b = torch.stack((entropy_b, balance_b, z_b, torch.ones_like(z_b))).double()
        load_e = (load_be * counted_b1).sum(0).double()
        one.last.copy_(torch.cat((load_e, of_b @ self._targets_b)))

    def backward_start(self, window: Window) -> None:
        for sums in (self._sums, self._last):
            sums.zero_()

    def forward_start(self, targets_bt: Tensor) -> None:
        self._sums += self._last
        self._targets_b = (targets_bt != IGNORE_INDEX).sum(1).double()

    @torch.no_grad()
    def updated(self, window: Window, skip: Any) -> None:
        sums_ln = mesh.total_(self._mesh, self._sums + self._last)
        load_le, means_ln = sums_ln.tensor_split([self._n_experts], 1)
        total_l1 = load_le.sum(1, keepdim=True)
        below_le = (total_l1 - self._n_experts * load_le).sign()
        below_le = torch.where(torch.as_tensor(skip), 0.0, below_le)
        for one, below_e in zip(self._experts, below_le, strict=True):
            if (bias_e := one.router.balance_bias) is not None:
                bias_e.add_(below_e.to(bias_e.dtype), alpha=one.routing.balance_rate)
        share_le = load_le * self._n_experts / total_l1
        found = {"load_max": share_le.amax(1), "load_cv": share_le.std(1, correction=0)}
        found |= zip(_MEANS, (means_ln[:, :-1] / means_ln[:, -1:]).unbind(1), strict=True)
        dead_l = torch.where(total_l1[:, 0] > 0, (load_le == 0).sum(1).double(), math.nan)
        self._by_layer = found | {"dead": dead_l}

    def figures(self, targets: Any, scale: Tensor) -> dict[str, Any]:
        return {f"moe/{key}": getattr(self._by_layer[key], how)() for key, how in BY_LAYER.items()}

    def by_block(self) -> dict[str, dict[str, Tensor]]:
        return {
            f"moe/{key}": dict(zip(self._blocks, of_l, strict=True))
            for key, of_l in self._by_layer.items()
        }

    def finished(self, outcome: Outcome) -> None:
        found = {f"moe/{key}": outcome.more[f"moe/{key}"] for key in BY_LAYER}
        self._row = {name: value for name, value in found.items() if math.isfinite(value)}

    def row(self, window: Window) -> dict[str, Any]:
        return self._row
