"""Share between GPT2 and Llama: initial values, logits, the count of FLOPs, and checks of sizes."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from llmexp.config.values import ConfigError, refuse
from llmexp.models.documents import Documents, KVCache, attend, find_documents
from llmexp.models.initial import SEEDS, Blocks
from llmexp.models.operands import Spread, autocast_dtype, products
from llmexp.models.planned import kind_of

INIT_STD = 0.02
MUP_HEAD = 64  # width of a head at which attention of mup is the standard one


class LanguageModel(nn.Module):
    """Hold what GPT2 and Llama share.

    A model makes its parameters on the meta device and then calls `begin`. It has `blocks`, an
    embedding's `dropout`, a `final_norm`, `head_weight` (v, d) and `hidden(tokens)`, the hidden
    states (b, t, d) after the final norm.
    """

    spread: Spread | None = None  # in training, where ranks share the tokens
    document_end: int | None = None  # the last id of a document, to keep attention inside each
    document_spans = True  # on a CPU; false: masks, for blocks that are compiled one by one
    flops_formula = "6 x matmul parameters + 12 x layers x length x width"
    blocks: nn.ModuleList
    dropout: nn.Dropout
    final_norm: nn.Module
    head_weight: Tensor
    max_position_embeddings: int
    residual: str  # the dtype of the residual stream: full, as the parameters', or autocast
    sliding_window: int | None = None  # tokens that a token looks back to; None: all
    base_width: int | None = None  # where model.parametrization is mup
    width_ratio = 1.0  # d_model / base_width
    mlp_factor = 4.0  # width of the MLP over that of the model, where a rule gives the shape

    @classmethod
    def mlp_width(cls, d_model: int) -> int:
        """Return the width of an MLP that is not given: to a multiple of 64 if it is not whole."""
        width = cls.mlp_factor * d_model
        return round(width) if width.is_integer() else max(1, round(width / 64)) * 64

    def hidden(self, tokens_bt: Tensor, past: Any = None) -> Tensor:
        raise NotImplementedError

    def forward(self, tokens_bt: Tensor) -> Tensor:
        """Return logits (b, t, v) of the next token."""
        return F.linear(self.hidden(tokens_bt), self.head_weight)

    def parametrize(self, kind: str, base_width: int | None, width: int) -> None:
        """Take the multipliers of a parametrization, before `begin`. Raises ConfigError."""
        if kind != "standard":
            self._take_multipliers(base_width, width)

    def _take_multipliers(self, base_width: int | None, width: int) -> None:
        """Take those of mup (Yang et al. 2022, arXiv 2203.03466, table 8) as the package mup.

        With m =
        width / base_width matrices of the blocks begin with a variance over m, logits are over m,
        and those of attention are 8 q k / head width. Rates: `llmexp.optim.groups.by_width`.
        """
        if base_width is None:
            text = "model.parametrization=mup needs the width at which it is the standard one"
            raise refuse("missing_value", "model.base_width", None, text, 256)
        self.base_width, self.width_ratio = base_width, width / base_width
        for block in self.blocks:
            attention: Any = block.attention
            attention.logit_scale = math.sqrt(MUP_HEAD) / attention.head_dim

    def placed(self, tokens_bt: Tensor, past: KVCache | None) -> tuple[int, Documents | None]:
        """Return the position of the first token, and where documents lie.

        Raises ConfigError for too long a sequence.
        """
        t = tokens_bt.shape[1]
        first = 0 if past is None else past.begin(t)
        check_length(first + t, self.max_position_embeddings)
        if self.document_end is None:
            return first, None
        return first, find_documents(tokens_bt, self.document_end, self.document_spans)

    def through_blocks(self, h_btd: Tensor, *given: Any) -> Tensor:
        """Return what blocks and final norm make of embedded tokens, as the output head takes it.

        With `residual` = autocast the residual stream is in the dtype of products: half the traffic
        in 16 bits, and less exact. `given`: what each block takes beside it.
        """
        spread = self.spread if self.training else None
        h_btd = self.dropout(h_btd if spread is None else spread.part(h_btd))
        for block in self.blocks:
            h_btd = block(autocast_dtype(h_btd) if self.residual == "autocast" else h_btd, *given)
        h_btd = self.final_norm(h_btd)
        h_btd = h_btd if spread is None else spread.whole(h_btd)
        return h_btd if self.width_ratio == 1 else h_btd / self.width_ratio

    def begin(self, device: torch.device) -> None:
        """Take memory and initial values, unless the model stays on the meta device."""
        if device.type != "meta":
            give_memory(self, device)
            self.init_weights()

    @torch.no_grad()
    def init_weights(self, piece_of: Callable[[Tensor], Any] | None = None) -> None:
        """Draw all parameters anew, from a seed that the global generator gives.

        Weights N(0, std^2) with `initial_std`, biases 0, norms 1. They are the same on any layout
        of ranks: `piece_of` tells this rank's piece of a parameter that is split.
        """
        blocks = Blocks(int(torch.randint(SEEDS, (), device="cpu")), piece_of)
        for prefix, module in self.named_modules():
            for last, p in module.named_parameters(recurse=False):
                if last == "bias" or isinstance(module, nn.LayerNorm | nn.RMSNorm):
                    blocks.held(p).fill_(0.0 if last == "bias" else 1.0)
                elif isinstance(module, nn.Linear | nn.Embedding | Weights):
                    std = self.initial_std(f"{prefix}.{last}")
                    draw = functools.partial(Tensor.normal_, std=std)
                    # in fp32 whatever the parameters' dtype, which then differ in rounding alone
                    for part, values in blocks.drawn(p, draw, torch.float32):
                        part.copy_(values)

    def initial_std(self, name: str) -> float:
        """Return the standard deviation of a matrix's initial values, by its name.

        The two projections of a block that end on the residual stream are scaled by
        1/sqrt(2 n_layers) (section 2.3 of the paper of GPT-2); with mup all of the blocks by
        1/sqrt(m), too.
        """
        residual = name.endswith(("out_proj.weight", "down_proj.weight"))
        ratio = self.width_ratio if name.startswith("blocks.") else 1.0
        std = INIT_STD / math.sqrt(2 * len(self.blocks)) if residual else INIT_STD
        return std / math.sqrt(ratio)

    def is_ours(self) -> bool:
        """Return whether this is the class itself, not a subclass that may compute otherwise."""
        return type(self).__module__.startswith("llmexp.models.")

    def can_remember(self, length: int) -> bool:
        """Return whether `hidden` takes a `KVCache` of up to `length` tokens."""
        seen = self.sliding_window is None or self.sliding_window >= length
        return self.is_ours() and self.document_end is None and seen

    def same_in_training(self) -> bool:
        """Return whether training computes what evaluation does: without dropout."""
        return self.is_ours() and bool(self.dropout.p == 0)

    def flops_per_token(self, sequence_length: int) -> int:
        """FLOPs of one token's forward and backward pass at `sequence_length` tokens.

        6 per matmul parameter (2 forward, 4 backward; the head once, the embedding look-ups not)
        and 12 x layers x length x width for attention, counted as the full square as is usual
        although half of it is masked (PaLM, Chowdhery et al. 2022, appendix B).
        """
        matmul_parameters = in_matrices(self.blocks) + self.head_weight.numel()
        first: Any = self.blocks[0]
        width: int = first.attention.q_proj.out_features
        return 6 * matmul_parameters + 12 * len(self.blocks) * sequence_length * width


class Attention(nn.Module):
    """Causal self-attention in which n_heads / n_kv_heads query heads share a key/value head.

    `bias` is that of queries, keys and values, `out_bias` that of the projection after them.
    """

    split_over_ranks = False  # by tensor parallelism
    spread: Spread | None = None
    look: Callable[..., None] | None = None  # sees queries and keys that are trained on
    logit_scale: float | None = None  # factor on q k; None: 1 / sqrt(head width)

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        n_kv_heads: int,
        head_dim: int,
        dropout: float,
        *,
        bias: bool,
        out_bias: bool,
    ) -> None:
        super().__init__()
        self.head_dim, self.dropout, self.grouped = head_dim, dropout, n_kv_heads < n_heads
        wide, narrow = n_heads * head_dim, n_kv_heads * head_dim
        # Three matrices instead of one: each can be split over ranks by its output rows, that is by
        # heads.
        self.q_proj = nn.Linear(d_model, wide, bias=bias)
        self.k_proj = nn.Linear(d_model, narrow, bias=bias)
        self.v_proj = nn.Linear(d_model, narrow, bias=bias)
        self.out_proj = nn.Linear(wide, d_model, bias=out_bias)

    def heads(self, x_btd: Tensor, *tables: Tensor) -> tuple[Tensor, ...]:
        """Return queries (b, h, t, k), keys and values (b, g, t, k) of this rank's heads."""
        return tuple(map(self.by_head, project(self, x_btd)))

    def by_head(self, x_btd: Tensor) -> Tensor:
        """Return features of several heads (b, t, ...) head by head: (b, h, t, k)."""
        # -1, not n_heads: under tensor parallelism a rank holds only some of the heads.
        return x_btd.view(*x_btd.shape[:2], -1, self.head_dim).transpose(1, 2)

    def forward(self, x_btd: Tensor, *given: Any) -> Tensor:
        """Return (b, t, d). `given`: what `heads` takes beside x, then documents, cache or None."""
        *tables, documents = given
        q_bhtk, k_bgtk, v_bgtk = self.heads(x_btd, *tables)
        if self.look is not None and self.training:
            self.look(self, q_bhtk, k_bgtk, documents)
        dropout = self.dropout if self.training else 0.0
        y_bhtk = attend(q_bhtk, k_bgtk, v_bgtk, documents, dropout, self.grouped, self.logit_scale)
        y_btd: Tensor = self.out_proj(y_bhtk.transpose(1, 2).flatten(2))
        return y_btd


