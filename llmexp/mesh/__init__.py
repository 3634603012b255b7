"""Start ranks, arrange them, spread a model over them, sum over them.

The only package that touches torch.distributed. In reading order:
groups    the process group and device mesh of a rank, its store and timeouts; sums over ranks
split     tensors of which each rank may hold a part
wrap      DDP and compilation, from outside
sharding  FSDP and tensor parallelism
sequence  tokens between products, spread over tensor-parallel ranks
ranks     where hosts meet (in Slurm, else launchers/); start the ranks of a host, watch them,
          start again when one is lost
fake_group one rank of a run, played alone
"""

from llmexp.mesh.groups import (
    TRIAL,
    Mesh,
    any_rank,
    check_loopback,
    differing_ranks,
    from_first,
    gather_last,
    join,
    largest,
    largest_by_head,
    leave,
    maximum,
    mean_of_split,
    meeting_store,
    numbered,
    ranks_where,
    shorten_timeout,
    total_,
    visited_store,
)
from llmexp.mesh.split import (
    global_norm,
    inner,
    largest_entry,
    local_part,
    norms,
    share_buffers,
    share_here,
    share_work,
    summed_over_all,
    summed_over_ranks,
    without_partials,
)
from llmexp.mesh.wrap import micro_step, reshard, wrap
