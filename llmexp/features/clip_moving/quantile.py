from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from llmexp.features.clip_moving.moving import Moving


class Quantile(Moving):
    """Clip by the quantile of the last norms, before clipping.

    AutoClip (Seetharaman et al. 2020), who take all norms of the run.
    """

    kept = "window"

    def limit(self, norm: Tensor) -> Any:
        if self.updates < self.knobs.warmup_steps:
            return self.knobs.max_norm
        limit = float(np.quantile(self.norms, self.knobs.quantile))
        return limit if self.knobs.max_norm is None else min(limit, self.knobs.max_norm)

    def add(self, norm: float, after: float) -> None:
        self.norms.append(norm)
