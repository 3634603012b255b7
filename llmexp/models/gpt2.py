"""GPT-2 (Radford et al. 2019, "Language Models are Unsupervised Multitask Learners").

Names end in their dimensions: b batch, t time (tokens), d model width, f MLP width, h heads, k head
width, v vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from llmexp.models.common import Attention, Block, LanguageModel, check_divides, embedding
from llmexp.models.documents import KVCache
from llmexp.models.operands import Spread, products
from llmexp.models.settings import Knobs


class LayerNorm(nn.LayerNorm):
    """Torch's. `shared`: takes weights and biases where several ranks have them."""

    shared: Callable[..., tuple[Tensor, ...]] | None = None

    def forward(self, x: Tensor) -> Tensor:
        held = (self.weight, self.bias)
        weight, bias = held if self.shared is None else self.shared(*held)
        return F.layer_norm(x, self.normalized_shape, weight, bias, self.eps)


class MLP(nn.Module):
    """Two linear layers around GELU (Hendrycks and Gimpel 2016).

    GELU is exact, or its tanh approximation.
    """

    spread: Spread | None = None

    def __init__(self, d_model: int, d_ff: int, gelu: str) -> None:
        super().__init__()
        self.approximate = "none" if gelu == "exact" else gelu
        self.up_proj = nn.Linear(d_model, d_ff)
        self.down_proj = nn.Linear(d_ff, d_model)

    def forward(self, x_btd: Tensor) -> Tensor:
        (up_btf,) = products(self, x_btd, self.up_proj)
        return self.down_proj(F.gelu(up_btf, approximate=self.approximate))


class GPT2(LanguageModel):
    """GPT-2: learned positions, pre-norm blocks, output projection tied with the token embedding.

    Raises ConfigError for sizes that do not fit together.
    """

    def __init__(
        self,
        vocab_size: Knobs.vocab_size,
        max_position_embeddings: Knobs.max_position_embeddings,
        n_layers: Knobs.n_layers,
        n_heads: Knobs.n_heads,
        d_model: Knobs.d_model,
        d_ff: Knobs.d_ff,
        dropout: Knobs.dropout = 0.0,
        gelu: Knobs.gelu = "tanh",
        residual: Knobs.residual = "full",
        parametrization: Knobs.parametrization = "standard",
        base_width: Knobs.base_width = None,
    ) -> None:
        super().__init__()
        check_divides("n_heads", n_heads, "d_model", d_model)
        self.vocab_size, self.residual = vocab_size, residual
        self.max_position_embeddings = max_position_embeddings
        sizes = d_model, n_heads, n_heads, d_model // n_heads, dropout
        # Without torch's own initial values: init_weights alone draws random numbers, once per
        # weight.
        device = torch.get_default_device()
        with torch.device("meta"):
            self.token_embedding = embedding(vocab_size, d_model)
            self.position_embedding = embedding(max_position_embeddings, d_model)
            self.dropout = nn.Dropout(dropout)
            self.blocks = nn.ModuleList(
                Block(
                    LayerNorm(d_model),
                    Attention(*sizes, bias=True, out_bias=True),
                    LayerNorm(d_model),
                    MLP(d_model, d_ff or self.mlp_width(d_model), gelu),
                    dropout,
                )
                for _ in range(n_layers)
            )
            self.final_norm = LayerNorm(d_model)
        self.parametrize(parametrization, base_width, d_model)
        self.begin(device)

    @property
    def head_weight(self) -> Tensor:  # type: ignore[override]
        """Output projection (v, d), a Parameter: the token embedding's weight."""
        return self.token_embedding.weight

    def hidden(self, tokens_bt: Tensor, past: KVCache | None = None) -> Tensor:
        """Return the hidden states (b, t, d) after the final norm.

        Raises ValueError for too long a sequence.
        """
        first, documents = self.placed(tokens_bt, past)
        positions = torch.arange(first, first + tokens_bt.shape[1], device=tokens_bt.device)
        positions = positions if documents is None else documents.positions_bt
        h_btd = self.token_embedding(tokens_bt) + self.position_embedding(positions)
        return self.through_blocks(h_btd, past or documents)
