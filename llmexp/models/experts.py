"""A mixture of experts in place of an MLP: a router, its losses, products expert by expert.

No token is dropped, and the experts of a token depend on no other one. Each loss that is added is
a mean over the tokens of one sequence, so it does not depend on how a batch is cut.

Names end in their dimensions: b batch, t time (tokens), n tokens (b x t), e experts, k those that
a token is sent to, m places (n x k), d model width, f width of an expert.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from llmexp.models.common import Weights
from llmexp.models.operands import autocast_dtype
from llmexp.settings.values import refuse


@dataclass(frozen=True)
class Routing:
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
    first, most = routing.first_dense_layers, routing.n_experts
    if first >= len(blocks):
        text = f"leaves none of model.n_layers={len(blocks)} for experts"
        raise refuse("out_of_range", "model.first_dense_layers", first, text, len(blocks) - 1)
    if routing.per_token > most:
        text = f"there are model.n_experts={most}"
        raise refuse("out_of_range", "model.experts_per_token", routing.per_token, text, most)
    if parametrization != "standard":
        text = "how rates of routers and experts follow the width is not known for mup"
        raise refuse("unsupported", "model.parametrization", parametrization, text, "standard")
    for block in list(blocks)[first:]:
        mlp: Any = block.mlp
        d_model, width = mlp.gate_proj.in_features, mlp.gate_proj.out_features
        if mlp.gate_proj.bias is not None:
            raise refuse("unsupported", "model.biases", "all", "experts have no biases", "qkv")
        width, shared = routing.width or width, None
        if routing.n_shared:
            shared = type(mlp)(d_model, routing.n_shared * width, False)
        block.mlp = Experts(d_model, width, routing, shared)


class Router(Weights):
    """Score each expert for each token, in fp32 at least, and choose the best of them."""

    balance_bias: Tensor | None  # on the choice alone, moved by the load of whole steps

    def __init__(self, d_model: int, routing: Routing) -> None:
        super().__init__(routing.n_experts, d_model)
        self.routing = routing
        self.bias = nn.Parameter(torch.empty(routing.n_experts)) if routing.bias else None
        moves = routing.balance == "bias"
        self.register_buffer("balance_bias", torch.empty(routing.n_experts) if moves else None)

    def forward(self, x_btd: Tensor) -> tuple[Tensor, ...]:
        """Return logits, scores, and of each token its experts and what theirs are weighted by."""
        how, dtype = self.routing, torch.promote_types(x_btd.dtype, torch.float32)
        with torch.autocast(x_btd.device.type, enabled=False):
            bias = None if self.bias is None else self.bias.to(dtype)
            logits_bte = F.linear(x_btd.to(dtype), self.weight.to(dtype), bias)
        scores_bte = logits_bte.sigmoid() if how.router == "sigmoid" else logits_bte.softmax(-1)
        wanted_bte = scores_bte.detach()
        if self.balance_bias is not None:
            wanted_bte = wanted_bte + self.balance_bias
        # of equal ones the first, on any device and in any batch
        order_bte = wanted_bte.sort(dim=-1, descending=True, stable=True).indices
        chosen_btk = order_bte[..., : how.per_token]
        weights_btk = scores_bte.gather(-1, chosen_btk)
        if how.norm_topk:
            weights_btk = weights_btk / weights_btk.sum(-1, keepdim=True)
        return logits_bte, scores_bte, chosen_btk, weights_btk


class Experts(nn.Module):
    """Send each token through some of many SwiGLU experts, and through `shared`, if there is one.

    Shazeer et al. 2017; experts that all tokens pass: Dai et al. 2024 (arXiv 2401.06066).
    """

    added_losses: list[Tensor] | None = None  # takes those of each sequence (b,), from SummedLoss
    look: Callable[..., None] | None = None  # sees what is routed in training
    # where ranks have a part of each expert's width: for tokens and weights, and for the sum
    over_width: tuple[Callable[..., tuple[Tensor, ...]], Callable[[Tensor], Tensor]] | None = None

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
        if self.training:
            self._judge(logits_bte, scores_bte, chosen_btk)
        y_btd = self._routed(x_btd, chosen_btk, weights_btk)
        return y_btd if self.shared is None else y_btd + self.shared(x_btd)

    def _routed(self, x_btd: Tensor, chosen_btk: Tensor, weights_btk: Tensor) -> Tensor:
        """Return the sum of the experts' outputs for each token, in the dtype of the products."""
        x_btd = autocast_dtype(x_btd)
        if self.over_width is not None:
            x_btd, weights_btk = self.over_width[0](x_btd, weights_btk)
        k, chosen_m = self.routing.per_token, chosen_btk.flatten()
        order_m = chosen_m.argsort(stable=True)
        places_m = torch.arange(len(order_m), device=order_m.device)
        back_m = torch.empty_like(order_m).scatter_(0, order_m, places_m)
        experts_e = torch.arange(self.routing.n_experts, device=order_m.device)
        ends_e = torch.searchsorted(chosen_m[order_m], experts_e, right=True, out_int32=True)
        x_md = _Moved.apply(x_btd.flatten(0, 1), order_m, back_m, k)
        projections = (self.gate_proj, self.up_proj, self.down_proj)
        gate, up, down = (autocast_dtype(_own(one.weight)) for one in projections)
        h_mf = F.silu(_Grouped.apply(x_md, gate, ends_e)) * _Grouped.apply(x_md, up, ends_e)
        y_md = _Moved.apply(_Grouped.apply(h_mf, down, ends_e), back_m, order_m, 1)
        y_btkd = y_md.view(*chosen_btk.shape, -1)
        y_btd = (y_btkd * weights_btk[..., None]).sum(2).to(y_md.dtype)
        return y_btd if self.over_width is None else self.over_width[1](y_btd)

    def _judge(self, logits_bte: Tensor, scores_bte: Tensor, chosen_btk: Tensor) -> None:
        """Find the losses of each sequence, and hand on those that are trained on.

        The balance is that of DeepSeek-V3 (arXiv 2412.19437, equations 17 to 20), the other one
        that of ST-MoE (arXiv 2202.08906, equation 5).
        """
        how, (_, t, e) = self.routing, scores_bte.shape
        with torch.set_grad_enabled(torch.is_grad_enabled() and how.balance == "sequence"):
            share_bte = scores_bte / scores_bte.sum(-1, keepdim=True)
            one_btk = torch.ones_like(chosen_btk, dtype=share_bte.dtype)
            load_be = torch.zeros_like(share_bte[:, 0])
            load_be = load_be.scatter_add(1, chosen_btk.flatten(1), one_btk.flatten(1))
            balance_b = (load_be * share_bte.mean(1)).sum(-1) * (e / (how.per_token * t))
        with torch.set_grad_enabled(torch.is_grad_enabled() and how.z_loss > 0):
            z_b = logits_bte.logsumexp(-1).square().mean(1)
        if self.look is not None:
            self.look(self, share_bte, load_be, balance_b, z_b)
        if self.added_losses is not None:
            weighed = (how.balance_loss, balance_b), (how.z_loss, z_b)
            self.added_losses += [factor * loss for factor, loss in weighed if loss.requires_grad]


