from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from llmexp import mesh
from llmexp.config.values import refuse
from llmexp.features.clip_per_group.config import EXAMPLE
from llmexp.optim.patterns import first_matches
from llmexp.train.clipping import EPSILON, Clipped
from llmexp.train.limiting import LimitingRule


def grouped(model: nn.Module, patterns: list[str]) -> list[tuple[nn.Parameter, int | None]]:
    """Return the trained parameters, each with the place of its pattern. Raises ConfigError."""
    if not patterns:
        raise refuse("missing_value", "clip.limits", "[]", "clip=per_group needs them", EXAMPLE)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    return [*zip(trained.values(), first_matches(trained, patterns, "clip.limits"), strict=True)]


class PerGroup(LimitingRule):
    """Clip each group of gradients by its own norm; a limit of None is no limit."""

    def __init__(self, clip: Any, *more: Any) -> None:
        super().__init__(clip, *more)
        self.values = {f"grad_norm/{limit.match}": limit.max_norm for limit in clip.limits}
        self._pairs = grouped(self.model, [limit.match for limit in clip.limits])

    def clip(self, gradients: list[Tensor], norm: Tensor) -> Clipped:
        groups = [group for p, group in self._pairs if p.grad is not None]
        norms = mesh.norms(self.mesh, gradients).double()
        each, found, after = norms.unbind(), [], []
        for group, limit in [*enumerate(self.values.values()), (None, None)]:
            places = [i for i, own in enumerate(groups) if own == group]
            own = [each[i] for i in places] or [norms.sum() * 0]
            norm = torch.linalg.vector_norm(torch.stack(own))
            factor = ((math.inf if limit is None else limit) / (norm + EPSILON)).clamp(max=1.0)
            if places and limit is not None:
                held = [mesh.local_part(gradients[i]) for i in places]
                torch._foreach_mul_(held, factor.to(held[0].dtype))
            found.append(norm)
            after.append(norm * factor)
        whole = torch.linalg.vector_norm(torch.stack(after))
        clipped = torch.stack([a < norm for a, norm in zip(after, found, strict=True)]).any()
        self.found = dict(zip(self.values, found, strict=False))
        return whole.to(gradients[0].dtype), clipped, None


RULES = {"per_group": PerGroup}
