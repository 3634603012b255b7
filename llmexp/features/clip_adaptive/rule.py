from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from llmexp import mesh
from llmexp.models.common import held_in_rows
from llmexp.train.clipping import Clipped
from llmexp.train.limiting import LimitingRule, as_figures, on_ladder

LEAST_WEIGHTS = 1e-3  # norm of a unit's weights


class Adaptive(LimitingRule):
    """Clip each unit's gradient to `ratio` times the norm of its weights.

    Adaptive gradient clipping, AGC, is by Brock et al. 2021 (arXiv 2102.06171). A unit is a row of
    a matrix, the inputs of one output, or a whole vector; weights of a norm below 1e-3 count as
    that. Each expert has matrices of its own. The output head is left out, as its authors do.
    """

    def __init__(self, clip: Any, *more: Any) -> None:
        super().__init__(clip, *more)
        self.units = {"units": clip.ratio}
        head = getattr(self.model, "head_weight", None)
        own = (p for p in self.model.parameters() if p.requires_grad and p is not head)
        self._parameters, self._rows = list(own), held_in_rows(self.model)

    def clip(self, gradients: list[Tensor], norm: Tensor) -> Clipped:
        ratio, weights = self.knobs.ratio, [p for p in self._parameters if p.grad is not None]
        own: list[Any] = [weight.grad for weight in weights]
        rows = [id(weight) in self._rows for weight in weights]
        of_weights, of_gradients = (
            list(map(_unit_norms, vs, rows)) for vs in ([w.detach() for w in weights], own)
        )
        # All units of this rank in one row: a device is asked for few operations.
        held = [mesh.local_part(norms) for norms in of_gradients]
        norms_n = torch.cat([norms.flatten() for norms in held])
        least_n = torch.cat([mesh.local_part(n).flatten() for n in of_weights])
        least_n = least_n.clamp(min=LEAST_WEIGHTS)
        above_n = norms_n > least_n * ratio
        factors_n = torch.where(above_n, least_n * ratio / norms_n.clamp(min=1e-6), 1.0)
        sizes = [norms.numel() for norms in held]
        for gradient, norms, factors in zip(own, held, factors_n.split(sizes), strict=True):
            mesh.local_part(gradient).mul_(factors.view(norms.shape))
        by_weight = on_ladder(norms_n / least_n, ratio).split(sizes)
        counted = torch.stack([units.sum(0) for units in by_weight])
        clipped = mesh.maximum(self.mesh, above_n.any().to(norms_n.dtype)) > 0
        self.found = as_figures("units", mesh.summed_over_all(self.mesh, of_gradients, counted))
        return mesh.global_norm(self.mesh, gradients), clipped, None


def _unit_norms(values: Tensor, in_rows: bool) -> Tensor:
    """Return the norm of each unit, in a shape that values can be multiplied with."""
    if values.ndim > 1:
        dims = -1 if in_rows else tuple(range(1, values.ndim))
        return mesh.without_partials(torch.linalg.vector_norm(values, dim=dims, keepdim=True))
    return mesh.without_partials(torch.linalg.vector_norm(values))


RULES = {"adaptive": Adaptive}