def experts_of(model: nn.Module) -> dict[str, Experts]:
    """Return the mixtures of experts in a model, by their names."""
    return {name: m for name, m in model.named_modules() if isinstance(m, Experts)}


def _own(weight: Any) -> Tensor:
    """Return what this rank has of a parameter that tensor parallelism may have split."""
    found: Tensor = weight.to_local() if hasattr(weight, "to_local") else weight
    return found


class _Moved(torch.autograd.Function):
    """Rows in another order, each `times` as often; without additions in any order."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order_m: Tensor, back_m: Tensor, times: int) -> Tensor:
        ctx.save_for_backward(back_m)
        ctx.times = times
        return x[order_m if times == 1 else order_m // times]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (back_m,) = ctx.saved_tensors
        found = gradients[0][back_m]
        if ctx.times > 1:
            found = found.view(-1, ctx.times, found.shape[-1]).sum(1)
        return found, None, None, None


class _Grouped(torch.autograd.Function):
    """Rows (m, d) that are sorted by expert, times the transpose of the matrix (f, d) of theirs."""

    @staticmethod
    def forward(ctx: Any, x_md: Tensor, weight_efd: Tensor, ends_e: Tensor) -> Tensor:
        ctx.save_for_backward(x_md, weight_efd, ends_e)
        return grouped(x_md, weight_efd, ends_e)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x_md, weight_efd, ends_e = ctx.saved_tensors
        gradient_mf = gradients[0].contiguous()
        x_gradient = weight_gradient = None
        if ctx.needs_input_grad[0]:
            x_gradient = grouped(gradient_mf, weight_efd.transpose(1, 2), ends_e)
        if ctx.needs_input_grad[1]:
            weight_gradient = grouped_outer(gradient_mf, x_md, ends_e)
        return x_gradient, weight_gradient, None


def _in_one_kernel(*operands: Tensor) -> bool:
    """Return whether torch's grouped products take the operands: bf16 in rows of 16 bytes."""
    fits = all(x.dtype == torch.bfloat16 and x.is_cuda for x in operands)
    return fits and all(n % 8 == 0 for x in operands for n in x.shape[-2 + (x.ndim < 3) :])


