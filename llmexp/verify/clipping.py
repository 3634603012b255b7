"""The rules of clipping from their formulas, for the reference: whole gradients in float64."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from llmexp.settings.config import Clip
from llmexp.update.patterns import first_matches


def norm_of(gradients: Sequence[Tensor]) -> float:
    return math.sqrt(math.fsum(float(g.square().sum()) for g in gradients))


class Clipping:
    """Clip window after window, and keep the norms that moving limits follow."""

    def __init__(self, clip: Clip, model: nn.Module) -> None:
        self._clip = clip
        named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._parameters = list(named.values())
        self._head = getattr(model, "head_weight", None)
        patterns = [limit.match for limit in clip.limits] if clip.kind == "per_group" else []
        self._groups = first_matches(list(named), patterns, "clip.limits")
        self._before: list[float] = []  # norms of the windows before, and what they were clipped to
        self._after: list[float] = []

    def clip(self, error: float) -> tuple[float, float]:
        """Clip the gradients in place, and return their 2-norm before and after.

        `error`: relative, of norms that are clipped by.
        """
        clip, gradients = self._clip, self._gradients(self._parameters)
        before = norm_of(gradients) * (1 + error)
        if clip.kind == "value" and clip.max_value is not None:
            for g in gradients:
                g.clamp_(-clip.max_value, clip.max_value)
        elif clip.kind == "per_group":
            for number, limit in enumerate(clip.limits):
                pairs = zip(self._parameters, self._groups, strict=True)
                own = self._gradients([p for p, group in pairs if group == number])
                _scale(own, limit.max_norm, norm_of(own) * (1 + error))
        elif clip.kind == "adaptive":
            self._clip_units(error)
        else:
            _scale(gradients, self._limit(before), before)
        self._before.append(before)
        self._after.append(norm_of(gradients))
        return before, self._after[-1]

    def _gradients(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        return [p.grad for p in parameters if p.grad is not None]

    def _limit(self, norm: float) -> float | None:
        """Return the limit of this norm, by the norms of the windows before."""
        clip, number = self._clip, len(self._before)
        most = clip.max_norm if clip.kind in ("norm", "zscore", "quantile") else None
        bound = math.inf if most is None else most
        if clip.kind == "quantile" and number >= clip.warmup_steps:
            last = self._before[-clip.window :]
            return min(bound, float(np.quantile(last, clip.quantile)))
        if clip.kind != "zscore" or number < clip.warmup_steps:
            return most
        first, later = self._after[: clip.warmup_steps], self._after[clip.warmup_steps :]
        mean, variance = float(np.mean(first)), float(np.var(first))
        for after in later:
            mean = clip.decay * mean + (1 - clip.decay) * after
            variance = clip.decay * variance + (1 - clip.decay) * (after - mean) ** 2
        far = clip.z * (math.sqrt(variance) + 1e-6)
        return min(bound, mean + far**2 / (norm - mean)) if norm - mean > far else most

    def _clip_units(self, error: float) -> None:
        for p in self._parameters:
            if p is self._head or p.grad is None:
                continue
            rows, weights = p.grad.view(len(p) if p.ndim > 1 else 1, -1), p.detach().view_as(p.grad)
            limits = weights.reshape(rows.shape).norm(dim=1).clamp(min=1e-3) * self._clip.ratio
            norms = rows.norm(dim=1) * (1 + error)
            rows.mul_((limits / norms.clamp(min=1e-6)).clamp(max=1.0)[:, None])

    def limit_updates(self, optimizers: Sequence[Optimizer], exact: Sequence[Tensor]) -> None:
        """Take back what clip=update does of AdamW's updates, of parameters that were `exact`."""
        if self._clip.kind != "update":
            return
        old = {id(p): value for p, value in zip(self._parameters, exact, strict=True)}
        adamw: list[Any] = [o for o in optimizers if isinstance(o, torch.optim.AdamW)]
        for optimizer, group in [(o, g) for o in adamw for g in o.param_groups]:
            for p in group["params"]:
                moment = optimizer.state[p]["exp_avg_sq"]
                moment = moment / (1 - group["betas"][1] ** len(self._before))
                rms = (p.grad.square() / moment.clamp(min=group["eps"] ** 2)).mean().sqrt()
                share = 1 / max(1.0, float(rms) / self._clip.threshold)
                p.detach().copy_(old[id(p)] + share * (p.detach() - old[id(p)]))


def _scale(gradients: Sequence[Tensor], limit: float | None, norm: float) -> None:
    if limit is not None:
        for g in gradients:
            g.mul_(min(1.0, limit / (norm + 1e-6)))
