"""Describe the machine: names, memory, and the peak rates that mfu divides by. Unknown hardware has
no peak."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import os
import platform
import re
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

# Dense peak TFLOP/s from the makers' data sheets, by a part of the CUDA device name; first match
# wins.
_PEAK_TFLOPS: list[tuple[str, dict[str, float]]] = [
    ("B200", {"bf16": 2250, "fp16": 2250, "tf32": 1125}),
    ("H200 NVL", {"bf16": 835, "fp16": 835, "tf32": 417.5, "fp32": 60}),
    ("H200", {"bf16": 989, "fp16": 989, "tf32": 494.5, "fp32": 67}),
    ("H100 PCIe", {"bf16": 756, "fp16": 756, "tf32": 378, "fp32": 51}),
    ("H100 NVL", {"bf16": 835, "fp16": 835, "tf32": 417.5, "fp32": 60}),
    ("H100 80GB HBM3", {"bf16": 989, "fp16": 989, "tf32": 494.5, "fp32": 67}),
    ("A100", {"bf16": 312, "fp16": 312, "tf32": 156, "fp32": 19.5}),
    ("L40S", {"bf16": 362, "fp16": 362, "tf32": 183, "fp32": 91.6}),
    ("L4", {"bf16": 121, "fp16": 121, "tf32": 60, "fp32": 30.3}),
    ("A10G", {"bf16": 70, "fp16": 70, "tf32": 35, "fp32": 31.2}),
    ("V100-SXM2", {"fp16": 125, "fp32": 15.7}),
    ("T4", {"fp16": 65, "fp32": 8.1}),
]


def peak_flops(device: torch.device, precision: str) -> float | None:
    """Peak FLOP/s of one device in this arithmetic, or None where it is not known for sure."""
    if device.type != "cuda":
        return None
    words = torch.cuda.get_device_name(device).split()
    if "MIG" in words:  # a slice of the chip
        return None
    for part, rates in _PEAK_TFLOPS:
        wanted = part.split()
        if any(_same(words[i : i + len(wanted)], wanted) for i in range(len(words))):
            return rates[precision] * 1e12 if precision in rates else None
    return None


def _same(words: list[str], wanted: list[str]) -> bool:
    """Whole words, or a first word with a suffix such as A100-SXM4-80GB: 'A10' must not match
    'A100'."""
    return (
        len(words) == len(wanted)
        and words[1:] == wanted[1:]
        and f"{words[0]}-".startswith(f"{wanted[0]}-")
    )


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    name = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        models = [
            line.split(":", 1)[1].strip()
            for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
            if "model name" in line
        ]
        name = models[0] if models else name
    threads = torch.get_num_threads()
    return f"{name}, {threads} thread{'s' if threads > 1 else ''}"


def peak_memory_gib(device: torch.device) -> float:
    """Peak memory of this process so far in GiB: allocated on the GPU, resident on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30


def memory_bytes(device: torch.device) -> int | None:
    """Return what the device has in all: of a CPU the host's memory, or what its control group may
    use of it; None where that is not known."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    try:
        found = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return None
    for limit in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):  # the file may say `max`
            found = min(found, int(Path(limit).read_text()))
    return found


def versions() -> dict[str, str]:
    names = ("torch", "numpy", "hydra-core", "omegaconf", "tiktoken", "wandb", "safetensors")
    found = {"python": platform.python_version()}
    for name in ("llmexp", *names):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def drivers() -> dict[str, str]:
    """Return the versions of CUDA, cuDNN and the NVIDIA driver; what is not there is absent."""
    found: dict[str, Any] = {"cuda": torch.version.cuda}
    if torch.cuda.is_available():
        found["cudnn"] = torch.backends.cudnn.version()
    with contextlib.suppress(OSError):
        version = re.search(
            r"Kernel Module.*?\s([0-9]+\.[0-9.]+)\s",
            Path("/proc/driver/nvidia/version").read_text(),
        )
        found["driver"] = version[1] if version else None
    return {name: str(version) for name, version in found.items() if version is not None}


def source_digest() -> str:
    """sha256 over the package's source files, by name and content."""
    package = Path(__file__).resolve().parents[1]
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(str(path.relative_to(package)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def commit() -> str | None:
    """Commit of the source tree that llmexp runs from, with `-dirty` for changed files; None
    outside of one."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    try:
        out = subprocess.run(
            ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40",
            "--exclude=*"],
            capture_output=True, text=True, encoding="utf-8", errors="replace", timeout=5,
            check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
    return out.stdout.strip()