@torch.library.custom_op("llmexp::grouped", mutates_args=())
def grouped(x_md: Tensor, weight_efd: Tensor, ends_e: Tensor) -> Tensor:
    """Return (m, f): rows, sorted by expert, times the transpose of the expert's matrix.

    `ends_e`: where the rows of each expert end. 16-bit products on a CPU are made in fp32: oneDNN
    would compile them anew for each number of rows.
    """
    if _in_one_kernel(x_md, weight_efd):
        return F.grouped_mm(x_md, weight_efd.transpose(1, 2), offs=ends_e)
    x, weight = _exact(x_md), _exact(weight_efd)
    out, start = x.new_empty(len(x), weight.shape[1]), 0
    for number, end in enumerate(ends_e.tolist()):
        if end > start:
            torch.mm(x[start:end], weight[number].T, out=out[start:end])
        start = end
    return out.to(x_md.dtype)


@torch.library.custom_op("llmexp::grouped_outer", mutates_args=())
def grouped_outer(y_mf: Tensor, x_md: Tensor, ends_e: Tensor) -> Tensor:
    """Return (e, f, d): of each expert the sum of the outer products of its rows; 0 for none."""
    if _in_one_kernel(y_mf, x_md):
        return F.grouped_mm(y_mf.T, x_md, offs=ends_e)
    x, y = _exact(x_md), _exact(y_mf)
    out, start = x.new_zeros(len(ends_e), y.shape[1], x.shape[1]), 0
    for number, end in enumerate(ends_e.tolist()):
        if end > start:
            torch.mm(y[start:end].T, x[start:end], out=out[number])
        start = end
    return out.to(x_md.dtype)


def _exact(x: Tensor) -> Tensor:
    return x.float() if x.element_size() == 2 and x.device.type == "cpu" else x


@grouped.register_fake
def _(x_md: Tensor, weight_efd: Tensor, ends_e: Tensor) -> Tensor:
    return x_md.new_empty(len(x_md), weight_efd.shape[1])


@grouped_outer.register_fake
def _(y_mf: Tensor, x_md: Tensor, ends_e: Tensor) -> Tensor:
    return x_md.new_empty(len(ends_e), y_mf.shape[1], x_md.shape[1])
