"""Keep in the host's memory what blocks need for the backward pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from llmexp.models.loss import blocks_of
from llmexp.models.planned import kind_of


def offload_blocks(model: nn.Module, ranks: int = 1) -> None:
    """Make each block keep what it needs on the host, where it computes on an accelerator.

    The device holds what one block keeps. `ranks` share the tokens of a sequence. The blocks'
    forward functions are replaced in place.
    """
    for block in blocks_of(model):
        block.forward = _offloaded(block.forward, ranks)


class _OnHost:
    """Keep what one call of a block needs for its backward pass on the host, each tensor once.

    Weights and their copies stay, and what the call was given beside its tokens: of tensors with
    two dimensions only those with a row a token go.
    """

    def __init__(self, rows: tuple[int, ...], given: set[int]) -> None:
        self._rows, self._given = rows, given
        # with the tensors, so that no other one gets their place while the block computes
        self._sent: dict[Any, tuple[Tensor, Any]] = {}

    def pack(self, x: Tensor) -> Any:
        place = x.untyped_storage()._cdata
        tokens = x.ndim > 2 or (x.ndim == 2 and x.shape[0] in self._rows)
        if not tokens or place in self._given or kind_of(x.device) != "cuda":
            return x
        key = place, x.storage_offset(), x.shape, x.stride(), x.dtype, x._version
        if key not in self._sent:
            self._sent[key] = x, (to_host(x), x.device)
        return self._sent[key][1]

    def unpack(self, packed: Any) -> Tensor:
        return packed if isinstance(packed, Tensor) else from_host(*packed)

    def release(self) -> None:
        """Give the device its memory back: the copies are queued before what comes next."""
        self._sent.clear()


def to_host(x: Tensor) -> Tensor:
    """Return a copy in the host's memory, pinned beside a CUDA device, which it goes on from.

    A tensor with gaps is copied on its device first: torch would take it through memory that is
    not pinned, at a fifth of the rate.
    """
    there = torch.empty_like(x, device="cpu", pin_memory=x.is_cuda)
    whole = x if x.stride() == there.stride() else x.clone()
    return there.copy_(whole, non_blocking=True)


def from_host(x: Tensor, device: torch.device) -> Tensor:
    """Return what `to_host` has copied, on its device again."""
    return x.to(device, non_blocking=True)


def _offloaded(forward: Callable[..., Any], ranks: int) -> Callable[..., Any]:
    """Return the forward function of a block."""

    def offloaded(h_btd: Tensor, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(h_btd, *args, **kwargs)
        rows = h_btd.shape[:-1].numel()
        # also what is in objects, such as the places of documents
        given = [x for one in args for x in (one, *getattr(one, "__dict__", {}).values())]
        places = {x.untyped_storage()._cdata for x in given if isinstance(x, Tensor)}
        kept = _OnHost((rows, rows * ranks), places)
        with saved_tensors_hooks(kept.pack, kept.unpack):
            out = forward(h_btd, *args, **kwargs)
        kept.release()
        return out

    return offloaded
