"""Llama and its relatives (Touvron et al. 2023; grouped-query attention and sizes as in Llama 3,
Dubey et al. 2024). Switches make it Qwen 3 (Yang et al. 2025), OLMo 2 (OLMo et al. 2024) or Mistral
(Jiang et al. 2023).

Names end in their dimensions: b batch, t time (tokens), d model width, f MLP width, h heads, g
key/value heads, k head width, v vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from llmexp.models.checks import (
    check_choice,
    check_divides,
    check_dropout,
    check_length,
    check_positive,
    check_sizes,
)
from llmexp.models.common import (
    FLOPS_FORMULA,
    RESIDUALS,
    begin,
    can_remember,
    embedding,
    flops_per_token,
    init_weights,
    logits,
    project,
    same_in_training,
    stream,
)
from llmexp.models.documents import Documents, Past, attend, find_documents, within

SCALING = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


@dataclass(frozen=True)
class Shape:
    """The sizes of a block and its switches (see `Llama`)."""

    d_model: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    d_ff: int
    dropout: float
    norm_eps: float
    biases: str
    qk_norm: str
    norm: str


def rope_tables(
    length: int,
    head_dim: int,
    theta: float,
    like: Tensor,
    scaling: Mapping[str, float] | None = None,
) -> tuple[Tensor, Tensor]:
    """Cosine and sine (t, k) of the rotary position embedding (Su et al. 2021, section 3.4).

    The halves of the last dimension are equal: feature i is rotated with feature i + k/2. Computed
    in fp32 (fp64 where `like` is fp64) on the device of `like`, whatever autocast says: in bf16
    neighbouring positions beyond 256 would be one and the same.
    """
    dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
    exponents_k = torch.arange(0, head_dim, 2, device=like.device, dtype=dtype) / head_dim
    positions_t = torch.arange(length, device=like.device, dtype=dtype)
    frequencies_k = theta**-exponents_k
    if scaling is not None:
        frequencies_k = scaled(frequencies_k, **scaling)
    # A broadcast product, because autocast would take an outer product or einsum down to bf16.
    angles_tk = positions_t[:, None] * frequencies_k
    angles_tk = torch.cat((angles_tk, angles_tk), dim=-1)
    return angles_tk.cos(), angles_tk.sin()


def scaled(
    frequencies_k: Tensor,
    factor: float,
    low_freq_factor: float,
    high_freq_factor: float,
    original_max_position_embeddings: float,
) -> Tensor:
    """Return rotary frequencies stretched for longer contexts, as Llama 3.1 does: waves longer than
    the original context / low_freq_factor by `factor`, those shorter than it / high_freq_factor not
    at all, those between in a straight line."""
    turns_k = original_max_position_embeddings * frequencies_k / (2 * math.pi)
    kept_k = (turns_k - low_freq_factor) / (high_freq_factor - low_freq_factor)
    kept_k = kept_k.clamp(0, 1)
    return frequencies_k * (kept_k + (1 - kept_k) / factor)


def apply_rope(x_bhtk: Tensor, cos_tk: Tensor, sin_tk: Tensor) -> Tensor:
    """Rotate queries or keys to their positions; computed in the tables' dtype, returned in x's."""
    first, second = x_bhtk.chunk(2, dim=-1)
    rotated_bhtk = x_bhtk * cos_tk + torch.cat((-second, first), dim=-1) * sin_tk
    return rotated_bhtk.to(x_bhtk.dtype)


class Norm(nn.RMSNorm):
    """RMSNorm in the dtype of its input, computed in fp32. With weights of another dtype torch
    takes six kernels for one. `shared`: takes the weights where several ranks have them."""

    shared: Callable[[Tensor], Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight if self.shared is None else self.shared(self.weight)
        return F.rms_norm(x, self.normalized_shape, weight.to(x.dtype), self.eps)


class Attention(nn.Module):
    """Causal self-attention in which n_heads / n_kv_heads query heads share a key/value head."""

    split_over_ranks = False  # by tensor parallelism

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        self.dropout = shape.dropout
        self.grouped = shape.n_kv_heads < shape.n_heads
        self.qk_norm = shape.qk_norm
        d_model, bias = shape.d_model, shape.biases != "none"
        wide, narrow = shape.n_heads * self.head_dim, shape.n_kv_heads * self.head_dim
        self.q_proj = nn.Linear(d_model, wide, bias=bias)
        self.k_proj = nn.Linear(d_model, narrow, bias=bias)
        self.v_proj = nn.Linear(d_model, narrow, bias=bias)
        self.out_proj = nn.Linear(wide, d_model, bias=shape.biases == "all")
        if self.qk_norm != "none":
            sizes = (wide, narrow) if self.qk_norm == "full" else (self.head_dim,) * 2
            self.q_norm, self.k_norm = (Norm(n, eps=shape.norm_eps) for n in sizes)

    def forward(
        self, x_btd: Tensor, cos: Tensor, sin: Tensor, documents: Documents | Past | None = None
    ) -> Tensor:
        b, t, _ = x_btd.shape
        # -1, not n_heads: under tensor parallelism a rank holds only some of the heads.
        q, k, v = project(self, x_btd)
        if self.qk_norm == "full":  # over all heads at once
            q, k = self.q_norm(q), self.k_norm(k)
        q_bhtk, k_bgtk, v_bgtk = (
            x.view(b, t, -1, self.head_dim).transpose(1, 2) for x in (q, k, v)
        )
        if self.qk_norm == "head":
            q_bhtk, k_bgtk = self.q_norm(q_bhtk), self.k_norm(k_bgtk)
        q_bhtk = apply_rope(q_bhtk, cos, sin)
        k_bgtk = apply_rope(k_bgtk, cos, sin)
        dropout = self.dropout if self.training else 0.0
        y_bhtk = attend(q_bhtk, k_bgtk, v_bgtk, documents, dropout, self.grouped)
        return self.out_proj(y_bhtk.transpose(1, 2).reshape(b, t, -1))


class MLP(nn.Module):
    """SwiGLU (Shazeer 2020, "GLU Variants Improve Transformer")."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        bias = shape.biases == "all"
        self.gate_proj = nn.Linear(shape.d_model, shape.d_ff, bias=bias)
        self.up_proj = nn.Linear(shape.d_model, shape.d_ff, bias=bias)
        self.down_proj = nn.Linear(shape.d_ff, shape.d_model, bias=bias)

    def forward(self, x_btd: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x_btd)) * self.up_proj(x_btd))