class Block(nn.Module):
    """Transformer block, with dropout on what each branch adds to the residual stream.

    Norms are before the branches (pre-norm), or where `after` says so behind them.
    """

    def __init__(
        self,
        attention_norm: nn.Module,
        attention: Attention,
        mlp_norm: nn.Module,
        mlp: nn.Module,
        dropout: float,
        after: bool = False,
    ) -> None:
        super().__init__()
        self.attention_norm, self.attention = attention_norm, attention
        self.mlp_norm, self.mlp = mlp_norm, mlp
        self.dropout, self.after = nn.Dropout(dropout), after

    def forward(self, h_btd: Tensor, *given: Any) -> Tensor:
        """Return the residual stream after the block. `given`: see `Attention.forward`."""
        if self.after:
            h_btd = h_btd + self.dropout(self.attention_norm(self.attention(h_btd, *given)))
            return h_btd + self.dropout(self.mlp_norm(self.mlp(h_btd)))
        h_btd = h_btd + self.dropout(self.attention(self.attention_norm(h_btd), *given))
        return h_btd + self.dropout(self.mlp(self.mlp_norm(h_btd)))


class Weights(nn.Module):
    """Hold a matrix, or one for each expert (e, f, d), that other modules multiply by.

    `active`: how many of these a token is multiplied by; None: all.
    """

    def __init__(self, *shape: int, active: int | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape))
        self.active = shape[0] if active is None else active

    def used(self) -> int:
        """Return how many parameters a token is multiplied by."""
        return self.weight.numel() // self.weight.shape[0] * self.active


