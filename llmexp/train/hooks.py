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
        try:
            figures = _checked(found)
            if wanted:  # else reading a tensor would make the host wait for nothing
                read = {key: _float(key, value) for key, value in figures.items()}
                # a row is strict JSON
                loop.figures |= {k: (v, (name, hook)) for k, v in read.items() if math.isfinite(v)}
        except ValueError as error:
            raise TrainingFailed(
                f"the hook {name} returned {error} at {event} of step {step}; a hook returns None "
                f"or a dict of numbers, for example {{'mine/norm': 1.5}}{place(hook)}"
            ) from None


def _checked(found: Any) -> dict[str, Any]:
    """Return the figures that a hook returned, without reading a tensor.

    Raises ValueError for anything else.
    """
    if found is None:
        return {}
    if not isinstance(found, Mapping):
        raise ValueError(_short(found))
    for key, value in found.items():
        if not isinstance(key, str):
            raise ValueError(f"the key {_short(key)}")
        if isinstance(value, Tensor):
            if value.numel() != 1 or value.is_complex():
                raise ValueError(f"{key}=a tensor {tuple(value.shape)} of {value.dtype}")
        else:
            _float(key, value)
    return dict(found)


def _float(key: str, value: Any) -> float:
    """Return a hook's figure as a float. Raise ValueError for what is no number."""
    if isinstance(value, str | bytes):
        raise ValueError(f"{key}={_short(value)}")
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        raise ValueError(f"{key}={_short(value)}") from None


def _short(value: Any) -> str:
    text = repr(value)
    return f"{text if len(text) <= 60 else text[:57] + '...'} ({type(value).__name__})"
