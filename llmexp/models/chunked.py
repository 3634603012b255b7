"""The summed cross-entropy of an output head, chunk by chunk, without ever holding all logits.

Gradients are made in the forward pass. This file has the function and its kernel for a CPU; the
kernel for an accelerator is in `rows`.

Names end in their dimensions: b batch, t time (tokens), n rows (b x t, or a chunk of them), d model
width, v vocabulary (this rank's part of it, or a tile of that), i tiles, 1 a dimension kept for
broadcasting.

Rows are taken in chunks and the vocabulary in tiles. Of each tile of logits z only e = exp(z - m)
is kept, m being the tile's row maximum. When a chunk has seen all tiles, softmax = e * c with
c = exp(m - logsumexp) per row and tile, so that the scaling goes onto the small matrices and the
tiles themselves need no further pass:
    dh = sum over tiles (e @ W) * c - W[target],   dW = e^T @ (h * c) - one_hot(target)^T @ h.
With a shard the ranks share a chunk's row maxima and sums in two reductions (MAX, then SUM) and dh
in one at the end. Its W is then a part, of which W[target] and one_hot see only the targets that
lie there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from llmexp.models.operands import (
    Dtypes,
    How,
    Made,
    VocabShard,
    add_product,
    local_targets,
    log_over_ranks,
    multiply,
    subtract_rows,
)
from llmexp.models.planned import kind_of


def chunk_sizes(device: torch.device, vocab_size: int, compiled: bool = False) -> tuple[int, int]:
    """Rows per chunk, which bounds the memory for logits, and vocabulary per tile.

    On a CPU a tile of logits (512 x 2048 fp32, 4 MiB) stays in the cache between its product and
    its sums. On an accelerator large products and few launches count.
    """
    if not in_rows(device):
        return 512, 2048
    from llmexp.models.rows import chunk_rows

    return chunk_rows(device, vocab_size, compiled), vocab_size


def in_rows(device: torch.device) -> bool:
    """Return whether chunks are of whole rows instead of tiles."""
    return kind_of(device) != "cpu"


@dataclass(frozen=True)
class _Head:
    """The rows of the output head that are on this rank, in tiles."""

    weight_vd: Tensor  # in the operands' dtype
    dtypes: Dtypes
    tile_size: int

    def starts(self) -> range:
        return range(0, self.weight_vd.shape[0], self.tile_size)

    def tile(self, start: int) -> Tensor:
        return self.weight_vd[start : start + self.tile_size].to(self.dtypes.compute)


@dataclass(frozen=True)
class _Chunk:
    """Some rows, and their targets as rows of this rank's head."""

    h_nd: Tensor
    target_n1: Tensor
    none_n1: Tensor  # whether the row has no target
    here_n1: Tensor  # whether its target is in this rank's part of the vocabulary


def _chunked_nll(h_nd: Tensor, weight_vd: Tensor, how: How) -> Made:
    """Return the cross-entropy of the rows, chunk by chunk, and the gradients that are needed.

    These are of the sum, by `h_nd` and by `weight_vd`; None for one that is not needed.
    """
    dtypes, vocab_size = how.dtypes, weight_vd.shape[0]
    rows_per_chunk, tile_size = chunk_sizes(h_nd.device, vocab_size, how.compiled)
    if in_rows(h_nd.device):
        from llmexp.models.rows import nll_by_rows

        return nll_by_rows(h_nd, weight_vd, how, rows_per_chunk)
    head = _Head(weight_vd.to(dtypes.operand), dtypes, tile_size)
    nll: list[Tensor] = []
    grad_h_nd = grad_weight_vd = None
    if how.needs[0]:  # contiguous, to be reduced
        grad_h_nd = h_nd.new_zeros(h_nd.shape, dtype=dtypes.sums)
    if how.needs[1]:
        grad_weight_vd = torch.zeros_like(weight_vd, dtype=dtypes.sums)
    h_nd = h_nd.to(dtypes.operand)
    for first in range(0, h_nd.shape[0], rows_per_chunk):
        cut = slice(first, first + rows_per_chunk)
        where = local_targets(how.targets_n[cut], how.shard, vocab_size)
        chunk = _Chunk(h_nd[cut].to(dtypes.compute), *where)
        tiles, c_ni, nll_n1 = _softmax(chunk, head, how.shard, keep=any(how.needs))
        nll.append(nll_n1[:, 0])
        grad_chunk_nd = None if grad_h_nd is None else grad_h_nd[cut]
        _add_gradients(grad_chunk_nd, grad_weight_vd, chunk, tiles, c_ni, head)
        del tiles  # they would live beside those of the next chunk
    if how.shard is not None and grad_h_nd is not None:
        grad_h_nd = how.shard.sum(grad_h_nd)
    return nll, grad_h_nd, grad_weight_vd


def chunked_cross_entropy(
    h_btd: Tensor, weight_vd: Tensor, targets_bt: Tensor, shard: VocabShard | None
) -> Tensor:
    """Return (b, t): the terms of `chunked_cross_entropy_sum`, without gradients."""
    how = How(targets_bt.flatten(), Dtypes.of(h_btd, weight_vd), shard)
    with torch.no_grad(), torch.autocast(h_btd.device.type, enabled=False):
        nll, _, _ = _chunked_nll(h_btd.flatten(0, -2), weight_vd, how)
    return torch.cat(nll).view(targets_bt.shape)


