"""The kind of device that computes a tensor, and its memory.

It is the tensor's own device, or the one that a plan is made for.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

# what operations of our own do, by their names: who counts memory looks inside
bodies: dict[str, Callable[..., Any]] = {}
_planned: list[tuple[str, float]] = []


def kind_of(device: torch.device) -> str:
    """Return `cpu`, `cuda`, ...: what decides how something is computed."""
    return _planned[-1][0] if _planned else device.type


def has_values() -> bool:
    """Return whether tensors hold values: not while a plan is made."""
    return not _planned


def memory_of(device: torch.device) -> float:
    """Return the bytes that an accelerator has."""
    if _planned:
        return _planned[-1][1]
    return float(torch.cuda.get_device_properties(device).total_memory)


@contextlib.contextmanager
def planned_for(kind: str, memory: float) -> Iterator[None]:
    """Decide as on another kind of device, for tensors without memory."""
    _planned.append((kind, memory))
    try:
        yield
    finally:
        _planned.pop()


def operation(body: Callable[..., Any]) -> Any:
    """Return what calls a function as one operation, which compilers and plans do not look into.

    It is for callers without gradients: autograd would else look into it. The first call of one by
    torch.library.custom_op would import torch._dynamo, for a second.
    """
    name = f"llmexp::{body.__name__}"
    schema = torch.library.infer_schema(body, mutates_args=())
    torch.library.define(name, schema, tags=(torch.Tag.pt2_compliant_tag,))
    torch.library.impl(name, "default", body)
    return getattr(torch.ops.llmexp, body.__name__).default
