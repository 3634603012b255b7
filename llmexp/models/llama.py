"""Llama (Touvron et al. 2023; grouped-query attention and sizes as in Llama 3, Dubey et al. 2024).

Names end in their dimensions: b batch, t time (tokens), d model width, f MLP width, h heads, g
key/value heads, k head width, v vocabulary.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from llmexp.models.checks import check_divides, check_dropout, check_length, check_sizes
from llmexp.models.common import (
    FLOPS_FORMULA,
    flops_per_token,
    init_weights,
    logits,
    same_in_training,
)
from llmexp.models.documents import Documents, attend, find_documents


def rope_tables(length: int, head_dim: int, theta: float, like: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and sine (t, k) of the rotary position embedding (Su et al. 2021, section 3.4).

    The halves of the last dimension are equal: feature i is rotated with feature i + k/2. Computed
    in fp32 (fp64 where `like` is fp64) on the device of `like`, whatever autocast says: in bf16
    neighbouring positions beyond 256 would be one and the same.
    """
    dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
    exponents_k = torch.arange(0, head_dim, 2, device=like.device, dtype=dtype) / head_dim
    positions_t = torch.arange(length, device=like.device, dtype=dtype)
    # A broadcast product, because autocast would take an outer product or einsum down to bf16.
    angles_tk = positions_t[:, None] * theta**-exponents_k
    angles_tk = torch.cat((angles_tk, angles_tk), dim=-1)
    return angles_tk.cos(), angles_tk.sin()


def apply_rope(x_bhtk: Tensor, cos_tk: Tensor, sin_tk: Tensor) -> Tensor:
    """Rotate queries or keys to their positions; computed in the tables' dtype, returned in x's."""
    first, second = x_bhtk.chunk(2, dim=-1)
    rotated_bhtk = x_bhtk * cos_tk + torch.cat((-second, first), dim=-1) * sin_tk
    return rotated_bhtk.to(x_bhtk.dtype)


class Attention(nn.Module):
    """Causal self-attention in which n_heads / n_kv_heads query heads share a key/value head."""

    def __init__(self, d_model: int, n_heads: int, n_kv_heads: int, dropout: float) -> None:
        super().__init__()
        self.head_dim = d_model // n_heads
        self.dropout = dropout
        self.grouped = n_kv_heads < n_heads
        self.q_proj = nn.Linear(d_model, d_model, bias=False)
        self.k_proj = nn.Linear(d_model, n_kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(d_model, n_kv_heads * self.head_dim, bias=False)
        self.out_proj = nn.Linear(d_model, d_model, bias=False)

    def forward(
        self, x_btd: Tensor, cos: Tensor, sin: Tensor, documents: Documents | None = None
    ) -> Tensor:
        b, t, _ = x_btd.shape
        # -1, not n_heads: under tensor parallelism a rank holds only some of the heads.
        q_bhtk = self.q_proj(x_btd).view(b, t, -1, self.head_dim).transpose(1, 2)
        k_bgtk = self.k_proj(x_btd).view(b, t, -1, self.head_dim).transpose(1, 2)
        v_bgtk = self.v_proj(x_btd).view(b, t, -1, self.head_dim).transpose(1, 2)
        q_bhtk = apply_rope(q_bhtk, cos, sin)
        k_bgtk = apply_rope(k_bgtk, cos, sin)
        dropout = self.dropout if self.training else 0.0
        y_bhtk = attend(q_bhtk, k_bgtk, v_bgtk, documents, dropout, self.grouped)
        return self.out_proj(y_bhtk.transpose(1, 2).reshape(b, t, -1))


class MLP(nn.Module):
    """SwiGLU (Shazeer 2020, "GLU Variants Improve Transformer")."""

    def __init__(self, d_model: int, d_ff: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(d_model, d_ff, bias=False)
        self.up_proj = nn.Linear(d_model, d_ff, bias=False)
        self.down_proj = nn.Linear(d_ff, d_model, bias=False)

    def forward(self, x_btd: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x_btd)) * self.up_proj(x_btd))


class Block(nn.Module):
    """Pre-norm transformer block; dropout on what each branch adds to the residual stream."""

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        n_kv_heads: int,
        d_ff: int,
        dropout: float,
        norm_eps: float,
    ) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(d_model, eps=norm_eps)
        self.attention = Attention(d_model, n_heads, n_kv_heads, dropout)
        self.mlp_norm = nn.RMSNorm(d_model, eps=norm_eps)
        self.mlp = MLP(d_model, d_ff)
        self.dropout = nn.Dropout(dropout)

    def forward(
        self, h_btd: Tensor, cos: Tensor, sin: Tensor, documents: Documents | None = None
    ) -> Tensor:
        attended_btd = self.attention(self.attention_norm(h_btd), cos, sin, documents)
        h_btd = h_btd + self.dropout(attended_btd)
        return h_btd + self.dropout(self.mlp(self.mlp_norm(h_btd)))