def held_in_rows(model: nn.Module) -> set[int]:
    """Return the ids of the parameters of `Weights`, whose last dimension is a matrix's row."""
    return {id(m.weight) for m in model.modules() if isinstance(m, Weights)}


def idle_parameters(model: nn.Module) -> int:
    """Return the parameters that a token leaves out: of the experts that it is not sent to."""
    return sum(m.weight.numel() - m.used() for m in model.modules() if isinstance(m, Weights))


def parameter_counts(model: Any) -> tuple[int | None, int | None]:
    """Count parameters without embedding tables but with the head, and in matrices of the blocks.

    Both are without `idle_parameters`. A head that is tied with an embedding counts. Both are None
    for a model that does not name its blocks and its head.
    """
    blocks, head = getattr(model, "blocks", None), getattr(model, "head_weight", None)
    if blocks is None or head is None:
        return None, None
    tables = {m.weight for m in model.modules() if isinstance(m, nn.Embedding)} - {head}
    with_head = sum(p.numel() for p in model.parameters() if p not in tables)
    return with_head - idle_parameters(model), in_matrices(blocks)


def in_matrices(module: nn.Module) -> int:
    """Return the parameters in the matrices of a module that a token is multiplied by."""
    linear = sum(m.weight.numel() for m in module.modules() if isinstance(m, nn.Linear))
    return linear + sum(m.used() for m in module.modules() if isinstance(m, Weights))


