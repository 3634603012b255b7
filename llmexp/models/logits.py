"""The logits of attention: their scale, and which keys a query sees."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from llmexp.models.documents import Documents


def divisor_of(attention: Any) -> float:
    """Return what the products of queries and keys are divided by."""
    scale = getattr(attention, "logit_scale", None)
    return math.sqrt(attention.head_dim) if scale is None else 1 / scale


def seen_by(rows_r: Tensor, t: int, documents: Documents | None) -> Tensor:
    """Return which of t tokens the queries of these rows see: (r, t), or (b, 1, r, t)."""
    index_t = torch.arange(t, device=rows_r.device)
    seen = rows_r[:, None] >= index_t
    if documents is not None and documents.mask_b1ts is not None:
        seen = documents.mask_b1ts[:, :, rows_r]
    elif documents is not None:
        first_bt = index_t - documents.positions_bt
        seen = seen & (index_t >= first_bt[:, rows_r, None])[:, None]
    return seen
