"""The loss end: from hidden states and targets to a summed cross-entropy, without ever holding all
logits.

Names end in their dimensions: b batch, t time (tokens), n rows (b x t, or a chunk of them), d model
width, v vocabulary (this rank's part of it, or a tile of that), i tiles, 1 a dimension kept for
broadcasting.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

IGNORE_INDEX = -100
KERNELS = ("auto", "chunked", "plain")

# Below this vocabulary the logits are small beside the trunk, and fewer, larger operations win.
MIN_CHUNKED_VOCAB = 2048


@dataclass(frozen=True)
class VocabShard:
    """One rank's part of an output head whose rows, the vocabulary, are split over several ranks.

    The parts are contiguous, of equal size and in the order of the ranks. `sum` and `max` reduce a
    tensor in place over these ranks and return it; `gather` returns the ranks' tensors joined along
    the last dimension.
    """

    first: int  # id of the first row of the part
    size: int  # rows of the full vocabulary
    sum: Callable[[Tensor], Tensor]
    max: Callable[[Tensor], Tensor]
    gather: Callable[[Tensor], Tensor]


def _chunk_sizes(device: torch.device) -> tuple[int, int]:
    """Rows per chunk, which bounds the memory for logits, and vocabulary per tile.

    On a CPU a tile of logits (512 x 2048 fp32, 4 MiB) stays in the cache between its product and
    its sums. On an accelerator large products and few launches count.
    """
    return (512, 2048) if device.type == "cpu" else (4096, 1 << 30)


def _compute_dtypes(h_nd: Tensor, weight_vd: Tensor) -> tuple[torch.dtype, torch.dtype]:
    """Dtype that the head's operands are rounded to, and dtype that its products are computed in.

    They differ on a CPU without instructions for the first: rounding the operands and multiplying
    in fp32 gives what the instructions would, and is many times faster than torch's loops in plain
    C++.
    """
    device_type = h_nd.device.type
    if torch.is_autocast_enabled(device_type) and h_nd.dtype != torch.float64:
        operand_dtype = torch.get_autocast_dtype(device_type)
    else:
        operand_dtype = torch.promote_types(h_nd.dtype, weight_vd.dtype)
    if device_type == "cpu" and operand_dtype.itemsize == 2:
        native = operand_dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()
        return operand_dtype, operand_dtype if native else torch.float32
    return operand_dtype, operand_dtype


def _matmul(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """Multiply a @ b, with the result in `dtype`; on an accelerator never rounded to the operands'
    dtype between."""
    if a.dtype == dtype:
        return a @ b
    if a.device.type == "cuda":
        return torch.mm(a, b, out_dtype=dtype)
    return (a @ b).to(dtype)


def _chunked_nll(
    h_nd: Tensor,
    weight_vd: Tensor,
    targets_n: Tensor,
    needs_h: bool,
    needs_weight: bool,
    operand_dtype: torch.dtype,
    compute_dtype: torch.dtype,
    shard: VocabShard | None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return the summed cross-entropy and, where needed, its gradients by `h_nd` and `weight_vd`,
    in one pass.

    Rows are taken in chunks and the vocabulary in tiles. Of each tile of logits z only e = exp(z - m) is
    kept, m being the tile's row maximum. When a chunk has seen all tiles, softmax = e * c with
    c = exp(m - logsumexp) per row and tile, so that the scaling goes onto the small matrices and the tiles
    themselves need no further pass:
        dh = sum over tiles (e @ W) * c - W[target],   dW = e^T @ (h * c) - one_hot(target)^T @ h.
    With a shard the ranks share a chunk's row maxima and sums in two reductions (MAX, then SUM) and dh in one
    at the end. Its W is then a part, of which W[target] and one_hot see only the targets that lie there.
    """  # noqa: E501
    sum_dtype = torch.float64 if compute_dtype == torch.float64 else torch.float32
    # softmax * h is tiny where the vocabulary is large: keep it out of fp16's subnormal range.
    scale = 256.0 if compute_dtype == torch.float16 else 1.0
    rows_per_chunk, tile_size = _chunk_sizes(h_nd.device)
    starts = range(0, weight_vd.shape[0], tile_size)
    first_id = 0 if shard is None else shard.first

    nll = torch.zeros((), dtype=sum_dtype, device=h_nd.device)
    grad_h_nd = (
        h_nd.new_zeros(h_nd.shape, dtype=sum_dtype) if needs_h else None
    )  # contiguous, to be reduced
    grad_weight_vd = torch.zeros_like(weight_vd, dtype=sum_dtype) if needs_weight else None
    h_nd, weight_vd = h_nd.to(operand_dtype), weight_vd.to(operand_dtype)

    def weight_tile(start: int) -> Tensor:
        return weight_vd[start : start + tile_size].to(compute_dtype)

    for first in range(0, h_nd.shape[0], rows_per_chunk):
        chunk = slice(first, first + rows_per_chunk)
        chunk_nd = h_nd[chunk].to(compute_dtype)
        target_n1 = targets_n[chunk][:, None]
        valid_n1 = target_n1 != IGNORE_INDEX
        target_n1 = target_n1 - first_id
        here_n1 = valid_n1 & (target_n1 >= 0) & (target_n1 < weight_vd.shape[0])
        # Other rows are computed with target 0 and multiplied away: their place is not known on the
        # host.
        target_n1 = target_n1.masked_fill(~here_n1, 0)

        target_logit_n1 = torch.zeros_like(target_n1, dtype=sum_dtype)
        tiles: list[Tensor] = []
        maxima: list[Tensor] = []
        sums: list[Tensor] = []
        for start in starts:
            z_nv = (chunk_nd @ weight_tile(start).T).to(sum_dtype)
            column_n1 = target_n1 - start
            clamped_n1 = column_n1.clamp(0, z_nv.shape[1] - 1)
            target_logit_n1 = torch.where(
                column_n1 == clamped_n1, z_nv.gather(1, clamped_n1), target_logit_n1
            )
            maxima.append(z_nv.amax(1, keepdim=True))
            e_nv = z_nv.sub_(maxima[-1]).exp_()
            sums.append(e_nv.sum(1, keepdim=True))
            if needs_h or needs_weight:
                tiles.append(e_nv.to(compute_dtype))
        max_ni = torch.cat(maxima, 1)
        max_n1 = max_ni.amax(1, keepdim=True)
        if shard is not None:
            max_n1 = shard.max(max_n1)
        relative_ni = (max_ni - max_n1).exp()
        total_n1 = (relative_ni * torch.cat(sums, 1)).sum(1, keepdim=True)
        # Relative to the maximum, as the total is, so that a loss far below 1 keeps its digits.
        at_target_n1 = (target_logit_n1 - max_n1).masked_fill(~here_n1, 0)
        owners_n1 = here_n1.to(sum_dtype)
        if shard is not None:
            total_n1, at_target_n1, owners_n1 = shard.sum(
                torch.stack((total_n1, at_target_n1, owners_n1))
            )
        # A target that is nobody's spoils the loss instead of passing unseen.
        at_target_n1 = at_target_n1.masked_fill(owners_n1 != 1, torch.nan)
        nll += (total_n1.log() - at_target_n1).masked_fill(~valid_n1, 0).sum()

        if grad_h_nd is None and grad_weight_vd is None:
            continue
        c_ni = (relative_ni / total_n1).masked_fill(~valid_n1, 0)
        for i, (start, e_nv) in enumerate(zip(starts, tiles, strict=True)):
            c_n1 = c_ni[:, i : i + 1]
            if grad_h_nd is not None:
                grad_h_nd[chunk].addcmul_(_matmul(e_nv, weight_tile(start), sum_dtype), c_n1)
            if grad_weight_vd is not None:
                scaled_nd = (chunk_nd * (c_n1 * scale)).to(compute_dtype)
                grad_tile_vd = grad_weight_vd[start : start + tile_size]
                if compute_dtype == sum_dtype:
                    grad_tile_vd.addmm_(e_nv.T, scaled_nd)
                else:
                    grad_tile_vd.add_(_matmul(e_nv.T, scaled_nd, sum_dtype), alpha=1 / scale)
        if grad_h_nd is not None:
            grad_h_nd[chunk].sub_(weight_vd[target_n1[:, 0]] * here_n1)
        if grad_weight_vd is not None:
            _subtract_rows(grad_weight_vd, target_n1[:, 0], (chunk_nd * here_n1).to(sum_dtype))
    if shard is not None and grad_h_nd is not None:
        grad_h_nd = shard.sum(grad_h_nd)
    return nll, grad_h_nd, grad_weight_vd