def check_divides(divisor_name: str, divisor: int, whole_name: str, whole: int) -> None:
    """Raise ConfigError, with the nearest divisors of `whole`, unless `divisor` divides it."""
    if whole % divisor:
        divisors = [d for d in range(1, whole + 1) if whole % d == 0]
        nearest = sorted(sorted(divisors, key=lambda d: abs(d - divisor))[:3])
        raise ConfigError(
            "out_of_range",
            f"model.{divisor_name}={divisor} does not divide model.{whole_name}={whole}: "
            f"nearest valid values of model.{divisor_name}: {', '.join(map(str, nearest))}",
        )


def check_length(length: int, max_position_embeddings: int) -> None:
    """Raise ConfigError where a batch is longer (in tokens) than the model has positions."""
    if length > max_position_embeddings:
        raise ConfigError(
            "out_of_range",
            f"sequence of {length} tokens: the model has model.max_position_embeddings="
            f"{max_position_embeddings}; shorten batch.sequence_length or raise it",
        )


def embedding(count: int, width: int) -> nn.Embedding:
    """Return a table without values: drawing on meta imports torch._dynamo, for a second."""
    return nn.Embedding(count, width, _weight=torch.empty(count, width))


def give_memory(model: nn.Module, device: torch.device) -> None:
    """Replace parameters on the meta device by ones with memory but without values, buffers by 0.

    Each rank gets its parts alone of those that are split. (`to_empty` and `zeros_like` would
    import sympy.)
    """
    for module in model.modules():
        for name, p in list(module.named_parameters(recurse=False)):
            if not p.is_meta:
                continue
            split = hasattr(p, "device_mesh")
            values = (
                torch.empty_like(p, device=device)
                if split
                else torch.empty(p.shape, dtype=p.dtype, device=device)
            )
            setattr(module, name, nn.Parameter(values))
        for name, buffer in list(module.named_buffers(recurse=False)):
            if buffer.is_meta:  # ours begin at 0
                zeros = torch.zeros(buffer.shape, dtype=buffer.dtype, device=device)
                module.register_buffer(name, zeros)


def in_one_product(device: torch.device) -> bool:
    """Return whether queries, keys and values come from one product.

    They do not on a CPU, where another shape rounds differently and recorded runs have to stay
    equal.
    """
    return kind_of(device) == "cuda"


def project(attention: Any, x_btd: Tensor) -> Sequence[Tensor]:
    """Return queries, keys and values of x.

    They come from one product where `in_one_product` says so and tensor parallelism has not split
    them. Parameters and names are as for several products.
    """
    x_btd = autocast_dtype(x_btd)
    q, k, v = attention.q_proj, attention.k_proj, attention.v_proj
    if attention.split_over_ranks or not in_one_product(x_btd.device):
        return products(attention, x_btd, q, k, v)
    return _joined_product(x_btd, q, k, v)


def _joined_product(x_btd: Tensor, q: Any, k: Any, v: Any) -> Sequence[Tensor]:
    weight = torch.cat((q.weight, k.weight, v.weight))
    bias = None if q.bias is None else torch.cat((q.bias, k.bias, v.bias))
    sizes = [m.out_features for m in (q, k, v)]
    return F.linear(x_btd, weight, bias).split(sizes, dim=-1)


def all_finite(tensor: Tensor) -> bool:
    """Return whether a tensor holds no infinity and no NaN; the host waits."""
    if not (tensor.is_floating_point() and tensor.numel()):
        return True
    return bool(torch.stack(tensor.aminmax()).isfinite().all())
