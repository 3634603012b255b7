"""Measure chosen steps layer by layer: norms of each module's tensors, and one forward pass.

Reading changes nothing: the forward pass is one of its own, without gradients or dropout.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from llmexp import mesh
from llmexp.config.values import is_ours
from llmexp.models.documents import Documents
from llmexp.models.logits import divisor_of, seen_by
from llmexp.models.loss import SummedLoss, blocks_of
from llmexp.optim import precision

_TOKENS = 512  # of the window's first sequence, at most, in the forward pass
QUERIES = 64  # of these tokens, spread evenly, whose attention is looked at
_DEAD = 0.01  # of the layer's RMS: a unit that no token brings beyond this is dead
_PARTS = ("attention", "mlp")  # of a block
BLOCK_FIGURES = (
    "residual_rms", "attention_rms", "mlp_rms", "dead_units", "attention_logit_max",
    "attention_entropy",
)  # fmt: skip


# by figure: values by module with parameters or by block, or one value; on the device
Taken = dict[str, dict[str, Tensor] | Tensor]


class Layers:
    """Take the figures of a step on the device, in the order in which they come to be.

    All ranks call together. Sharded layouts give the figures of a single rank.
    """

    def __init__(self, joined: mesh.Mesh, loss: SummedLoss, arithmetic: str) -> None:
        self._mesh, self._loss, self._arithmetic = joined, loss, arithmetic
        model: nn.Module = loss.model
        blocks = blocks_of(model)
        self._blocks = {name: m for name, m in model.named_modules() if m in blocks}
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        self._parameters = [p for _, p in named]
        owners = [name.rpartition(".")[0] or name for name, _ in named]
        self._modules = list(dict.fromkeys(owners))
        self._owner = torch.tensor([self._modules.index(o) for o in owners], device=joined.device)
        self._taken: Taken = {}
        self._before: list[Tensor] = []

    def look(self, tokens_bt: Tensor) -> None:
        """Run the window's first sequence through the model, as it is before its update."""
        own_1t = tokens_bt[:1, :_TOKENS].to(self._mesh.device, non_blocking=True)
        # the same on all ranks, however the window is cut
        tokens_1t = mesh.from_first(self._mesh, own_1t)
        found: dict[str, dict[str, Tensor]] = {figure: {} for figure in BLOCK_FIGURES}
        with ExitStack() as stack:
            stack.enter_context(self._loss.evaluating())
            for name, block in self._blocks.items():
                self._watch(stack, name, block, found)
            stack.enter_context(precision.autocast(self._arithmetic, self._mesh.device))
            logits_tv = self._loss(tokens_1t)[0]
        logits_tv = logits_tv.to(_exact(logits_tv))
        self._taken = {figure: by_block for figure, by_block in found.items() if by_block}
        self._taken["logit_max"] = logits_tv.amax()
        self._taken["log_z"] = logits_tv.logsumexp(-1).mean()

    def before_update(self) -> None:
        """Take the norms of the gradients, before clipping, and of the weights."""
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in self._parameters]
        self._before = [p.detach().clone() for p in self._parameters]
        self._taken["grad_norm"] = self._by_module(gradients)
        self._taken["weight_norm"] = self._by_module(self._before)

    def after_update(self) -> Taken:
        """Return all that was taken, by figure.

        The update is the difference of the weights; weight decay is a part of it.
        """
        held = [mesh.local_part(p.detach()) for p in self._parameters]
        torch._foreach_sub_([mesh.local_part(b) for b in self._before], held)
        self._taken["update_norm"] = self._by_module(self._before)
        taken, self._taken, self._before = self._taken, {}, []
        return taken

    def _by_module(self, values: Sequence[Tensor]) -> dict[str, Tensor]:
        squares = mesh.norms(self._mesh, values).double().square()
        sums = torch.zeros(len(self._modules), dtype=torch.float64, device=squares.device)
        norms = sums.index_add_(0, self._owner, squares).sqrt()
        return dict(zip(self._modules, norms, strict=True))

    def _watch(
        self, stack: ExitStack, name: str, block: Any, found: dict[str, dict[str, Tensor]]
    ) -> None:
        """Add hooks to a block that put its figures into `found` as it runs.

        The hooks are removed with the stack; a module that the block lacks has no figures.
        """
        rms = [(getattr(block, part, None), f"{part}_rms") for part in _PARTS]
        for module, figure in [(block, "residual_rms"), *rms]:
            if isinstance(module, nn.Module):
                hook = _keeps(found[figure], name)
                stack.callback(module.register_forward_hook(hook).remove)
        attention: Any = getattr(block, "attention", None)
        if is_ours(type(attention).__module__):  # so `heads` is what we mean by it

            def look_at(module: Any, inputs: tuple[Any, ...]) -> None:
                q_bhtk, k_bgtk, _ = module.heads(*inputs[:-1])
                with torch.autocast(q_bhtk.device.type, enabled=False):  # products of 16 bits
                    largest, entropy = attention_figures(
                        q_bhtk, k_bgtk, inputs[-1], divisor_of(module)
                    )
                found["attention_logit_max"][name] = mesh.maximum(self._mesh, largest)
                found["attention_entropy"][name] = mesh.mean_of_split(self._mesh, entropy)

            stack.callback(attention.register_forward_pre_hook(look_at).remove)
        down = getattr(getattr(block, "mlp", None), "down_proj", None)
        if isinstance(down, nn.Module):

            def count_dead(module: Any, inputs: tuple[Any, ...]) -> None:
                units_btf = mesh.local_part(inputs[0])  # those of this rank's rows of weights
                units_btf = units_btf.to(_exact(units_btf)).abs()
                whole = mesh.mean_of_split(self._mesh, units_btf.square().mean()).sqrt()
                dead = (
                    (units_btf.flatten(0, -2).amax(0) <= _DEAD * whole).to(units_btf.dtype).mean()
                )
                found["dead_units"][name] = mesh.mean_of_split(self._mesh, dead)

            stack.callback(down.register_forward_pre_hook(count_dead).remove)