class Llama(nn.Module):
    """Llama: rotary positions, RMSNorm, SwiGLU, grouped-query attention, no biases, no rope
    scaling.

    Sizes are counts (`d_model`, `d_ff`: features; `max_position_embeddings`: tokens, a stated limit
    only, as rotary positions need no table); `dropout` is the probability used on the embedding, on
    the attention weights and on each residual branch. Raises ValueError for sizes that do not fit
    together.
    """

    document_end: int | None = None  # the last id of a document, to keep attention inside each
    flops_formula = FLOPS_FORMULA
    init_weights, forward = init_weights, logits
    flops_per_token, same_in_training = flops_per_token, same_in_training

    def __init__(
        self,
        vocab_size: int,
        max_position_embeddings: int,
        n_layers: int,
        n_heads: int,
        n_kv_heads: int,
        d_model: int,
        d_ff: int,
        dropout: float = 0.0,
        rope_theta: float = 10000.0,
        tied_head: bool = True,
        norm_eps: float = 1e-5,
    ) -> None:
        super().__init__()
        check_sizes(
            vocab_size=vocab_size,
            max_position_embeddings=max_position_embeddings,
            n_layers=n_layers,
            n_heads=n_heads,
            n_kv_heads=n_kv_heads,
            d_model=d_model,
            d_ff=d_ff,
        )
        check_divides("n_heads", n_heads, "d_model", d_model)
        check_divides("n_kv_heads", n_kv_heads, "n_heads", n_heads)
        check_dropout(dropout)
        self.head_dim = d_model // n_heads
        if self.head_dim % 2:
            raise ValueError(
                f"model.d_model={d_model} / model.n_heads={n_heads} gives heads {self.head_dim} "
                f"wide: rotary positions need an even width, e.g. "
                f"model.d_model={(self.head_dim + 1) * n_heads}"
            )
        for name, value in {"rope_theta": rope_theta, "norm_eps": norm_eps}.items():
            if (
                isinstance(value, bool)
                or not isinstance(value, int | float)
                or not 0 < value < math.inf
            ):
                raise ValueError(f"model.{name}={value!r}: must be a finite number above 0")
        self.vocab_size = vocab_size
        self.max_position_embeddings = max_position_embeddings
        self.rope_theta = float(rope_theta)
        # Without torch's own initial values: init_weights alone draws random numbers, once per
        # weight.
        device = torch.get_default_device()
        with torch.device("meta"):
            self.token_embedding = nn.Embedding(vocab_size, d_model)
            self.dropout = nn.Dropout(dropout)
            self.blocks = nn.ModuleList(
                Block(d_model, n_heads, n_kv_heads, d_ff, dropout, norm_eps)
                for _ in range(n_layers)
            )
            self.final_norm = nn.RMSNorm(d_model, eps=norm_eps)
            self.head = None if tied_head else nn.Linear(d_model, vocab_size, bias=False)
        self.to_empty(device=device)
        self.init_weights()

    @property
    def head_weight(self) -> Tensor:
        """Output projection (v, d), a Parameter: the token embedding's weight unless `tied_head` is
        false."""
        return self.token_embedding.weight if self.head is None else self.head.weight

    def features(self, tokens_bt: Tensor) -> Tensor:
        """Hidden states (b, t, d) after the final norm. Raises ValueError for too long a
        sequence."""
        t = tokens_bt.shape[1]
        check_length(t, self.max_position_embeddings)
        h_btd = self.dropout(self.token_embedding(tokens_bt))
        # Made anew each time: a buffer would not survive `to_empty`, and the tables are a few
        # kilobytes.
        cos, sin = rope_tables(t, self.head_dim, self.rope_theta, like=h_btd)
        documents = None
        if self.document_end is not None:
            documents = find_documents(tokens_bt, self.document_end)
            at = documents.positions_bt
            cos, sin = cos[at][:, None], sin[at][:, None]  # (b, 1, t, k)
        for block in self.blocks:
            h_btd = block(h_btd, cos, sin, documents)
        return self.final_norm(h_btd)
