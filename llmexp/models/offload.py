"""Keep in the host's memory what blocks need for the backward pass."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from llmexp.models.planned import kind_of
from llmexp.models.recompute import blocks_of


def offload_blocks(model: nn.Module, ranks: int = 1) -> None:
    """Make each block keep what it needs on the host, where it computes on an accelerator.

    The copies are made on a stream of their own, while the block goes on and the next one begins:
    the device holds what two blocks keep at most, and that of none behind the last one. `ranks`
    share the tokens of a sequence. The blocks' forward functions are replaced in place.
    """
    leaving = deque[_OnHost]()
    blocks = blocks_of(model)
    for block in blocks:
        behind = 0 if block is blocks[-1] else 1
        block.forward = _offloaded(block.forward, ranks, leaving, behind)


class _OnHost:
    """Keep what one call of a block needs for its backward pass on the host, each tensor once.

    Weights and their copies stay, and what the call was given beside its tokens: of tensors with
    two dimensions only those with a row a token go.
    """

    def __init__(self, rows: tuple[int, ...], given: set[int]) -> None:
        self._rows, self._given = rows, given
        # held until they are copied, so that no other gets their place
        self._sent: dict[Any, tuple[Tensor, Any]] = {}
        self._copied: Any = None  # an event behind the last copy

    def pack(self, x: Tensor) -> Any:
        place = x.untyped_storage()._cdata
        tokens = x.ndim > 2 or (x.ndim == 2 and x.shape[0] in self._rows)
        if not tokens or place in self._given or kind_of(x.device) != "cuda":
            return x
        key = place, x.storage_offset(), x.shape, x.stride(), x.dtype, x._version
        if key not in self._sent:
            self._sent[key] = x, (self._send(x), x.device)
        return self._sent[key][1]

    def _send(self, x: Tensor) -> Tensor:
        """Return a copy on the host, which begins once x is computed."""
        streams, stream = torch.get_device_module(x.device), _stream_beside(x.device)
        stream.wait_stream(streams.current_stream())
        with streams.stream(stream):
            found = to_host(x)
            self._copied = streams.Event()
            self._copied.record(stream)
        return found

    def leave(self) -> None:
        """Let what is computed from now on wait for the copies, and take the memory."""
        if self._copied is not None:
            self._copied.wait()
        self._copied = None
        self._sent.clear()

    def unpack(self, packed: Any) -> Tensor:
        self.leave()
        return packed if isinstance(packed, Tensor) else from_host(*packed)


@functools.cache
def _stream_beside(device: torch.device) -> Any:
    return torch.get_device_module(device).Stream()


def to_host(x: Tensor) -> Tensor:
    """Return a copy in the host's memory, pinned beside a CUDA device, which it goes on from."""
    return torch.empty_like(x, device="cpu", pin_memory=x.is_cuda).copy_(x, non_blocking=True)


def from_host(x: Tensor, device: torch.device) -> Tensor:
    """Return what `to_host` has copied, on its device again."""
    return x.to(device, non_blocking=True)


def _offloaded(
    forward: Callable[..., Any], ranks: int, leaving: deque[_OnHost], behind: int
) -> Callable[..., Any]:
    """Return the forward function of a block; `behind`: how many blocks may still be `leaving`."""

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
        leaving.append(kept)
        while len(leaving) > behind:
            leaving.popleft().leave()
        return out

    return offloaded
