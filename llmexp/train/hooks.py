"""The user's own functions, called in one place."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from llmexp.config.targets import is_class, own_line, place
from llmexp.data.window import Window
from llmexp.run import Run
from llmexp.train.feature import Feature, own_name
from llmexp.train.state import Loop
from llmexp.train.step import Setup, TrainingFailed


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


def of_hooks(hooks: Sequence[tuple[str, Callable[..., Any]]], setup: Setup) -> list[Feature]:
    """Return what listens for a user: one feature for all functions, and own features as they are.

    A class gets the `Setup`, and its knobs.
    """
    classes = [found for _, found in hooks if is_class(found)]
    functions = [(name, found) for name, found in hooks if not is_class(found)]
    made: list[Feature] = [UserHooks(functions)] if functions else []
    for found in classes:
        made.append(feature := found(setup))
        feature.name = own_name(type(feature))
    return made


class UserHooks(Feature):
    """Call the user's functions, and only here, at the events of docs/custom-parts.md.

    Finite figures that they return are kept for the row of this step where there will be one.
    """

    def __init__(self, hooks: list[tuple[str, Callable[..., Any]]]) -> None:
        self._hooks = hooks
        self._figures: dict[str, tuple[float, tuple[str, Any]]] = {}  # and the hook, by key

    def step_start(self, step: int) -> None:
        self._call("step_start", step)

    def backward_start(self, window: Window) -> None:
        self._call("backward_start", window.step + 1, window)

    def backward_end(self, window: Window) -> None:
        self._call("backward_end", window.step + 1, window)

    def step_end(self, window: Window, row: dict[str, Any] | None) -> None:
        self._call("step_end", window.step + 1, window, row)

    def evaluated(self, window: Window, row: dict[str, Any]) -> None:
        self._call("evaluated", window.step + 1, window, row)

    def saved(self, step: int) -> None:
        self.loop.row_is_due = False
        self._call("saved", step)

    def row_ready(self, row: dict[str, Any]) -> None:
        figures, self._figures = self._figures, {}
        for key, (value, (name, hook)) in figures.items():
            if key in row:
                raise TrainingFailed(
                    f"the hook {name}{place(hook)} returned {key}, which the row of step "
                    f"{row['step']} has already; choose another name, for example mine/{key}"
                )
            row[key] = value

    def _call(
        self,
        event: str,
        step: int,
        window: Window | None = None,
        row: dict[str, Any] | None = None,
    ) -> None:
        loop: Loop = self.loop
        batches = None if window is None else window.micro_batches
        for name, hook in self._hooks:
            gradients = loop.setup.gradients if event == "backward_end" else []
            so_far = None if row is None else dict(row)
            model, optimizers, user = loop.setup.model, loop.setup.optimizers, loop.parts.user
            context = HookContext(step, model, optimizers, loop.run, so_far, user, batches)
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
                    f"the hook {name} replaced a gradient at {event} of step {step}, which would "
                    f"not be clipped; change it in place, such as p.grad.mul_(2){place(hook)}"
                )
            try:
                # without a row a tensor is not read: that would make the host wait for nothing
                read = _figures(found, read_tensors=loop.row_is_due)
                if loop.row_is_due:  # a row is strict JSON
                    finite = {k: (v, (name, hook)) for k, v in read.items() if math.isfinite(v)}
                    self._figures |= finite
            except ValueError as error:
                raise TrainingFailed(
                    f"the hook {name} returned {error} at {event} of step {step}; a hook returns "
                    f"None or a dict of numbers, for example {{'mine/norm': 1.5}}{place(hook)}"
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
