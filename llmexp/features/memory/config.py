from __future__ import annotations

from dataclasses import dataclass

from llmexp.config.values import knob

SECTION = "train"
NO_WORK = ("check_memory",)


@dataclass(frozen=True, kw_only=True)
class Knobs:
    check_memory: bool = knob(
        "refuse a run whose ranks cannot fit into this host's memory",
        False,
        affects="nothing",
        default=True,
    )
