from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from llmexp import mesh
from llmexp.train.clipping import Clipped
from llmexp.train.limiting import LimitingRule


class ByValue(LimitingRule):
    """Clip each entry to [-max_value, max_value]."""

    def __init__(self, clip: Any, *more: Any) -> None:
        super().__init__(clip, *more)
        if clip.max_value is not None:
            self.values = {"grad_entry_max": clip.max_value}

    def clip(self, gradients: list[Tensor], norm: Tensor) -> Clipped:
        most = self.knobs.max_value
        if most is None:
            return super().clip(gradients, norm)
        held = [mesh.local_part(g) for g in gradients]
        largest = mesh.largest_entry(self.mesh, gradients)
        torch._foreach_clamp_min_(held, -most)
        torch._foreach_clamp_max_(held, most)
        self.found = {"grad_entry_max": largest}
        return mesh.global_norm(self.mesh, gradients), largest > most, None


RULES = {"value": ByValue}
