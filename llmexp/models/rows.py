"""The kernel of the chunked loss for an accelerator: large chunks of whole rows, few launches.

Names as in `chunked`; v is padded here to a multiple of 64, so that every matrix of a product
begins its rows at an aligned place whatever the vocabulary. Logits of the padding are -inf.

Of a chunk's logits z only p, their softmax over this rank's vocabulary, is kept, rounded to the
dtype of the products, and its log at the targets. With a shard the softmax over all is p * share,
share = exp(s - logsumexp of s over the ranks), s being a rank's own logsumexp:
    dh = (p @ W) * share - W[target],   dW = p^T @ (h * share) - one_hot(target)^T @ h.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from llmexp.models.operands import (
    ALIGNED,
    IGNORE_INDEX,
    How,
    Made,
    add_product,
    local_targets,
    log_over_ranks,
    multiply,
    subtract_rows,
)
from llmexp.models.planned import memory_of

SHARE = 1 / 32  # of an accelerator's memory, for what is held of one chunk's logits
MOST_ROWS = 16384  # of a chunk: the products get no faster beyond


def chunk_rows(device: torch.device, vocab_size: int, compiled: bool) -> int:
    """Return the rows of a chunk: a power of two.

    For each logit fp32 values, their log-softmax and p are held at once; where the softmax is
    compiled, 16-bit values and p.
    """
    room = int(memory_of(device) * SHARE) // ((4 if compiled else 10) * vocab_size)
    return max(256, min(MOST_ROWS, 1 << max(0, room.bit_length() - 1)))


@dataclass(frozen=True)
class _Rows:
    """All rows of a micro-batch and the head, padded."""

    h_nd: Tensor  # 0 where the row has no target
    head_vd: Tensor
    vocab_size: int  # without the padding
    target_n1: Tensor  # as rows of this rank's head; 0 where it is not here
    none_n1: Tensor  # whether the row has no target
    here_n1: Tensor  # whether its target is in this rank's part of the vocabulary


def nll_by_rows(h_nd: Tensor, weight_vd: Tensor, how: How, most: int) -> Made:
    """Return the cross-entropy of each row and the gradients that are needed, in one pass.

    The gradients are those of the sum by `h_nd` and by `weight_vd`; None for one that is not
    needed. A chunk has at most so many rows.
    """
    dtypes, shard, n, v = how.dtypes, how.shard, h_nd.shape[0], weight_vd.shape[0]
    chunks = max(1, -(-n // most))
    rows = -(-n // (8 * chunks)) * 8  # of each chunk: of one size, for one compiled graph
    whole = _padded(h_nd, weight_vd, how, chunks * rows)
    # Minus the loss of each row, and the part of the softmax that is on this rank.
    log_n1 = torch.empty_like(whole.target_n1, dtype=dtypes.sums)
    share_n1 = (~whole.none_n1).to(dtypes.sums)
    grad_h_nd = torch.empty_like(whole.h_nd, dtype=dtypes.sums) if how.needs[0] else None
    grad_vd = torch.zeros_like(whole.head_vd, dtype=dtypes.sums) if how.needs[1] else None
    for first in range(0, chunks * rows, rows):
        cut = slice(first, first + rows)
        _add_chunk(whole, how, cut, log_n1, share_n1, grad_h_nd, grad_vd)
    if shard is None:  # a target that is nobody's
        log_n1.masked_fill_(~whole.here_n1, torch.nan)
    nll_n = log_n1.masked_fill_(whole.none_n1, 0).neg_()[:n, 0]
    target_n = whole.target_n1[:, 0]
    if grad_h_nd is not None:
        grad_h_nd.mul_(share_n1.div_(dtypes.softmax_scale))
        grad_h_nd = grad_h_nd.sub_(whole.head_vd[target_n] * whole.here_n1)[:n]
        if shard is not None:
            grad_h_nd = shard.sum(grad_h_nd)
    if grad_vd is not None:
        subtract_rows(grad_vd, target_n, (whole.h_nd * whole.here_n1).to(dtypes.sums))
        grad_vd = grad_vd[:v]
    return [nll_n], grad_h_nd, grad_vd


def _padded(h_nd: Tensor, weight_vd: Tensor, how: How, rows: int) -> _Rows:
    """Return the operands in their dtype; rows that are added have no target."""
    n, (v, d), dtypes = h_nd.shape[0], weight_vd.shape, how.dtypes
    targets_n = F.pad(how.targets_n, (0, rows - n), value=IGNORE_INDEX)
    target_n1, none_n1, here_n1 = local_targets(targets_n, how.shard, v)
    h_nd = F.pad(h_nd, (0, 0, 0, rows - n)) if rows > n else h_nd
    head_vd = weight_vd.new_empty((-(-v // ALIGNED) * ALIGNED, d), dtype=dtypes.compute)
    head_vd[:v].copy_(weight_vd.to(dtypes.operand))
    head_vd[v:].zero_()
    h_nd = h_nd.to(dtypes.operand).to(dtypes.compute).masked_fill(none_n1, 0)
    return _Rows(h_nd, head_vd, v, target_n1, none_n1, here_n1)


def _add_chunk(
    whole: _Rows,
    how: How,
    cut: slice,
    log_n1: Tensor,
    share_n1: Tensor,
    grad_h_nd: Tensor | None,
    grad_vd: Tensor | None,
) -> None:
    """Compute one chunk: write its rows of the three tensors, and add to the head's gradient."""
    dtypes, target_n1, h_nd = how.dtypes, whole.target_n1[cut], whole.h_nd[cut]
    # Where one kernel makes the softmax, 16-bit logits halve what it moves; three need them exact.
    z_nv = multiply(h_nd, whole.head_vd.T, dtypes.compute if how.compiled else dtypes.sums)
    z_nv[:, whole.vocab_size :] = -torch.inf
    softmax = _compiled_softmax() if how.compiled else local_softmax
    shift = math.log(dtypes.softmax_scale)
    p_nv, own_n1 = softmax(z_nv, target_n1, dtypes.sums, dtypes.compute, shift)
    log_n1[cut] = own_n1
    if how.shard is not None:
        sum_n1 = z_nv.gather(1, target_n1).to(dtypes.sums) - own_n1  # logsumexp of this rank's
        one_n1, here_n1 = torch.ones_like(sum_n1), whole.here_n1[cut]
        log_n1[cut], factor_n1, total_n1 = log_over_ranks(
            how.shard, sum_n1, one_n1, own_n1, here_n1
        )
        share_n1[cut] *= factor_n1 / total_n1
        h_nd = (h_nd * share_n1[cut]).to(dtypes.compute)
    del z_nv
    if grad_h_nd is not None:
        multiply(p_nv, whole.head_vd, dtypes.sums, out=grad_h_nd[cut])
    if grad_vd is not None:
        add_product(grad_vd, p_nv.T, h_nd, 1 / dtypes.softmax_scale)


def local_softmax(
    z_nv: Tensor, target_n1: Tensor, sums: torch.dtype, dtype: torch.dtype, shift: float
) -> tuple[Tensor, Tensor]:
    """Return exp(shift) times the softmax of logits in `dtype`, and its log at the targets.

    The log is without the shift, in `sums`. These are three kernels, or one that a compiler makes
    of them.
    """
    log_nv = F.log_softmax(z_nv, 1, dtype=sums)
    own_n1 = log_nv.gather(1, target_n1)
    if shift:
        log_nv = log_nv + shift
    return torch.exp(log_nv, out=torch.empty_like(log_nv, dtype=dtype)), own_n1


@functools.cache
def _compiled_softmax() -> Callable[..., tuple[Tensor, Tensor]]:
    return torch.compile(local_softmax, dynamic=False)