def _subtract_rows(out_vd: Tensor, index_n: Tensor, rows_nd: Tensor) -> None:
    """out[index] -= rows, repeated indices included, in an order that is the same each time."""
    if out_vd.device.type == "cpu":
        out_vd.index_add_(0, index_n, rows_nd, alpha=-1)
    else:
        # index_add_ would add atomically, in any order; this one sorts.
        out_vd.index_put_((index_n,), -rows_nd, accumulate=True)


class _ChunkedNLL(torch.autograd.Function):
    """`_chunked_nll` as a differentiable function; its gradients are made on the way forward."""

    @staticmethod
    def forward(ctx: Any, h_nd: Tensor, weight_vd: Tensor, *arguments: Any) -> Tensor:
        nll, *ctx.gradients = _chunked_nll(h_nd, weight_vd, *arguments)
        ctx.dtypes = h_nd.dtype, weight_vd.dtype
        ctx.n_arguments = len(arguments)
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
        return (*scaled, *[None] * ctx.n_arguments)


def chunked_cross_entropy_sum(
    h_btd: Tensor, weight_vd: Tensor, targets_bt: Tensor, shard: VocabShard | None = None
) -> Tensor:
    """Sum over targets other than -100 of the cross-entropy of `h @ weight.T`, in nats, fp32 (fp64
    in fp64).

    `h_btd` (b, t, d), `weight_vd` (v, d), `targets_bt` (b, t) ids below v, any other makes the sum
    nan. Under autocast the operands are rounded to its dtype. It never holds more than 512 (on an
    accelerator 4096) rows of logits, and does no gradient work without grad mode. The gradient can
    be taken once, and not differentiated again.

    With a `shard`, `weight_vd` is this rank's part and the ranks of the shard call together, with
    the same h and targets. Each gets the whole sum and the whole gradient by h, and the gradient of
    its own part.
    """
    grad_mode = torch.is_grad_enabled()
    needs_h, needs_weight = grad_mode and h_btd.requires_grad, grad_mode and weight_vd.requires_grad
    dtypes = _compute_dtypes(h_btd, weight_vd)
    with torch.autocast(h_btd.device.type, enabled=False):
        return _ChunkedNLL.apply(
            h_btd.flatten(0, -2),
            weight_vd,
            targets_bt.flatten(),
            needs_h,
            needs_weight,
            *dtypes,
            shard,
        )


