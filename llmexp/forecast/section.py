"""The section `plan` of a command: its knobs, and how they are read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from llmexp.config.convert import convert_section
from llmexp.config.values import knob, optional, refuse
from llmexp.system.devices import device_named

# GPT-2 124M compiled in bf16 is estimated to reach this of an H200.
PEAK_SHARE = 0.3


@dataclass(frozen=True, kw_only=True)
class PlanKnobs:
    """The way that a run is planned; no part of its config."""

    device: str | None = knob(
        "device that memory and time are planned for, such as h200, a100-80, l4 or cpu; null: they "
        "are not planned",
        "h200",
    )
    memory_gib: float | None = optional(
        "GiB that a rank may take, beside plan.device; null: nine tenths of that device, or of a "
        "rank's share of this host",
        16.0,
        above=0,
    )
    host_gib: float | None = optional(
        "GiB of memory of each host, beside plan.device; null: that of this host where the device "
        "is cpu, else hosts are not judged",
        512.0,
        above=0,
    )
    peak_share: float = knob(
        "share of the peak rate of plan.device that steps are taken to reach, where nothing is "
        "measured",
        0.4,
        above=0,
        at_most=1,
        default=PEAK_SHARE,
    )
    price_per_gpu_hour: float | None = optional(
        "price of an hour of one GPU, in any currency; null: no cost is printed", 2.5, above=0
    )


def build_plan(mapping: Mapping[str, Any]) -> PlanKnobs:
    """Return the section `plan`. Raises ConfigError, also for a device that is not known."""
    found: PlanKnobs = convert_section(PlanKnobs, mapping, "plan.")
    for name in ("memory_gib", "host_gib"):
        if found.device is None and (value := getattr(found, name)) is not None:
            text = "acts only beside plan.device; add for example plan.device=h200"
            raise refuse("idle_knob", f"plan.{name}", value, text)
    if found.device is not None:
        device_named(found.device)
    if found.device in (None, "cpu") and found.peak_share != PEAK_SHARE:
        text = "is of an accelerator's peak; add for example plan.device=h200"
        raise refuse("idle_knob", "plan.peak_share", found.peak_share, text)
    return found
