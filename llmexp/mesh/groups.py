"""The process group and the device mesh of a rank, the store beside it, figures over all ranks."""

from __future__ import annotations

import datetime
import functools
import hashlib
import math
import os
import socket
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from llmexp.config.values import ConfigError

# names the file through which the ranks of one host meet
MEETING = "LLMEXP_MEETING"
STARTED = "LLMEXP_RANK_STARTED"  # tells a rank that our process started it and reports for it
TRIAL = "LLMEXP_TRIAL"  # in a process that tries steps: what its ranks' keys begin with
LOOPBACK_S = 3.0


@dataclass(frozen=True)
class Mesh:
    """Describe the place of this process among the ranks.

    The ranks form replicas x shards x tensor-parallel ranks, the last varying fastest. `dp_rank`
    and `dp_size` count the ranks that see different sequences: replicas x shards.
    """

    rank: int
    world_size: int
    dp_rank: int
    dp_size: int
    kind: str
    device: torch.device
    sharding: DeviceMesh | None  # of FSDP: (shard,) or (replicate, shard)
    tensor: DeviceMesh | None  # of tensor parallelism
    reduces_once: bool  # FSDP communicates once a step instead of in every micro-batch
    sequence: bool = False  # tensor-parallel ranks share the tokens outside of matrix products

    @property
    def distributed(self) -> bool:
        return self.world_size > 1

    @property
    def sharded(self) -> bool:
        """Return whether ranks hold parts of tensors, so that a forward pass needs all ranks."""
        return self.sharding is not None or self.tensor is not None

    @property
    def random_stream(self) -> int:
        """Return which random numbers this rank draws: its replica's, or its own ones."""
        return self.rank if self.sequence else self.dp_rank

    @property
    def dp_group(self) -> dist.ProcessGroup | None:
        """Return the group of ranks that see different sequences; None: all. Not for dp_size 1."""
        if self.sharding is None or self.tensor is None:
            return None
        return self.sharding.get_group()


def check_loopback() -> None:
    """Raise ConfigError when processes of this host cannot reach each other.

    Its ranks would wait for ever.
    """
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
            socket.create_connection(("localhost", port), timeout=LOOPBACK_S).close()
    except OSError as error:
        raise ConfigError(
            "network",
            "the ranks of one host talk over its loopback interface, and localhost cannot be "
            f"reached ({error}); bring it up (ip link set lo up), or start the container with a "
            "network",
        ) from None


def join(  # noqa: PLR0913 (what parallelism says)
    device_type: str,
    kind: str,
    replicate_size: int,
    shard_size: int,
    tensor_parallel_size: int,
    *,
    reduces_once: bool = False,
    sequence: bool = False,
    backend: str | None = None,
    timeout_s: float = 600.0,
) -> Mesh:
    """Join the process group that torchrun's variables describe, and return this process's mesh.

    Without these variables the process is alone. All ranks have `timeout_s` seconds to come. Raises
    ConfigError when the launched world is not the configured one.
    """
    sizes = (replicate_size, shard_size, tensor_parallel_size)
    world, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    if world != (expected := math.prod(sizes)):
        raise ConfigError(
            "wrong_ranks", f"{world} ranks were started, but the run's parallelism has {expected}"
        )
    device = torch.device(device_type)
    if device_type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    sharding = tensor = None
    if world > 1:
        if not dist.is_initialized():
            names = f"cpu:gloo,cuda:{backend or 'nccl'}" if device_type == "cuda" else "gloo"
            timeout, place = datetime.timedelta(seconds=timeout_s), os.environ.get(MEETING)
            store: dist.Store | None = None
            if TRIAL in os.environ:
                store = visited_store(os.environ[TRIAL], timeout_s)
            elif place is not None:
                store = dist.FileStore(place, world)
                store.set_timeout(timeout)
            dist.init_process_group(
                names, store=store, rank=rank, world_size=world, timeout=timeout
            )
        if kind in ("fsdp", "hsdp", "tp", "fsdp_tp"):
            sharding, tensor = _axes(device_type, kind, sizes)
    dp_rank, dp_size = rank // tensor_parallel_size, replicate_size * shard_size
    return Mesh(
        rank, world, dp_rank, dp_size, kind, device, sharding, tensor, reduces_once, sequence
    )


def _axes(
    device_type: str, kind: str, sizes: tuple[int, int, int]
) -> tuple[DeviceMesh | None, DeviceMesh | None]:
    """Return the axes over which parameters are sharded, and split inside of products."""
    named = zip(("replicate", "shard", "tp"), sizes, strict=True)
    dims = {name: n for name, n in named if n > 1 or (kind == "hsdp" and name != "tp")}
    whole = init_device_mesh(device_type, tuple(dims.values()), mesh_dim_names=tuple(dims))
    left = tuple(n for n in dims if n != "tp")
    return whole[left] if kind != "tp" and left else None, whole["tp"] if "tp" in dims else None


@functools.cache
def meeting_store(prefix: str, timeout_s: float) -> dist.Store:
    """Open the store that torchrun's variables describe; its keys begin with `prefix`.

    Unless torchrun serves it, rank 0 does, as long as it lives; it waits for the others. What the
    ranks start reaches it with `visited_store`.
    """
    timeout = datetime.timedelta(seconds=timeout_s)
    return dist.PrefixStore(prefix, next(dist.rendezvous("env://", timeout=timeout))[0])


