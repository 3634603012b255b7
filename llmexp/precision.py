"""Which arithmetic: fp32, tf32, bf16, fp16 (autocast; the only one with a GradScaler), fp64.

Master weights, gradients and optimizer state stay fp32 (fp64 in fp64).
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch


def choose(kind: str, device: torch.device) -> tuple[str, str]:
    """(kind, reason). `auto` is bf16 where the device computes it natively, else fp32.

    Raises ValueError for an arithmetic that the device lacks.
    """
    native = _native_bf16(device)
    if kind == "auto":
        where = "this GPU" if device.type == "cuda" else "this CPU"
        return ("bf16", f"chosen: {where} computes bf16") if native else ("fp32", f"chosen: {where} has no bf16 units")
    if kind == "tf32" and (device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 0)):
        raise ValueError(f"precision.kind=tf32: {device.type} has no TF32 units; for example precision=fp32")
    if kind == "bf16" and device.type == "cuda" and not native:
        raise ValueError("precision.kind=bf16: this GPU has no bf16 units; for example precision=fp16")
    if kind in ("bf16", "fp16") and device.type == "cpu" and not (native and kind == "bf16"):
        return kind, "as asked; this CPU emulates it, slowly"
    return kind, "as asked"


def _native_bf16(device: torch.device) -> bool:
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    capabilities = torch.cpu.get_capabilities()
    return bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16") or capabilities.get("bf16"))


def apply(kind: str) -> None:
    """Process-wide matmul settings: TF32 only when it was asked for."""
    torch.backends.cuda.matmul.allow_tf32 = kind == "tf32"
    torch.backends.cudnn.allow_tf32 = kind == "tf32"


def parameter_dtype(kind: str) -> torch.dtype:
    return torch.float64 if kind == "fp64" else torch.float32


def autocast(kind: str, device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """The context for forward passes."""
    if kind in ("bf16", "fp16"):
        return torch.autocast(device.type, dtype=torch.bfloat16 if kind == "bf16" else torch.float16)
    return contextlib.nullcontext()


def grad_scaler(kind: str, device: torch.device, init_scale: float, growth_interval: int) -> torch.amp.GradScaler:
    """A scaler that is enabled for fp16 only; disabled, it passes everything through."""
    return torch.amp.GradScaler(
        device.type, init_scale=init_scale, growth_interval=growth_interval, enabled=kind == "fp16"
    )
