"""Let a limit move: begin it after some updates, and keep what it follows in checkpoints."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from llmexp.optim import updating
from llmexp.train.clipping import Clipped, clip_norm
from llmexp.train.feature import starting
from llmexp.train.limiting import LimitingRule


class Moving(LimitingRule):
    """Clip by a limit of the norm from the applied updates before the step.

    For the first `warmup_steps` updates, and beyond them as an upper bound, it is `max_norm`; None:
    no limit.
    """

    moving = True
    kept = ""  # the knob that says how many norms are

    def __init__(self, clip: Any, *more: Any) -> None:
        super().__init__(clip, *more)
        self.values, self.updates = {"clip_limit": None}, 0
        self.norms: deque[float] = deque(maxlen=getattr(clip, self.kept))
        self.mean: float | None = None
        self.variance = 0.0

    def limit(self, norm: Tensor) -> Any:
        """Return the limit for a norm: a number, a 0-dim tensor, or None."""
        raise NotImplementedError

    def add(self, norm: float, after: float) -> None:
        """Take the finite norms, before and after clipping, of an applied update."""
        raise NotImplementedError

    @classmethod
    def too_late(cls, clip: Any, max_steps: int) -> str:
        if clip.warmup_steps < max_steps:
            return ""
        return (
            f"clip.warmup_steps={clip.warmup_steps}: the run ends after {max_steps} updates, "
            f"so clip={clip.kind} never gives a limit"
        )

    def clip(self, gradients: list[Tensor], norm: Tensor) -> Clipped:
        limit = self.limit(norm)
        shown = math.inf if limit is None else limit
        shown = shown if isinstance(shown, Tensor) else norm.new_full((), shown)
        self.found = {"clip_limit": shown}
        by_update = updating.clips_in_update(self.optimizers, norm)
        return clip_norm(gradients, norm, limit, by_update)

    def factor(self, outcome: Any) -> float | None:
        return outcome.grad_norm_post_clip / outcome.grad_norm if outcome.grad_norm > 0 else 1.0

    def finished(self, outcome: Any) -> None:
        super().finished(outcome)
        if not outcome.skipped:
            self.updates += 1
            self.add(outcome.grad_norm, outcome.grad_norm_post_clip)

    def begins_anew(self, changed: Sequence[str]) -> bool:
        return bool(starting(changed, "clip."))

    def state_dict(self) -> dict[str, Any]:
        norms = {"updates": self.updates, "norms": list(self.norms)}
        return norms | {"mean": self.mean, "variance": self.variance}

    def load_state_dict(self, state: dict[str, Any], anew: bool) -> None:
        if not anew:
            self.updates = state["updates"]
            self.norms.extend(state["norms"])
            self.mean, self.variance = state["mean"], state["variance"]
