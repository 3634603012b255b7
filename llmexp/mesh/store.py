"""The store through which the ranks of a run meet: keys and values, beside their process group."""

from __future__ import annotations

import datetime
import functools
import os

import torch.distributed as dist

TRIAL = "LLMEXP_TRIAL"  # in a process that tries steps: what its ranks' keys begin with


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