def _softmax(
    chunk: _Chunk, head: _Head, shard: VocabShard | None, keep: bool
) -> tuple[list[Tensor], Tensor, Tensor]:
    """Return the softmax of a chunk's logits as e * c, and the loss of each row.

    Without `keep` there are no e: no gradient is wanted.
    """
    sum_dtype, target_n1 = head.dtypes.sums, chunk.target_n1
    target_logit_n1 = torch.zeros_like(target_n1, dtype=sum_dtype)
    tiles: list[Tensor] = []
    maxima: list[Tensor] = []
    sums: list[Tensor] = []
    for start in head.starts():
        z_nv = (chunk.h_nd @ head.tile(start).T).to(sum_dtype)
        column_n1 = target_n1 - start
        clamped_n1 = column_n1.clamp(0, z_nv.shape[1] - 1)
        target_logit_n1 = torch.where(
            column_n1 == clamped_n1, z_nv.gather(1, clamped_n1), target_logit_n1
        )
        maxima.append(z_nv.amax(1, keepdim=True))
        e_nv = z_nv.sub_(maxima[-1]).exp_()
        sums.append(e_nv.sum(1, keepdim=True))
        if keep:
            tiles.append(e_nv.to(head.dtypes.compute))
    max_ni = torch.cat(maxima, 1)
    max_n1 = max_ni.amax(1, keepdim=True)
    relative_ni = (max_ni - max_n1).exp()
    total_n1 = (relative_ni * torch.cat(sums, 1)).sum(1, keepdim=True)
    own_n1 = target_logit_n1 - max_n1
    log_n1, factor_n1, total_n1 = log_over_ranks(shard, max_n1, total_n1, own_n1, chunk.here_n1)
    nll_n1 = (-log_n1).masked_fill(chunk.none_n1, 0)
    c_ni = (relative_ni * factor_n1 / total_n1).masked_fill(chunk.none_n1, 0)
    return tiles, c_ni, nll_n1


def _add_gradients(
    grad_h_nd: Tensor | None,
    grad_weight_vd: Tensor | None,
    chunk: _Chunk,
    tiles: list[Tensor],
    c_ni: Tensor,
    head: _Head,
) -> None:
    """Add a chunk's part, in place, to the gradients that are wanted."""
    dtypes, target_n = head.dtypes, chunk.target_n1[:, 0]
    for i, (start, e_nv) in enumerate(zip(head.starts(), tiles, strict=False)):
        c_n1 = c_ni[:, i : i + 1]
        if grad_h_nd is not None:
            grad_h_nd.addcmul_(multiply(e_nv, head.tile(start), dtypes.sums), c_n1)
        if grad_weight_vd is not None:
            scaled_nd = (chunk.h_nd * c_n1).to(dtypes.compute)
            grad_tile_vd = grad_weight_vd[start : start + head.tile_size]
            add_product(grad_tile_vd, e_nv.T, scaled_nd)
    if grad_h_nd is not None:
        grad_h_nd.sub_(head.weight_vd[target_n] * chunk.here_n1)
    if grad_weight_vd is not None:
        rows_nd = (chunk.h_nd * chunk.here_n1).to(dtypes.sums)
        subtract_rows(grad_weight_vd, target_n, rows_nd)


class _ChunkedNLL(torch.autograd.Function):
    """`_chunked_nll` as a differentiable function; its gradients are made on the way forward."""

    @staticmethod
    def forward(ctx: Any, h_nd: Tensor, weight_vd: Tensor, how: How) -> Tensor:
        parts, *ctx.gradients = _chunked_nll(h_nd, weight_vd, how)
        nll = torch.zeros((), dtype=how.dtypes.sums, device=h_nd.device)
        for part in parts:
            nll += part.sum()
        ctx.dtypes = h_nd.dtype, weight_vd.dtype
        return nll

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.gradients is None:
            raise RuntimeError(
                "second backward through the same loss: its gradients were given away"
            )
        # In place and only once: a copy of the weight's gradient would be the largest tensor of the
        # step.
        scaled = [
            None if gradient is None else gradient.mul_(grad_output).to(dtype)
            for gradient, dtype in zip(ctx.gradients, ctx.dtypes, strict=True)
        ]
        ctx.gradients = None
        return (*scaled, None)


def chunked_cross_entropy_sum(
    h_btd: Tensor,
    weight_vd: Tensor,
    targets_bt: Tensor,
    shard: VocabShard | None = None,
    compiled: bool = False,
) -> Tensor:
    """Return the cross-entropy of `h @ weight.T`, summed over all targets other than -100.

    It is in nats and in fp32 (fp64 in fp64).

    `h_btd` (b, t, d), `weight_vd` (v, d), `targets_bt` (b, t) ids below v, any other makes the sum
    nan. Under autocast the operands are rounded to its dtype. It never holds more than 512 rows of
    logits (on an accelerator as many as `rows.SHARE` of its memory has room for), and does no
    gradient work without grad mode. The gradient can be taken once, and not differentiated again.
    `compiled`: see `How`.

    With a `shard`, `weight_vd` is this rank's part and the ranks of the shard call together, with
    the same h and targets. Each gets the whole sum and the whole gradient by h, and the gradient of
    its own part.
    """
    grad_mode = torch.is_grad_enabled()
    needs = grad_mode and h_btd.requires_grad, grad_mode and weight_vd.requires_grad
    how = How(targets_bt.flatten(), Dtypes.of(h_btd, weight_vd), shard, needs, compiled)
    with torch.autocast(h_btd.device.type, enabled=False):
        return _ChunkedNLL.apply(h_btd.flatten(0, -2), weight_vd, how)
