"""Clip gradients, once per window, unscaled and reduced."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from llmexp import mesh

LEAST_WEIGHTS = 1e-3  # norm of a unit's weights, in `clip_units`
RUNGS = range(-4, 5)  # limits that are tried beside the own one: that x 2**k


def clip_norm(
    gradients: Sequence[Tensor],
    norm: Tensor,
    max_norm: float | Tensor | None,
    by_update: bool = False,
) -> tuple[Any, Any, Tensor | None]:
    """Clip in place by `norm`; return (norm after clipping, whether anything was clipped, None).

    These are numbers on a CPU, else 0-dim tensors. With `by_update` nothing is changed, and the
    last value is the factor with which the update has to multiply.

    `gradients` may be split over the ranks; `norm` is that of them all. The factor is
    min(1, max_norm / (norm + 1e-6)) (Pascanu et al. 2013, with torch's epsilon). A limit of None is
    no limit.
    """
    if max_norm is None:
        return norm, torch.zeros((), dtype=torch.bool, device=norm.device), None
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    if by_update:
        return norm * factor, factor < 1, factor
    held = [mesh.local_part(g) for g in gradients]
    if norm.device.type != "cpu":
        torch._foreach_mul_(held, factor)
        return norm * factor, factor < 1, None
    clipped = bool(norm.isfinite() and factor < 1)  # else its update is skipped, or the factor is 1
    if clipped:
        torch._foreach_mul_(held, float(factor))
    return float(norm * factor if clipped else norm), clipped, None


def clip_values(
    joined: mesh.Mesh, gradients: Sequence[Tensor], max_value: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Clip each entry to [-max_value, max_value], in place.

    Return (norm after clipping, whether anything was clipped, the largest entry), 0-dim tensors.
    """
    held = [mesh.local_part(g) for g in gradients]
    largest = mesh.largest_entry(joined, gradients)
    torch._foreach_clamp_min_(held, -max_value)
    torch._foreach_clamp_max_(held, max_value)
    return mesh.global_norm(joined, gradients), largest > max_value, largest


def clip_groups(
    joined: mesh.Mesh,
    gradients: Sequence[Tensor],
    groups: Sequence[int | None],
    limits: Sequence[float | None],
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Clip each group of gradients by its own norm, in place.

    `groups` says to which each gradient belongs, None: to none; a limit of None is no limit. Return
    (norm of all after clipping, whether anything was clipped, the norm of each group before), 0-dim
    tensors.
    """
    norms = mesh.norms(joined, gradients).double()
    each, found, after = norms.unbind(), [], []
    for number, limit in enumerate([*limits, None]):
        wanted = number if number < len(limits) else None
        places = [i for i, group in enumerate(groups) if group == wanted]
        norm = torch.linalg.vector_norm(torch.stack([each[i] for i in places] or [norms.sum() * 0]))
        factor = ((math.inf if limit is None else limit) / (norm + 1e-6)).clamp(max=1.0)
        if places and limit is not None:
            held = [mesh.local_part(gradients[i]) for i in places]
            torch._foreach_mul_(held, factor.to(held[0].dtype))
        found.append(norm)
        after.append(norm * factor)
    whole = torch.linalg.vector_norm(torch.stack(after))
    clipped = torch.stack([a < norm for a, norm in zip(after, found, strict=True)]).any()
    return whole.to(gradients[0].dtype), clipped, found[:-1]


def clip_units(joined: mesh.Mesh, weights: Sequence[Tensor], ratio: float) -> tuple[Tensor, Tensor]:
    """Clip each unit's gradient to `ratio` times the norm of its weights, in place.

    Adaptive gradient clipping, AGC, is by Brock et al. 2021 (arXiv 2102.06171). A unit is a row of
    a matrix, the inputs of one output, or a whole vector; weights of a norm below 1e-3 count as
    that. Return (whether anything was clipped, the sum of `on_ladder` of the units' ratios).
    """
    gradients: list[Any] = [weight.grad for weight in weights]
    of_weights, of_gradients = (
        [_unit_norms(v) for v in vs] for vs in ([w.detach() for w in weights], gradients)
    )
    # All units of this rank in one row: a device is asked for few operations.
    held = [mesh.local_part(norms) for norms in of_gradients]
    norms_n = torch.cat([norms.flatten() for norms in held])
    least_n = torch.cat([mesh.local_part(n).flatten() for n in of_weights]).clamp(min=LEAST_WEIGHTS)
    above_n = norms_n > least_n * ratio
    factors_n = torch.where(above_n, least_n * ratio / norms_n.clamp(min=1e-6), 1.0)
    sizes = [norms.numel() for norms in held]
    for gradient, norms, factors in zip(gradients, held, factors_n.split(sizes), strict=True):
        mesh.local_part(gradient).mul_(factors.view(norms.shape))
    by_weight = on_ladder(norms_n / least_n, ratio).split(sizes)
    counted = torch.stack([units.sum(0) for units in by_weight])
    clipped = mesh.maximum(joined, above_n.any().to(norms_n.dtype)) > 0
    return clipped, mesh.summed_over_all(joined, of_gradients, counted)


def on_ladder(values: Tensor, limit: float) -> Tensor:
    """Return for each value 1, whether it is above each rung of a limit, and min(1, rung / value).

    The rungs are limit x 2**k for k in RUNGS; the result is float64, (values, 1 + 2 x rungs), of
    which sums are taken.
    """
    exponents = torch.arange(RUNGS.start, RUNGS.stop, device=values.device, dtype=torch.float64)
    limits = limit * 2.0**exponents
    values = values.double().reshape(-1, 1)
    factors = (limits / values).clamp(max=1.0)
    return torch.cat((torch.ones_like(values), values > limits, factors), 1)


class UpdateLimit:
    """Limit the RMS of AdamW's update of each tensor, before the rate.

    With the tensor's gradient g and AdamW's second moment v, corrected for its start, the rate is
    divided by max(1, RMS / threshold), RMS = sqrt(mean(g^2 / max(v, eps^2))): StableAdamW (Wortsman
    et al. 2023, arXiv 2304.13013, algorithm 2), which has the threshold 1, as Adafactor has for its
    update g / sqrt(v) (Shazeer & Stern 2018). Weight decay is a part of the update.

    An update is made by the optimizer, and then taken back by its share, so that kernels and the
    skipping of updates stay as they are.
    """

    def __init__(
        self, joined: mesh.Mesh, optimizers: Sequence[Optimizer], threshold: float
    ) -> None:
        self._mesh, self._threshold = joined, threshold
        self._limited = [
            (optimizer.state, group, p)
            for optimizer in optimizers
            if isinstance(optimizer, torch.optim.AdamW)
            for group in optimizer.param_groups
            for p in group["params"]
        ]
        sizes = [p.numel() for *_, p in self._limited]
        self._sizes = torch.tensor(sizes, dtype=torch.float64, device=joined.device)
        self._before: list[Tensor] = []

    @torch.no_grad()
    def before(self) -> None:
        """Keep the weights as they are before the update."""
        held = [mesh.local_part(p).detach() for *_, p in self._limited]
        self._before = list(torch._foreach_mul(held, 1.0))

    @torch.no_grad()
    def after(self, skip: Tensor | bool) -> tuple[Tensor, Tensor]:
        """Limit the update that was made, or was not where `skip` is true.

        Return (whether anything was limited, the sum of `on_ladder` of the tensors' RMS).
        """
        parameters = [p for *_, p in self._limited]
        squares = mesh.summed_over_ranks(self._mesh, parameters, self._squares().double())
        rms = (squares / self._sizes).sqrt()
        factors = (self._threshold / rms).clamp(max=1.0)
        factors = torch.where(torch.as_tensor(skip, device=factors.device), 1.0, factors)
        by_dtype = {p.dtype: factors.to(p.dtype).unbind() for p in parameters}
        for number, (p, old) in enumerate(zip(parameters, self._before, strict=True)):
            held, factor = mesh.local_part(p), by_dtype[p.dtype][number]
            torch.lerp(old, held, factor, out=held)
        self._before = []
        return (factors < 1).any(), on_ladder(rms, self._threshold).sum(0)

    def _squares(self) -> Tensor:
        """Return the sum of g^2 / max(v, eps^2) of this rank's part of each tensor.

        It is 0 where no update was made yet.
        """
        held, zero = dict[int, tuple[Any, Any, Any]](), torch.zeros((), device=self._mesh.device)
        for number, (states, group, p) in enumerate(self._limited):
            if p.grad is not None and (state := states.get(p)):
                held[number] = state, group, p
        if not held:
            return zero.expand(len(self._limited))
        steps = torch.stack([state["step"] for state, *_ in held.values()]).double()
        betas = [group["betas"][1] for _, group, _ in held.values()]
        starts = {beta: (1 - beta**steps).unbind() for beta in set(betas)}
        moments = [
            mesh.local_part(state["exp_avg_sq"]) / starts[beta][n]
            for n, ((state, *_), beta) in enumerate(zip(held.values(), betas, strict=True))
        ]
        least = [max(g["eps"] ** 2, torch.finfo(p.dtype).tiny) for _, g, p in held.values()]
        torch._foreach_clamp_min_(moments, least)
        torch._foreach_sqrt_(moments)
        gradients = [mesh.local_part(p.grad) for *_, p in held.values()]
        norms = torch._foreach_norm(torch._foreach_div(gradients, moments))
        found = dict(zip(held, norms, strict=True))
        return torch.stack([found.get(n, zero) for n in range(len(self._limited))]).square()


def _unit_norms(values: Tensor) -> Tensor:
    """Return the norm of each unit, in a shape that values can be multiplied with."""
    if values.ndim > 1:
        dims = tuple(range(1, values.ndim))
        return mesh.without_partials(torch.linalg.vector_norm(values, dim=dims, keepdim=True))
    return mesh.without_partials(torch.linalg.vector_norm(values))
