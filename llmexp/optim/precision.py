"""Choose the arithmetic: fp32, tf32, bf16, fp16 (autocast; the only one with a loss scale), fp64.

Master weights, gradients and optimizer state stay fp32 (fp64 in fp64).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from llmexp.config.values import ConfigError


def choose(kind: str, device: torch.device) -> tuple[str, str]:
    """Return (kind, a reason or a warning in words).

    `auto` is bf16 where the device computes it natively, else fp32. Raises ConfigError for an
    arithmetic that the device lacks.
    """
    if device.type == "cuda":
        where, native = "this GPU", torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        where, units = "this CPU", torch.cpu.get_capabilities()
        native = any(units.get(name) for name in ("avx512_bf16", "amx_bf16", "bf16"))
    if kind == "auto":
        if native:
            return "bf16", f"chosen: {where} computes bf16"
        return "fp32", f"chosen: {where} has no bf16 units"
    if kind == "tf32" and (
        device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 0)
    ):
        raise ConfigError(
            "no_device",
            f"precision.kind=tf32: {device.type} has no TF32 units; for example precision=fp32",
        )
    if kind == "bf16" and device.type == "cuda" and not native:
        raise ConfigError(
            "no_device",
            "precision.kind=bf16: this GPU has no bf16 units; for example precision=fp16",
        )
    if kind in ("bf16", "fp16") and device.type == "cpu" and not (native and kind == "bf16"):
        return kind, "this CPU emulates it, slowly"
    return kind, ""


def apply(kind: str) -> None:
    """Process-wide matmul settings: TF32 only when it was asked for."""
    torch.backends.cuda.matmul.allow_tf32 = kind == "tf32"
    torch.backends.cudnn.allow_tf32 = kind == "tf32"


def make_deterministic() -> None:
    """Take only algorithms that give the same bits each time, for the whole process.

    An operation without one raises an error. To be called before anything is computed on a device:
    cuBLAS reads its workspace when it starts.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    # nothing reads it
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cuda.enable_cudnn_sdp(False)  # its backward pass adds in any order
    torch.backends.cudnn.benchmark = False


def _deterministic() -> tuple[bool, bool]:
    """Return whether only deterministic algorithms are taken, and whether others are a warning."""
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    return torch.are_deterministic_algorithms_enabled(), warn_only


@contextlib.contextmanager
def settings_kept() -> Iterator[None]:
    """Put back what `apply` and `make_deterministic` change, for a process that lives on."""
    name, uninitialized = "CUBLAS_WORKSPACE_CONFIG", torch.utils.deterministic
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = (
        os.environ.get(name),
        _deterministic(),
        uninitialized.fill_uninitialized_memory,  # type: ignore[attr-defined]
        torch.backends.cuda.cudnn_sdp_enabled(),
        cudnn.benchmark,
        # `allow_tf32` cannot be read where a program has set its newer name
        matmul.fp32_precision == "tf32",
        cudnn.conv.fp32_precision == "tf32",  # type: ignore[attr-defined]
    )
    try:
        yield
    finally:
        workspace, deterministic, filled, sdp, benchmark, *tf32 = before
        if workspace is None:
            os.environ.pop(name, None)
        if deterministic != _deterministic():  # it imports torch._inductor, for a second
            torch.use_deterministic_algorithms(deterministic[0], warn_only=deterministic[1])
        uninitialized.fill_uninitialized_memory = filled  # type: ignore[attr-defined]
        torch.backends.cuda.enable_cudnn_sdp(sdp)
        cudnn.benchmark = benchmark
        matmul.allow_tf32, cudnn.allow_tf32 = tf32


def parameter_dtype(kind: str) -> torch.dtype:
    """Return the dtype of parameters, gradients and optimizer state."""
    return torch.float64 if kind == "fp64" else torch.float32


def autocast(kind: str, device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Return the context for forward passes."""
    if kind in ("bf16", "fp16"):
        return torch.autocast(
            device.type, dtype=torch.bfloat16 if kind == "bf16" else torch.float16
        )
    return contextlib.nullcontext()


class Scaler:
    """The loss scale of fp16 (Micikevicius et al. 2018); 1 for all other arithmetic.

    It follows GradScaler's rule with its default factors. Its state stays on the device. torch's
    own class looks at each rank's gradients for itself and takes no mix of whole and split ones;
    here the caller decides with the norm over all ranks.
    """

    def __init__(
        self, kind: str, device: torch.device, init_scale: float, growth_interval: int
    ) -> None:
        self.enabled = kind == "fp16"
        self.value = torch.tensor(init_scale if self.enabled else 1.0, device=device)
        # since the last overflow or growth
        self._steps = torch.zeros((), dtype=torch.int64, device=device)
        self._growth_interval = growth_interval

    def unscale(self, gradients: list[Tensor]) -> None:
        """Divide in place; once per window."""
        if self.enabled:
            torch._foreach_mul_(gradients, 1.0 / self.value)

    def update(self, norm: Tensor) -> None:
        """Halve the scale after an overflow, double it after `growth_interval` steps without one.

        An overflow is a gradient norm that is not finite; no scale changes the loss.
        """
        overflow = ~norm.isfinite()
        self._steps = torch.where(overflow, 0, self._steps + 1)
        grown = self._steps == self._growth_interval
        self._steps = torch.where(grown, 0, self._steps)
        larger = torch.where((self.value * 2).isfinite() & grown, self.value * 2, self.value)
        self.value = torch.where(overflow, self.value * 0.5, larger)

    def state_dict(self) -> dict[str, float]:
        """Return what a checkpoint keeps. The host waits."""
        return {"scale": float(self.value), "steps": int(self._steps)} if self.enabled else {}

    def load_state_dict(self, state: dict[str, float]) -> None:
        if self.enabled and state:  # a fork's parent may have had another precision
            self.value.fill_(state["scale"])
            self._steps.fill_(state["steps"])
