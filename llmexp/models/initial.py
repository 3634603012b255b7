"""Draw values for parameters block by block: the same ones however ranks cut the parameters."""

from __future__ import annotations

import contextlib
import hashlib
import math
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

BLOCK = 2**18  # elements of a block, about, as it has whole rows
SEEDS = 2**32  # of which torch's generator on the CPU makes different numbers

Draw = Callable[..., Any]  # fills a block, given a `generator`


def seed_of(text: str) -> int:
    """Return the seed of a generator, below 2^64, that a text stands for."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def seed_all(number: int) -> None:
    """Seed the generators of torch, numpy and Python."""
    # torch.manual_seed keeps a trace of its call where CUDA is not started
    torch.default_generator.manual_seed(number)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed(number)
    random.seed(number)
    np.random.seed(number % 2**32)


@contextlib.contextmanager
def numbers_of(seed: int) -> Iterator[None]:
    """Draw the random numbers of a seed inside; those of outside go on as if nothing was drawn."""
    python, numpy = random.getstate(), np.random.get_state()
    cuda = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(cuda):
        seed_all(seed)
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)


class Blocks:
    """Give each block of the parameters that are drawn, in turn, a seed of its own.

    `seed`: that of the first block; later ones have the next, so no two are equal. `piece_of` tells
    this rank's `local` piece of a parameter and its `offset`; None: a rank holds all of each.
    """

    def __init__(self, seed: int, piece_of: Callable[[Tensor], Any] | None = None) -> None:
        self._next, self._piece_of = seed, piece_of

    def held(self, p: Tensor) -> Tensor:
        """Return what this rank holds of a parameter, in the same memory."""
        found: Tensor = p.detach() if self._piece_of is None else self._piece_of(p).local
        return found

    def drawn(self, p: Tensor, draw: Draw, dtype: torch.dtype) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield parts of what this rank holds of a parameter, each with the values drawn for it.

        Only blocks of which it holds something are drawn, on the CPU in `dtype`, one at a time; in
        their own place where that can be.
        """
        shape, held = tuple(p.shape) or (1,), self.held(p)
        offset = (0,) * p.ndim if self._piece_of is None else self._piece_of(p).offset
        if not p.ndim:
            held, offset = held.view(1), (0,)
        rows = max(1, BLOCK // max(1, math.prod(shape[1:])))  # of a block
        seed, first, last = self._next, offset[0], offset[0] + held.shape[0]
        self._next += -(-shape[0] // rows)
        columns = [slice(a, a + n) for a, n in zip(offset[1:], held.shape[1:], strict=True)]
        generator = torch.Generator()
        for number in range(first // rows, -(-last // rows) if held.numel() else 0):
            begin, end = number * rows, min((number + 1) * rows, shape[0])
            generator.manual_seed((seed + number) % SEEDS)
            low, high = max(begin, first), min(end, last)
            part, size = held[low - first : high - first], (end - begin, *shape[1:])
            own = part.shape == size and part.is_contiguous() and part.device.type == "cpu"
            block = (
                part
                if own and part.dtype == dtype
                else torch.empty(size, dtype=dtype, device="cpu")
            )
            draw(block, generator=generator)
            yield part, block[(slice(low - begin, high - begin), *columns)]
