"""Count cores, and name accelerators with what their makers' data sheets say; without torch."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from llmexp.config.values import ConfigError


@dataclass(frozen=True)
class Device:
    """An accelerator, or `cpu`.

    `part`: a part of the name that CUDA gives it; `gib`: memory as CUDA reports it; `tflops`: dense
    peak rates; `bus`: GB/s to the host, one way, of its PCIe with 16 lanes.
    """

    name: str
    part: str
    gib: float
    tflops: dict[str, float] = field(default_factory=dict)
    bf16: bool = True  # whether it computes bf16
    bus: float = 32


# Dense peak rates of chips that come with other memories, too.
HOPPER = {"bf16": 989, "fp16": 989, "tf32": 494.5, "fp32": 67}
HOPPER_NVL = {"bf16": 835, "fp16": 835, "tf32": 417.5, "fp32": 60}
A100 = {"bf16": 312, "fp16": 312, "tf32": 156, "fp32": 19.5}
V100 = {"fp16": 125, "fp32": 15.7}
# Of those whose `part` is in a device's own name, the first ones of one `part` are meant.
DEVICES = (
    Device("b200", "B200", 178.0, {"bf16": 2250, "fp16": 2250, "tf32": 1125}, bus=64),
    Device("h200-nvl", "H200 NVL", 139.8, HOPPER_NVL, bus=64),
    Device("h200", "H200", 139.8, HOPPER, bus=64),
    Device(
        "h100-pcie", "H100 PCIe", 79.1, {"bf16": 756, "fp16": 756, "tf32": 378, "fp32": 51}, bus=64
    ),
    Device("h100-nvl", "H100 NVL", 93.1, HOPPER_NVL, bus=64),
    Device("h100", "H100 80GB HBM3", 79.1, HOPPER, bus=64),
    Device("a100-80", "A100", 79.1, A100),
    Device("a100-40", "A100", 39.4, A100),
    Device("l40s", "L40S", 44.4, {"bf16": 362, "fp16": 362, "tf32": 183, "fp32": 91.6}),
    Device("l4", "L4", 22.0, {"bf16": 121, "fp16": 121, "tf32": 60, "fp32": 30.3}),
    Device("a10g", "A10G", 22.0, {"bf16": 70, "fp16": 70, "tf32": 35, "fp32": 31.2}),
    Device("v100-32", "V100-SXM2", 31.7, V100, bf16=False, bus=16),
    Device("v100-16", "V100-SXM2", 15.8, V100, bf16=False, bus=16),
    Device("t4", "T4", 14.6, {"fp16": 65, "fp32": 8.1}, bf16=False, bus=16),
)


def cpu_count() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def threads_per_rank(ranks: int) -> int:
    """CPU threads of each of a host's ranks: $OMP_NUM_THREADS, else their share of the cores."""
    given = os.environ.get("OMP_NUM_THREADS", "")
    return int(given) if given.isdecimal() and int(given) else max(1, cpu_count() // ranks)


def device_named(name: str) -> Device | None:
    """Return the accelerator of that name, None for `cpu`. Raise ConfigError with the list."""
    found = {device.name: device for device in DEVICES}
    if name == "cpu":
        return None
    if name not in found:
        raise ConfigError(
            "unknown_option",
            f"plan.device={name}: is not known; use one of {', '.join(found)}, cpu",
        )
    return found[name]


def device_called(cuda_name: str, gib: float) -> Device | None:
    """Return the accelerator that CUDA gives this name and about this memory.

    None where it is not known for sure.
    """
    words = cuda_name.split()
    if "MIG" in words:  # a slice of the chip
        return None
    named = [device for device in DEVICES if _names(words, device.part.split())]
    sizes = [device for device in named if device.part == named[0].part]
    return min(sizes, key=lambda device: abs(device.gib - gib), default=None)


def _names(words: list[str], wanted: list[str]) -> bool:
    return any(_same(words[i : i + len(wanted)], wanted) for i in range(len(words)))


def _same(words: list[str], wanted: list[str]) -> bool:
    """Return whether a name has the wanted words, whole or with a suffix such as A100-SXM4-80GB.

    'A10' must not match 'A100'.
    """
    return words[1:] == wanted[1:] and f"{words[0]}-".startswith(f"{wanted[0]}-")
