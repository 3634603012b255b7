"""Llama and its relatives, chosen by switches.

Llama: Touvron et al. 2023; grouped-query attention and sizes as in Llama 3, Dubey et al. 2024.
Switches make it Qwen 3 (Yang et al. 2025), OLMo 2 (OLMo et al. 2024) or Mistral (Jiang et al.
2023).

Names end in their dimensions: b batch, t time (tokens), d model width, f MLP width, h heads, g
key/value heads, k head width, v vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from llmexp.config.values import TINY, choice, count, knob, refuse
from llmexp.models import common
from llmexp.models.common import Block, LanguageModel, check_divides, embedding
from llmexp.models.documents import KVCache, within
from llmexp.models.operands import Spread, products
from llmexp.models.planned import operation
from llmexp.models.settings import Knobs


@dataclass(frozen=True)
class RopeScaling:
    """Stretch rotary frequencies for longer contexts, as Llama 3.1 does.

    Waves longer than the original context / low_freq_factor become longer by `factor`, those below
    it / high_freq_factor stay, those between follow a straight line.
    """

    factor: float = knob("times that long waves become longer", 8.0, above=0)
    low_freq_factor: float = knob("longer waves than context / this are stretched", 1.0, above=0)
    high_freq_factor: float = knob("shorter waves than context / this stay", 4.0, above=0)
    original_max_position_embeddings: float = knob("tokens; the context before", 8192, above=0)

    def __post_init__(self) -> None:
        low, high = self.low_freq_factor, self.high_freq_factor
        if not low < high:
            text = f"must be above low_freq_factor={low}"
            raise refuse("out_of_range", "model.rope_scaling.high_freq_factor", high, text, low * 4)

    def scaled(self, frequencies_k: Tensor) -> Tensor:
        """Return the stretched frequencies."""
        turns_k = self.original_max_position_embeddings * frequencies_k / (2 * math.pi)
        width = self.high_freq_factor - self.low_freq_factor
        kept_k = ((turns_k - self.low_freq_factor) / width).clamp(0, 1)
        return frequencies_k * (kept_k + (1 - kept_k) / self.factor)


def rope_tables(
    length: int,
    head_dim: int,
    theta: float,
    like: Tensor,
    scaling: RopeScaling | None = None,
) -> tuple[Tensor, Tensor]:
    """Cosine and sine (t, k) of the rotary position embedding (Su et al. 2021, section 3.4).

    The halves of the last dimension are equal: feature i is rotated with feature i + k/2. Computed
    in fp32 (fp64 where `like` is fp64) on the device of `like`, whatever autocast says: in bf16
    neighbouring positions beyond 256 would be one and the same.
    """
    dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
    exponents_k = torch.arange(0, head_dim, 2, device=like.device, dtype=dtype) / head_dim
    frequencies_k = theta**-exponents_k
    if scaling is not None:
        frequencies_k = scaling.scaled(frequencies_k)
    cos_tk, sin_tk = turns(length, frequencies_k)
    return cos_tk, sin_tk


@operation
def turns(length: int, frequencies_k: Tensor) -> tuple[Tensor, Tensor]:
    """Return cosine and sine (t, 2k) of each position times each frequency, twice side by side.

    It is one operation for a compiler, which would else compute them again for each entry of
    queries and keys in each block.
    """
    positions_t = torch.arange(length, device=frequencies_k.device, dtype=frequencies_k.dtype)
    # A broadcast product, because autocast would take an outer product or einsum down to bf16.
    angles_tk = positions_t[:, None] * frequencies_k
    angles_tk = torch.cat((angles_tk, angles_tk), dim=-1)
    return angles_tk.cos(), angles_tk.sin()


@torch.library.register_fake(turns)
def _(length: int, frequencies_k: Tensor) -> tuple[Tensor, Tensor]:
    shape = length, 2 * len(frequencies_k)
    return frequencies_k.new_empty(shape), frequencies_k.new_empty(shape)


def apply_rope(x_bhtk: Tensor, cos_tk: Tensor, sin_tk: Tensor) -> Tensor:
    """Rotate queries or keys to their positions; computed in the tables' dtype, returned in x's."""
    first, second = x_bhtk.chunk(2, dim=-1)
    rotated_bhtk = x_bhtk * cos_tk + torch.cat((-second, first), dim=-1) * sin_tk
    return rotated_bhtk.to(x_bhtk.dtype)


class Norm(nn.RMSNorm):
    """RMSNorm in the dtype of its input, computed in fp32.

    With weights of another dtype torch takes six kernels for one. `shared`: where
    tensor-parallel ranks all have the weights, returns them so that their gradients are summed.
    """

    shared: Callable[..., tuple[Tensor, ...]] | None = None

    def forward(self, x: Tensor) -> Tensor:
        (weight,) = (self.weight,) if self.shared is None else self.shared(self.weight)
        return F.rms_norm(x, self.normalized_shape, weight.to(x.dtype), self.eps)


class Attention(common.Attention):
    """The attention of all models, with rotary positions and norms of queries and keys."""

    def __init__(self, *sizes: Any, biases: str, qk_norm: str, norm_eps: float) -> None:
        super().__init__(*sizes, bias=biases != "none", out_bias=biases == "all")
        self.qk_norm = qk_norm
        if qk_norm != "none":
            whole = self.q_proj.out_features, self.k_proj.out_features
            widths = whole if qk_norm == "full" else (self.head_dim,) * 2
            self.q_norm, self.k_norm = (Norm(n, eps=norm_eps) for n in widths)

    def heads(self, x_btd: Tensor, *tables: Tensor) -> tuple[Tensor, ...]:
        """Return queries (b, h, t, k), keys and values (b, g, t, k) of this rank's heads.

        `tables`: cosine and sine of the rotary positions.
        """
        q, k, v = common.project(self, x_btd)
        if self.qk_norm == "full":  # over all heads at once
            q, k = self.q_norm(q), self.k_norm(k)
        q_bhtk, k_bgtk, v_bgtk = map(self.by_head, (q, k, v))
        if self.qk_norm == "head":
            q_bhtk, k_bgtk = self.q_norm(q_bhtk), self.k_norm(k_bgtk)
        return apply_rope(q_bhtk, *tables), apply_rope(k_bgtk, *tables), v_bgtk


class MLP(nn.Module):
    """SwiGLU (Shazeer 2020, "GLU Variants Improve Transformer")."""

    spread: Spread | None = None

    def __init__(self, d_model: int, d_ff: int, bias: bool) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(d_model, d_ff, bias=bias)
        self.up_proj = nn.Linear(d_model, d_ff, bias=bias)
        self.down_proj = nn.Linear(d_ff, d_model, bias=bias)

    def forward(self, x_btd: Tensor) -> Tensor:
        gate_btf, up_btf = products(self, x_btd, self.gate_proj, self.up_proj)
        return self.down_proj(F.silu(gate_btf) * up_btf)


def _head_dim(given: int | None, d_model: int, n_heads: int) -> int:
    """Return the features per head, an even number: they rotate in pairs. Raises ConfigError."""
    if given is not None:
        if given % 2:
            raise refuse("out_of_range", "model.head_dim", given, "must be even", given + 1)
        return given
    check_divides("n_heads", n_heads, "d_model", d_model)
    found = d_model // n_heads
    if found % 2:
        text = f"gives {n_heads} heads that are {found} wide: rotary positions need an even width"
        raise refuse("out_of_range", "model.d_model", d_model, text, (found + 1) * n_heads)
    return found


def _block(
    sizes: tuple[Any, ...], d_ff: int, biases: str, qk_norm: str, norm_eps: float, after: bool
) -> Block:
    d_model, dropout = sizes[0], sizes[-1]
    attention = Attention(*sizes, biases=biases, qk_norm=qk_norm, norm_eps=norm_eps)
    norms = Norm(d_model, eps=norm_eps), Norm(d_model, eps=norm_eps)
    mlp = MLP(d_model, d_ff, biases == "all")
    return Block(norms[0], attention, norms[1], mlp, dropout, after=after)


class LlamaKnobs(Knobs):
    """The arguments of `Llama`."""

    n_kv_heads = Annotated[int, count("key/value heads; must divide n_heads", 4)]
    rope_theta = Annotated[
        float,
        knob(
            "base of the rotary wavelengths, which run from 2 pi to about 2 pi x this many tokens",
            10000.0,
            above=0,
        ),
    ]
    tied_head = Annotated[bool, knob("true: the output projection is the token embedding", False)]
    norm_eps = Annotated[float, knob("added to the mean square in RMSNorm", 1e-5, at_least=TINY)]
    head_dim = Annotated[int | None, count("features of a head, even; null: d_model / n_heads", 64)]
    biases = Annotated[
        str,
        choice(
            "biases of queries, keys and values (qkv; Qwen 2), or of every linear layer of a block",
            "none | qkv | all",
        ),
    ]
    qk_norm = Annotated[
        str,
        choice(
            "RMSNorm of each head's queries and keys (Qwen 3), or of all heads' at once "
            "(full; OLMo 2)",
            "none | head | full",
        ),
    ]
    norm = Annotated[
        str, choice("RMSNorm before or after attention and MLP (OLMo 2: post)", "pre | post")
    ]
    rope_scaling = Annotated[
        RopeScaling | None,
        knob(
            "rotary positions for longer contexts (Llama 3.1): {factor: 8.0, low_freq_factor: "
            "1.0, high_freq_factor: 4.0, original_max_position_embeddings: 8192}; null: none"
        ),
    ]
    sliding_window = Annotated[
        int | None,
        count("tokens that a token attends to, itself among them (Mistral); null: all", 4096),
    ]


class Llama(LanguageModel):
    """Llama: rotary positions, RMSNorm, SwiGLU, grouped-query attention; or a relative of it.

    `max_position_embeddings` is a stated limit only, as rotary positions need no table. Raises
    ConfigError for sizes that do not fit together.
    """

    mlp_factor = 8 / 3  # with a third matrix in the MLP

    def __init__(
        self,
        vocab_size: LlamaKnobs.vocab_size,
        max_position_embeddings: LlamaKnobs.max_position_embeddings,
        n_layers: LlamaKnobs.n_layers,
        n_heads: LlamaKnobs.n_heads,
        n_kv_heads: LlamaKnobs.n_kv_heads,
        d_model: LlamaKnobs.d_model,
        d_ff: LlamaKnobs.d_ff,
        dropout: LlamaKnobs.dropout = 0.0,
        rope_theta: LlamaKnobs.rope_theta = 10000.0,
        tied_head: LlamaKnobs.tied_head = True,
        norm_eps: LlamaKnobs.norm_eps = 1e-5,
        head_dim: LlamaKnobs.head_dim = None,
        biases: LlamaKnobs.biases = "none",
        qk_norm: LlamaKnobs.qk_norm = "none",
        norm: LlamaKnobs.norm = "pre",
        rope_scaling: LlamaKnobs.rope_scaling = None,
        sliding_window: LlamaKnobs.sliding_window = None,
        residual: LlamaKnobs.residual = "full",
        parametrization: LlamaKnobs.parametrization = "standard",
        base_width: LlamaKnobs.base_width = None,
        n_experts: LlamaKnobs.n_experts = 0,
        experts_per_token: LlamaKnobs.experts_per_token = 2,
        d_expert: LlamaKnobs.d_expert = None,
        n_shared_experts: LlamaKnobs.n_shared_experts = 0,
        first_dense_layers: LlamaKnobs.first_dense_layers = 0,
        router: LlamaKnobs.router = "softmax",
        norm_topk: LlamaKnobs.norm_topk = True,
        router_bias: LlamaKnobs.router_bias = False,
        router_z_loss: LlamaKnobs.router_z_loss = 0.0,
        balance: LlamaKnobs.balance = "bias",
        balance_rate: LlamaKnobs.balance_rate = 1e-3,
        balance_loss: LlamaKnobs.balance_loss = 1e-2,
    ) -> None:
        super().__init__()
        self.head_dim = _head_dim(head_dim, d_model, n_heads)
        check_divides("n_kv_heads", n_kv_heads, "n_heads", n_heads)
        self.vocab_size, self.max_position_embeddings = vocab_size, max_position_embeddings
        self.rope_theta, self.rope_scaling = rope_theta, rope_scaling
        self.sliding_window, self.residual = sliding_window, residual
        sizes = d_model, n_heads, n_kv_heads, self.head_dim, dropout
        more = d_ff or self.mlp_width(d_model), biases, qk_norm, norm_eps, norm == "post"
        # without torch's own initial values: init_weights alone draws, once per weight
        device = torch.get_default_device()
        with torch.device("meta"):
            self.token_embedding = embedding(vocab_size, d_model)
            self.dropout = nn.Dropout(dropout)
            self.blocks = nn.ModuleList(_block(sizes, *more) for _ in range(n_layers))
            self.final_norm = Norm(d_model, eps=norm_eps)
            self.head = None if tied_head else nn.Linear(d_model, vocab_size, bias=False)
            if n_experts:
                from llmexp.models.experts import Routing, put_experts

                sent = experts_per_token, d_expert, n_shared_experts, first_dense_layers
                scored = router, norm_topk, router_bias, router_z_loss
                routing = Routing(n_experts, *sent, *scored, balance, balance_rate, balance_loss)
                put_experts(self.blocks, routing, parametrization)
        self.parametrize(parametrization, base_width, d_model)
        self.begin(device)

    @property
    def head_weight(self) -> Tensor:  # type: ignore[override]
        """Return the output projection (v, d); where `tied_head`, the token embedding's weight."""
        return self.token_embedding.weight if self.head is None else self.head.weight

    def hidden(self, tokens_bt: Tensor, past: KVCache | None = None) -> Tensor:
        """Return the hidden states (b, t, d) after the final norm, or raise ValueError."""
        t = tokens_bt.shape[1]
        first, documents = self.placed(tokens_bt, past)
        h_btd = self.token_embedding(tokens_bt)
        # made anew each time: a buffer would not survive `to_empty`, and they are small
        cos, sin = rope_tables(first + t, self.head_dim, self.rope_theta, h_btd, self.rope_scaling)
        cos, sin = cos[first:], sin[first:]
        if documents is not None:
            at = documents.positions_bt
            cos, sin = cos[at][:, None], sin[at][:, None]  # (b, 1, t, k)
        if self.sliding_window is not None and self.sliding_window < t:
            documents = within(self.sliding_window, tokens_bt, documents)
        return self.through_blocks(h_btd, cos, sin, past or documents)
