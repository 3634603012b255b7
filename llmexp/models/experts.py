"""A mixture of experts in place of an MLP: a router, its losses, products expert by expert.

No token is dropped, and the experts of a token depend on no other one. Each loss that is added is
a mean over the tokens of one sequence, so it does not depend on how a batch is cut.

Names end in their dimensions: b batch, t time (tokens), n tokens (b x t), e experts, k those that
a token is sent to, m places (n x k), d model width, f width of an expert.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import register_flop_formula

from llmexp.config.values import refuse
from llmexp.models.common import Weights
from llmexp.models.operands import autocast_dtype
from llmexp.models.planned import bodies, has_values, kind_of, operation


class Routing(NamedTuple):
    """Say how many experts there are, which of them a token is sent to, and what balances them."""

    n_experts: int
    per_token: int
    width: int | None  # None: that of the MLP
    n_shared: int
    first_dense_layers: int
    router: str
    norm_topk: bool
    bias: bool
    z_loss: float
    balance: str
    balance_rate: float
    balance_loss: float


def put_experts(blocks: nn.ModuleList, routing: Routing, parametrization: str) -> None:
    """Put experts in place of the MLP of each block but for the first dense ones.

    Raises ConfigError for what does not fit together.
    """
    first, layers, most = routing.first_dense_layers, len(blocks), routing.n_experts
    if first >= layers:
        text = f"leaves none of model.n_layers={layers} for experts"
        raise refuse("out_of_range", "model.first_dense_layers", first, text, layers - 1)
    if routing.per_token > most:
        text = f"there are model.n_experts={most}"
        raise refuse("out_of_range", "model.experts_per_token", routing.per_token, text, most)
    if routing.per_token == 1 and routing.norm_topk:
        text = "with model.experts_per_token=1 each weight is divided by itself: no router learns"
        raise refuse("conflict", "model.norm_topk", True, text, False)
    if parametrization != "standard":
        text = "how rates of routers and experts follow the width is not known for mup"
        raise refuse("unsupported", "model.parametrization", parametrization, text, "standard")
    for block in blocks[first:]:
        mlp: Any = block.mlp
        if mlp.gate_proj.bias is not None:
            raise refuse("unsupported", "model.biases", "all", "experts have no biases", "qkv")
        d_ff, d_model = mlp.gate_proj.weight.shape
        width = routing.width or d_ff
        shared = type(mlp)(d_model, routing.n_shared * width, False) if routing.n_shared else None
        block.mlp = Experts(d_model, width, routing, shared)


class Router(Weights):
    """Score each expert for each token, in fp32 at least, and choose the best of them."""

    balance_bias: Tensor | None  # on the choice alone, moved by the load of whole steps

    def __init__(self, d_model: int, routing: Routing) -> None:
        super().__init__(routing.n_experts, d_model)
        self.routing = routing
        self.bias = nn.Parameter(torch.empty(routing.n_experts)) if routing.bias else None
        moved = torch.empty(routing.n_experts) if routing.balance == "bias" else None
        self.register_buffer("balance_bias", moved)

    def forward(self, x_btd: Tensor) -> tuple[Tensor, ...]:
        """Return logits, scores, and of each token its experts and what theirs are weighted by."""
        how, dtype = self.routing, torch.promote_types(x_btd.dtype, torch.float32)
        exact = nullcontext() if x_btd.is_meta else torch.autocast(x_btd.device.type, enabled=False)
        with exact:  # meta has no autocast
            bias = None if self.bias is None else self.bias.to(dtype)
            logits_bte = F.linear(x_btd.to(dtype), self.weight.to(dtype), bias)
        scores_bte = logits_bte.sigmoid() if how.router == "sigmoid" else logits_bte.softmax(-1)
        wanted_bte = scores_bte.detach()
        if self.balance_bias is not None:
            wanted_bte = wanted_bte + self.balance_bias
        # of equal ones the first, on any device and in any batch
        order_bte = wanted_bte.argsort(dim=-1, descending=True, stable=True)
        chosen_btk = order_bte[..., : how.per_token]
        weights_btk = scores_bte.gather(-1, chosen_btk)
        if how.norm_topk:
            weights_btk = weights_btk / _sum(weights_btk)
        return logits_bte, scores_bte, chosen_btk, weights_btk


class Experts(nn.Module):
    """Send each token through some of many SwiGLU experts, and through `shared`, if there is one.

    Shazeer et al. 2017; experts that all tokens pass: Dai et al. 2024 (arXiv 2401.06066).
    """

    added_losses: list[Tensor] | None = None  # takes those of each sequence (b,), for SummedLoss
    look: Callable[..., None] | None = None  # sees what is routed in training
    # where ranks have a part of each expert's width: for tokens and weights, and for the sum
    over_width: list[Callable[..., Any]] | None = None

    def __init__(self, d_model: int, f: int, routing: Routing, shared: nn.Module | None) -> None:
        super().__init__()
        self.routing, self.shared = routing, shared
        e, active = routing.n_experts, routing.per_token
        self.router = Router(d_model, routing)
        self.gate_proj = Weights(e, f, d_model, active=active)
        self.up_proj = Weights(e, f, d_model, active=active)
        self.down_proj = Weights(e, d_model, f, active=active)

    def forward(self, x_btd: Tensor) -> Tensor:
        logits_bte, scores_bte, chosen_btk, weights_btk = self.router(x_btd)
        if self.training and torch.is_grad_enabled():  # else somebody looks at the model
            self._judge(logits_bte, scores_bte, chosen_btk)
        sent_btd = autocast_dtype(x_btd)
        if self.over_width is not None:
            sent_btd, weights_btk = self.over_width[0](sent_btd, weights_btk)
        chosen_m = chosen_btk.flatten()
        order_m = chosen_m.argsort(stable=True)
        experts_e = torch.arange(self.routing.n_experts, device=order_m.device)
        ends_e = torch.searchsorted(chosen_m[order_m], experts_e, right=True, out_int32=True)
        stacks: Any = (m.weight for m in (self.gate_proj, self.up_proj, self.down_proj))
        own = (autocast_dtype(w.to_local() if hasattr(w, "to_local") else w) for w in stacks)
        sent_nd, weights_nk = sent_btd.flatten(0, 1), weights_btk.flatten(0, 1)
        y_btd = _Sent.apply(sent_nd, weights_nk, *own, order_m, ends_e).view(x_btd.shape)
        if self.over_width is not None:
            y_btd = self.over_width[1](y_btd)
        return y_btd if self.shared is None else y_btd + self.shared(x_btd)

    def _judge(self, logits_bte: Tensor, scores_bte: Tensor, chosen_btk: Tensor) -> None:
        """Find the losses of each sequence, and hand on those that are trained on.

        The balance is that of DeepSeek-V3 (arXiv 2412.19437, equations 17 to 20), the other one
        that of ST-MoE (arXiv 2202.08906, equation 5).
        """
        how, (_, t, e) = self.routing, scores_bte.shape
        with torch.set_grad_enabled(how.balance == "sequence"):
            share_bte = scores_bte / _sum(scores_bte)
            chosen_bm, load_be = chosen_btk.flatten(1), torch.zeros_like(share_bte[:, 0])
            one_bm = torch.ones_like(chosen_bm, dtype=load_be.dtype)
            load_be = load_be.scatter_add(1, chosen_bm, one_bm)
            balance_b = (load_be * share_bte.mean(1)).sum(-1) * (e / (how.per_token * t))
        with torch.set_grad_enabled(how.z_loss > 0):
            z_b = logits_bte.logsumexp(-1).square().mean(1)
        if self.look is not None:
            self.look(self, share_bte, load_be, balance_b, z_b)
        if self.added_losses is not None:
            weighed = (how.balance_loss, balance_b), (how.z_loss, z_b)
            self.added_losses += [factor * loss for factor, loss in weighed if loss.requires_grad]


def _sum(scores: Tensor) -> Tensor:
    """Return the sum over the last dimension, kept; not 0 where all sigmoids have underflowed."""
    return scores.sum(-1, keepdim=True).clamp_min(torch.finfo(scores.dtype).tiny)


def experts_of(model: nn.Module) -> dict[str, Experts]:
    """Return the mixtures of experts in a model, by their names."""
    return {name: m for name, m in model.named_modules() if isinstance(m, Experts)}


class _Sent(torch.autograd.Function):
    """`sent` as a differentiable function; what is saved is without the outputs of experts."""

    @staticmethod
    def forward(ctx: Any, *given: Tensor) -> Tensor:
        out_nd, gate_mf, up_mf = sent(*given)
        ctx.save_for_backward(*given, gate_mf, up_mf)
        return out_nd

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return *sent_backward(gradients[0], *ctx.saved_tensors), None, None


def _parts(
    like: Tensor, gate_efd: Tensor, ends_e: Tensor, m: int
) -> Iterator[tuple[slice, Any, Callable[..., Tensor]]]:
    """Yield sorted rows, the experts that they go to, and the product of both, written to `out`.

    These are all at once where `in_one_kernel` says so. Else they are one expert after the other:
    what is made for it stays in the cache of a CPU. A plan takes experts as evenly loaded, and two
    of them: all hold as much, each beside the rest of the one before.
    """
    if in_one_kernel(like, gate_efd):
        yield slice(None), slice(None), lambda a, b, out: out.copy_(F.grouped_mm(a, b, offs=ends_e))
        return
    on_cpu, e = kind_of(like.device) == "cpu", len(gate_efd)
    start, product = 0, _rounded if like.dtype.itemsize == 2 and on_cpu else torch.mm
    ends = ends_e.tolist() if has_values() else [-(-m // e), -(-m // e) * 2][:e]
    for expert, end in enumerate(ends):
        yield slice(start, end), expert, product
        start = end


def in_one_kernel(like: Tensor, gate_efd: Tensor) -> bool:
    """Return whether torch's grouped products take all experts: bf16 in rows of 16 bytes."""
    aligned = not any(size % 8 for size in gate_efd.shape[1:])
    return kind_of(like.device) == "cuda" and like.dtype == torch.bfloat16 and aligned