def row_of(taken: Taken) -> dict[str, Any]:
    """Return the figures as a line of layers.jsonl has them; the host waits.

    What is not finite is absent.
    """
    parts = [list(part.values()) if isinstance(part, dict) else [part] for part in taken.values()]
    values = iter(torch.stack([figure.double() for part in parts for figure in part]).tolist())
    found = dict[str, Any]()
    for name, part in taken.items():
        if isinstance(part, dict):
            found[name] = {where: x for where in part if math.isfinite(x := next(values))}
        elif math.isfinite(x := next(values)):
            found[name] = x
    return found


def attention_figures(
    q_bhtk: Tensor, k_bgtk: Tensor, documents: Documents | None, divisor: float
) -> tuple[Tensor, Tensor]:
    """Return the largest attention logit, and the mean entropy of attention in nats.

    They are over all heads and QUERIES queries, which are spread evenly from the first to the last
    token; logits are q k / `divisor`, of the tokens that a query sees.
    """
    t, dtype = q_bhtk.shape[2], _exact(q_bhtk)
    rows = torch.linspace(0, t - 1, min(t, QUERIES), device=q_bhtk.device).round().long()
    q_bhrk, k_bgtk = q_bhtk[:, :, rows].to(dtype), k_bgtk.to(dtype)
    k_bhtk = k_bgtk.repeat_interleave(q_bhtk.shape[1] // k_bgtk.shape[1], dim=1)
    logits_bhrt = q_bhrk @ k_bhtk.transpose(-1, -2) / divisor
    logits_bhrt = logits_bhrt.masked_fill(~seen_by(rows, t, documents), -math.inf)
    entropy_bhr = torch.special.entr(logits_bhrt.softmax(-1)).sum(-1)
    return logits_bhrt.amax(), entropy_bhr.mean()


def _exact(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _keeps(values: dict[str, Tensor], name: str) -> Callable[..., None]:
    """Return a forward hook that keeps the root of the mean square of the module's output."""

    def hook(module: nn.Module, inputs: Any, output: Any) -> None:
        x = output[0] if isinstance(output, tuple) else output
        values[name] = x.to(_exact(x)).square().mean().sqrt()

    return hook