class Block(nn.Module):
    """Transformer block with a norm before each branch, or after it (`norm`: pre, post); dropout on
    what each branch adds to the residual stream."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.after = shape.norm == "post"
        self.attention_norm = Norm(shape.d_model, eps=shape.norm_eps)
        self.attention = Attention(shape)
        self.mlp_norm = Norm(shape.d_model, eps=shape.norm_eps)
        self.mlp = MLP(shape)
        self.dropout = nn.Dropout(shape.dropout)

    def forward(
        self, h_btd: Tensor, cos: Tensor, sin: Tensor, documents: Documents | Past | None = None
    ) -> Tensor:
        if self.after:
            attended_btd = self.attention_norm(self.attention(h_btd, cos, sin, documents))
            h_btd = h_btd + self.dropout(attended_btd)
            return h_btd + self.dropout(self.mlp_norm(self.mlp(h_btd)))
        attended_btd = self.attention(self.attention_norm(h_btd), cos, sin, documents)
        h_btd = h_btd + self.dropout(attended_btd)
        return h_btd + self.dropout(self.mlp(self.mlp_norm(h_btd)))


def _head_dim(given: int | None, d_model: int, n_heads: int) -> int:
    """Return the features per head. Raises ValueError for an odd number: they rotate in pairs."""
    if given is not None:
        check_sizes(head_dim=given)
        if given % 2:
            raise ValueError(f"model.head_dim={given}: must be even, for example {given + 1}")
        return given
    check_divides("n_heads", n_heads, "d_model", d_model)
    found = d_model // n_heads
    if found % 2:
        raise ValueError(
            f"model.d_model={d_model} / model.n_heads={n_heads} gives heads {found} "
            f"wide: rotary positions need an even width, e.g. "
            f"model.d_model={(found + 1) * n_heads}"
        )
    return found


def _check_scaling(given: Mapping[str, float]) -> None:
    """Raise ValueError unless all keys of SCALING are there, as numbers that make sense."""
    if set(given) != set(SCALING):
        raise ValueError(f"model.rope_scaling={dict(given)}: the keys are {', '.join(SCALING)}")
    check_positive(**{f"rope_scaling.{key}": value for key, value in given.items()})
    low, high = given["low_freq_factor"], given["high_freq_factor"]
    if not low < high:
        raise ValueError(
            f"model.rope_scaling.high_freq_factor={high}: must be above low_freq_factor={low}"
        )


class Llama(nn.Module):
    """Llama: rotary positions, RMSNorm, SwiGLU, grouped-query attention.

    Sizes are counts (`d_model`, `d_ff`: features; `max_position_embeddings`: tokens, a stated limit
    only, as rotary positions need no table); `dropout` is the probability used on the embedding, on
    the attention weights and on each residual branch. Switches of relatives: `head_dim` features
    per head (None: d_model / n_heads), `biases` (none; qkv: on queries, keys and values; all: on
    every linear layer of a block), `qk_norm` (none; head: RMSNorm of each head's queries and keys;
    full: of all heads' at once), `norm` (pre or post: before or after a branch), `rope_scaling`
    (the keys of `SCALING`, as `scaled` takes them), `sliding_window` (tokens that a token looks
    back to, itself among them), `residual` (full or autocast: `stream`). Raises ValueError for
    sizes that do not fit together.
    """

    document_end: int | None = None  # the last id of a document, to keep attention inside each
    document_spans = True  # on a CPU; false: masks, for blocks that are compiled one by one
    flops_formula = FLOPS_FORMULA
    init_weights, forward, stream = init_weights, logits, stream
    flops_per_token, same_in_training = flops_per_token, same_in_training
    can_remember = can_remember

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
        head_dim: int | None = None,
        biases: str = "none",
        qk_norm: str = "none",
        norm: str = "pre",
        rope_scaling: Mapping[str, float] | None = None,
        sliding_window: int | None = None,
        residual: str = "full",
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
            sliding_window=1 if sliding_window is None else sliding_window,
        )
        self.head_dim = _head_dim(head_dim, d_model, n_heads)
        check_divides("n_kv_heads", n_kv_heads, "n_heads", n_heads)
        check_dropout(dropout)
        check_positive(rope_theta=rope_theta, norm_eps=norm_eps)
        check_choice("biases", biases, ("none", "qkv", "all"))
        check_choice("qk_norm", qk_norm, ("none", "head", "full"))
        check_choice("norm", norm, ("pre", "post"))
        check_choice("residual", residual, RESIDUALS)
        if rope_scaling is not None:
            _check_scaling(rope_scaling)
        self.vocab_size, self.max_position_embeddings = vocab_size, max_position_embeddings
        self.rope_theta, self.rope_scaling = float(rope_theta), rope_scaling
        self.sliding_window, self.residual = sliding_window, residual
        width = self.head_dim
        shape = Shape(
            d_model, n_heads, n_kv_heads, width, d_ff, dropout, norm_eps, biases, qk_norm, norm
        )
        # Without torch's own initial values: init_weights alone draws random numbers, once per
        # weight.
        device = torch.get_default_device()
        with torch.device("meta"):
            self.token_embedding = embedding(vocab_size, d_model)
            self.dropout = nn.Dropout(dropout)
            self.blocks = nn.ModuleList(Block(shape) for _ in range(n_layers))
            self.final_norm = Norm(d_model, eps=norm_eps)
            self.head = None if tied_head else nn.Linear(d_model, vocab_size, bias=False)
        begin(self, device)

    @property
    def head_weight(self) -> Tensor:
        """Output projection (v, d), a Parameter: the token embedding's weight unless `tied_head` is
        false."""
        return self.token_embedding.weight if self.head is None else self.head.weight

    def features(self, tokens_bt: Tensor, past: Past | None = None) -> Tensor:
        """Hidden states (b, t, d) after the final norm. Raises ValueError for too long a
        sequence."""
        t = tokens_bt.shape[1]
        first = 0 if past is None else past.begin(t)
        check_length(first + t, self.max_position_embeddings)
        h_btd = self.dropout(self.token_embedding(tokens_bt))
        # Made anew each time: a buffer would not survive `to_empty`, and the tables are a few
        # kilobytes.
        cos, sin = rope_tables(first + t, self.head_dim, self.rope_theta, h_btd, self.rope_scaling)
        cos, sin = cos[first:], sin[first:]
        documents = None
        if self.document_end is not None:
            documents = find_documents(tokens_bt, self.document_end, self.document_spans)
            at = documents.positions_bt
            cos, sin = cos[at][:, None], sin[at][:, None]  # (b, 1, t, k)
        if self.sliding_window is not None and self.sliding_window < t:
            documents = within(self.sliding_window, tokens_bt, documents)
        for block in self.blocks:
            h_btd = block(self.stream(h_btd), cos, sin, past or documents)
        return self.final_norm(h_btd)
