"""The largest attention logits of a window, by head, taken as it is trained on.

Names end in their dimensions: b batch, t and s time (tokens), r some of t, h query heads, g
key/value heads, k head width.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from llmexp.config.values import is_ours
from llmexp.models.logits import divisor_of, seen_by
from llmexp.models.loss import blocks_of
from llmexp.models.planned import kind_of

_MOST = 2**24  # logits that are held at once


def attentions_of(model: nn.Module) -> list[Any]:
    """Return the attention of each block, where all of them are llmexp's own; else none."""
    found = [getattr(block, "attention", None) for block in blocks_of(model)]
    return found if all(is_ours(type(one).__module__) for one in found) else []


@torch.no_grad()
def keep_largest(attention: Any, q_bhtk: Tensor, k_bgtk: Tensor, documents: Any) -> None:
    """Raise the kept logit of each head to the largest of these queries and keys.

    A logit is q k / `divisor_of`, of a key that the query sees.
    """
    b, h, t, width = q_bhtk.shape
    g = k_bgtk.shape[1]
    dtype = attention.largest_h.dtype
    narrow = q_bhtk.element_size() == 2 and kind_of(q_bhtk.device) == "cuda"
    q_bhtk, k_bgtk = (x.detach() if narrow else x.detach().to(dtype) for x in (q_bhtk, k_bgtk))
    rows = max(1, min(t, _MOST // (b * h * t)))
    for first in range(0, t, rows):
        last = min(first + rows, t)
        q_xrk = q_bhtk[:, :, first:last].reshape(b * g, -1, width)
        k_xks = k_bgtk[:, :, :last].reshape(b * g, last, width).transpose(1, 2)
        if narrow:  # tensor cores, and sums that are not rounded
            logits_xrs = torch.bmm(q_xrk, k_xks, out_dtype=torch.float32)
        else:  # not `bmm` itself: selective recomputation would keep its result
            logits_xrs = q_xrk.new_empty(b * g, q_xrk.shape[1], last)
            torch.bmm(q_xrk, k_xks, out=logits_xrs)
        logits_bhrs = logits_xrs.view(b, h, last - first, last)
        rows_r = torch.arange(first, last, device=q_bhtk.device)
        hidden = ~seen_by(rows_r, t, documents)[..., :last]
        largest_bh = logits_bhrs.masked_fill_(hidden, -math.inf).amax((2, 3)) / divisor_of(
            attention
        )
        largest_bh = torch.where(attention.counted_b[:, None], largest_bh, -math.inf)
        attention.largest_h.copy_(torch.maximum(attention.largest_h, largest_bh.amax(0)))
