"""Count what tensors without memory would hold: bytes by what they are for."""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from llmexp.models.planned import bodies

_BLOCK = 512  # bytes that allocators round up to
_DEVICE = torch.ops.prim.device.default
_READ = torch.ops.aten._local_scalar_dense.default


class Held:
    """A piece of memory: its size and what it is for."""

    __slots__ = ("bytes", "kind", "storage")

    def __init__(self, size: int, kind: str) -> None:
        self.bytes, self.kind = size, kind
        self.storage: Any = None


class Counting(TorchDispatchMode):
    """Count the memory that operations take on a device, by the `phase` in which they take it.

    `peak` is what was held when most was held. A figure that the host reads is
    1: a window without a target would make no update.
    """

    def __init__(self, device_type: str) -> None:
        super().__init__()
        self.phase = "buffers"
        self.held: dict[int, Held] = {}
        self.now: Counter[str] = Counter()
        self.total = 0
        self.peak: dict[str, int] = {}
        self.peak_total = 0
        self._device_type = device_type

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE and isinstance(args[0], FakeTensor):  # two thirds of all calls
            return args[0].fake_device
        if any(getattr(t, "__name__", "") == "DTensor" for t in types):
            return NotImplemented  # it comes again, with what the rank has of it
        if func is _READ:
            return 1.0 if args[0].is_floating_point() else 0
        if (body := bodies.get(func.name())) is not None:
            with self:
                return body(*args)
        kwargs = kwargs or {}
        if func is torch.ops.aten.addmm.dtype_out:
            return kwargs["out"]  # torch 2.11 cannot run it without memory
        real = _is_bookkeeping(func, args, kwargs)
        with unset_fake_temporarily() if real else contextlib.nullcontext():
            out = func(*args, **kwargs)
        for tensor in (out,) if isinstance(out, Tensor) else tree_iter(out):
            if isinstance(tensor, Tensor) and tensor.device.type == self._device_type:
                self._add(tensor.untyped_storage())
        return out

    def _add(self, storage: Any) -> None:
        key = storage._cdata
        size = -(-storage.nbytes() // _BLOCK) * _BLOCK
        if (known := self.held.get(key)) is not None:
            self._change(known, size)
            return
        held = self.held[key] = Held(0, self.phase)

        def gone(_: Any) -> None:
            if self.held.get(key) is held:
                del self.held[key]
                self._change(held, 0)

        held.storage = weakref.ref(storage, gone)
        self._change(held, size)

    def _change(self, held: Held, size: int) -> None:
        self.now[held.kind] += size - held.bytes
        self.total += size - held.bytes
        held.bytes = size
        if self.total > self.peak_total:
            self.peak_total, self.peak = self.total, dict(self.now)

    def call(self, kind: str, tensors: Iterable[Tensor]) -> None:
        """Say what tensors are for that are held already."""
        for tensor in tensors:
            if held := self.held.get(tensor.untyped_storage()._cdata):
                self.rename(held, kind)

    def rename(self, held: Held, kind: str) -> None:
        self.now[held.kind] -= held.bytes
        held.kind = kind
        self.now[kind] += held.bytes

    def restart(self) -> None:
        """Forget the peak so far."""
        self.peak_total, self.peak = self.total, dict(self.now)

    def during(self, phase: str) -> AbstractContextManager[Any]:
        """Count what is taken now as for `phase`."""
        return mock.patch.object(self, "phase", phase)

    def resizing(self) -> AbstractContextManager[Any]:
        """Notice storages that are given and freed without an operation, as FSDP does."""
        resize: Any = torch.UntypedStorage.resize_

        def counted(storage: Any, size: int) -> Any:
            result = resize(storage, size)
            if storage._cdata in self.held:
                self._add(storage)
            return result

        return mock.patch.object(torch.UntypedStorage, "resize_", counted)


def _is_bookkeeping(func: Any, args: Any, kwargs: Any) -> bool:
    """Return whether a call makes one of the int32 lists in which DDP writes down its buckets.

    Its C++ code reads them.
    """
    aten = torch.ops.aten
    if func is aten.copy_.default:
        return args[0].dtype == torch.int32 and not isinstance(args[0], FakeTensor)
    return func is aten.empty.memory_format and kwargs.get("dtype") == torch.int32
