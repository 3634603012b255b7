"""Muon, on torch's, whose ranks share its work, and the polynomials of its matrices."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim._muon import _adjust_lr

from llmexp import mesh
from llmexp.config.values import choice, count, knob, refuse
from llmexp.models.common import held_in_rows
from llmexp.models.planned import has_values
from llmexp.optim.optimizers.adamw import adamw_of
from llmexp.optim.optimizers.settings import Knobs
from llmexp.optim.updating import trained

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
        raise refuse("wrong_type", "optimizer.ns_coefficients", given, text, example) from None
    safety = SAFETY if given == "polar_express" else 1.0
    if safety > 1:  # all but the last polynomial, as in algorithm 1
        scaled = [(a / safety, b / safety**3, c / safety**5) for a, b, c in found[:-1]]
        found = [*scaled, found[-1]]
    return (found + found[-1:] * steps)[:steps], safety


def orthogonalize(matrix: Tensor, rows: Sequence[Triple], safety: float, eps: float) -> Tensor:
    """Return U p(S) V^T for the matrix U S V^T over its norm; p is the polynomials' chain.

    Multiplications and their order are torch's (`torch.optim.Muon`), which takes the matrix in bf16
    and no taller than wide. Of several, as of experts, each is taken by itself.
    """
    if matrix.ndim > 2 and not has_values():  # a plan: the last one, beside the others' results
        others = torch.empty_like(matrix[1:])
        return torch.cat((orthogonalize(matrix[0], rows, safety, eps)[None], others))
    if matrix.ndim > 2:
        return torch.stack([orthogonalize(one, rows, safety, eps) for one in matrix])
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

    skips_whole = True
    no_rms = ""  # its AdamW has one

    def __init__(self, parameters: list[nn.Parameter], ns_coefficients: Any, **knobs: Any) -> None:
        super().__init__([p for p in parameters if p.ndim == 2], **knobs)
        if stacked := [p for p in parameters if p.ndim > 2]:  # a matrix for each expert
            self.add_param_group({"params": stacked})
        polynomials(ns_coefficients, 1)  # refuses what is none
        torchs = ns_coefficients == "jordan"
        for group in self.param_groups:
            group["ns_coefficients"] = POLYNOMIALS["jordan"][0] if torchs else ns_coefficients

    def width_factors(self, ratio: float) -> tuple[float, float]:
        """Return the factors on the rate of the matrices of blocks, and of all else, with mup.

        Its update has a norm that makes outputs change alike at any width, unless its rate is
        matched with AdamW's: then it has a factor sqrt(width), which is taken back.
        """
        matched = self.param_groups[0]["adjust_lr_fn"] == "match_rms_adamw"
        return (1 / math.sqrt(ratio) if matched else 1.0), 1.0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        found_inf: Tensor | None = getattr(self, "found_inf", None)
        skip = None if found_inf is None else found_inf > 0
        _, ranks = mesh.share_here()
        for group in self.param_groups:
            held: tuple[list[Tensor], ...] = ([], [], [])
            self._init_group(group, *held)  # parameters, gradients, momenta
            rows, safety = polynomials(group["ns_coefficients"], group["ns_steps"])
            work = partial(orthogonalize, rows=rows, safety=safety, eps=group["eps"])
            by_shape: dict[Any, list[tuple[Tensor, ...]]] = {}
            for one in zip(*held, strict=True):
                by_shape.setdefault(_turned(one[0]).shape, []).append(one)
            for same in by_shape.values():
                for start in range(0, len(same), ranks):
                    self._round(group, work, same[start : start + ranks], skip)

    def _round(
        self,
        group: dict[str, Any],
        work: Callable[[Tensor], Tensor],
        held: list[tuple[Tensor, ...]],
        skip: Tensor | None,
    ) -> None:
        """Update matrices of one shape or its transpose, at most one for each rank.

        `held`: their parameters, gradients and momenta. `work` makes a matrix orthogonal. Where
        `skip` (0-dim, bool) is true nothing changes; the device chooses.
        """
        decay, beta, lr = group["weight_decay"], group["momentum"], group["lr"]
        parameters, gradients, momenta = zip(*held, strict=True)
        new = [m.lerp(g, 1 - beta) for m, g in zip(momenta, gradients, strict=True)]
        pairs = zip(gradients, new, strict=True)
        wanted = [g.lerp(m, beta) if group["nesterov"] else m for g, m in pairs]
        made = mesh.share_work(work, [_turned(w.bfloat16()) for w in wanted])
        for p, m, new_m, turned in zip(parameters, momenta, new, made, strict=True):
            direction = turned if turned.shape == p.shape else turned.mT
            rate = _adjust_lr(lr, group["adjust_lr_fn"], p.shape[-2:])
            new_p = (p * (1 - lr * decay)).add_(direction, alpha=-rate)
            p.copy_(new_p if skip is None else torch.where(skip, p, new_p))
            m.copy_(new_m if skip is None else torch.where(skip, m, new_m))


def _turned(matrix: Tensor) -> Tensor:
    """Return the matrix, or its transpose where it is taller than wide."""
    return matrix.mT if matrix.size(-2) > matrix.size(-1) else matrix


def muon(
    model: nn.Module,
    lr: Knobs.lr,
    momentum: Knobs.momentum = 0.95,
    nesterov: Knobs.nesterov = True,
    ns_steps: Annotated[int, count("Newton-Schulz iterations", 5, at_most=99)] = 5,
    ns_coefficients: Annotated[
        Any,
        knob(
            "their polynomials: jordan, polar_express, newton_schulz, or a, b, c of a s + b s^3 + "
            "c s^5",
            "polar_express",
        ),
    ] = "jordan",
    weight_decay: Knobs.weight_decay = 0.1,
    adjust_lr: Annotated[
        str, choice("update size of Muon's matrices", "match_rms_adamw | original")
    ] = "match_rms_adamw",
    adamw_lr: Annotated[
        float | None, knob("another base rate for AdamW's part; null: lr", 3e-4, at_least=0)
    ] = None,
    beta1: Knobs.beta1 = 0.9,
    beta2: Knobs.beta2 = 0.95,
    eps: Knobs.eps = 1e-8,
) -> list[Optimizer]:
    """Muon (Jordan et al. 2024) on the hidden matrices, AdamW on embeddings, head and vectors.

    The head is the model's `head_weight`; of a model without that attribute a head that is an
    nn.Linear gets Muon too. `adjust_lr=match_rms_adamw` (Liu et al. 2025) gives both the same
    update size, so one `lr` serves both.
    """
    outer = {id(p) for m in model.modules() if isinstance(m, nn.Embedding) for p in m.parameters()}
    outer.add(id(getattr(model, "head_weight", None)))
    parameters = trained(model)
    stacked = held_in_rows(model)  # of experts
    hidden = [p for p in parameters if (p.ndim == 2 and id(p) not in outer) or id(p) in stacked]
    taken = set(map(id, hidden))
    rest = [p for p in parameters if id(p) not in taken]
    if not hidden:
        raise refuse(
            "unsupported", "optimizer", "muon", "the model has no hidden matrices", "adamw"
        )
    return [
        Muon(
            hidden,
            lr=lr,
            momentum=momentum,
            nesterov=nesterov,
            ns_steps=ns_steps,
            ns_coefficients=ns_coefficients,
            weight_decay=weight_decay,
            adjust_lr_fn=adjust_lr,
        ),
        adamw_of(rest, lr if adamw_lr is None else adamw_lr, (beta1, beta2), eps, weight_decay),
    ]
