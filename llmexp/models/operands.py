"""Share between models and the two kernels of the chunked loss: operands, products, ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from llmexp.models.planned import kind_of

IGNORE_INDEX = -100
ALIGNED = 64  # rows of the head on an accelerator: a padded one has a multiple


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


@dataclass(frozen=True)
class Spread:
    """Spread the tokens of each sequence over ranks, where a block computes token by token.

    `part` takes a rank's tokens (b, s, d) of whole sequences (b, t, d); `whole` is its inverse, of
    a tensor whose gradient is whole on each rank. `products` returns linear layers' outputs for
    whole sequences, of their part.
    """

    part: Callable[[Tensor], Tensor]
    whole: Callable[[Tensor], Tensor]
    products: Callable[[Tensor, Sequence[nn.Linear]], list[Tensor]]


def products(module: Any, x: Tensor, *linears: nn.Linear) -> list[Tensor]:
    """Return the outputs of linear layers that take the same x."""
    if module.spread is not None and module.training:
        found: list[Tensor] = module.spread.products(x, linears)
        return found
    return [linear(x) for linear in linears]


@dataclass(frozen=True)
class Dtypes:
    """The dtype of the head's operands, and the one that their products are computed in.

    They differ on a CPU without instructions for the first: rounding the operands and multiplying
    in fp32 gives what the instructions would, and is many times faster than torch's loops in plain
    C++.
    """

    operand: torch.dtype
    compute: torch.dtype

    @classmethod
    def of(cls, h_nd: Tensor, weight_vd: Tensor) -> Dtypes:
        device_type = h_nd.device.type
        if torch.is_autocast_enabled(device_type) and h_nd.dtype != torch.float64:
            operand = torch.get_autocast_dtype(device_type)
        else:
            operand = torch.promote_types(h_nd.dtype, weight_vd.dtype)
        if kind_of(h_nd.device) == "cpu" and operand.itemsize == 2:
            native = operand == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()
            return cls(operand, operand if native else torch.float32)
        return cls(operand, operand)

    @property
    def sums(self) -> torch.dtype:
        return torch.float64 if self.compute == torch.float64 else torch.float32

    @property
    def softmax_scale(self) -> float:
        """Return a factor that keeps a softmax out of fp16's subnormal range.

        It is tiny where the vocabulary is large.
        """
        return 2.0**14 if self.compute == torch.float16 else 1.0


@dataclass(frozen=True)
class How:
    """Tell a kernel what it computes beside its rows and the head: targets, and in which way.

    `needs`: whether the gradients by the rows and by the head are wanted. `compiled`: on an
    accelerator the softmax of a chunk runs through torch.compile.
    """

    targets_n: Tensor
    dtypes: Dtypes
    shard: VocabShard | None = None
    needs: tuple[bool, bool] = (False, False)
    compiled: bool = False


Made = tuple[list[Tensor], Tensor | None, Tensor | None]  # nll, gradients by rows and by head


def multiply(a: Tensor, b: Tensor, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
    """Return a @ b in `dtype`.

    On an accelerator the product is never rounded to the operands' dtype on its way.
    """
    if a.dtype == dtype:
        return torch.mm(a, b, out=out)
    if a.device.type == "cuda":
        return torch.mm(a, b, out_dtype=dtype, out=out)
    product = a @ b
    return product.to(dtype) if out is None else out.copy_(product)


def add_product(out: Tensor, a: Tensor, b: Tensor, alpha: float = 1.0) -> None:
    """Add alpha * (a @ b) to `out`, whose dtype may be wider.

    On an accelerator the product itself does that.
    """
    if a.dtype == out.dtype:
        out.addmm_(a, b, alpha=alpha)
    elif a.device.type == "cuda":
        torch.addmm(out, a, b, alpha=alpha, out_dtype=out.dtype, out=out)
    else:
        out.add_(a @ b, alpha=alpha)


def local_targets(
    targets_n: Tensor, shard: VocabShard | None, vocab_size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (n, 1) each: targets as rows of this rank's head, where rows have none, where here.

    A target that is not here is row 0, to be multiplied away: its place is not known on the host.
    """
    target_n1 = targets_n[:, None]
    none_n1 = target_n1 == IGNORE_INDEX
    if shard is not None:
        target_n1 = target_n1 - shard.first
    here_n1 = ~none_n1 & (target_n1 >= 0) & (target_n1 < vocab_size)
    return target_n1.masked_fill(~here_n1, 0), none_n1, here_n1


def log_over_ranks(
    shard: VocabShard | None, base_n1: Tensor, total_n1: Tensor, own_n1: Tensor, here_n1: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the log-softmax at the targets, and this rank's factor and the total of each row.

    `total_n1`: the sum of exp(logit - base) over this rank's vocabulary; `own_n1`: the target's
    logit - base. The softmax over all ranks is exp(logit - base) * factor / total. Ranks share
    these in two reductions. A target that is on no rank gives nan.
    """
    own_n1 = own_n1.masked_fill(~here_n1, 0)
    factor_n1, owners_n1 = torch.ones_like(total_n1), here_n1.to(total_n1.dtype)
    if shard is not None:
        # relative to the largest rank, so that a loss far below 1 keeps its digits
        relative_n1 = base_n1 - shard.max(base_n1.clone())
        factor_n1 = relative_n1.exp()
        own_n1 = (own_n1 + relative_n1).masked_fill(~here_n1, 0)
        total_n1, own_n1, owners_n1 = shard.sum(
            torch.stack((total_n1 * factor_n1, own_n1, owners_n1))
        )
    own_n1 = own_n1.masked_fill(owners_n1 != 1, torch.nan)
    return own_n1 - total_n1.log(), factor_n1, total_n1


def subtract_rows(out_vd: Tensor, index_n: Tensor, rows_nd: Tensor) -> None:
    """out[index] -= rows, repeated indices included, in an order that is the same each time."""
    if out_vd.device.type == "cpu":
        out_vd.index_add_(0, index_n, rows_nd, alpha=-1)
    else:
        # index_add_ would add atomically, in any order; this one sorts.
        out_vd.index_put_((index_n,), -rows_nd, accumulate=True)


def autocast_dtype(x: Tensor) -> Tensor:
    """Return x in the dtype that products will have: once for several of them."""
    kind = x.device.type
    if x.is_meta or x.dtype == torch.float64 or not torch.is_autocast_enabled(kind):
        return x
    return x.to(torch.get_autocast_dtype(kind))
