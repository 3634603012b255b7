"""Arrange the ranks of a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from llmexp.config.execution import Parallelism
from llmexp.config.values import refuse
from llmexp.run.derived import Derived, derived, resolved_knob

_RANKS = "parallelism.kind parallelism.nproc_per_node parallelism.nnodes"
DERIVED_SIZES = {
    "dp_size": Derived(
        "replicas that share a real batch",
        (*_RANKS.split(), "parallelism.tensor_parallel_size"),
        "world_size {world_size} / tensor_parallel_size {tensor_parallel_size}",
    ),
    "world_size": Derived(
        "ranks on all hosts",
        tuple(_RANKS.split()),
        "nnodes {nnodes} x nproc_per_node {nproc_per_node}",
    ),
}


@dataclass(frozen=True)
class Layout:
    """The arrangement of ranks: hosts x ranks on each = replicas x shards x tensor-parallel."""

    nnodes: int = resolved_knob("parallelism.nnodes")
    nproc_per_node: int = resolved_knob(
        "parallelism.nproc_per_node", "parallelism.nproc_per_node train.device"
    )
    replicate_size: int = derived(
        "groups of ranks that each hold the whole model", f"{_RANKS} parallelism.replicate_size"
    )
    shard_size: int = derived("ranks over which parameters and optimizer state are spread", _RANKS)
    tensor_parallel_size: int = derived(
        "ranks that compute each layer together", f"{_RANKS} parallelism.tensor_parallel_size"
    )

    @property
    def world_size(self) -> int:
        """Return the number of ranks."""
        return self.nnodes * self.nproc_per_node

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Return the ranks of each kind: replicas, shards and tensor-parallel ones."""
        return self.replicate_size, self.shard_size, self.tensor_parallel_size

    @property
    def dp_size(self) -> int:
        """Return the number of ranks that see different sequences."""
        return self.replicate_size * self.shard_size


def solve_layout(p: Parallelism, nproc_per_node: int) -> Layout:
    """Return the arrangement of `nproc_per_node` ranks on each host.

    Raises ConfigError for what does not divide.
    """
    world, replicate, tp = p.nnodes * nproc_per_node, 1, 1
    if p.kind == "single" and world > 1:
        key, value = ("nnodes", p.nnodes) if p.nnodes > 1 else ("nproc_per_node", nproc_per_node)
        text = "parallelism=single has one rank; for more use parallelism=ddp"
        raise refuse("wrong_ranks", f"parallelism.{key}", value, text, 1)
    key = "parallelism.tensor_parallel_size"
    if p.kind == "ddp":
        replicate = world
    elif p.kind == "hsdp":
        key, replicate = "parallelism.replicate_size", p.replicate_size or p.nnodes
    elif p.kind == "fsdp_tp":
        tp = p.tensor_parallel_size or nproc_per_node
    elif p.kind == "tp" and (tp := p.tensor_parallel_size or world) != world:
        text = f"parallelism=tp splits each layer over all {world} ranks"
        text += "; for less use parallelism=fsdp_tp"
        raise refuse("wrong_ranks", key, tp, text, world)
    size = replicate * tp
    if world % size:
        divisor = max(n for n in range(1, size) if world % n == 0)
        raise refuse("wrong_ranks", key, size, f"does not divide the {world} ranks", divisor)
    return Layout(p.nnodes, nproc_per_node, replicate, world // size, tp)


def check_tokens(length: int, tp: int) -> None:
    """Raise ConfigError where `tp` ranks cannot share the tokens of a sequence evenly."""
    if length % tp:
        text = f"cannot be shared evenly by the {tp} ranks of parallelism.sequence_parallel=true"
        raise refuse("out_of_range", "batch.sequence_length", length, text, -(-length // tp) * tp)


def check_split(model: dict[str, Any], tp: int) -> None:
    """Raise ConfigError where a model's sizes cannot be split over `tp` ranks."""
    for key in ("n_heads", "n_kv_heads", "d_ff", "d_expert", "vocab_size"):
        size = model.get(key)
        if isinstance(size, int) and size % tp:
            text = f"cannot be split over parallelism.tensor_parallel_size={tp} ranks"
            example = None if "heads" in key else -(-size // tp) * tp  # d_model has to fit too
            raise refuse("out_of_range", f"model.{key}", size, text, example)
