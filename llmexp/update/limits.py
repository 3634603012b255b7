"""The limit of the gradient norm: fixed, or from the norms of the steps before."""

from __future__ import annotations

import math
from collections import deque
from typing import Any

import numpy as np
import torch
from torch import Tensor

from llmexp.settings.clipping import BY_NORM, MOVING, Clip

_EPSILON = 1e-6  # added to the standard deviation, as ZClip's authors do


class Limit:
    """Give each step the limit of its gradient norm, from the applied updates before it.

    - `norm`: `max_norm`, always; rules that are not by norm have none.
    - `quantile`: the quantile `quantile` of the last `window` norms, before clipping (AutoClip,
      Seetharaman et al. 2020, who take all norms of the run).
    - `zscore`: ZClip (Kumar et al. 2025, arXiv 2504.02507): where the norm g is more than `z`
      standard deviations s above the mean m, m + z^2 s^2 / (g - m). Mean and variance follow the
      norms after clipping, with weight 1 - `decay` for the newest.

    For the first `warmup_steps` updates, and beyond them as an upper bound, it is `max_norm`; None:
    no limit.
    """

    def __init__(self, clip: Clip) -> None:
        self._clip, self.moving = clip, clip.kind in MOVING
        self._most = clip.max_norm if clip.kind in BY_NORM else None
        self._updates = 0
        kept = clip.window if clip.kind == "quantile" else clip.warmup_steps
        self._norms: deque[float] = deque(maxlen=kept)
        self._mean: float | None = None
        self._variance = 0.0

    def of(self, norm: Tensor) -> Any:
        """Return the limit for a norm: a number, a 0-dim tensor, or None."""
        clip = self._clip
        if clip.kind == "quantile" and self._updates >= clip.warmup_steps:
            limit = float(np.quantile(self._norms, clip.quantile))
            return limit if self._most is None else min(limit, self._most)
        if clip.kind == "zscore" and self._mean is not None:
            far = clip.z * (math.sqrt(self._variance) + _EPSILON)
            return self._by_deviation(norm, self._mean, far)
        return self._most

    def _by_deviation(self, norm: Tensor, mean: float, far: float) -> Tensor:
        """Return the limit of a norm that may be more than `far` above the mean."""
        above = norm.double() - mean
        limit = torch.full_like(above, far**2) / above + mean
        found = torch.where(above > far, limit, math.inf)
        return found.clamp(max=math.inf if self._most is None else self._most).to(norm.dtype)

    def add(self, norm: float, clipped_norm: float) -> None:
        """Take the finite norms, before and after clipping, of an applied update."""
        if not self.moving:
            return
        self._updates += 1
        if self._clip.kind == "quantile":
            self._norms.append(norm)
        elif self._mean is not None:
            keep = self._clip.decay
            self._mean = keep * self._mean + (1 - keep) * clipped_norm
            self._variance *= keep
            self._variance += (1 - keep) * (clipped_norm - self._mean) ** 2
        else:
            self._norms.append(clipped_norm)
            if len(self._norms) == self._clip.warmup_steps:
                self._mean = math.fsum(self._norms) / len(self._norms)
                squares = ((norm - self._mean) ** 2 for norm in self._norms)
                self._variance = math.fsum(squares) / len(self._norms)

    def state_dict(self) -> dict[str, Any]:
        norms = {"updates": self._updates, "norms": list(self._norms)}
        return norms | {"mean": self._mean, "variance": self._variance}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._updates = state["updates"]
        self._norms.extend(state["norms"])
        self._mean, self._variance = state["mean"], state["variance"]
