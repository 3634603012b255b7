"""Optimizers and the guarded update.

An optimizer function takes the model and its knobs and returns one torch optimizer or a list of
them.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim._muon import muon as update_muon

from llmexp.settings.values import shown

_MUON_KNOBS = (
    "lr", "weight_decay", "momentum", "nesterov", "ns_coefficients", "eps", "ns_steps",
    "adjust_lr_fn",
)  # fmt: skip
# torch's optimizers import its compiler, for a second, to keep themselves out of graphs; no step of
# ours is in one.
for _method in ("add_param_group", "load_state_dict", "state_dict", "zero_grad"):
    _wrapped = inspect.unwrap(getattr(Optimizer, _method))
    setattr(_wrapped, "__dynamo_disable", _wrapped)


class AdamW(torch.optim.AdamW):
    """torch's AdamW; its step imports no compiler."""

    step = torch.no_grad()(inspect.unwrap(torch.optim.AdamW.step))


class SGD(torch.optim.SGD):
    """torch's SGD, likewise."""

    step = torch.no_grad()(inspect.unwrap(torch.optim.SGD.step))


def _rate(key: str, value: float, *, zero: bool = True) -> float:
    if (
        isinstance(value, bool)
        or not isinstance(value, (int, float))
        or not math.isfinite(value)
        or value < 0
    ):
        raise ValueError(
            f"optimizer.{key}={shown(value)}: a finite number from 0 is needed; for example "
            f"optimizer.{key}=3e-4"
        )
    if not zero and value == 0:
        raise ValueError(
            f"optimizer.{key}=0: a number above 0 is needed; for example optimizer.{key}=3e-4"
        )
    return float(value)


def _decay(key: str, value: float) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1:
        raise ValueError(
            f"optimizer.{key}={shown(value)}: a number from 0 to below 1 is needed; for example "
            f"optimizer.{key}=0.9"
        )
    return float(value)


def _flag(key: str, value: bool) -> bool:
    if not isinstance(value, bool):
        raise ValueError(
            f"optimizer.{key}={shown(value)}: true or false is needed; for example "
            f"optimizer.{key}=true"
        )
    return value


