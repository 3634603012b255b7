"""Make a twin of a run: one that differs in the last bits of its initial weights alone."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from llmexp.models.initial import Blocks, seed_of


@torch.no_grad()
def perturb(
    model: nn.Module, seed: int, twin: int, piece_of: Callable[[Tensor], Any] | None = None
) -> None:
    """Move each entry of the parameters by -1, 0 or +1 unit in the last place.

    The draws differ with (seed, twin). They come from generators of their own, so the training RNG
    stays as it is. `piece_of` tells this rank's `local` piece of a split tensor and its `offset`.
    """
    blocks = Blocks(seed_of(f"{seed}/twin {twin}"), piece_of)
    for p in model.parameters():
        if p.is_meta or not p.is_floating_point():
            continue
        for part, drawn in blocks.drawn(p, _directions, torch.int8):
            directions = drawn.to(part.device)
            towards = directions.to(part.dtype) * math.inf  # nan where the direction is 0
            part.copy_(torch.where(directions == 0, part, torch.nextafter(part, towards)))


def _directions(block: Tensor, generator: torch.Generator) -> None:
    block.random_(-1, 2, generator=generator)
