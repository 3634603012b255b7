"""The update by any optimizers, which can be skipped on the device; their groups and rates.

Each optimizer is a file of `optimizers`, which a run imports when it is named.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from llmexp.config.values import ConfigError

# torch's optimizers keep themselves out of compiled graphs, and import the compiler for that, which
# takes a second. No step of ours is in a graph.
for _method in ("add_param_group", "load_state_dict", "state_dict", "zero_grad"):
    _wrapped = inspect.unwrap(getattr(Optimizer, _method))
    setattr(_wrapped, "__dynamo_disable", _wrapped)


def trained(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters of a model that are trained."""
    return [p for p in model.parameters() if p.requires_grad]


def held_by(*optimizers: Optimizer) -> list[nn.Parameter]:
    """Return the parameters of optimizers."""
    return [p for o in optimizers for group in o.param_groups for p in group["params"]]


def can_fuse(parameters: list[nn.Parameter], split: bool = True) -> bool:
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


def set_rate(optimizers: list[Optimizer], factor: float) -> float:
    """Set every group to its base rate x its own factor x `factor`; return the rows' rate.

    That is the first base rate x `factor`. `groups` may have given groups factors of their own.
    Raises ConfigError for a rate that `wrong_rate` finds, before any is set.
    """
    if wrong := wrong_rate(optimizers, factor):
        raise ConfigError("bad_own_part", f"optimizer: {wrong}")
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
    if getattr(optimizer, "skips_whole", False):  # by a choice between whole tensors
        return not any(hasattr(p, "device_mesh") for p in held_by(optimizer))
    with_momentum = any(group.get("momentum") for group in optimizer.param_groups)
    if isinstance(optimizer, torch.optim.SGD) and with_momentum and not optimizer.state:
        return False  # a skipped first step would leave torch's fused momentum uninitialised
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def takes_factor(optimizer: Optimizer) -> bool:
    """Return whether the next update can multiply the gradients by the clip factor.

    torch's fused kernels can, unless a hook looks at the gradients before them.
    """
    own_step = vars(type(optimizer)).get("takes_factor", False)
    return own_step and _skips_on_device(optimizer) and not optimizer._optimizer_step_pre_hooks


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
        # also None, in place of those of the update before
        optimizer.found_inf = found_inf  # type: ignore[attr-defined]
        optimizer.grad_scale = scale  # type: ignore[attr-defined]
        optimizer.step()
