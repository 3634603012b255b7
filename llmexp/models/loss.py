"""The loss end of a model: `SummedLoss`, from token ids to a summed cross-entropy.

Names end in their dimensions: b batch, t time (tokens), d model width, v vocabulary.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from llmexp.models.chunked import chunk_sizes, chunked_cross_entropy, chunked_cross_entropy_sum
from llmexp.models.initial import numbers_of
from llmexp.models.operands import ALIGNED, IGNORE_INDEX, VocabShard
from llmexp.models.planned import kind_of, memory_of

# Below this vocabulary the logits are small beside the trunk, and fewer, larger operations win.
MIN_CHUNKED_VOCAB = 2048

# A compiled step holds the logits of a micro-batch, in 16 bits, up to this share of the memory of
# an accelerator: the compiler makes them, their softmax and their gradient in one place.
WHOLE_SHARE = 0.1


def plain_cross_entropy(logits_btv: Tensor, targets_bt: Tensor, reduction: str = "sum") -> Tensor:
    """Return the cross-entropy of `logits_btv`, summed over all targets other than -100.

    It is in fp32 (fp64 in fp64). With `reduction` none it is not summed: (b, t).
    """
    logits_btv = logits_btv if logits_btv.dtype == torch.float64 else logits_btv.float()
    nll = F.cross_entropy(
        logits_btv.flatten(0, -2),
        targets_bt.flatten(),
        ignore_index=IGNORE_INDEX,
        reduction=reduction,
    )
    return nll if reduction == "sum" else nll.view(targets_bt.shape)


def compiled_cross_entropy(logits_btv: Tensor, targets_bt: Tensor, vocabulary: int) -> Tensor:
    """Return what `plain_cross_entropy` returns, in operations that a compiler fuses better.

    It reads the logits once in the backward pass, where the gradient of torch's own function is
    first summed over the vocabulary. Of logits only the first `vocabulary` count.
    """
    logits_btv = logits_btv if logits_btv.dtype == torch.float64 else logits_btv.float()
    ids_v = torch.arange(logits_btv.shape[-1], device=logits_btv.device)
    if vocabulary < len(ids_v):  # whole rows: they are aligned
        logits_btv = torch.where(ids_v < vocabulary, logits_btv, -math.inf)
    top_bt1 = logits_btv.detach().amax(-1, keepdim=True)
    log_z_bt = (logits_btv - top_bt1).exp().sum(-1).log() + top_bt1.squeeze(-1)
    own_btv = torch.where(ids_v == targets_bt[..., None], logits_btv, 0.0)
    return torch.where(targets_bt != IGNORE_INDEX, log_z_bt - own_btv.sum(-1), 0.0).sum()


@contextlib.contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Have a model in evaluation mode inside, for all that only looks at it.

    Afterwards the mode of each module, the value of each buffer and all random numbers are as
    before; those inside are the same at each look. A buffer that has another shape by then is a
    cache, and stays.
    """
    modes = [(module, module.training) for module in model.modules()]
    kept = [
        (module._buffers, name, buffer, buffer.detach().clone())
        for module, _ in modes
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    try:
        with numbers_of(0):
            model.eval()
            yield
    finally:
        model.train(modes[0][1])  # it may undo what `eval()` has done besides
        for module, training in modes:
            module.training = training
        for buffers, name, buffer, value in kept:
            if getattr(buffers.get(name), "shape", None) == value.shape:
                buffers[name] = buffer
                buffer.detach().copy_(value)


def is_shipped(model: Any) -> bool:
    """Return whether all code of a model is ours: on all ranks it does the same in each pass."""
    return bool(getattr(model, "is_ours", lambda: False)())


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """Return the blocks of a model: its attribute `blocks`, or none."""
    blocks = getattr(model, "blocks", None)
    return list(blocks) if isinstance(blocks, nn.ModuleList) else []


class SummedLoss(nn.Module):
    """The model and its loss: all that a training step calls, once for each micro-batch.

    It is the cross-entropy, summed over the valid targets of the micro-batch.
    `model(tokens_bt)` returns logits (b, t, v). Where it also has `hidden(tokens_bt)` (b, t, d)
    and `head_weight` (v, d), whose product the logits are, the logits are never held as a whole.
    Its parameters are the model's, without copies. The loss is `chunked` where the model allows it
    and the vocabulary is large enough to gain.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model: Any = model  # nn.Module's own attribute types are too narrow for hidden()
        self.shard: VocabShard | None = None
        self.chunked = self.has_head() and self._head_weight().shape[0] >= MIN_CHUNKED_VOCAB
        self._run_trunk: Callable[[Tensor], Tensor] = self._trunk
        self.run_fused: Callable[[Tensor, Tensor], Tensor] | None = None
        self._compiled = False
        # those that hand on losses of their own for each sequence
        self._adding: list[Any] = [m for m in model.modules() if hasattr(m, "added_losses")]

    def has_head(self) -> bool:
        """Return whether the model gives its hidden states and its output head apart."""
        head_weight = getattr(self.model, "head_weight", None)
        return hasattr(self.model, "hidden") and head_weight is not None

    def share_vocabulary(self, shard: VocabShard) -> None:
        """Take this rank's output head as a part of the vocabulary from now on.

        Only the chunked loss can handle that, of a model that `has_head`. `model.head_weight` is
        then a DTensor split by rows, or this rank's rows themselves.
        """
        self.shard = shard
        self.chunked = True

    def _trunk(self, tokens_bt: Tensor) -> Tensor:
        """Return the hidden states for the chunked loss, or the logits for the plain one."""
        if self.chunked:
            return self.model.hidden(tokens_bt)
        out = self.model(tokens_bt)
        if not isinstance(out, Tensor) or out.ndim != 3 or out.shape[:2] != tokens_bt.shape:
            got = tuple(out.shape) if isinstance(out, Tensor) else type(out).__name__
            raise ValueError(
                f"model._target_: {type(self.model).__name__} returned {got} for tokens of shape "
                f"{tuple(tokens_bt.shape)}: it must return logits (batch, time, vocabulary)"
            )
        return out

    def _fused(self, tokens_bt: Tensor, targets_bt: Tensor) -> Tensor:
        """Return the model and the plain loss as one function, for a compiler."""
        if not self.has_head():
            return plain_cross_entropy(self._trunk(tokens_bt), targets_bt)
        head_vd = self._head_weight()
        vocabulary = head_vd.shape[0]
        # rows of zeros, whose logits nobody reads: a device reads what is aligned faster
        padded = F.pad(head_vd, (0, 0, 0, -vocabulary % ALIGNED))
        logits_btv = F.linear(self.model.hidden(tokens_bt), padded)
        return compiled_cross_entropy(logits_btv, targets_bt, vocabulary)

    def fuses_loss(self, tokens: int, device: torch.device) -> bool:
        """Return whether model and plain loss are compiled as one function.

        They are on CUDA where the logits of so many tokens are small beside its memory, or where
        the model gives logits only; never with a split vocabulary.
        """
        if kind_of(device) != "cuda" or self.shard is not None:
            return False
        if not self.chunked:
            return True
        logits = tokens * self._head_weight().shape[0] * 2
        return logits <= WHOLE_SHARE * memory_of(device)

    def _head_weight(self) -> Tensor:
        """Return the rows of the output head that are on this rank (v, d).

        Gradients flow back to the model's parameter.
        """
        weight_vd = self.model.head_weight
        if self.shard is not None and hasattr(weight_vd, "to_local"):
            return weight_vd.to_local()
        return weight_vd

    def loss_kernel(self, device: torch.device, compiled_rows: int | None = None) -> str:
        """Return which kernel runs, and its sizes on a device: "chunked(rows=512, vocab=2048)".

        `compiled_rows`: tokens of a micro-batch of a step that `compile_trunk` compiles.
        """
        if compiled_rows is not None and self.fuses_loss(compiled_rows, device):
            return "plain, compiled with the model"
        if not self.chunked:
            return "plain"
        vocab_size = self._head_weight().shape[0]
        rows, tile = chunk_sizes(device, vocab_size, compiled_rows is not None)
        return f"chunked(rows={rows}, vocab={min(tile, vocab_size)})"

    def compile_trunk(self) -> None:
        """Run the trunk through torch.compile from now on, with the loss where `fuses_loss`.

        Parameters and their names stay as they are.

        The trunk is all before the chunked loss, or the whole model before the plain one.
        """
        self._compiled = True
        self._run_trunk = torch.compile(self._trunk, dynamic=False)
        self.run_fused = torch.compile(self._fused, dynamic=False)

    def compile_blocks(self) -> None:
        """Run each of the model's `blocks` through torch.compile from now on.

        A model without blocks has its trunk compiled.

        Blocks of the same shapes share one compiled graph. For trunks that something in Python has
        to enter between the blocks, as the gathering of sharded parameters does. Parameters' names
        stay as they are.
        """
        blocks = getattr(self.model, "blocks", None)
        if not isinstance(blocks, nn.ModuleList | nn.Sequential) or not len(blocks):
            return self.compile_trunk()
        self._compiled = True
        self.model.document_spans = False  # new ones in each micro-batch: each would be compiled
        for block in blocks:
            block.compile(dynamic=False)

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """Around evaluation: no gradients, no dropout, and nothing is compiled in mid-run.

        A model without dropout or the like keeps its compiled graph; any other is evaluated
        uncompiled. All is as before afterwards: see `evaluation_mode`.
        """
        same = getattr(self.model, "same_in_training", lambda: False)
        with torch.no_grad():
            if self.run_fused is not None and same():
                yield
            else:
                with evaluation_mode(self), self._eager():
                    yield

    def _eager(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context in which nothing runs compiled.

        The compiler is not even imported where nothing is compiled.
        """
        if not self._compiled:
            return contextlib.nullcontext()
        return torch.compiler.set_stance("force_eager")

    def forward(
        self, tokens_bt: Tensor, targets_bt: Tensor | None = None, *, each: bool = False
    ) -> Tensor:
        """Return the cross-entropy in nats, summed over all targets other than -100.

        It is a scalar in fp32 (fp64 in fp64). Losses that modules add are in its gradient alone.

        `tokens_bt` and `targets_bt` are (b, t) ids. With no valid target it is 0, with gradients of
        0. Without targets it returns the logits (b, t, v) of the whole vocabulary, which carry no
        gradient. With `each` it returns the terms of the sum (b, t), which carry none either.
        Raises ValueError where a model's own logits do not have the shape (b, t, v).
        """
        if targets_bt is None or each:
            # Uncompiled: texts have many lengths, and each would be compiled anew.
            with torch.no_grad(), self._eager():
                return self._unsummed(tokens_bt, targets_bt)
        if self._adding:
            return self._with_added(tokens_bt, targets_bt)
        return self._nll(tokens_bt, targets_bt)

    def _with_added(self, tokens_bt: Tensor, targets_bt: Tensor) -> Tensor:
        """Return the loss, with those that modules add in its gradient alone."""
        for module in self._adding:  # a list of its own: blocks share one compiled graph
            module.added_losses = []
        nll = self._nll(tokens_bt, targets_bt)
        losses = [loss for module in self._adding for loss in module.added_losses]
        for module in self._adding:  # what the backward pass computes again adds nothing
            module.added_losses = None
        if not losses:
            return nll
        # the mean over sequences, each as often as it has targets: not one that only fills up
        targets_b = (targets_bt != IGNORE_INDEX).sum(1)
        added = (torch.stack(losses).sum(0) * targets_b).sum().to(nll.dtype)
        return nll + (added - added.detach())  # its gradient alone

    def _nll(self, tokens_bt: Tensor, targets_bt: Tensor) -> Tensor:
        count, device = tokens_bt.numel(), tokens_bt.device
        # in `evaluating` without a compiled graph, whole logits would only take memory
        if self.run_fused is not None and self.training and self.fuses_loss(count, device):
            return self._compiled_call(self.run_fused, tokens_bt, targets_bt)
        out = self._compiled_call(self._run_trunk, tokens_bt)
        if self.chunked:
            head, compiled = self._head_weight(), self._compiled
            return chunked_cross_entropy_sum(out, head, targets_bt, self.shard, compiled)
        return plain_cross_entropy(out, targets_bt)

    def _compiled_call(self, run: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        """Call what may be compiled; in evaluation with the graph of training, if that serves."""
        reuses_graph = self.run_fused is not None and self.training and not torch.is_grad_enabled()
        with torch.enable_grad() if reuses_graph else contextlib.nullcontext():
            out = run(*inputs)
        return out.detach() if reuses_graph else out

    def _unsummed(self, tokens_bt: Tensor, targets_bt: Tensor | None) -> Tensor:
        """Return the loss of each target; without targets the logits of the whole vocabulary."""
        out = self._trunk(tokens_bt)
        if not self.chunked:
            return out if targets_bt is None else plain_cross_entropy(out, targets_bt, "none")
        head_vd = self._head_weight()
        if targets_bt is not None:
            return chunked_cross_entropy(out, head_vd, targets_bt, self.shard)
        logits_btv = F.linear(out, head_vd)
        return logits_btv if self.shard is None else self.shard.gather(logits_btv)
