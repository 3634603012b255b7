"""Score multiple choice by the log-likelihood of each choice after its context.

Completions are scored by the likeliest tokens. Requests are those of lm-eval (EleutherAI's
harness), so that both agree item by item: white space at the end of the context belongs to the
continuation, context and continuation are encoded together, and what is too long loses its
beginning. Names end in their dimensions: b rows, t positions, n items, r requests.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from llmexp import mesh
from llmexp.config.values import ConfigError
from llmexp.data.tokenizers.base import Tokenizer
from llmexp.metrics.ratio import with_error
from llmexp.models.loss import SummedLoss, evaluation_mode, plain_cross_entropy
from llmexp.models.operands import IGNORE_INDEX
from llmexp.optim import precision
from llmexp.tasks.items import Item, read_task

WHOLE_LOGITS = 4096  # tokens of a batch whose logits are held whole


@dataclass(frozen=True)
class Request:
    """Ids of a context and a continuation, of which the last `count` are scored."""

    ids: list[int]
    count: int


@dataclass(frozen=True)
class Task:
    """A task ready to be scored: the items, and a request for each choice of each."""

    name: str
    items: list[Item]
    requests: list[Request]


def prepare_tasks(
    names: Sequence[str], folder: str | None, tokenizer: Tokenizer, length: int
) -> list[Task]:
    """Return the tasks of these names, with their requests. Raises ConfigError."""
    return [prepare_task(name, read_task(name, folder), tokenizer, length) for name in names]


def prepare_task(name: str, items: Sequence[Item], tokenizer: Tokenizer, length: int) -> Task:
    """Return a task of a tokenizer and the longest input of a model.

    Raises ConfigError for a choice that is longer, with file and line.
    """
    requests = []
    for item in items:
        for context, choice in zip(item.contexts, item.choices, strict=True):
            context_ids, ids = encode_pair(tokenizer, context, f" {choice}")
            if not context_ids:
                raise ConfigError(
                    "wrong_tokenizer",
                    f"{item.place}: the context is empty, and {tokenizer.name} has no token for "
                    "the start of a document to put there",
                )
            if not ids:
                raise ConfigError(
                    "wrong_tokenizer",
                    f"{item.place}: the choice {choice!r} has no token of its own, as "
                    f"{tokenizer.name} makes one of its letters and of those before it; leave the "
                    "item out",
                )
            if len(ids) > length:
                raise ConfigError(
                    "too_large",
                    f"{item.place}: a choice has {len(ids):,} tokens, and the longest input of the "
                    f"model is batch.sequence_length={length}",
                )
            requests.append(Request((context_ids + ids)[-(length + 1) :], len(ids)))
    return Task(name, list(items), requests)


def encode_pair(
    tokenizer: Tokenizer, context: str, continuation: str
) -> tuple[list[int], list[int]]:
    """Return the ids of a context and of what follows, as lm-eval has them.

    (TemplateLM._encode_pair and loglikelihood.)
    """
    if not context.strip():
        end = tokenizer.eot_token
        return [] if end is None else [end], tokenizer.encode_ordinary(context + continuation)
    spaces = len(context) - len(context.rstrip())
    if spaces:
        context, continuation = context[:-spaces], context[-spaces:] + continuation
    whole = tokenizer.encode_ordinary(context + continuation)
    alone = tokenizer.encode_ordinary(context)
    return alone, whole[len(alone) :]


def batches(requests: Sequence[Request], tokens: int) -> list[list[int]]:
    """Return the numbers of the requests, the longest first, cut where `tokens` are full."""
    order = sorted(range(len(requests)), key=lambda i: (-len(requests[i].ids), i))
    found: list[list[int]] = []
    rows = 0
    for number in order:
        if not found or len(found[-1]) == rows:
            rows = max(1, tokens // (len(requests[number].ids) - 1))
            found.append([])
        found[-1].append(number)
    return found


def pad(chosen: Sequence[Request]) -> tuple[Tensor, Tensor]:
    """Return (tokens_bt, targets_bt) of requests, the longest first.

    The end of a row is filled: attention is causal, so what is scored does not see that.
    """
    width = max((len(one.ids) - 1 for one in chosen), default=1)
    tokens = np.zeros((max(1, len(chosen)), width), np.int64)
    targets = np.full(tokens.shape, IGNORE_INDEX, np.int64)
    for row, one in enumerate(chosen):
        stop = len(one.ids) - 1
        tokens[row, :stop] = one.ids[:-1]
        targets[row, stop - one.count : stop] = one.ids[-one.count :]
    return torch.from_numpy(tokens), torch.from_numpy(targets)


def likelihoods(
    requests: Sequence[Request],
    loss: SummedLoss,
    joined: mesh.Mesh,
    kind: str,
    tokens: int,
    greedy: bool = False,
) -> tuple[np.ndarray, np.ndarray]:
    """Return float64 [r]: the log-likelihood of each request's continuation, in nats.

    With `greedy` also 1.0 for one whose tokens are each the likeliest. The ranks share the batches
    out; each calls the model equally often, as a sharded one needs. `kind` is the precision,
    `tokens` the size of a batch. The mode of the model is left alone.
    """
    found_2r = torch.zeros(2, len(requests), dtype=torch.float64, device=joined.device)
    dealt = batches(requests, min(tokens, WHOLE_LOGITS) if greedy else tokens)
    for first in range(0, len(dealt), joined.dp_size):
        mine = dealt[first + joined.dp_rank] if first + joined.dp_rank < len(dealt) else []
        tokens_bt, targets_bt = (
            x.to(joined.device, non_blocking=True) for x in pad([requests[i] for i in mine])
        )
        hit_b = torch.zeros(len(tokens_bt), device=joined.device)
        with torch.no_grad(), precision.autocast(kind, joined.device):
            if greedy:
                logits_btv = loss(tokens_bt)
                nll_bt = plain_cross_entropy(logits_btv, targets_bt, "none")
                hit_b = ((logits_btv.argmax(-1) == targets_bt) | (targets_bt < 0)).all(1)
            else:
                nll_bt = loss(tokens_bt, targets_bt, each=True)
        if mine:
            index = torch.tensor(mine).to(joined.device, non_blocking=True)
            found_2r[:, index] = torch.stack([-nll_bt.double().sum(1), hit_b.double()])
    lls_r, hits_r = mesh.total_(joined, found_2r).cpu().numpy()
    return lls_r, hits_r


def score_task(
    task: Task, loss: SummedLoss, joined: mesh.Mesh, kind: str, tokens: int
) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Return the figures of a task, and the scores of each item.

    Raises ConfigError where the model gives a likelihood that is not finite.
    """
    completed = task.items[0].completed
    with evaluation_mode(loss):
        lls, hits = likelihoods(task.requests, loss, joined, kind, tokens, completed)
    if not np.isfinite(lls).all():
        raise ConfigError("not_finite", f"the task {task.name}: a likelihood is not finite")
    samples, first = [], 0
    for item in task.items:
        own = lls[first : first + len(item.choices)].tolist()
        samples.append(_sample(item, own, bool(hits[first])))
        first += len(item.choices)
    return task_figures(samples), samples


def _sample(item: Item, lls: list[float], hit: bool) -> dict[str, Any]:
    sizes = [len(choice.encode()) for choice in item.choices]
    normed = [ll / size for ll, size in zip(lls, sizes, strict=True)]
    context = item.contexts[item.answer]
    space = context[len(context.rstrip()) :]  # it is scored, too
    return {
        "id": item.id,
        "answer": item.answer,
        "loglikelihoods": lls,
        "acc": float(hit if item.completed else int(np.argmax(lls)) == item.answer),
        "acc_norm": float(hit if item.completed else int(np.argmax(normed)) == item.answer),
        "nll": -lls[item.answer],
        "bytes": len(f"{space} {item.choices[item.answer]}".encode()),
    }


def task_figures(samples: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return acc, acc_norm and bits per byte of the right choices, each with its standard error.

    acc_norm is by likelihoods per byte of the choice; errors are over the items.
    """

    def column(key: str) -> np.ndarray:
        return np.array([one[key] for one in samples], dtype=np.float64)

    one_n = np.ones(len(samples))
    found = with_error("acc", column("acc"), one_n)
    found |= with_error("acc_norm", column("acc_norm"), one_n)
    return found | with_error("bits_per_byte", column("nll") / math.log(2), column("bytes"))
