"""Take an optimizer's state apart into named tensors and plain values, and put it together again.

torch's own optimizers keep a tensor or a number by each key. Others keep lists of tensors, or
tensors of a kind of their own, such as 8-bit codes with their scales.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

TENSOR, PACKED = "<tensor>", "<packed>"  # keys of a mapping that stands for one
_KINDS = ("torchao.",)  # packages whose kinds of tensors a checkpoint may name


@dataclass(frozen=True)
class Traits:
    """Hold what a trial of an optimizer has shown that is none of ours."""

    name: str
    counters: tuple[str, ...]  # keys of its groups that steps change, or nobody can set
    draws: bool  # random numbers
    parts: bool  # whether parts of a tensor are updated as the whole is
    like_adam: bool  # whether each entry is updated by itself, the same for gradients 64 x as large
    state_bytes: float  # for each byte of a parameter, in a tiny copy
    key: str = "optimizer.name"  # the knob that names it


def traits_of(optimizer: Optimizer) -> Traits | None:
    """Return what is known of an optimizer of a library or the user's; None for one of ours."""
    return getattr(optimizer, "llmexp_traits", None)


def is_packed(value: Any) -> bool:
    """Return whether a tensor is made of others, and not split over ranks."""
    return hasattr(value, "__tensor_flatten__") and not hasattr(value, "device_mesh")


def taken_apart(key: str, value: Any, tensors: dict[str, Tensor]) -> Any:
    """Put the tensors of a value into `tensors`, by names that begin with `key`.

    Return the value with marks in their places, plain.
    """
    if is_packed(value):
        names, about = value.__tensor_flatten__()
        parts = {n: taken_apart(f"{key}.{n}", getattr(value, n), tensors) for n in names}
        kind = type(value)
        return {PACKED: f"{kind.__module__}.{kind.__qualname__}", "about": about, "parts": parts}
    if isinstance(value, Tensor):
        tensors[key] = value
        return {TENSOR: key}
    if isinstance(value, Mapping):
        return {name: taken_apart(f"{key}.{name}", v, tensors) for name, v in value.items()}
    if isinstance(value, list | tuple):
        kind = type(value)
        return kind(taken_apart(f"{key}.{number}", v, tensors) for number, v in enumerate(value))
    return copy.deepcopy(value)


def put_together(value: Any, tensors: dict[str, Tensor]) -> Any:
    """Return a value that `taken_apart` has made plain, with its tensors, which are taken out.

    Raises ValueError for a kind of tensor that no optimizer of ours has.
    """
    if isinstance(value, Mapping) and PACKED in value:
        module, _, name = str(value[PACKED]).rpartition(".")
        if not module.startswith(_KINDS):
            raise ValueError(f"{value[PACKED]} is not a kind of tensor of an optimizer's state")
        kind: Any = getattr(importlib.import_module(module), name)
        parts = put_together(value["parts"], tensors)
        return kind.__tensor_unflatten__(parts, value["about"], None, None)
    if isinstance(value, Mapping) and TENSOR in value:
        return tensors.pop(value[TENSOR])
    if isinstance(value, Mapping):
        return {key: put_together(v, tensors) for key, v in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(put_together(v, tensors) for v in value)
    return value


def apart(state: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return what an optimizer keeps of a parameter: what is plain by key, and tensors by name.

    A tensor that has a key for itself is among the tensors alone.
    """
    tensors = {k: v for k, v in state.items() if isinstance(v, Tensor) and not is_packed(v)}
    others = [key for key in state if key not in tensors]
    return {key: taken_apart(key, state[key], tensors) for key in others}, tensors


def together(plain: Mapping[str, Any], tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Return the state that `apart` has taken apart. Raises ValueError as `put_together` does."""
    whole = {key: put_together(value, tensors) for key, value in plain.items()}
    return whole | tensors  # without those that are in others now


def straighten(state: Any) -> None:
    """Lay tensors out row by row, in a dict or in lists within it.

    That is how a checkpoint gives them back. Products of a matrix that lies column by column, such
    as torch.linalg.qr makes, round differently on CUDA.
    """
    for key, value in state.items() if isinstance(state, dict) else enumerate(state):
        if isinstance(value, dict | list):
            straighten(value)
        elif isinstance(value, Tensor) and not is_packed(value):
            state[key] = value.contiguous()
