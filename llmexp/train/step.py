"""One optimizer step, and the live parts that it works on."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from llmexp import mesh
from llmexp.config.kinds import Kind
from llmexp.data.window import Window
from llmexp.models.initial import seed_all, seed_of
from llmexp.models.loss import SummedLoss
from llmexp.optim import precision, updating
from llmexp.train.clipping import Rule
from llmexp.train.feature import Features

# Codes of an `Outcome`; the update is applied for the first.
OK, SKIPPED, EMPTY, BAD_LOSS, BAD_NORM = range(5)
_FIGURES = (
    "target_tokens", "skipped", "loss", "grad_norm", "grad_norm_post_clip", "clipped", "loss_scale",
)  # fmt: skip


class TrainingFailed(RuntimeError):
    """Training cannot go on; the text says what, where, and what is intact."""

    def __init__(self, text: str, kind: Kind = "failed") -> None:
        super().__init__(text)
        self.kind = kind


@dataclass(frozen=True)
class Setup:
    """Hold what a rank trains with: its model, optimizers and mesh, and the settings of a step."""

    mesh: mesh.Mesh
    model: nn.Module
    loss: SummedLoss  # model + loss, unwrapped: evaluation and compile
    module: nn.Module  # the same, wrapped for the mesh: training
    parameters: list[nn.Parameter]
    optimizers: list[Optimizer]
    scaler: precision.Scaler
    clipping: Rule
    arithmetic: str  # fp32, bf16, ...: the kind of precision
    rate_factor: Callable[[int], float]  # of the learning rate, after so many updates
    stage_rate: Callable[[int], float]  # a second one, after so many steps: by the batch
    features: Features = field(default_factory=Features)

    @property
    def gradients(self) -> list[Tensor]:
        """Return the gradients that are there, of which each rank may hold a part."""
        return [p.grad for p in self.parameters if p.grad is not None]

    def zero_gradients(self) -> None:
        for gradient in self.gradients:
            mesh.local_part(gradient).zero_()


@dataclass
class Outcome:
    """Hold what a step came to: numbers on a CPU, else tensors that are copied to the host at once.

    `read` makes these numbers; it waits for that copy alone, not for work queued after it.
    """

    target_tokens: Any
    skipped: Any  # its update was not applied
    loss: Any
    grad_norm: Any
    grad_norm_post_clip: Any
    clipped: Any
    loss_scale: Any
    more: dict[str, Any] = field(default_factory=dict)  # of features
    lr: float = 0.0
    own_nll: Any = 0.0  # this rank's part of the loss, summed; it stays on the device

    def __post_init__(self) -> None:
        self._copied: torch.cuda.Event | None = None
        values = [*(getattr(self, name) for name in _FIGURES), *self.more.values()]
        if isinstance(self.skipped, bool):  # they are on the host
            self._take(values)
            return
        self._pinned = torch.empty(len(values), dtype=torch.float64, pin_memory=True)
        self._pinned.copy_(torch.stack(values), non_blocking=True)
        self._copied = torch.cuda.Event()
        self._copied.record()

    def read(self) -> Outcome:
        """Return it with numbers alone."""
        if self._copied is not None:
            self._copied.synchronize()
            self._copied = None
            self._take(self._pinned.tolist())
        return self

    def _take(self, values: Sequence[Any]) -> None:
        numbers = map(float, values)
        for name in _FIGURES:
            setattr(self, name, next(numbers))
        self.skipped, self.clipped = bool(self.skipped), bool(self.clipped)
        self.more = {name: next(numbers) for name in self.more}

    @property
    def is_finite(self) -> bool:
        """Return whether it has targets, and finite figures."""
        return self.code in (OK, SKIPPED)

    @property
    def code(self) -> int:
        """Return what is wrong, or OK: what `must_skip` and `judge` found on the device."""
        if self.target_tokens == 0:
            return EMPTY
        if not math.isfinite(self.loss):
            return BAD_LOSS
        if not math.isfinite(self.grad_norm):
            return BAD_NORM
        return SKIPPED if self.skipped else OK


def train_step(setup: Setup, window: Window, finish_last: Callable[[], int]) -> Outcome:
    """Take one optimizer step, in execution order: accumulate, reduce, measure, clip, update.

    The gradient is that of the summed loss of all valid targets of all ranks over their number. All
    ranks begin with the buffers of rank 0, and each moves its own on, micro-batch by micro-batch.
    `finish_last` waits for the outcome of the step before, and returns the number of applied
    updates; called this late, the device has finished that step and the wait is short.
    """
    mesh.share_buffers(setup.mesh, setup.model)
    targets, loss_weight = loss_factor(setup, window)
    nll = accumulate(setup, window, loss_weight)
    own_nll = on_host(nll.clone())
    loss = on_host(mesh.total_(setup.mesh, nll)) / at_least_one(targets)

    gradients = setup.gradients
    held = [mesh.local_part(g) for g in gradients]  # this rank's parts: the same storage
    setup.scaler.unscale(held)
    setup.features.at("backward_end", window)
    norm = mesh.global_norm(setup.mesh, gradients)
    skip = must_skip(loss, norm, targets)
    # here and not earlier: the schedule counts applied updates, and the device is busy meanwhile
    updates = finish_last()
    norm_after, clipped, clip_factor = setup.clipping.clip(gradients, norm)

    lr_factor = setup.rate_factor(updates) * setup.stage_rate(window.step)
    lr = updating.set_rate(setup.optimizers, lr_factor)
    scale, more = setup.scaler.value, dict[str, Any]()
    for judge in setup.features.on("judge"):
        skip = judge(skip, loss, norm)
    updating.update(setup.optimizers, skip, clip_factor)
    clipped = setup.clipping.after_update(skip, clipped)
    setup.features.at("updated", window, skip)
    for figures_of in setup.features.on("figures"):
        more |= figures_of(targets, scale)
    if setup.scaler.enabled:
        setup.scaler.update(norm)
    torch._foreach_zero_(held)
    clipped = clipped and not skip if isinstance(skip, bool) else clipped & ~skip
    return Outcome(targets, skip, loss, norm, norm_after, clipped, scale, more, lr, own_nll)


def on_host(value: Tensor) -> Any:
    """Return a 0-dim tensor as a number on a CPU, where reading is free, else as it is."""
    return value.item() if value.device.type == "cpu" else value


def at_least_one(count: Any) -> Any:
    return count.clamp(min=1) if isinstance(count, Tensor) else max(count, 1.0)


def loss_factor(setup: Setup, window: Window) -> tuple[Any, Tensor]:
    """Return the valid targets of a window on all ranks, and the factor on each micro-batch's loss.

    It is dp_size / targets x loss scale, 0-dimensional, on the device, the same on all ranks. DDP
    and FSDP average gradients over the ranks: it makes the sum over ranks a mean per target.
    """
    device, dtype = setup.mesh.device, precision.parameter_dtype(setup.arithmetic)
    count: Any = float(window.target_count)
    if setup.mesh.dp_size > 1 or device.type != "cpu":
        own_count = torch.tensor(count, dtype=torch.float64).to(device, non_blocking=True)
        count = on_host(mesh.total_(setup.mesh, own_count))
    factor = setup.mesh.dp_size / at_least_one(count)
    factor = factor.to(dtype) if isinstance(factor, Tensor) else torch.tensor(factor, dtype=dtype)
    return count, factor * setup.scaler.value if setup.scaler.enabled else factor


def accumulate(
    setup: Setup,
    window: Window,
    loss_weight: Tensor,
    look: Callable[[Tensor, int], None] = lambda nll, number: None,
) -> Tensor:
    """Add up the gradients of the micro-batches, times `loss_weight`, over the ranks too.

    Return the summed loss of this rank's targets. `look` gets that of each micro-batch, and its
    number from 1, before the backward pass.
    """
    device, kind, nll = setup.mesh.device, setup.arithmetic, torch.zeros_like(loss_weight)
    for i, (tokens_bt, targets_bt) in enumerate(window.micro_batches, 1):
        tokens_bt = tokens_bt.to(device, non_blocking=True)
        targets_bt = targets_bt.to(device, non_blocking=True)
        setup.features.at("forward_start", targets_bt)
        with mesh.micro_step(setup.mesh, setup.module, last=i == len(window.micro_batches)):
            with precision.autocast(kind, device):
                micro_nll = setup.module(tokens_bt, targets_bt)
            look(micro_nll, i)
            with contextlib.ExitStack() as around:
                for context_of in setup.features.on("around_backward"):
                    around.enter_context(context_of(window, i))
                # torch imports sympy, half a second, for a gradient that is given
                (micro_nll * loss_weight).backward()
        nll += micro_nll.detach()
    return nll


def must_skip(loss: Any, norm: Any, count: Any) -> Any:
    """Return whether no target is valid or a figure not finite; `Outcome.code` must agree."""
    if isinstance(loss, Tensor):
        return ~(loss.isfinite() & norm.isfinite() & (count > 0))
    return not (math.isfinite(loss) and math.isfinite(norm) and count > 0)


def seed_step(seed: int, step: int, random_stream: int) -> None:
    """Seed the RNG of a window from (seed, step, `Mesh.random_stream`) alone.

    Tensor-parallel ranks draw the same, unless each has tokens of its own. Nothing that happens
    between two windows can disturb it, and a resumed run needs no RNG state.
    """
    seed_all(seed_of(f"{seed}/{step}/{random_stream}"))
