from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from llmexp.features.clip_moving.moving import Moving

_EPSILON = 1e-6  # added to the standard deviation, as ZClip's authors do


class ZScore(Moving):
    """Clip norms far above the mean of those before.

    ZClip (Kumar et al. 2025, arXiv 2504.02507): where the norm g is more than `z` standard
    deviations s above the mean m, the limit is m + z^2 s^2 / (g - m). Mean and variance follow the
    norms after clipping, with weight 1 - `decay` for the newest.
    """

    kept = "warmup_steps"

    def limit(self, norm: Tensor) -> Any:
        if self.mean is None:
            return self.knobs.max_norm
        far = self.knobs.z * (math.sqrt(self.variance) + _EPSILON)
        above = norm.double() - self.mean
        limit = torch.full_like(above, far**2) / above + self.mean
        found = torch.where(above > far, limit, math.inf)
        bound = math.inf if self.knobs.max_norm is None else self.knobs.max_norm
        return found.clamp(max=bound).to(norm.dtype)

    def add(self, norm: float, after: float) -> None:
        if self.mean is not None:
            keep = self.knobs.decay
            self.mean = keep * self.mean + (1 - keep) * after
            self.variance *= keep
            self.variance += (1 - keep) * (after - self.mean) ** 2
            return
        self.norms.append(after)
        if len(self.norms) == self.knobs.warmup_steps:
            self.mean = math.fsum(self.norms) / len(self.norms)
            squares = ((norm - self.mean) ** 2 for norm in self.norms)
            self.variance = math.fsum(squares) / len(self.norms)
