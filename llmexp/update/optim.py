"""Optimizers, and the update that can be skipped on the device.

A function takes the model and its knobs and returns one torch optimizer or a list of them.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from numbers import Real
from typing import Annotated, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from llmexp import mesh
from llmexp.settings.parts import OptimizerKnobs
from llmexp.settings.values import ConfigError, choice, count, knob, refuse
from llmexp.update.muon import Muon

# torch's optimizers keep themselves out of compiled graphs, and import the compiler for that, which
# takes a second. No step of ours is in a graph.
for _method in ("add_param_group", "load_state_dict", "state_dict", "zero_grad"):
    _wrapped = inspect.unwrap(getattr(Optimizer, _method))
    setattr(_wrapped, "__dynamo_disable", _wrapped)


class AdamW(torch.optim.AdamW):
    """torch's AdamW; its step imports no compiler."""

    step = torch.no_grad()(inspect.unwrap(torch.optim.AdamW.step))


class SGD(torch.optim.SGD):
    """torch's SGD, likewise."""

    step = torch.no_grad()(inspect.unwrap(torch.optim.SGD.step))


def _fused(parameters: list[nn.Parameter], split: bool = True) -> bool:
    """Return whether torch's fused kernel takes the parameters; `split`: also those of FSDP."""
    fits = all(p.device.type in ("cpu", "cuda") and p.is_floating_point() for p in parameters)
    return fits and (split or not any(hasattr(p, "device_mesh") for p in parameters))


def decay_groups(parameters: list[nn.Parameter], weight_decay: float) -> list[dict]:
    """Decay on matrices only: gains, biases and other vectors are left alone.

    A kernel works on a whole group at once and takes no mix of parameters on different meshes.
    """
    groups: dict[tuple[bool, Any], dict] = {}
    for p in sorted(parameters, key=lambda p: p.ndim < 2):
        matrix = p.ndim >= 2
        empty = {"params": [], "weight_decay": weight_decay if matrix else 0.0}
        groups.setdefault((matrix, getattr(p, "device_mesh", None)), empty)["params"].append(p)
    return list(groups.values())


def adamw(
    model: nn.Module,
    lr: OptimizerKnobs.lr,
    beta1: OptimizerKnobs.beta1 = 0.9,
    beta2: OptimizerKnobs.beta2 = 0.95,
    eps: OptimizerKnobs.eps = 1e-8,
    weight_decay: OptimizerKnobs.weight_decay = 0.1,
) -> Optimizer:
    """AdamW (Loshchilov & Hutter 2019), fused where torch can, decay on matrices only."""
    return _adamw(_trained(model), lr, (beta1, beta2), eps, weight_decay)


