"""The user's own functions, called in one place."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from llmexp.data.window import Window
from llmexp.run import Run
from llmexp.settings.targets import own_line, place
from llmexp.train.state import Loop
from llmexp.train.step import TrainingFailed


@dataclass(frozen=True)
class HookContext:
    """Hold all that a hook sees.

    `step` counts from 1; `row` holds the row's figures so far, None when no row is due; `user` is
    the config's section of that name. `micro_batches` are those of the step's window on this rank,
    as it trains on them: (inputs, targets) int64 [b, t], where a target below 0 does not count;
    None where no window is there.
    """

    step: int
    model: nn.Module
    optimizers: list[Optimizer]
    run: Run
    row: dict[str, Any] | None
    user: dict[str, Any]
    micro_batches: list[tuple[Tensor, Tensor]] | None = None


def call_hooks(
    loop: Loop,
    event: str,
    step: int,
    row: dict[str, Any] | None = None,
    *,
    window: Window | None = None,
    wanted: bool = False,
) -> None:
    """Call the user's functions, here and nowhere else.

    Finite figures that they return are kept for the row of this step where there will be one
    (`wanted`).
    """
    parts = loop.parts
    batches = None if window is None else window.micro_batches
    for name, hook in parts.hooks:
        gradients = loop.setup.gradients if event == "backward_end" else []
        so_far = None if row is None else dict(row)
        context = HookContext(
            step, loop.setup.model, loop.setup.optimizers, parts.run, so_far, parts.user, batches
        )
        try:
            found = hook(event, context)
        # a hook does not decide how a run ends
        except (Exception, SystemExit, KeyboardInterrupt) as error:
            where = own_line(error)
            if loop.mesh.distributed:
                where = f"rank {loop.mesh.rank}, {where}"
            raise TrainingFailed(
                f"the hook {name} failed at {event} of step {step}: {error!r} ({where})"
            ) from error
        if gradients and [*map(id, loop.setup.gradients)] != [*map(id, gradients)]:
            raise TrainingFailed(
                f"the hook {name} put another tensor in the place of a gradient at {event} of step "
                f"{step}, which is not measured and clipped; change it in place, such as "
                f"p.grad.mul_(2){place(hook)}"
            )
        try:
            # without a row a tensor is not read: that would make the host wait for nothing
            read = _figures(found, read_tensors=wanted)
            if wanted:  # a row is strict JSON
                loop.figures |= {k: (v, (name, hook)) for k, v in read.items() if math.isfinite(v)}
        except ValueError as error:
            raise TrainingFailed(
                f"the hook {name} returned {error} at {event} of step {step}; a hook returns None "
                f"or a dict of numbers, for example {{'mine/norm': 1.5}}{place(hook)}"
            ) from None


def _figures(found: Any, *, read_tensors: bool) -> dict[str, float]:
    """Return the figures that a hook returned; the host waits for tensors that are read.

    Raises ValueError for anything else.
    """
    if not isinstance(found, Mapping | None):
        raise ValueError(_short(found))
    figures = dict[str, float]()
    for key, value in (found or {}).items():
        if not isinstance(key, str):
            raise ValueError(f"the key {_short(key)}")
        if isinstance(value, Tensor):
            if value.numel() != 1 or value.is_complex():
                raise ValueError(f"{key}=a tensor {tuple(value.shape)} of {value.dtype}")
            if not read_tensors:
                continue
        try:
            if isinstance(value, str | bytes):  # Python would read a number in it
                raise TypeError
            figures[key] = float(value)
        except (TypeError, ValueError, RuntimeError):
            raise ValueError(f"{key}={_short(value)}") from None
    return figures


def _short(value: Any) -> str:
    text = repr(value)
    return f"{text if len(text) <= 60 else text[:57] + '...'} ({type(value).__name__})"
