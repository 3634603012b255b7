"""Count what a rank holds, and say whether that fits and what would.

Each is computed from the run itself, on tensors without memory.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from llmexp.config.values import refuse
from llmexp.forecast.dry_run import KINDS, Cut, Footprint, cut_of, rehearse
from llmexp.forecast.process import process_bytes
from llmexp.models.loss import blocks_of
from llmexp.run.batch import shared_sequences
from llmexp.run.layout import solve_layout
from llmexp.system import hardware
from llmexp.system.devices import Device
from llmexp.system.text import gib
from llmexp.train.assembly.assemble import Parts

GIB = 2**30
# Of a device's memory; the rest is for the context of CUDA, for libraries and for what an allocator
# cannot use.
USABLE = 0.9
# A workspace of cuBLAS for each thread that multiplies: the forward and the backward pass.
WORKSPACES = {"h": 2 * 32 * 2**20, "b": 2 * 32 * 2**20}
WORKSPACE = 2 * 8.1 * 2**20
SHARDS = (2, 4, 8)  # ranks of FSDP that are tried where a run has one rank
BETWEEN_STEPS = ("parameters", "gradients", "moments")
Remedy = tuple[str, Cut]  # overrides, and the cut that they make


@dataclass(frozen=True)
class Room:
    """Memory of a rank: of the device in all, and what a plan may use of it."""

    device: Device | None  # None: a CPU
    name: str
    total: float
    usable: float

    @property
    def taken(self) -> float:
        """Return what is taken beside the model: by the process on a CPU, else by libraries."""
        if self.device is None:
            return process_bytes(torch.get_num_threads())
        return WORKSPACES.get(self.device.name[0], WORKSPACE)


def room_of(parts: Parts, device: Device | None, limit: float | None) -> Room | None:
    """Return the memory of a rank on the device, or on this host; None where it is not known."""
    if device is not None:
        name, there = device.name, device.gib * GIB
    else:
        ranks = parts.run.layout.nproc_per_node
        name = "this host" if ranks == 1 else "a rank's share of this host"
        there = (hardware.memory_bytes(torch.device("cpu")) or 0) / ranks
    if limit is not None:
        return Room(device, name, limit * GIB, limit * GIB)
    return Room(device, name, there, USABLE * there) if there else None


class Forecast:
    """The memory of cuts of one run on one device, `compiled` or not; each is rehearsed once."""

    def __init__(self, parts: Parts, precision: str, room: Room, compiled: bool) -> None:
        self.parts, self.precision, self.room, self.compiled = parts, precision, room, compiled
        self.cut = cut_of(parts)
        # sequences of a rank that the steps of all stages can be cut into
        self.whole = shared_sequences(parts.config.batch) // parts.run.dp_size
        with torch.device("meta"):
            self.has_blocks = bool(blocks_of(parts.build_model()))
        self._known: dict[Cut, Footprint] = {}

    def footprint(self, cut: Cut) -> Footprint:
        if cut not in self._known:
            device, kind = self.room.device, cut.parallelism.activation_checkpointing
            compiled = self.compiled and kind != "offload"  # which is not compiled
            self._known[cut] = rehearse(self.parts, cut, self.precision, device, compiled)
        return self._known[cut]

    def needed(self, cut: Cut) -> float:
        """Return the bytes of a rank at its peak."""
        held = self.footprint(cut)
        return sum(held[kind] for kind in KINDS) + self.room.taken

    def fits(self, cut: Cut) -> bool:
        """Return whether a cut fits; it is not rehearsed if what it holds between steps does not.

        That is what the run's own cut holds, in as many parts as there are ranks that share it.
        """
        if (own := self._known.get(self.cut)) is not None and cut not in self._known:
            held = sum(own[kind] for kind in BETWEEN_STEPS) * _shards(self.cut) / _shards(cut)
            if held + self.room.taken > self.room.usable:
                return False
        return self.needed(cut) <= self.room.usable

    def figures(self) -> dict[str, Any]:
        """Return bytes of a rank, as plain values."""
        return {
            **self.footprint(self.cut),
            "taken": round(self.room.taken),
            "peak": round(self.needed(self.cut)),
            "usable": round(self.room.usable),
        }

    def largest(self, cut: Cut, at_most: int) -> Cut | None:
        """Return the cut with the largest micro-batch that fits, of at most `at_most` sequences.

        It divides the same real batch. None where one sequence is too many.
        """
        sizes = [n for n in range(1, min(at_most, self.whole) + 1) if self.whole % n == 0]
        fit = bisect.bisect_left(sizes, True, key=lambda n: not self.fits(cut_to(cut, n)))
        return cut_to(cut, sizes[fit - 1]) if fit else None


def _shards(cut: Cut) -> int:
    return cut.layout.shard_size * cut.layout.tensor_parallel_size


def cut_to(cut: Cut, micro: int) -> Cut:
    whole = cut.micro * cut.accumulation
    return dataclasses.replace(cut, micro=micro, accumulation=whole // micro)


def memory_sections(forecast: Forecast) -> list[tuple[str, str]]:
    """Return (label, text) pairs: what a rank holds, whether it fits, what would."""
    cut, room = forecast.cut, forecast.room
    held, needed = forecast.footprint(cut), forecast.needed(cut)
    parts = [f"{kind} {gib(held[kind])}" for kind in KINDS if held[kind]]
    parts.append(f"{'the process' if room.device is None else 'libraries'} {gib(room.taken)}")
    eager = ", all but the loss counted as not compiled" if forecast.compiled else ""
    rank = "a rank" if cut.layout.world_size > 1 else "in all"
    rows = [
        ("memory", f"{gib(needed)} GiB {rank} at the peak of a step{eager}: {', '.join(parts)}")
    ]
    if needed <= room.usable:
        rows.append(("fits", f"yes, into {_room(room)}"))
        larger = forecast.largest(cut, cut.micro * cut.accumulation)
        if larger is not None and larger.micro > cut.micro:
            accumulation = "no accumulation"
            if larger.accumulation > 1:
                accumulation = f"gradient_accumulation_steps {larger.accumulation}"
            fits = f"{gib(forecast.needed(larger))} of {gib(room.usable)} GiB"
            text = f"batch.micro_batch_size={larger.micro} with {accumulation} computes the same"
            rows.append(("hint", f"{text}, but for rounding and dropout's draws, and fits: {fits}"))
        return rows
    rows.append(("fits", f"no: {gib(needed - room.usable)} GiB more than {_room(room)}"))
    found = []
    if smaller := forecast.largest(cut, cut.micro - 1):
        accumulation = f"batch.gradient_accumulation_steps={smaller.accumulation}"
        found = [(f"batch.micro_batch_size={smaller.micro} {accumulation}", smaller)]
    for remedies in (_recomputed(forecast), _sharded(cut)):
        fit = (one for one in remedies if forecast.fits(one[1]))
        found += itertools.islice(fit, 1)
    texts = [f"{way} ({gib(forecast.needed(other))} GiB)" for way, other in found]
    rows.append(("would fit", "; ".join(texts) or "nothing that was tried"))
    return rows


def _recomputed(forecast: Forecast) -> Iterator[Remedy]:
    cut, p = forecast.cut, forecast.cut.parallelism
    if p.activation_checkpointing == "none" and forecast.has_blocks:
        for kind in ("selective", "full", *["offload"] * (forecast.room.device is not None)):
            wanted = kind == "offload" and forecast.parts.config.train.compile is True
            way = f"parallelism.activation_checkpointing={kind}" + " train.compile=false" * wanted
            chosen = dataclasses.replace(p, activation_checkpointing=kind)
            yield way, dataclasses.replace(cut, parallelism=chosen)


def _sharded(cut: Cut) -> Iterator[Remedy]:
    ranks = cut.layout.nproc_per_node if cut.parallelism.kind in ("single", "ddp") else 0
    for count in SHARDS if ranks == 1 else (ranks,) * bool(ranks):
        chosen = dataclasses.replace(cut.parallelism, kind="fsdp", nproc_per_node=count)
        other = dataclasses.replace(cut, parallelism=chosen, layout=solve_layout(chosen, count))
        yield f"parallelism=fsdp parallelism.nproc_per_node={count}", other


def _room(room: Room) -> str:
    of = "" if room.usable == room.total else f", of {gib(room.total)} of {room.name}"
    return f"the {gib(room.usable)} GiB that may be used{of}"


def precision_on(parts: Parts, asked: str, device: Device | None) -> str:
    """Return the arithmetic of the run on the device: what was asked for, or what `auto` is.

    Raises ConfigError for one that the device has no units for.
    """
    if device is None:
        return parts.precision
    if asked == "auto":
        return "bf16" if device.bf16 else "fp32"
    if (asked == "bf16" and not device.bf16) or (asked == "tf32" and asked not in device.tflops):
        other = "fp16" if asked == "bf16" else "fp32"
        raise refuse(
            "no_device", "precision.kind", asked, f"{device.name} has no units for it", other
        )
    return asked
