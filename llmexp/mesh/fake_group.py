"""Play one rank of a run alone: a process group whose collectives do nothing."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn


@contextlib.contextmanager
def pretended(world: int, rank: int = 0) -> Iterator[None]:
    """Be a rank of a group of `world` ranks that do not exist; of one rank, do nothing."""
    if world == 1:
        yield
        return
    # its import costs half a second
    from torch.testing._internal.distributed.fake_pg import FakeStore

    as_rank = {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": "0"}
    # DDP compares the ranks' shapes, and a pretended group brings none from the others.
    compared = "torch.nn.parallel.distributed._verify_param_shape_across_processes"
    with mock.patch.dict(os.environ, as_rank), mock.patch(compared):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
        try:
            yield
        finally:
            dist.destroy_process_group()


def reduce_at_once(module: nn.Module) -> None:
    """Let DDP reduce its buckets in a pretended group, whose own futures hold no result."""
    if isinstance(module, nn.parallel.DistributedDataParallel):
        module.register_comm_hook(None, _reduced)


# Without annotations: DDP refuses those that are texts, as they are in this file.
def _reduced(state, bucket):  # type: ignore[no-untyped-def]
    dist.all_reduce(bucket.buffer())
    done: Any = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done