def _iterations(key: str, value: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 99:
        raise ValueError(
            f"optimizer.{key}={shown(value)}: a whole number from 1 to 99 is needed; for example "
            f"optimizer.{key}=5"
        )
    return value


def _fused(parameters: list[nn.Parameter], split: bool = True) -> bool:
    """Return whether torch's fused kernel takes them; `split`: whether it takes parameters that are
    split over ranks."""
    fits = all(p.device.type in ("cpu", "cuda") and p.is_floating_point() for p in parameters)
    return fits and (split or not any(hasattr(p, "device_mesh") for p in parameters))


def _decay_groups(parameters: list[nn.Parameter], weight_decay: float) -> list[dict]:
    """Decay on matrices only: gains, biases and other vectors are left alone.

    A kernel works on a whole group at once and takes no mix of parameters on different meshes.
    """
    weight_decay = _rate("weight_decay", weight_decay)
    groups: dict[tuple[bool, Any], dict] = {}
    for p in sorted(parameters, key=lambda p: p.ndim < 2):
        matrix = p.ndim >= 2
        empty = {"params": [], "weight_decay": weight_decay if matrix else 0.0}
        groups.setdefault((matrix, getattr(p, "device_mesh", None)), empty)["params"].append(p)
    return list(groups.values())


def adamw(
    model: nn.Module,
    lr: float,
    beta1: float = 0.9,
    beta2: float = 0.95,
    eps: float = 1e-8,
    weight_decay: float = 0.1,
) -> Optimizer:
    """AdamW (Loshchilov & Hutter 2019), fused where torch has the kernel, decay on matrices
    only."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    return AdamW(
        _decay_groups(parameters, weight_decay),
        lr=_rate("lr", lr, zero=False),
        betas=(_decay("beta1", beta1), _decay("beta2", beta2)),
        eps=_rate("eps", eps),
        fused=_fused(parameters),
    )


def sgd(
    model: nn.Module,
    lr: float,
    momentum: float = 0.9,
    nesterov: bool = False,
    weight_decay: float = 0.0,
) -> Optimizer:
    """Stochastic gradient descent with momentum, decay on matrices only."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    if _flag("nesterov", nesterov) and momentum == 0:
        raise ValueError(
            "optimizer.nesterov=true: there must be momentum; for example optimizer.momentum=0.9"
        )
    return SGD(
        _decay_groups(parameters, weight_decay),
        lr=_rate("lr", lr, zero=False),
        momentum=_decay("momentum", momentum),
        nesterov=nesterov,
        fused=_fused(parameters, split=False),
    )


class Muon(torch.optim.Muon):
    """torch's Muon, which skips an update without a wait of the host."""

    _step_supports_amp_scaling = True

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        skip: Tensor | None = getattr(self, "found_inf", None)
        if skip is None or skip.device.type == "cpu":
            return None if skip is not None and bool(skip) else super().step(closure)
        self.step_unless(skip > 0)
        return None

    @torch.no_grad()
    def step_unless(self, skip: Tensor) -> None:
        """Update all, or nothing where `skip` (0-dim, bool) is true: each matrix is computed on a
        copy, and the device chooses."""
        for group in self.param_groups:
            held: tuple[list[Tensor], ...] = ([], [], [])
            self._init_group(group, *held)  # parameters, gradients, momenta
            knobs = {key: value for key, value in group.items() if key in _MUON_KNOBS}
            for parameter, gradient, momentum in zip(*held, strict=True):
                new, new_momentum = parameter.clone(), momentum.clone()
                update_muon([new], [gradient], [new_momentum], has_complex=False, **knobs)
                parameter.copy_(torch.where(skip, parameter, new))
                momentum.copy_(torch.where(skip, momentum, new_momentum))


def muon(
    model: nn.Module,
    lr: float,
    momentum: float = 0.95,
    nesterov: bool = True,
    ns_steps: int = 5,
    weight_decay: float = 0.1,
    adjust_lr: str = "match_rms_adamw",
    adamw_lr: float | None = None,
    beta1: float = 0.9,
    beta2: float = 0.95,
    eps: float = 1e-8,
) -> list[Optimizer]:
    """Muon (Jordan et al. 2024) on the hidden matrices, AdamW on embeddings, head and vectors.

    The head is the model's `head_weight`; of a model without that attribute a head that is an
    nn.Linear gets Muon too. `adjust_lr=match_rms_adamw` (Liu et al. 2025) gives both the same
    update size, so one `lr` serves both.
    """
    outer = {id(p) for m in model.modules() if isinstance(m, nn.Embedding) for p in m.parameters()}
    outer.add(id(getattr(model, "head_weight", None)))
    parameters = [p for p in model.parameters() if p.requires_grad]
    hidden = [p for p in parameters if p.ndim == 2 and id(p) not in outer]
    rest = [p for p in parameters if not (p.ndim == 2 and id(p) not in outer)]
    if adjust_lr not in ("match_rms_adamw", "original"):
        raise ValueError(
            f"optimizer.adjust_lr={adjust_lr}: match_rms_adamw or original is needed; for example "
            "optimizer.adjust_lr=match_rms_adamw"
        )
    if not hidden:
        raise ValueError(
            "optimizer=muon: the model has no hidden matrices; for example optimizer=adamw"
        )
    return [
        Muon(
            hidden,
            lr=_rate("lr", lr, zero=False),
            momentum=_decay("momentum", momentum),
            nesterov=_flag("nesterov", nesterov),
            ns_steps=_iterations("ns_steps", ns_steps),
            weight_decay=_rate("weight_decay", weight_decay),
            adjust_lr_fn=adjust_lr,
        ),
        AdamW(
            _decay_groups(rest, weight_decay),
            lr=_rate("lr", lr) if adamw_lr is None else _rate("adamw_lr", adamw_lr),
            betas=(_decay("beta1", beta1), _decay("beta2", beta2)),
            eps=_rate("eps", eps),
            fused=_fused(rest),
        ),
    ]


def as_list(built: Optimizer | Sequence[Optimizer]) -> list[Optimizer]:
    """Return the optimizers with their base rates noted, so that a schedule can scale each
    group."""
    optimizers = [built] if isinstance(built, Optimizer) else list(built)
    if not optimizers or not all(isinstance(o, Optimizer) for o in optimizers):
        raise ValueError("optimizer: the function must return a torch optimizer or a list of them")
    for group in (g for o in optimizers for g in o.param_groups):
        group.setdefault("initial_lr", group["lr"])
    return optimizers


def set_rate(optimizers: list[Optimizer], factor: float) -> float:
    """Set every group to its base rate x factor; return the rate of the first group."""
    for group in (g for o in optimizers for g in o.param_groups):
        group["lr"] = group["initial_lr"] * factor
    return optimizers[0].param_groups[0]["lr"]


def _guards(optimizer: Optimizer) -> bool:
    """Return whether the optimizer can leave everything as it is by a flag on the device."""
    if isinstance(optimizer, Muon):  # which chooses between whole matrices
        return not any(
            hasattr(p, "device_mesh") for g in optimizer.param_groups for p in g["params"]
        )
    with_momentum = any(group.get("momentum") for group in optimizer.param_groups)
    if isinstance(optimizer, torch.optim.SGD) and with_momentum and not optimizer.state:
        return (
            False  # a skipped first step would leave torch's fused momentum buffers uninitialised
        )
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def takes_factor(optimizer: Optimizer) -> bool:
    """Return whether the next update can multiply the gradients by the clip factor: torch's
    kernels can, and nobody looks at the gradients before them."""
    ours = type(optimizer) in (AdamW, SGD)
    return ours and _guards(optimizer) and not optimizer._optimizer_step_pre_hooks


def clips_in_update(optimizers: list[Optimizer], norm: Tensor) -> bool:
    """Return whether the next update is to clip gradients of this norm. On a CPU it is not: there a
    factor of 1 costs nothing when it is looked at first."""
    return norm.is_cuda and norm.dtype == torch.float32 and all(map(takes_factor, optimizers))


def update(optimizers: list[Optimizer], skip: Tensor | bool, factor: Tensor | None = None) -> None:
    """One update of all optimizers, or of none where `skip` (0-dim bool tensor, or known to the
    host) is true; with the gradients times `factor` (0-dim, fp32), if all of them `takes_factor`.

    Kernels that support it decide on the device (parameters, moments and step counts then stay
    bit-identical), so the host does not wait; with any other optimizer in the list the host reads
    `skip` first.
    """
    found_inf: Tensor | None = None
    if isinstance(skip, Tensor) and all(map(_guards, optimizers)):
        found_inf = skip.to(torch.float32)
    elif skip:
        return
    scale = None if factor is None else factor.reciprocal()  # which torch divides by
    for optimizer in optimizers:
        if found_inf is not None or scale is not None:
            optimizer.found_inf = found_inf  # type: ignore[attr-defined]
            optimizer.grad_scale = scale  # type: ignore[attr-defined]
        optimizer.step()