def plain_cross_entropy_sum(logits_btv: Tensor, targets_bt: Tensor) -> Tensor:
    """Sum over targets other than -100 of the cross-entropy of `logits_btv`, in fp32 (fp64 in
    fp64)."""
    logits_btv = logits_btv if logits_btv.dtype == torch.float64 else logits_btv.float()
    return F.cross_entropy(
        logits_btv.flatten(0, -2), targets_bt.flatten(), ignore_index=IGNORE_INDEX, reduction="sum"
    )


class WindowLoss(nn.Module):
    """Summed cross-entropy of a model over the valid targets of one micro-batch: all that a step
    calls.

    `model(tokens_bt)` returns logits (b, t, v). Where it also has `features(tokens_bt)` (b, t, d)
    and `head_weight` (v, d), whose product the logits are, the logits are never held as a whole.
    Its parameters are the model's, without copies. `kernel`: "chunked", "plain", or "auto", which
    takes "chunked" where the model allows it and the vocabulary is large enough to gain.
    """

    def __init__(self, model: nn.Module, kernel: str = "auto") -> None:
        super().__init__()
        if kernel not in KERNELS:
            raise ValueError(f"loss kernel {kernel!r}: must be one of {', '.join(KERNELS)}")
        self.model: Any = model  # nn.Module's own attribute types are too narrow for features()
        self.shard: VocabShard | None = None
        if kernel == "chunked" and not self._has_head():
            raise ValueError(
                f"loss kernel 'chunked': {type(model).__name__} lacks features() or head_weight; "
                "use 'plain'"
            )
        self.chunked = kernel == "chunked" or (
            kernel == "auto"
            and self._has_head()
            and self._head_weight().shape[0] >= MIN_CHUNKED_VOCAB
        )
        self._run_trunk: Callable[[Tensor], Tensor] = self._trunk

    def _has_head(self) -> bool:
        return (
            hasattr(self.model, "features") and getattr(self.model, "head_weight", None) is not None
        )

    def share_vocabulary(self, shard: VocabShard) -> None:
        """From now on this rank's head is a part of the vocabulary; only the chunked loss can
        handle that.

        `model.head_weight` is then a DTensor split by rows, or this rank's rows themselves. Raises
        ValueError where the model has no head of its own that could be split.
        """
        if not self._has_head():
            raise ValueError(
                f"tensor parallelism: {type(self.model).__name__} lacks features() or head_weight, "
                "so its output head cannot be split over ranks; use e.g. parallelism=fsdp"
            )
        self.shard = shard
        self.chunked = True

    def _trunk(self, tokens_bt: Tensor) -> Tensor:
        """Return everything before the chunked loss, or the whole model before the plain one."""
        return self.model.features(tokens_bt) if self.chunked else self.model(tokens_bt)

    def _head_weight(self) -> Tensor:
        """Return the rows of the head that are on this rank (v, d); gradients flow back to the
        model's parameter."""
        weight_vd = self.model.head_weight
        return (
            weight_vd.to_local()
            if self.shard is not None and hasattr(weight_vd, "to_local")
            else weight_vd
        )

    def loss_kernel(self, device: torch.device) -> str:
        """Return which kernel runs, and its sizes on a device: "chunked(rows=512, vocab=2048)".

        With a shared vocabulary "vocab=160 of 320" counts this rank's rows: ask before FSDP cuts
        them further.
        """
        if not self.chunked:
            return "plain"
        rows, tile = _chunk_sizes(device)
        whole = "" if self.shard is None else f" of {self.shard.size}"
        return f"chunked(rows={rows}, vocab={min(tile, self._head_weight().shape[0])}{whole})"

    def compile_trunk(self) -> None:
        """Run the trunk through torch.compile from now on; parameters and their names stay as they
        are.

        The trunk is all before the chunked loss, or the whole model before the plain one.
        """
        self._run_trunk = torch.compile(self._trunk, dynamic=False)

    def compile_blocks(self) -> None:
        """Run each of the model's `blocks` through torch.compile from now on, or the trunk where it
        has none.

        Blocks of the same shapes share one compiled graph. For trunks that something in Python has
        to enter between the blocks, as the gathering of sharded parameters does. Parameters' names
        stay as they are.
        """
        blocks = getattr(self.model, "blocks", None)
        if not isinstance(blocks, nn.ModuleList | nn.Sequential) or not len(blocks):
            return self.compile_trunk()
        for block in blocks:
            block.compile(dynamic=False)

    def forward(self, tokens_bt: Tensor, targets_bt: Tensor | None = None) -> Tensor:
        """Sum of cross-entropy (nats), a scalar in fp32 (fp64 in fp64), over targets other than
        -100.

        `tokens_bt` and `targets_bt` are (b, t) ids. With no valid target it is 0, with gradients of
        0. Without targets it returns the logits (b, t, v) of the whole vocabulary, which carry no
        gradient. Raises ValueError where a model's own logits do not have the shape (b, t, v).
        """
        if targets_bt is None:
            # Uncompiled: a text that grows token by token would be compiled anew for each length.
            with torch.no_grad(), torch.compiler.set_stance("force_eager"):
                return self._logits(tokens_bt)
        out = self._run_trunk(tokens_bt)
        if self.chunked:
            return chunked_cross_entropy_sum(out, self._head_weight(), targets_bt, self.shard)
        return plain_cross_entropy_sum(self._checked(out, tokens_bt), targets_bt)

    def _logits(self, tokens_bt: Tensor) -> Tensor:
        out = self._run_trunk(tokens_bt)
        if not self.chunked:
            return self._checked(out, tokens_bt)
        logits_btv = F.linear(out, self._head_weight())
        return logits_btv if self.shard is None else self.shard.gather(logits_btv)

    def _checked(self, out: Any, tokens_bt: Tensor) -> Tensor:
        """Return what the model returned, if that is logits."""
        if not isinstance(out, Tensor) or out.ndim != 3 or out.shape[:2] != tokens_bt.shape:
            got = tuple(out.shape) if isinstance(out, Tensor) else type(out).__name__
            raise ValueError(
                f"model._target_: {type(self.model).__name__} returned {got} for tokens of shape "
                f"{tuple(tokens_bt.shape)}: it must return logits (batch, time, vocabulary)"
            )
        return out
