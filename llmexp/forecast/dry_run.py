"""Rehearse an optimizer step of a run on tensors without memory, and count what it would hold."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from llmexp import mesh
from llmexp.config.convert import with_knobs
from llmexp.config.execution import Parallelism
from llmexp.data.window import Window
from llmexp.forecast.counting import Counting
from llmexp.mesh import fake_group
from llmexp.metrics.keys import OTHER_WEIGHTS
from llmexp.models import offload
from llmexp.models.planned import planned_for
from llmexp.optim.precision import autocast, parameter_dtype, settings_kept
from llmexp.optim.states import apart, traits_of
from llmexp.optim.updating import held_by
from llmexp.run.layout import Layout
from llmexp.system.devices import Device
from llmexp.train.assembly.assemble import Parts
from llmexp.train.set_up import set_up
from llmexp.train.step import Setup, train_step

KINDS = (
    "parameters", "gradients", "moments", *OTHER_WEIGHTS, "activations", "loss", "buffers",
)  # fmt: skip

OPERANDS = {"bf16": torch.bfloat16, "fp16": torch.float16}  # of products under autocast


@dataclass(frozen=True)
class Cut:
    """A way to cut the same run: what a step holds and takes depends on it."""

    micro: int
    accumulation: int
    parallelism: Parallelism
    layout: Layout


# Bytes that a rank holds when it holds most, by what they are for; with `offload` also those that a
# micro-batch leaves on the host, and all that it moves there and back.
Footprint = dict[str, int]


def cut_of(parts: Parts) -> Cut:
    """Return how the run is cut."""
    run, parallelism = parts.run, parts.config.parallelism
    return Cut(run.micro_batch_size, run.gradient_accumulation_steps, parallelism, run.layout)


def rehearse(
    parts: Parts, cut: Cut, precision: str, device: Device | None, compiled: bool = False
) -> Footprint:
    """Return what rank 0 of the run, cut like this, holds in a step.

    `device`: None is a CPU. `compiled`: with the loss of a compiled step; the rest is as without.

    A step is counted when the moments are there; of its micro-batches no more than two are taken,
    because each further one holds what the second does.
    """
    place = "cuda" if device is not None and torch.cuda.is_available() else "cpu"
    config = with_knobs(parts.config, train={"compile": False})
    counting = Counting(place)
    gc.collect()
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.enable_grad())
        stack.enter_context(fake_group.pretended(cut.layout.world_size))
        joined = mesh.join(
            place,
            cut.parallelism.kind,
            *cut.layout.sizes,
            reduces_once=cut.parallelism.fsdp_communication == "once",
            sequence=cut.parallelism.sequence_parallel,
        )
        if device is not None and place == "cpu":
            stack.enter_context(_as_accelerator())
        kind, size = ("cpu", 0.0) if device is None else ("cuda", device.gib * 2**30)
        stack.enter_context(planned_for(kind, size))
        stack.enter_context(counting.resizing())
        stack.enter_context(settings_kept())  # of what `set_up` changes
        beside = stack.enter_context(_host_beside())
        fake, modes = FakeTensorMode(allow_non_fake_inputs=True), contextlib.ExitStack()
        stack.enter_context(modes)
        made = dataclasses.replace(
            parts,
            config=dataclasses.replace(config, parallelism=cut.parallelism),
            run=dataclasses.replace(parts.run, micro_batch_size=cut.micro),
            precision=precision,
            hooks=[],  # of a user's: they may look at values, or write files
            build_model=lambda: without_memory(parts, modes, fake, counting),
            begin_model=lambda model, device, _: model.to(device),
        )
        setup = set_up(made, joined)
        if compiled and setup.loss.chunked and not joined.sharded:
            dtype = OPERANDS.get(precision, parameter_dtype(precision))
            setup.loss.run_fused = functools.partial(_whole_loss, setup.model, dtype)
        fake_group.reduce_at_once(setup.module)
        for method in ("hidden", "forward"):
            _watch(counting, setup.model, method, "activations")
        _watch(counting, setup.loss, "forward", "loss")
        for optimizer in setup.optimizers:
            _rehearse_states(optimizer)
        _first_step(made, setup, cut)
        _name(counting, setup)
        counting.restart()
        beside.clear()
        _step(made, setup, cut, micro_batches := min(2, cut.accumulation))
        modes.close()
    held = {kind: counting.peak.get(kind, 0) for kind in KINDS}
    return held | {kind: size // micro_batches for kind, size in beside.items()}


def without_memory(
    parts: Parts, modes: contextlib.ExitStack, fake: FakeTensorMode, counting: Counting
) -> nn.Module:
    """Return the model on the meta device.

    It becomes fake when it is moved from there, after it has been split over ranks.
    """
    with torch.device("meta"):
        model = parts.build_model()

    def to(device: torch.device) -> nn.Module:
        if any(p.is_meta for p in model.parameters()):
            modes.enter_context(fake)
            modes.enter_context(counting)
            model.to_empty(device=device)
        return model

    model.to = to  # type: ignore[method-assign,assignment]
    return model


@contextlib.contextmanager
def _host_beside() -> Iterator[Counter[str]]:
    """Keep what is offloaded where it is not counted; yield its bytes, and those that move."""
    found = Counter[str]()

    def to_host(x: Tensor) -> Tensor:
        found.update(offloaded=x.nbytes, moved=x.nbytes)
        return torch.empty_like(x, device="meta")

    def from_host(x: Tensor, device: torch.device) -> Tensor:
        found.update(moved=x.nbytes)
        return torch.empty_like(x, device=device)

    with (
        mock.patch.object(offload, "to_host", to_host),
        mock.patch.object(offload, "from_host", from_host),
    ):
        yield found


def _rehearse_states(optimizer: Any) -> None:
    """Let the optimizer of a library make its states, also where its step reads what is not there.

    They then have as many bytes for each of a parameter as those of the tiny copy that was tried.
    """
    if (traits := traits_of(optimizer)) is None:
        return
    step = optimizer.step

    def rehearsed() -> None:
        try:
            step()
        except Exception:
            for p in held_by(optimizer):
                size = round(traits.state_bytes * p.numel() * p.element_size())
                optimizer.state[p] = {"states": torch.empty_like(p, dtype=torch.uint8)}
                optimizer.state[p]["states"].resize_(size)

    optimizer.step = rehearsed


def _watch(counting: Counting, module: nn.Module, method: str, phase: str) -> None:
    """Count what a method of the module takes as for the phase."""
    original: Any = getattr(module, method, None)
    if original is None:
        return

    def watched(*args: Any, **kwargs: Any) -> Any:
        with counting.during(phase):
            return original(*args, **kwargs)

    setattr(module, method, watched)


def _first_step(parts: Parts, setup: Setup, cut: Cut) -> None:
    """Make the moments, and under FSDP the places that parameters are gathered to.

    Gradients are there already, but for DDP's: only it needs a backward pass, and features that
    look into one.
    """
    if setup.mesh.sharded:
        ids_bt = torch.zeros(cut.micro, parts.run.sequence_length, dtype=torch.int64)
        with torch.no_grad(), autocast(parts.precision, setup.mesh.device):
            setup.module(ids_bt, ids_bt)
        mesh.reshard(setup.module)
    looks = any(feature.looks for feature in setup.features)
    _step(parts, setup, cut, int(looks or setup.module is not setup.loss))


def _step(parts: Parts, setup: Setup, cut: Cut, micro_batches: int) -> None:
    """Train a step, one of those in which features hold most."""
    length = parts.run.sequence_length
    every = math.lcm(*(feature.peaks_every or 1 for feature in setup.features))
    ids_bt = torch.zeros(cut.micro, length, dtype=torch.int64)
    targets = cut.micro * length * max(micro_batches, 1)
    window = Window(every - 1, [(ids_bt, ids_bt)] * micro_batches, targets, 0)
    setup.features.at("backward_start", window)
    train_step(setup, window, lambda: 0)


def _whole_loss(model: Any, dtype: torch.dtype, tokens_bt: Tensor, targets_bt: Tensor) -> Tensor:
    """Take the memory of the model and of the loss that is compiled with it."""
    loss: Tensor = _WholeLoss.apply(model.hidden(tokens_bt), model.head_weight, dtype)
    return loss


class _WholeLoss(torch.autograd.Function):
    """Hold what the compiled loss of whole logits holds.

    That is its operands and the logits in the type of the products, whose gradient takes their
    place.
    """

    @staticmethod
    def forward(ctx: Any, h_btd: Tensor, weight_vd: Tensor, dtype: torch.dtype) -> Tensor:
        logits_btv = h_btd.new_empty(*h_btd.shape[:-1], weight_vd.shape[0], dtype=dtype)
        ctx.save_for_backward(h_btd.to(dtype), weight_vd.to(dtype), logits_btv)
        ctx.dtypes = h_btd.dtype, weight_vd.dtype
        return h_btd.new_zeros((), dtype=torch.promote_types(dtype, torch.float32))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, ...]:
        h_btd, weight_vd, *_ = ctx.saved_tensors
        found = torch.empty_like(h_btd), torch.empty_like(weight_vd)
        return *(g.to(dtype) for g, dtype in zip(found, ctx.dtypes, strict=True)), None


def _name(counting: Counting, setup: Setup) -> None:
    """Say what is held between steps."""
    of_parameters = [state for o in setup.optimizers for state in o.state.values()]
    states = [tensor for state in of_parameters for tensor in apart(state)[1].values()]
    local = mesh.local_part
    for held in list(counting.held.values()):
        counting.rename(held, "buffers")
    gradients = [local(p.grad) for p in setup.parameters if p.grad is not None]
    counting.call("parameters", [local(p) for p in setup.model.parameters()])
    counting.call("gradients", gradients)
    counting.call("moments", [local(v) for v in states])
    for feature in setup.features.acting("tensors"):
        counting.call(feature.name, [local(v) for v in feature.tensors().values()])


class _FusedNorm(torch.autograd.Function):
    """Hold what one kernel for a norm holds: its input and a number a row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, torch.empty_like(x[..., :1]))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, ...]:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight)


@contextlib.contextmanager
def _as_accelerator() -> Iterator[None]:
    """Hold on tensors of a CPU what an accelerator's kernels hold.

    These are flash attention of half precision, which takes dropout and shared heads, and an RMS
    norm that keeps its input.
    """
    attention = F.scaled_dot_product_attention

    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Any = None, *args: Any, **kw: Any) -> Tensor:
        if mask is not None or q.dtype.itemsize != 2:
            kw.pop("dropout_p", None)
            return attention(q, k, v, mask, **kw)
        return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)[0]

    def rms_norm(x: Tensor, shape: Any, weight: Any = None, eps: Any = None) -> Any:
        return normal(x, shape, weight, eps) if weight is None else _FusedNorm.apply(x, weight)

    normal = F.rms_norm
    with (
        mock.patch.object(F, "scaled_dot_product_attention", attend),
        mock.patch.object(F, "rms_norm", rms_norm),
    ):
        yield
