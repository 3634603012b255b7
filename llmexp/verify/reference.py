"""Write a run out in plain torch, for `verify geometry`, and model what rounding may do to it.

It shares with a run the model, the optimizer, the schedule, the order of sequences and the tokens,
and nothing of what is to be proven: not the reader, the loss, the wrapping, the reductions, the
clipping or the step.

The formulas of a feature's rules of clipping are in its file `verify`: `BY_RULE` and
`OF_UPDATE`, by rule.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from llmexp import features
from llmexp.data.order import sequence_index
from llmexp.data.sampler import Sampler
from llmexp.models.common import held_in_rows
from llmexp.optim import eval_weights
from llmexp.optim.updating import set_rate
from llmexp.train.assembly.assemble import Parts
from llmexp.train.windows import sampler_of

MATMUL = re.compile(
    r"(^|_)(|add|b|badd)mm$|(^|_)(dot|mv|addmv)$|^sent|scaled_dot_product|convolution|linear"
)
# of one forward and backward pass; sums over passes are exact, so this bounds memory alone
PASS_TOKENS = 1024


class Clipping:
    """Clip window after window, and keep the norms that limits follow."""

    def __init__(self, clip: Any, model: nn.Module) -> None:
        self.knobs, self.in_rows = clip, held_in_rows(model)
        self.named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.head = getattr(model, "head_weight", None)
        self.before: list[float] = []  # norms of the windows before, and what they were clipped to
        self.after: list[float] = []
        by_norm: dict[str, Any] = {
            "norm": lambda at, norm, _: at.scale(at.gradients, clip.max_norm, norm)
        }
        self._clip = (by_norm | features.merged("verify", "BY_RULE")).get(clip.kind)
        self._limit = features.merged("verify", "OF_UPDATE").get(clip.kind)

    def clip(self, error: float) -> tuple[float, float]:
        """Clip the gradients in place, and return their 2-norm before and after.

        `error`: relative, of norms that are clipped by.
        """
        before = self.norm(self.gradients, error)
        if self._clip is not None:
            self._clip(self, before, error)
        self.before.append(before)
        self.after.append(self.norm(self.gradients))
        return before, self.after[-1]

    @property
    def gradients(self) -> list[Tensor]:
        return [p.grad for p in self.named.values() if p.grad is not None]

    def norm(self, gradients: Sequence[Tensor], error: float = 0.0) -> float:
        squares = math.fsum(float(g.square().sum()) for g in gradients)
        return math.sqrt(squares) * (1 + error)

    def scale(self, gradients: Sequence[Tensor], limit: float | None, norm: float) -> None:
        """Scale gradients of this norm to a limit; None: there is none."""
        if limit is not None:
            for g in gradients:
                g.mul_(min(1.0, limit / (norm + 1e-6)))

    def limit_updates(self, optimizers: Sequence[Optimizer], exact: Sequence[Tensor]) -> None:
        """Take back what the rule does of updates, of parameters that were `exact`."""
        if self._limit is not None:
            self._limit(self, optimizers, dict(zip(self.named.values(), exact, strict=True)))


@dataclass
class Followed:
    """Holds what a run should leave: figures of its rows, a list each of one a step, and its end.

    A step without a valid target has no loss and no norm.
    """

    rows: dict[str, list[Any]]
    # parameters after the last step, float64, on the CPU
    end: dict[str, Tensor] = field(default_factory=dict)
    differing: list[str] = field(default_factory=list)  # what of a run has to be the same


def windows_in_order(parts: Parts, sizes: Sequence[int]) -> list[Tensor]:
    """Return the sequences of each step, int64 (rows, sequence_length + 1), in the run's order.

    `sizes`: sequences of each step.
    """
    order = sampler_of(parts)
    starts = starts_of(order, np.arange(sum(sizes)))
    ids = [order.stream.read(start, order.sequence_length + 1) for start in starts]
    return list(torch.from_numpy(np.stack(ids)).split(list(sizes)))


def starts_of(order: Sampler, k: np.ndarray) -> list[int]:
    """Return where the sequences `k` of a run begin in its stream, without the reader."""
    length = order.sequence_length
    if order.mixed is not None:
        return order.mixed.starts(k, order.seed, order.shuffle, length).tolist()
    n = order.stream.n_sequences(length)
    return (sequence_index(order.seed, k, n, order.shuffle) * length).tolist()


def targets_of(rows: Tensor, ignore_id: int | None, document_end: int | None) -> Tensor:
    """Return the targets (r, t) of sequences (r, t + 1), -100 where one does not count.

    That is an ignored id, and what follows the end of a document.
    """
    targets = rows[:, 1:].clone()
    if ignore_id is not None:
        targets[targets == ignore_id] = -100
    if document_end is not None:
        targets[rows[:, :-1] == document_end] = -100
    return targets


def logits_of(model: Any, tokens: Tensor) -> Tensor:
    """Return logits (b, t, v) float64 by the model's own account.

    They come from its features and its head where it has no forward.
    """
    if type(model).forward is nn.Module.forward:
        return (model.hidden(tokens) @ model.head_weight.T).double()
    return model(tokens).double()


def passes_differ(model: nn.Module, tokens: Tensor) -> bool:
    """Return whether two passes over the same tokens (b, t) differ.

    Then different cuts cannot compute the same.
    """
    found = []
    with torch.no_grad():
        for seed in (1, 2):
            torch.manual_seed(seed)
            found.append(logits_of(model, tokens).nan_to_num())
    return not torch.equal(*found)


@dataclass(frozen=True)
class Errors:
    """Relative errors of one rounding in an arithmetic.

    They are of what a matmul takes and gives, of a sum, of all else.
    """

    operand: float
    sums: float
    unit: float


def errors(kind: str, longest_sum: int) -> Errors:
    """From the unit roundoffs (half an ulp) u = 2^-p of a precision, p the bits of its significand.

    A sum of n terms that cancel is off by up to about u sqrt(n) / 2 of its size where each partial
    sum is rounded: partial sums walk at random, their rms is that of sqrt(n / 2) terms, and n
    errors of u / sqrt(3) add by squares.
    """
    unit = 2.0**-53 if kind == "fp64" else 2.0**-24
    sums = unit * max(1.0, math.sqrt(longest_sum) / 2)
    return Errors({"tf32": 2.0**-11, "fp16": 2.0**-11, "bf16": 2.0**-8}.get(kind, 0.0), sums, unit)


class Roundoff(TorchDispatchMode):
    """Monte Carlo arithmetic (Parker 1997): each operation's result has a random relative error.

    The error is that of its kind, or of its dtype's eps where that is coarser, as inside an
    optimizer that computes in bf16. How far a computation comes out under it is what rounding does
    to it, amplification included.
    """

    def __init__(self, sizes: Errors, seed: int) -> None:
        super().__init__()
        self.sizes = sizes
        self.seed = seed
        self._pool = np.random.default_rng(seed).uniform(-1.0, 1.0, 1 << 21)
        self._starts = np.random.default_rng(seed + 1)
        self._on: dict[torch.device, Tensor] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        schema, name = func._schema, func.overloadpacket.__name__
        if schema.is_mutable or any(r.alias_info is not None for r in schema.returns):
            return func(*args, **(kwargs or {}))
        given = [a for a in args if isinstance(a, Tensor)]
        matmul = MATMUL.search(name) is not None
        if matmul and self.sizes.operand and not name.endswith("backward"):
            args = tuple(
                self.disturb(a.clone(), self.sizes.operand) if _is_float(a) else a for a in args
            )
        out = func(*args, **(kwargs or {}))
        largest = max((a.numel() for a in given), default=0)
        for tensor in filter(_is_float, out if isinstance(out, (tuple, list)) else (out,)):
            size = self.sizes.sums if matmul or tensor.numel() < largest else self.sizes.unit
            # not the sums that attention keeps for its backward
            if matmul and tensor.ndim == given[0].ndim:
                size = max(size, self.sizes.operand)
            self.disturb(tensor, size)
        return out

    def disturb(self, tensor: Tensor, size: float) -> Tensor:
        """Multiplies in place by 1 + size x (uniform in [-1, 1])."""
        pool = self._on.setdefault(tensor.device, torch.from_numpy(self._pool).to(tensor.device))
        start = int(self._starts.integers(0, 1 << 20))
        stop = start + tensor.numel()
        if stop > len(pool):
            pool = pool.repeat(-(-stop // len(pool)))
        noise = pool[start:stop].view(tensor.shape)
        if tensor.dtype == torch.float64:
            return tensor.addcmul_(tensor, noise, value=size)
        size = max(size, torch.finfo(tensor.dtype).eps)
        return tensor.copy_(tensor.double() * (1 + size * noise))

    def of_norm(self, gradients: Sequence[Tensor]) -> float:
        """Return a relative error of the 2-norm of tensors.

        Partial sums of n squares grow evenly, so the n roundings of u / sqrt(3) of them add to u
        sqrt(n) / 3 of the sum, and to half of that of its root; sqrt(3) makes it the end of a
        uniform error with that rms.
        """
        longest = max((g.numel() for g in gradients), default=0)
        return self.sizes.unit * math.sqrt(3 * longest) / 6 * float(self._starts.uniform(-1.0, 1.0))


def _is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def train_plainly(
    parts: Parts,
    model: nn.Module,
    windows: Sequence[Tensor],
    ignore_id: int | None,
    off: Roundoff | None = None,
) -> Followed:
    """Train `model` (float64, on its device) on the windows, each as one batch.

    With `off` it computes under such errors. Loss: the sum of the cross-entropy over the valid
    targets / their number N, summed pass by pass. Gradient: that of nll / N, added up over the
    passes. Norm, clipping, rate and the skipping of a window without targets are as
    docs/semantics.md has them, and so is what features `follow`.
    """
    keys = ("target_tokens", "lr", "train/loss", "grad_norm", "grad_norm_post_clip")
    found, update = Followed({key: [] for key in keys}), 0
    device = next(model.parameters()).device
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizers, clipping = parts.build_optimizers(model), Clipping(parts.config.clip, model)
    moves = [follow(model) for follow in features.offered("verify", "follow")]
    in_update = None
    if off is not None:
        in_update = Roundoff(dataclasses.replace(off.sizes, operand=0.0), off.seed)
    for step, rows in enumerate(windows):
        rows = rows.to(device)
        targets = targets_of(rows, ignore_id, parts.document_end)
        count = int((targets != -100).sum())
        rate = set_rate(optimizers, parts.rate_factor(update) * parts.run.stage_at(step).rate)
        figures: tuple[Any, ...] = (None, None, None)
        if count:
            exact = [p.detach().clone() for p in parameters]
            if off is not None:  # a matmul is given rounded weights, the same in all passes
                for p in parameters:
                    off.disturb(p.detach(), off.sizes.operand)
            loss = _backward(model, parameters, rows, targets, count, off)
            for p, value in zip(parameters, exact, strict=True):
                p.detach().copy_(value)
            gradients = [p.grad for p in parameters if p.grad is not None]
            figures = loss, *clipping.clip(0.0 if off is None else off.of_norm(gradients))
            with in_update or contextlib.nullcontext():
                for optimizer in optimizers:
                    optimizer.step()
            clipping.limit_updates(optimizers, exact)
            for move in moves:
                move(targets)
            if in_update is not None:
                for p in parameters:
                    in_update.disturb(p.detach(), in_update.sizes.unit)
            update += 1
        for column, value in zip(found.rows.values(), (count, rate, *figures), strict=True):
            column.append(value)
    with eval_weights.evaluating(optimizers, model):  # as checkpoints have them
        found.end = {name: p.detach().cpu().clone() for name, p in model.named_parameters()}
    return found


def _backward(
    model: nn.Module,
    parameters: Sequence[Tensor],
    rows: Tensor,
    targets: Tensor,
    count: int,
    rounding: Roundoff | None,
) -> float:
    """Put the gradient of the mean loss of the valid targets into .grad; return that loss."""
    for p in parameters:
        p.grad = torch.zeros_like(p)
    losses = []
    added = list[Tensor]()  # of each sequence, by its valid targets
    losing: list[Any] = [m for m in model.modules() if hasattr(m, "added_losses")]
    for module in losing:
        module.added_losses = added
    with rounding or contextlib.nullcontext():
        size = max(1, PASS_TOKENS // rows.shape[1])
        for some, wanted in zip(rows.split(size), targets.split(size), strict=True):
            logits = logits_of(model, some[:, :-1]).flatten(0, 1)
            nll = F.cross_entropy(logits, wanted.flatten(), ignore_index=-100, reduction="sum")
            own = (wanted != -100).sum(1)
            ((nll + sum((loss * own).sum() for loss in added)) / count).backward()
            losses.append((nll / count).item())
            added.clear()
    return math.fsum(losses)
