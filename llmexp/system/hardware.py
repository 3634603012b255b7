"""Describe the machine: names, memory, and the peak rates that mfu divides by.

Unknown hardware has no peak.
"""

from __future__ import annotations

import contextlib
import os
import platform
import re
import resource
import sys
from pathlib import Path

import torch

from llmexp.config.labels import plural
from llmexp.system.devices import Device, device_called

_PEAK_AT_START = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def peak_flops(device: torch.device, precision: str) -> float | None:
    """Peak FLOP/s of one device in this arithmetic, or None where it is not known for sure."""
    if device.type != "cuda":
        return None
    known = accelerator(device)
    rates = {} if known is None else known.tflops
    return rates[precision] * 1e12 if precision in rates else None


def accelerator(device: torch.device) -> Device | None:
    """Return what data sheets say about a CUDA device; None where it is not known for sure."""
    gib = (memory_bytes(device) or 0) / 2**30
    return device_called(torch.cuda.get_device_name(device), gib)


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    name = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
        if model := re.search(r"model name[^:\n]*:(.*)", text):
            name = model[1].strip()
    return f"{name}, {plural(torch.get_num_threads(), 'thread')}"


def peak_memory_gib(device: torch.device) -> float:
    """Peak memory of this process so far in GiB: allocated on the GPU, resident on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if peak == _PEAK_AT_START:  # as yet it may be that of the process that started this one
        with contextlib.suppress(OSError):
            text = Path("/proc/self/status").read_text(encoding="utf-8", errors="replace")
            if found := re.search(r"VmHWM:\s*(\d+) kB", text):
                peak = int(found[1])
    return peak * (1 if sys.platform == "darwin" else 1024) / 2**30


def memory_bytes(device: torch.device) -> int | None:
    """Return what the device has in all; None where that is not known.

    For a CPU it is the host's memory, or what its control group may use of it.
    """
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