def _rounded(a: Tensor, b: Tensor, out: Tensor) -> Tensor:
    """Multiply in fp32 and round: oneDNN compiles a product in 16 bits for each number of rows."""
    with torch.autocast("cpu", enabled=False):  # a forward pass is under it
        return out.copy_(a.float() @ b.float())


def _operation(body: Callable[..., Any]) -> Any:
    """Make one operation of a function for torch, into which plans of memory see."""
    bodies[f"llmexp::{body.__name__}"] = body
    return operation(body)


@_operation
def sent(
    x_nd: Tensor,
    weights_nk: Tensor,
    gate_efd: Tensor,
    up_efd: Tensor,
    down_edf: Tensor,
    order_m: Tensor,
    ends_e: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the sum of the experts' outputs for each token, and their gate and up projections.

    `order_m`: places of tokens (n x k) in the order of experts, `ends_e`: where those of each end.
    """
    k, m = weights_nk.shape[1], len(order_m)
    tokens_m, weights_m1 = order_m // k, weights_nk.flatten()[order_m, None]
    gate_mf, up_mf = (x_nd.new_empty(m, gate_efd.shape[1]) for _ in range(2))
    weighted_md = weights_nk.new_empty(m, x_nd.shape[1])
    for rows, expert, product in _parts(x_nd, gate_efd, ends_e, m):
        x = x_nd.index_select(0, tokens_m[rows])
        gate = product(x, gate_efd[expert].mT, out=gate_mf[rows])
        up = product(x, up_efd[expert].mT, out=up_mf[rows])
        y = product(F.silu(gate).mul_(up), down_edf[expert].mT, out=x)
        torch.mul(y, weights_m1[rows], out=weighted_md[rows])
    return _summed(weighted_md, order_m, k).to(x_nd.dtype), gate_mf, up_mf


@_operation
def sent_backward(  # noqa: PLR0913 (those of `sent`, and what it has made)
    gradient_nd: Tensor,
    x_nd: Tensor,
    weights_nk: Tensor,
    gate_efd: Tensor,
    up_efd: Tensor,
    down_edf: Tensor,
    order_m: Tensor,
    ends_e: Tensor,
    gate_mf: Tensor,
    up_mf: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients by tokens, weights and the three stacks of matrices; 0 without rows."""
    k, m = weights_nk.shape[1], len(order_m)
    tokens_m, weights_m1 = order_m // k, weights_nk.flatten()[order_m, None].to(x_nd.dtype)
    of_gate, of_up, of_down = map(torch.empty_like, (gate_efd, up_efd, down_edf))
    of_x_md, of_weights_nk = x_nd.new_empty(m, x_nd.shape[1]), torch.empty_like(weights_nk)
    for rows, expert, product in _parts(x_nd, gate_efd, ends_e, m):
        x, gradient = (t.index_select(0, tokens_m[rows]) for t in (x_nd, gradient_nd))
        gate, up, weight = gate_mf[rows], up_mf[rows], weights_m1[rows]
        silu = F.silu(gate)
        h, of_h = silu * up, product(gradient, down_edf[expert], out=torch.empty_like(gate))
        of_weights_nk.view(-1)[order_m[rows]] = (of_h * h).sum(-1, dtype=weights_nk.dtype)
        product(gradient.mul_(weight).mT, h, out=of_down[expert])
        of_h.mul_(weight)
        of_gate_rows = torch.ops.aten.silu_backward(of_h * up, gate)
        of_up_rows = of_h.mul_(silu)
        product(of_gate_rows.mT, x, out=of_gate[expert])
        product(of_up_rows.mT, x, out=of_up[expert])
        of_x_rows = product(of_gate_rows, gate_efd[expert], out=of_x_md[rows])
        of_x_rows.add_(product(of_up_rows, up_efd[expert], out=x))
    return _summed(of_x_md, order_m, k), of_weights_nk, of_gate, of_up, of_down


def _summed(of_md: Tensor, order_m: Tensor, k: int) -> Tensor:
    """Return the sum over the k places of each token, from wherever each has gone."""
    places_m = torch.empty_like(order_m).index_copy_(
        0, order_m, torch.arange(len(order_m), device=order_m.device)
    )
    return F.embedding_bag(places_m.view(-1, k), of_md, mode="sum")


@torch.library.register_fake(sent)
def _(x_nd: Tensor, weights_nk: Tensor, gate_efd: Tensor, *more: Tensor) -> tuple[Tensor, ...]:
    made = (x_nd.new_empty(weights_nk.numel(), gate_efd.shape[1]) for _ in range(2))
    return torch.empty_like(x_nd), *made


@torch.library.register_fake(sent_backward)
def _(gradient_nd: Tensor, *given: Tensor) -> tuple[Tensor, ...]:
    return tuple(map(torch.empty_like, given[:5]))


@register_flop_formula(sent.overloadpacket)
def _(x_nd: Any, *given: Any, out_shape: Any) -> int:
    return 6 * x_nd[1] * math.prod(out_shape[1])


@register_flop_formula(sent_backward.overloadpacket)
def _(gradient_nd: Any, *given: Any, out_shape: Any) -> int:
    return 12 * gradient_nd[1] * math.prod(given[-1])
