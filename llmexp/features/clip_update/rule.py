from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from llmexp import mesh
from llmexp.config.values import refuse
from llmexp.train.clipping import Clipped
from llmexp.train.limiting import LimitingRule, as_figures, on_ladder


def check_limited(optimizers: Sequence[Optimizer]) -> None:
    """Raise ConfigError for optimizers whose update has no RMS that could be limited."""
    for optimizer in optimizers:
        if isinstance(optimizer, torch.optim.AdamW):
            continue
        kind = type(optimizer)
        if why := vars(kind).get("no_rms", f"{kind.__name__} is not torch's AdamW"):
            text = f"is the limit of StableAdamW, for AdamW's update; {why}"
            raise refuse("unsupported", "clip", "update", text, "norm")


class OfUpdate(LimitingRule):
    """Limit the RMS of AdamW's update of each tensor, before the rate.

    With the tensor's gradient g and AdamW's second moment v, corrected for its start, the rate is
    divided by max(1, RMS / threshold), RMS = sqrt(mean(g^2 / max(v, eps^2))): StableAdamW (Wortsman
    et al. 2023, arXiv 2304.13013, algorithm 2), which has the threshold 1, as Adafactor has for its
    update g / sqrt(v) (Shazeer & Stern 2018). Weight decay is a part of the update.

    An update is made by the optimizer, and then taken back by its share, so that kernels and the
    skipping of updates stay as they are.
    """

    def __init__(self, clip: Any, *more: Any) -> None:
        super().__init__(clip, *more)
        self.units = {"tensors": clip.threshold}
        check_limited(self.optimizers)
        self._limited = [
            (optimizer.state, group, p)
            for optimizer in self.optimizers
            if isinstance(optimizer, torch.optim.AdamW)
            for group in optimizer.param_groups
            for p in group["params"]
        ]
        sizes = [p.numel() for *_, p in self._limited]
        device = next(self.model.parameters()).device
        self._sizes = torch.tensor(sizes, dtype=torch.float64, device=device)
        self._before: list[Tensor] = []

    @torch.no_grad()
    def clip(self, gradients: list[Tensor], norm: Tensor) -> Clipped:
        """Keep the weights as they are before the update."""
        held = [mesh.local_part(p).detach() for *_, p in self._limited]
        self._before = list(torch._foreach_mul(held, 1.0))
        return super().clip(gradients, norm)

    @torch.no_grad()
    def after_update(self, skip: Tensor | bool, clipped: Any) -> Any:
        threshold, parameters = self.knobs.threshold, [p for *_, p in self._limited]
        squares = mesh.summed_over_ranks(self.mesh, parameters, self._squares().double())
        rms = (squares / self._sizes).sqrt()
        factors = (threshold / rms).clamp(max=1.0)
        factors = torch.where(torch.as_tensor(skip, device=factors.device), 1.0, factors)
        by_dtype = {p.dtype: factors.to(p.dtype).unbind() for p in parameters}
        for number, (p, old) in enumerate(zip(parameters, self._before, strict=True)):
            held, factor = mesh.local_part(p), by_dtype[p.dtype][number]
            torch.lerp(old, held, factor, out=held)
        self._before = []
        self.found = as_figures("tensors", on_ladder(rms, threshold).sum(0))
        return (factors < 1).any()

    def _squares(self) -> Tensor:
        """Return the sum of g^2 / max(v, eps^2) of this rank's part of each tensor.

        It is 0 where no update was made yet.
        """
        held, zero = dict[int, tuple[Any, Any, Any]](), torch.zeros((), device=self.mesh.device)
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


RULES = {"update": OfUpdate}
