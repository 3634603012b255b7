"""Causal attention, inside documents where a model knows the last id of one.

A `KVCache` gives it the tokens of earlier calls, where text is made token by token.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from llmexp.models.planned import kind_of

# Masked instead of attended to one by one: documents whose mean tokens, times the tokens of a
# window, are fewer. (A mask costs a token as much as the window is long; a span costs its call.)
_SHORT = 10_000


@dataclass(frozen=True)
class Documents:
    """The places of a micro-batch's documents, as spans or as a mask."""

    positions_bt: Tensor  # int64, from 0 in each document
    spans: list[tuple[int, int, int]] | None  # (row, start, stop)
    mask_b1ts: Tensor | None  # bool: true where the query t may look at s
    blocks: Any = None  # the mask as FlexAttention takes it, beside the other one


@dataclass
class KVCache:
    """Hold the keys and values of the `length` tokens of earlier calls, a pair for each layer.

    A first call may bring several tokens, each later one brings one.
    """

    length: int = 0
    pairs: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    _layer: int = 0  # which one comes next

    def begin(self, tokens: int) -> int:
        """Begin a call with so many tokens; return the position of the first."""
        self._layer, first = 0, self.length
        self.length += tokens
        return first

    def join(self, k_bgtk: Tensor, v_bgtk: Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys and values of this layer for all tokens so far."""
        if self._layer == len(self.pairs):
            self.pairs.append((k_bgtk, v_bgtk))
        else:
            k_old, v_old = self.pairs[self._layer]
            self.pairs[self._layer] = torch.cat((k_old, k_bgtk), 2), torch.cat((v_old, v_bgtk), 2)
        self._layer += 1
        return self.pairs[self._layer - 1]


def find_documents(tokens_bt: Tensor, end: int, spans: bool = True) -> Documents:
    """Return where documents lie; `end` is the last id of each. A window's start begins one.

    Spans are for the CPU, where the host knows the ids, and save what attention between documents
    would cost; a device is not waited for and gets a mask, and so do compiled graphs. On CUDA a
    graph gets blocks too; what it has no use for is not computed. `spans` false: never spans.
    """
    b, t = tokens_bt.shape
    index_t = torch.arange(t, device=tokens_bt.device)
    starts_bt = (tokens_bt == end).roll(1, dims=1)
    starts_bt[:, 0] = True
    first_bt = torch.where(starts_bt, index_t, 0).cummax(1).values  # of the token's document
    positions_bt = index_t - first_bt
    if spans and kind_of(tokens_bt.device) == "cpu" and not torch.compiler.is_compiling():
        found = starts_bt.nonzero().tolist()
        if len(found) * _SHORT <= b * t * t:
            following = [*found[1:], [b, 0]]
            lying = [
                (row, start, stop if row == next_row else t)
                for (row, start), (next_row, stop) in zip(found, following, strict=True)
            ]
            return Documents(positions_bt, lying, None)
    mask_b1ts = _inside(first_bt, index_t[:, None] >= index_t)
    if kind_of(tokens_bt.device) == "cuda" and torch.compiler.is_compiling():
        return Documents(positions_bt, None, mask_b1ts, flex_mask(first_bt))
    return Documents(positions_bt, None, mask_b1ts)


def _inside(first_bt: Tensor, seen_ts: Tensor) -> Tensor:
    """Return the mask (b, 1, t, s) of what `seen_ts` shows inside documents that begin there."""
    same_bts = first_bt[:, :, None] == first_bt[:, None, :]
    return (seen_ts & same_bts)[:, None]


def flex_mask(first_bt: Tensor) -> Any:
    """Return FlexAttention's mask of documents, from the first place of each token's document.

    FlexAttention does not compute blocks that are hidden, and compiled it makes no mask of all
    places.
    """

    def visible(row: Tensor, head: Tensor, t: Tensor, s: Tensor) -> Tensor:
        return (t >= s) & (first_bt[row, t] == first_bt[row, s])

    b, t = first_bt.shape
    return create_block_mask(visible, b, None, t, t, device=first_bt.device)


def within(window: int, tokens_bt: Tensor, documents: Documents | None) -> Documents:
    """Return the documents with a mask for a sliding window.

    Each token sees only the `window` tokens that end with it.
    """
    t = tokens_bt.shape[1]
    index_t = torch.arange(t, device=tokens_bt.device)
    back_ts = index_t[:, None] - index_t
    seen_ts = (back_ts >= 0) & (back_ts < window)
    if documents is None:
        return Documents(index_t, None, seen_ts[None, None])
    mask_b1ts = _inside(index_t - documents.positions_bt, seen_ts)
    return Documents(documents.positions_bt, None, mask_b1ts)


def repeats_heads(q_bhtk: Tensor, mask: Tensor | None) -> bool:
    """Return whether grouped key and value heads are repeated before attention.

    On an accelerator kernels for fp32 or for a mask know no groups, and without a kernel all scores
    would lie in memory.
    """
    return kind_of(q_bhtk.device) == "cuda" and (mask is not None or q_bhtk.dtype == torch.float32)


def _flexible(q_bhtk: Tensor, dropout: float) -> bool:
    """Return whether FlexAttention can take these queries.

    It knows no dropout and no narrow heads, and in fp32 its blocks of wide heads outgrow a core's
    memory.
    """
    return dropout == 0.0 and q_bhtk.shape[-1] >= 16 and q_bhtk.element_size() == 2


def attend(
    q_bhtk: Tensor,
    k_bgtk: Tensor,
    v_bgtk: Tensor,
    documents: Documents | KVCache | None,
    dropout: float,
    grouped: bool = False,
    scale: float | None = None,
) -> Tensor:
    """Return causal attention (b, h, t, k) of each token to those of its own document.

    `grouped`: several query heads share a key and value head. `scale`: of the products of queries
    and keys; None: 1 / sqrt(head width).
    """
    if documents is None and not grouped:
        return F.scaled_dot_product_attention(
            q_bhtk, k_bgtk, v_bgtk, dropout_p=dropout, is_causal=True, scale=scale
        )
    return _attend_inside(q_bhtk, k_bgtk, v_bgtk, documents, dropout, grouped, scale)


def _attend_inside(
    q_bhtk: Tensor,
    k_bgtk: Tensor,
    v_bgtk: Tensor,
    documents: Documents | KVCache | None,
    dropout: float,
    grouped: bool,
    scale: float | None,
) -> Tensor:
    """Return attention inside documents, after the keys of a cache, or of heads in groups."""
    if isinstance(documents, KVCache):
        k_bgtk, v_bgtk = documents.join(k_bgtk, v_bgtk)
        several = q_bhtk.shape[2] > 1
        return F.scaled_dot_product_attention(
            q_bhtk, k_bgtk, v_bgtk, is_causal=several, scale=scale, enable_gqa=grouped
        )
    if documents is not None and documents.blocks is not None and _flexible(q_bhtk, dropout):
        found: Tensor = flex_attention(
            q_bhtk, k_bgtk, v_bgtk, block_mask=documents.blocks, scale=scale, enable_gqa=grouped
        )
        return found
    if documents is None or documents.spans is None:
        mask = None if documents is None else documents.mask_b1ts
        if grouped and repeats_heads(q_bhtk, mask):
            times, grouped = q_bhtk.shape[1] // k_bgtk.shape[1], False
            k_bgtk, v_bgtk = (x.repeat_interleave(times, dim=1) for x in (k_bgtk, v_bgtk))
        causal = mask is None
        return F.scaled_dot_product_attention(
            q_bhtk, k_bgtk, v_bgtk, mask, dropout, causal, scale=scale, enable_gqa=grouped
        )
    # In fp32 at least: oneDNN would compile products in bf16 anew for each length of a document,
    # and keep hundreds of MiB of them; they would be slower, too.
    dtype = torch.promote_types(q_bhtk.dtype, torch.float32)
    wide = [x.to(dtype) for x in (q_bhtk, k_bgtk, v_bgtk)]
    parts: list[list[Tensor]] = [[] for _ in range(len(q_bhtk))]
    with torch.autocast(q_bhtk.device.type, enabled=False):
        for row, start, stop in documents.spans:
            q, k, v = (x[row : row + 1, :, start:stop] for x in wide)
            y = F.scaled_dot_product_attention(
                q, k, v, dropout_p=dropout, is_causal=True, scale=scale, enable_gqa=grouped
            )
            parts[row].append(y)
    return torch.cat([torch.cat(row, 2) for row in parts]).to(q_bhtk.dtype)
