"""Ranks: starting them, arranging them, spreading a model over them, sums over them.

The only place that touches torch.distributed.
"""

from llmexp.mesh.groups import (
    Mesh,
    any_rank,
    check_loopback,
    differing_ranks,
    gather_last,
    global_norm,
    join,
    largest_entry,
    leave,
    local_part,
    maximum,
    ranks_where,
    shorten_timeout,
    total,
)
from llmexp.mesh.wrap import micro_step, tensor_parallel_plan, wrap

__all__ = [
    "Mesh",
    "any_rank",
    "check_loopback",
    "differing_ranks",
    "gather_last",
    "global_norm",
    "join",
    "largest_entry",
    "leave",
    "local_part",
    "maximum",
    "micro_step",
    "ranks_where",
    "shorten_timeout",
    "tensor_parallel_plan",
    "total",
    "wrap",
]