def visited_store(prefix: str, timeout_s: float) -> dist.Store:
    """Open the store that other processes serve; its keys begin with `prefix`."""
    place, timeout = os.environ["MASTER_ADDR"], datetime.timedelta(seconds=timeout_s)
    port = int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(place, port, is_master=False, timeout=timeout, wait_for_workers=False)
    return dist.PrefixStore(prefix, store)


def note_file(run_dir: Path, rank: int) -> Path:
    """Return where a rank notes that it waits for others, or of what it failed."""
    return run_dir / "logs" / f"rank-{rank}.json"


def log_file(run_dir: Path, rank: int) -> Path:
    """Return where a rank prints."""
    return run_dir / "logs" / f"rank-{rank}.log"


def total_(mesh: Mesh, value: Tensor) -> Tensor:
    """Sum over the ranks that see different sequences, in place."""
    if mesh.dp_size > 1:
        dist.all_reduce(value, group=mesh.dp_group)
    return value


def maximum(mesh: Mesh, value: Tensor) -> Tensor:
    """Largest over all ranks, in place."""
    if mesh.distributed:
        dist.all_reduce(value, dist.ReduceOp.MAX)
    return value


def largest(mesh: Mesh, value: float) -> float:
    """Return the largest of a number that each rank has."""
    return float(maximum(mesh, torch.tensor(value, dtype=torch.float64)))


def any_rank(mesh: Mesh, *flags: bool) -> list[bool]:
    """Return for each flag whether it is set on any rank; the same answer on every rank.

    Waits for all ranks.
    """
    if not mesh.distributed:
        return list(flags)
    # on the CPU: its group is gloo, no device has to wait
    return maximum(mesh, torch.tensor(flags, dtype=torch.int64)).bool().tolist()


def ranks_where(mesh: Mesh, flag: bool) -> list[int]:
    """Return the ranks on which the flag is set; the same answer everywhere."""
    flags = torch.zeros(mesh.world_size, dtype=torch.int64)
    flags[mesh.rank] = flag
    return maximum(mesh, flags).nonzero().flatten().tolist()


def numbered(ranks: list[int]) -> str:
    """Return `rank 3`, or `ranks 0-7, 9`: ascending numbers in words."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and rank == spans[-1][-1] + 1:
            spans[-1].append(rank)
        else:
            spans.append([rank])
    words = (f"{s[0]}-{s[-1]}" if len(s) > 1 else f"{s[0]}" for s in spans)
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(words)}"


def differing_ranks(mesh: Mesh, text: str) -> list[int]:
    """Return the ranks whose `text` is not that of rank 0; the same answer everywhere."""
    digest = hashlib.sha256(text.encode()).digest()
    own = torch.frombuffer(bytearray(digest[:8]), dtype=torch.int64)
    return ranks_where(mesh, bool(own != from_first(mesh, own)))


def gather_last(mesh: DeviceMesh, value: Tensor) -> Tensor:
    """Return the ranks' values of equal shape, side by side along the last dimension."""
    parts = [torch.empty_like(value) for _ in range(mesh.size())]
    dist.all_gather(parts, value.contiguous(), group=mesh.get_group())
    return torch.cat(parts, -1)


def largest_by_head(mesh: Mesh, value: Tensor) -> Tensor:
    """Return the largest over the ranks that see different sequences, of all heads.

    The heads are the last dimension, of which each tensor-parallel rank has some.
    """
    if mesh.dp_size > 1:
        dist.all_reduce(value, dist.ReduceOp.MAX, group=mesh.dp_group)
    return value if mesh.tensor is None else gather_last(mesh.tensor, value)


def mean_of_split(mesh: Mesh, value: Tensor) -> Tensor:
    """Return the mean over tensor-parallel ranks, which hold equally many heads or units each."""
    if mesh.tensor is not None:
        dist.all_reduce(value, group=mesh.tensor.get_group())
        value /= mesh.tensor.size()
    return value


def from_first(mesh: Mesh, value: Tensor) -> Tensor:
    """Return the value that rank 0 has, on all ranks; each has one of its shape."""
    if mesh.distributed:
        value = value.clone()
        dist.broadcast(value, 0)
    return value


def shorten_timeout(mesh: Mesh, timeout_s: float) -> None:
    """From now on no rank waits longer than `timeout_s` for the others."""
    if not mesh.distributed:
        return
    groups: list[Any] = [None]
    for part in (mesh.sharding, mesh.tensor):
        if part is not None:
            groups += part.get_all_groups()
    # Public from torch 2.14 on, under another name.
    set_timeout = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
    for group in groups:
        # NCCL's watchdog ends the process without an error: gloo, which reports what happened, has
        # to notice first.
        later = 15 if mesh.device.type == "cuda" else 0
        set_timeout(datetime.timedelta(seconds=timeout_s + later), group)
        if later:
            whole: Any = group or dist.group.WORLD
            gloo = whole._get_backend(torch.device("cpu"))
            gloo._set_default_timeout(datetime.timedelta(seconds=timeout_s))


def leave(mesh: Mesh) -> None:
    """Leave the group, once module and optimizer are freed, as gloo may abort; print an error."""
    if mesh.distributed and dist.is_initialized():
        try:
            dist.destroy_process_group()
        except RuntimeError as error:
            print(f"rank {mesh.rank} left the others with an error: {error}", file=sys.stderr)
