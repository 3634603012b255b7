"""Make a twin of a run: one that differs in the last bits of its initial weights alone."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


def seed_of(text: str) -> int:
    """Return the seed of a generator, below 2^64, that a text stands for."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


@torch.no_grad()
def perturb(
    model: nn.Module, seed: int, twin: int, piece_of: Callable[[Tensor], Any] | None = None
) -> None:
    """Move each entry of the parameters by -1, 0 or +1 unit in the last place.

    The draws differ with (seed, twin). They come from a generator of their own, so the training RNG
    stays as it is; twin 0 moves nothing. `piece_of` tells this rank's `local` piece of a split
    tensor and its `offset`.
    """
    if twin == 0:
        return
    generator = torch.Generator().manual_seed(seed_of(f"{seed}/twin {twin}"))
    for p in model.parameters():
        if p.is_meta or not p.is_floating_point():
            continue
        directions = torch.randint(-1, 2, p.shape, generator=generator, dtype=torch.int8)
        held: Tensor = p
        if piece_of is not None:
            piece = piece_of(p)
            held = piece.local
            cuts = zip(piece.offset, held.shape, strict=True)
            directions = directions[tuple(slice(at, at + size) for at, size in cuts)]
        directions = directions.to(held.device)
        towards = directions.to(held.dtype) * math.inf  # nan where the direction is 0
        held.copy_(torch.where(directions == 0, held, torch.nextafter(held, towards)))
