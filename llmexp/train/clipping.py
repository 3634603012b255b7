"""Clip a gradient by its norm, or not at all: the rules `norm` and `none`; others are features."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from llmexp import features, mesh
from llmexp.config.values import Plain
from llmexp.data.window import Window
from llmexp.optim import updating
from llmexp.train.feature import Feature

EPSILON = 1e-6  # what torch adds to a norm that it clips by
# norm after clipping, whether anything was clipped, a factor that is left to the update or None:
# numbers on a CPU, else 0-dim tensors
Clipped = tuple[Any, Any, Tensor | None]


class Rule(Feature):
    """Leave the gradient as it is: the rule `none`, which others derive from.

    A rule acts once per window, on gradients that are unscaled and reduced. It is made before a run
    begins, too, of a model without memory and no mesh, and raises ConfigError for what it does not
    go with.
    """

    name = "limit"  # of its state in checkpoints
    max_norm: float | None = None  # the limit of the norm, where it is the same at each step
    moving = False  # it is another one at each step
    outcome: Any = None  # the `Outcome` of the last step

    def __init__(
        self, clip: Any, joined: mesh.Mesh | None, model: nn.Module, optimizers: list[Optimizer]
    ) -> None:
        self.knobs, self.mesh = clip, cast(mesh.Mesh, joined)
        self.model, self.optimizers = model, optimizers

    @classmethod
    def too_late(cls, clip: Any, max_steps: int) -> str:
        """Return a warning, where the rule does nothing in a run that short, else an empty text."""
        return ""

    def clip(self, gradients: list[Tensor], norm: Tensor) -> Clipped:
        """Clip gradients of this norm in place."""
        return clip_norm(gradients, norm, None)

    def after_update(self, skip: Any, clipped: Any) -> Any:
        """Limit what the update has made, unless it was skipped; return whether it clipped."""
        return clipped

    def factor(self, outcome: Any) -> float | None:
        """Return the factor on the gradient of an applied update; None: there is no one factor."""
        return 1.0

    def finished(self, outcome: Any) -> None:
        self.outcome = outcome

    def row(self, window: Window) -> Plain:
        if self.outcome is None or self.outcome.skipped:
            return {}
        factor = self.factor(self.outcome)
        found = {} if factor is None else {"clip_coefficient": factor}
        return {"clip_fraction": float(self.outcome.clipped)} | found


class ByNorm(Rule):
    """Clip the gradient to a limit of its norm."""

    def __init__(self, clip: Any, *more: Any) -> None:
        super().__init__(clip, *more)
        self.max_norm = clip.max_norm

    def clip(self, gradients: list[Tensor], norm: Tensor) -> Clipped:
        by_update = updating.clips_in_update(self.optimizers, norm)
        return clip_norm(gradients, norm, self.max_norm, by_update)

    def factor(self, outcome: Any) -> float | None:
        limit = self.max_norm
        return 1.0 if limit is None else min(1.0, limit / (outcome.grad_norm + EPSILON))


def rule_of(config: Any) -> type[Rule]:
    """Return the rule that a config names; another one than these two is imported."""
    known: dict[str, type[Rule]] = {"none": Rule, "norm": ByNorm}
    for part in features.asked_for(config, "rule"):
        known |= part.RULES
    return known[config.clip.kind]


def clip_norm(
    gradients: Sequence[Tensor],
    norm: Tensor,
    max_norm: float | Tensor | None,
    by_update: bool = False,
) -> Clipped:
    """Clip in place by `norm`; with `by_update` that is left to the update.

    `gradients` may be split over the ranks; `norm` is that of them all. The factor is
    min(1, max_norm / (norm + 1e-6)) (Pascanu et al. 2013, with torch's epsilon). A limit of None is
    no limit.
    """
    if max_norm is None:
        return norm, torch.zeros((), dtype=torch.bool, device=norm.device), None
    factor = (max_norm / (norm + EPSILON)).clamp(max=1.0)
    if by_update:
        return norm * factor, factor < 1, factor
    held = [mesh.local_part(g) for g in gradients]
    if norm.device.type != "cpu":
        torch._foreach_mul_(held, factor)
        return norm * factor, factor < 1, None
    share = float(factor)
    if not (share < 1 and math.isfinite(norm)):  # its update is skipped, or the factor is 1
        return float(norm), False, None
    torch._foreach_mul_(held, share)
    return float(norm * factor), True, None
