"""Muon, whose ranks share its work, and the polynomials that make its matrices orthogonal."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim._muon import _adjust_lr

from llmexp import mesh
from llmexp.settings.values import refuse

Triple = tuple[float, float, float]
# p(s) = a s + b s^3 + c s^5 on the singular values, in this order; the last one again after them.
POLYNOMIALS: dict[str, tuple[Triple, ...]] = {
    # https://kellerjordan.github.io/posts/muon: steep at 0, never exact
    "jordan": ((3.4445, -4.7750, 2.0315),),
    # the classical one of degree 5: exact in the end, slow from small values
    "newton_schulz": ((15 / 8, -10 / 8, 3 / 8),),
    # Amsel et al. 2025 (arXiv 2505.16932), algorithm 1, without its factor for safety
    "polar_express": (
        (8.28721201814563, -23.595886519098837, 17.300387312530933),
        (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
        (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
        (3.3184196573706015, -2.488488024314874, 0.51004894012372),
        (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
        (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
        (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
        (1.875, -1.25, 0.375),
    ),
}
SAFETY = 1.01  # of Polar Express: rounding may push singular values above 1


def polynomials(given: Any, steps: int) -> tuple[list[Triple], float]:
    """Return (a, b, c) of each iteration, and the factor on the norm that a matrix is divided by.

    `given`: a name of `POLYNOMIALS`, three numbers for all iterations, or a list of threes. Raises
    ConfigError.
    """
    rows: Any = POLYNOMIALS.get(given) if isinstance(given, str) else given
    if isinstance(rows, Sequence) and not any(isinstance(v, Sequence) for v in rows):
        rows = [rows]
    try:
        found = [(float(a), float(b), float(c)) for a, b, c in rows]
        found[0]
    except (TypeError, ValueError, IndexError):
        text = f"one of {', '.join(POLYNOMIALS)}, three numbers or a list of threes is needed"
        example = "polar_express" if isinstance(given, str) else [3.4445, -4.775, 2.0315]
        raise refuse("optimizer.ns_coefficients", given, text, example) from None
    safety = SAFETY if given == "polar_express" else 1.0
    if safety > 1:  # all but the last polynomial, as in algorithm 1
        scaled = [(a / safety, b / safety**3, c / safety**5) for a, b, c in found[:-1]]
        found = [*scaled, found[-1]]
    return (found + found[-1:] * steps)[:steps], safety


def orthogonalize(matrix: Tensor, rows: Sequence[Triple], safety: float, eps: float) -> Tensor:
    """Return U p(S) V^T for the matrix U S V^T over its norm; p is the polynomials' chain.

    Multiplications and their order are torch's (`torch.optim.Muon`), which takes the matrix in bf16
    and no taller than wide.
    """
    norm = matrix.norm()
    x = matrix / (norm.clamp(min=eps) if safety == 1 else norm * safety + eps)
    for a, b, c in rows:
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x


class Muon(torch.optim.Muon):
    """torch's Muon with its choice of polynomials, whose ranks share its work.

    In each round every rank makes one matrix orthogonal, and gets those of the others. An update
    can be skipped without a wait of the host.
    """

    _step_supports_amp_scaling = True

    def __init__(self, parameters: list[nn.Parameter], ns_coefficients: Any, **knobs: Any) -> None:
        super().__init__(parameters, **knobs)
        polynomials(ns_coefficients, 1)  # refuses what is none
        torchs = ns_coefficients == "jordan"
        for group in self.param_groups:
            group["ns_coefficients"] = POLYNOMIALS["jordan"][0] if torchs else ns_coefficients

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        skip: Tensor | None = getattr(self, "found_inf", None)
        self.step_unless(None if skip is None else skip > 0)

    @torch.no_grad()
    def step_unless(self, skip: Tensor | None) -> None:
        """Update all, or nothing where `skip` (0-dim, bool) is true; the device chooses."""
        for group in self.param_groups:
            held: tuple[list[Tensor], ...] = ([], [], [])
            self._init_group(group, *held)  # parameters, gradients, momenta
            rows, safety = polynomials(group["ns_coefficients"], group["ns_steps"])
            work = partial(orthogonalize, rows=rows, safety=safety, eps=group["eps"])
            for parameters, gradients, momenta in _rounds(*held):
                self._round(group, work, parameters, gradients, momenta, skip)

    def _round(
        self,
        group: dict[str, Any],
        work: Callable[[Tensor], Tensor],
        parameters: list[Tensor],
        gradients: list[Tensor],
        momenta: list[Tensor],
        skip: Tensor | None,
    ) -> None:
        """Update matrices of one shape or its transpose, at most one for each rank.

        `work` makes one of them orthogonal.
        """
        decay, beta, lr = group["weight_decay"], group["momentum"], group["lr"]
        new = [m.lerp(g, 1 - beta) for m, g in zip(momenta, gradients, strict=True)]
        pairs = zip(gradients, new, strict=True)
        wanted = [g.lerp(m, beta) if group["nesterov"] else m for g, m in pairs]
        made = mesh.share_work(work, [_turned(w.bfloat16()) for w in wanted])
        for p, m, new_m, turned in zip(parameters, momenta, new, made, strict=True):
            direction = turned if turned.shape == p.shape else turned.T
            rate = _adjust_lr(lr, group["adjust_lr_fn"], p.shape)
            new_p = (p * (1 - lr * decay)).add_(direction, alpha=-rate)
            p.copy_(new_p if skip is None else torch.where(skip, p, new_p))
            m.copy_(new_m if skip is None else torch.where(skip, m, new_m))


def _turned(matrix: Tensor) -> Tensor:
    """Return the matrix, or its transpose where it is taller than wide."""
    return matrix.T if matrix.size(0) > matrix.size(1) else matrix


def _rounds(*held: list[Tensor]) -> Iterator[tuple[list[Tensor], ...]]:
    """Yield parameters, gradients and momenta of one shape or its transpose, for each rank one."""
    by_shape: dict[Any, list[tuple[Tensor, ...]]] = {}
    for one in zip(*held, strict=True):
        by_shape.setdefault(_turned(one[0]).shape, []).append(one)
    _, ranks = mesh.share_here()
    for same in by_shape.values():
        for start in range(0, len(same), ranks):
            parameters, gradients, momenta = zip(*same[start : start + ranks], strict=True)
            yield list(parameters), list(gradients), list(momenta)
