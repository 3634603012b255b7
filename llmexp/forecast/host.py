"""Count what ranks take of their host's memory at a start, a save and a load."""

from __future__ import annotations

import math
from dataclasses import dataclass

from llmexp.checkpoint.stored import READ_BYTES
from llmexp.forecast.dry_run import Cut, Footprint
from llmexp.metrics.keys import OTHER_WEIGHTS
from llmexp.models.initial import BLOCK
from llmexp.system.text import gib
from llmexp.train.assembly.assemble import Parts
from llmexp.train.assembly.building import draws_by_blocks

_STAGES = ("start", "save", "load")  # and "step", with what is offloaded


@dataclass(frozen=True)
class HostNeed:
    """Bytes of a rank on its host by stage: what each has whatever the layout, and its share."""

    fixed: dict[str, float]
    shares: dict[str, float]
    ranks: int  # of a host

    @property
    def stages(self) -> dict[str, float]:
        """Return the bytes of a rank by stage."""
        return {stage: self.fixed[stage] + share for stage, share in self.shares.items()}

    @property
    def total(self) -> float:
        """Return what the ranks of a host take when they take most."""
        return self.ranks * max(self.stages.values())

    def figures(self) -> dict[str, int]:
        """Return bytes of a rank by stage, and of all ranks of a host."""
        found = {stage: round(size) for stage, size in self.stages.items()}
        return found | {"ranks_of_a_host": self.ranks, "of_a_host": round(self.total)}

    def hosts(self, usable: float) -> int | None:
        """Return over how many times as many hosts the shares would fit, None where they cannot."""
        left = {stage: usable / self.ranks - size for stage, size in self.fixed.items()}
        if min(left.values()) <= 0:
            return None
        return max(math.ceil(share / left[stage]) for stage, share in self.shares.items())


def host_need(
    parts: Parts, cut: Cut, held: Footprint, process: float, on_cpu: bool, behind: bool
) -> HostNeed:
    """Return what a rank takes of its host's memory, which holds the tensors too if `on_cpu`.

    `held`: the footprint of a step; `process`: bytes beside the tensors. `behind`: a checkpoint is
    written in the background, from a copy.
    """
    weights = held["parameters"] + sum(held[kind] for kind in OTHER_WEIGHTS)
    # DDP's gradients are views of its buckets
    state, gradients = weights + held["moments"], held["gradients"] or held["buffers"]
    copied, offloaded = float(state if behind else 0), held.get("offloaded", 0)
    section, sharded = parts.config.model, cut.layout.shard_size * cut.layout.tensor_parallel_size
    whole = 0
    if not draws_by_blocks(section) and (sharded > 1 or not on_cpu):
        whole = held["parameters"] * sharded
    room = 0 if on_cpu else 4 * BLOCK, 0 if on_cpu or copied else READ_BYTES, READ_BYTES
    tensors = (weights + gradients, state + gradients, state + gradients) if on_cpu else (0, 0, 0)
    fixed = {stage: process + whole + size for stage, size in zip(_STAGES, room, strict=True)}
    shares = dict(zip(_STAGES, map(float, tensors), strict=True))
    shares["save"] += copied + (offloaded if behind else 0)
    if offloaded:
        fixed["step"], shares["step"] = process, float(offloaded)
    return HostNeed(fixed, shares, cut.layout.nproc_per_node)


def host_rows(
    need: HostNeed, room: float | None, name: str, ways: list[str]
) -> list[tuple[str, str]]:
    """Return (label, text) pairs: what a rank takes of its host, whether all fit, what would.

    `room`: bytes that all may use, of the host called `name`; None: not known.
    """
    stages = [
        f"{gib(size)} at {'the' if s == 'start' else 'a'} {s}" for s, size in need.stages.items()
    ]
    text = f"GiB of a rank: {', '.join(stages)}; {need.ranks} on a host: {gib(need.total)}"
    if room is None:
        return [("host", f"{text}; give plan.host_gib=2000 to see whether that fits")]
    if need.total <= room:
        return [("host", f"{text}, and {name} has {gib(room)} that may be used")]
    rows = [("host", f"{text}, {gib(need.total - room)} more than may be used of {name}")]
    return rows + ([("would fit", ", or ".join(ways))] if ways else [])


def host_ways(need: HostNeed, waiting: HostNeed, room: float, shared: bool) -> list[str]:
    """Return what would fit in place of `need`, `waiting`: where steps wait for their checkpoints.

    `shared`: more ranks hold less each.
    """
    ways = ["checkpoint.async=false"] if waiting.total <= room < need.total else []
    hosts = need.hosts(room) if shared else None
    return ways + ([f"{hosts} times as many hosts (parallelism.nnodes)"] if hosts else [])