def _trained(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def _adamw(
    parameters: list[nn.Parameter],
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> AdamW:
    groups = decay_groups(parameters, weight_decay)
    return AdamW(groups, lr=lr, betas=betas, eps=eps, fused=_fused(parameters))


def sgd(
    model: nn.Module,
    lr: OptimizerKnobs.lr,
    momentum: OptimizerKnobs.momentum = 0.9,
    nesterov: OptimizerKnobs.nesterov = False,
    weight_decay: OptimizerKnobs.weight_decay = 0.0,
) -> Optimizer:
    """Stochastic gradient descent with momentum, decay on matrices only."""
    parameters = _trained(model)
    return SGD(
        decay_groups(parameters, weight_decay),
        lr=lr,
        momentum=momentum,
        nesterov=nesterov,
        fused=_fused(parameters, split=False),
    )


def muon(
    model: nn.Module,
    lr: OptimizerKnobs.lr,
    momentum: OptimizerKnobs.momentum = 0.95,
    nesterov: OptimizerKnobs.nesterov = True,
    ns_steps: Annotated[int, count("Newton-Schulz iterations", 5, at_most=99)] = 5,
    ns_coefficients: Annotated[
        Any,
        knob(
            "their polynomials: jordan, polar_express, newton_schulz, or a, b, c of a s + b s^3 + "
            "c s^5",
            "polar_express",
        ),
    ] = "jordan",
    weight_decay: OptimizerKnobs.weight_decay = 0.1,
    adjust_lr: Annotated[
        str, choice("update size of Muon's matrices", "match_rms_adamw | original")
    ] = "match_rms_adamw",
    adamw_lr: Annotated[
        float | None, knob("another base rate for AdamW's part; null: lr", 3e-4, at_least=0)
    ] = None,
    beta1: OptimizerKnobs.beta1 = 0.9,
    beta2: OptimizerKnobs.beta2 = 0.95,
    eps: OptimizerKnobs.eps = 1e-8,
) -> list[Optimizer]:
    """Muon (Jordan et al. 2024) on the hidden matrices, AdamW on embeddings, head and vectors.

    The head is the model's `head_weight`; of a model without that attribute a head that is an
    nn.Linear gets Muon too. `adjust_lr=match_rms_adamw` (Liu et al. 2025) gives both the same
    update size, so one `lr` serves both.
    """
    outer = {id(p) for m in model.modules() if isinstance(m, nn.Embedding) for p in m.parameters()}
    outer.add(id(getattr(model, "head_weight", None)))
    parameters = _trained(model)
    hidden = [p for p in parameters if p.ndim == 2 and id(p) not in outer]
    rest = [p for p in parameters if p.ndim != 2 or id(p) in outer]
    if not hidden:
        raise refuse("optimizer", "muon", "the model has no hidden matrices", "adamw")
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
        _adamw(rest, lr if adamw_lr is None else adamw_lr, (beta1, beta2), eps, weight_decay),
    ]


class Lion(Optimizer):
    """Lion (Chen et al. 2023), which skips an update without a wait of the host."""

    _step_supports_amp_scaling = True

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        skip: Tensor | None = getattr(self, "found_inf", None)
        for group in self.param_groups:
            lr, beta1, beta2 = group["lr"], group["beta1"], group["beta2"]
            shrink: Any = 1 - lr * group["weight_decay"]
            held = [p for p in group["params"] if p.grad is not None]
            for p in held:
                if not self.state[p]:
                    self.state[p]["momentum"] = torch.zeros_like(p)
            if not held:
                continue
            momenta = [mesh.local_part(self.state[p]["momentum"]) for p in held]
            gradients = [mesh.local_part(p.grad) for p in held]
            parameters = [mesh.local_part(p) for p in held]
            if skip is not None:  # with factors of 1 and steps of 0 nothing moves
                for gradient in gradients:
                    gradient.masked_fill_(skip > 0, 0.0)
                like = parameters[0]
                lr, shrink, beta2 = (
                    torch.where(skip > 0, like.new_full((), still), like.new_full((), value))
                    for value, still in ((lr, 0.0), (shrink, 1.0), (beta2, 1.0))
                )
            directions = torch._foreach_mul(momenta, beta1)
            torch._foreach_add_(directions, gradients, alpha=1 - beta1)
            torch._foreach_sign_(directions)
            torch._foreach_mul_(directions, lr)
            torch._foreach_mul_(parameters, shrink)
            torch._foreach_sub_(parameters, directions)
            torch._foreach_mul_(momenta, beta2)
            torch._foreach_add_(momenta, gradients, alpha=1 - group["beta2"])


def lion(
    model: nn.Module,
    lr: OptimizerKnobs.lr,
    beta1: Annotated[
        float, knob("Lion's share of the momentum in the direction", 0.9, at_least=0, below=1)
    ] = 0.9,
    beta2: Annotated[float, knob("Lion's decay of the momentum", 0.99, at_least=0, below=1)] = 0.99,
    weight_decay: OptimizerKnobs.weight_decay = 0.5,
) -> Optimizer:
    """Lion (Chen et al. 2023, algorithm 2): steps of size lr by the sign, decay on matrices only.

    A step is p <- p - lr (sign(beta1 m + (1 - beta1) g) + weight_decay p), and then
    m <- beta2 m + (1 - beta2) g. The paper takes rates 3 to 10 times lower than AdamW's, and a
    weight decay as many times larger.
    """
    knobs = {"lr": lr, "beta1": beta1, "beta2": beta2}
    return Lion(decay_groups(_trained(model), weight_decay), knobs)


def set_rate(optimizers: list[Optimizer], factor: float) -> float:
    """Set every group to its base rate x its own factor x `factor`; return the rows' rate.

    That is the first base rate x `factor`. `groups` may have given groups factors of their own.
    Raises ConfigError for a rate that `wrong_rate` finds, before any is set.
    """
    if wrong := wrong_rate(optimizers, factor):
        raise ConfigError(f"optimizer: {wrong}")
    for group in (g for o in optimizers for g in o.param_groups):
        rate = group["initial_lr"] * group.get("lr_factor", 1.0) * factor
        # torchao's is a tensor, which groups may have in common
        group["lr"] = torch.full_like(old, rate) if isinstance(old := group["lr"], Tensor) else rate
    return optimizers[0].param_groups[0]["initial_lr"] * factor


def wrong_rate(optimizers: Sequence[Optimizer], factor: float = 1.0) -> str | None:
    """Return what is wrong with a rate or a weight decay, in words; None where nothing is.

    Each is a finite number of at least 0, at each step: the knobs are checked, but an optimizer of
    one's own, or a hook, may have made another value.
    """
    for number, group in enumerate(g for o in optimizers for g in o.param_groups):
        base, own = group["initial_lr"], group.get("lr_factor", 1.0)
        values = {"base rate `initial_lr`": base}
        if isinstance(decay := group.get("weight_decay"), Real):
            values["weight decay"] = decay
        if _may_be(base):
            values[f"rate ({base} x {own} x {factor} of the schedule)"] = base * own * factor
        for what, value in values.items():
            if not _may_be(value):
                text = "a finite number of at least 0 is needed"
                return f"the {what} of its group {number} is {value}; {text}"
    return None


def _may_be(rate: Any) -> bool:
    """Return whether a value may be a rate. A tensor on a device is not read."""
    return isinstance(rate, Tensor) or (isinstance(rate, Real) and 0 <= float(rate) < math.inf)


def _skips_on_device(optimizer: Optimizer) -> bool:
    """Return whether a flag on the device can skip its update; else the host has to wait."""
    if isinstance(optimizer, (Muon, Lion)):  # which choose between whole tensors
        return not any(
            hasattr(p, "device_mesh") for g in optimizer.param_groups for p in g["params"]
        )
    with_momentum = any(group.get("momentum") for group in optimizer.param_groups)
    if isinstance(optimizer, torch.optim.SGD) and with_momentum and not optimizer.state:
        return False  # a skipped first step would leave torch's fused momentum uninitialised
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def takes_factor(optimizer: Optimizer) -> bool:
    """Return whether the next update can multiply the gradients by the clip factor.

    torch's fused kernels can, unless a hook looks at the gradients before them.
    """
    ours = type(optimizer) in (AdamW, SGD)
    return ours and _skips_on_device(optimizer) and not optimizer._optimizer_step_pre_hooks


def clips_in_update(optimizers: list[Optimizer], norm: Tensor) -> bool:
    """Return whether the next update is to clip gradients of this norm.

    On a CPU it is not: there `clip` reads the factor and skips a factor of 1.
    """
    return norm.is_cuda and norm.dtype == torch.float32 and all(map(takes_factor, optimizers))


def update(optimizers: list[Optimizer], skip: Tensor | bool, factor: Tensor | None = None) -> None:
    """Update by all optimizers, or by none where `skip` is true.

    `skip` is a 0-dim bool tensor, or a bool that the host knows. With `factor` (0-dim, fp32), which
    all optimizers must take (`takes_factor`), the gradients are multiplied by it. Kernels that
    support it decide on the device (parameters, moments and step counts then stay bit-identical),
    so the host does not wait; with any other optimizer in the list the host reads `skip` first.
    """
    found_inf: Tensor | None = None
    if isinstance(skip, Tensor) and all(map(_skips_on_device, optimizers)):
        found_inf = skip.to(torch.float32)
    elif skip:
        return
    scale = None if factor is None else factor.reciprocal()  # which torch divides by
    for optimizer in optimizers:
        if found_inf is not None or scale is not None:
            optimizer.found_inf = found_inf  # type: ignore[attr-defined]
            optimizer.grad_scale = scale  # type: ignore[attr-defined]
        optimizer.step()
