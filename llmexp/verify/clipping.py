"""Clip from the formulas, for the reference: whole gradients in float64.

The formulas of a feature's rules are in its file `verify`: `BY_RULE` and `OF_UPDATE`, by rule.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from llmexp import features


class Clipping:
    """Clip window after window, and keep the norms that limits follow."""

    def __init__(self, clip: Any, model: nn.Module) -> None:
        self.knobs = clip
        self.named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.head = getattr(model, "head_weight", None)
        self.before: list[float] = []  # norms of the windows before, and what they were clipped to
        self.after: list[float] = []
        self._clip = ({"norm": _by_norm} | features.merged("verify", "BY_RULE")).get(clip.kind)
        self._limit = features.merged("verify", "OF_UPDATE").get(clip.kind)

    def clip(self, error: float) -> tuple[float, float]:
        """Clip the gradients in place, and return their 2-norm before and after.

        `error`: relative, of norms that are clipped by.
        """
        before = self.norm(self.gradients, error)
        if self._clip is not None:
            self._clip(self, before, error)
        self.before.append(before)
        self.after.append(self.norm(self.gradients))
        return before, self.after[-1]

    @property
    def gradients(self) -> list[Tensor]:
        return [p.grad for p in self.named.values() if p.grad is not None]

    def norm(self, gradients: Sequence[Tensor], error: float = 0.0) -> float:
        squares = math.fsum(float(g.square().sum()) for g in gradients)
        return math.sqrt(squares) * (1 + error)

    def scale(self, gradients: Sequence[Tensor], limit: float | None, norm: float) -> None:
        """Scale gradients of this norm to a limit; None: there is none."""
        if limit is not None:
            for g in gradients:
                g.mul_(min(1.0, limit / (norm + 1e-6)))

    def limit_updates(self, optimizers: Sequence[Optimizer], exact: Sequence[Tensor]) -> None:
        """Take back what the rule does of updates, of parameters that were `exact`."""
        if self._limit is not None:
            self._limit(self, optimizers, dict(zip(self.named.values(), exact, strict=True)))


def _by_norm(at: Clipping, norm: float, error: float) -> None:
    at.scale(at.gradients, at.knobs.max_norm, norm)
