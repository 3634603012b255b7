"""Repeat a run up to a step, and look into that step: its sequences and its update.

Its worker has a folder that is a copy of the run's (see `verify.replay`), and the run's layout.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from llmexp import mesh
from llmexp.data.window import Window
from llmexp.models.loss import evaluation_mode
from llmexp.models.operands import IGNORE_INDEX
from llmexp.modes import diagnosis
from llmexp.optim import precision
from llmexp.system.redact import clean
from llmexp.train.clipping import ByNorm
from llmexp.train.finishing import FINDINGS, NotFinite, finish_step
from llmexp.train.loop import Due, take_step
from llmexp.train.state import Loop
from llmexp.train.step import (
    BAD_LOSS,
    BAD_NORM,
    Outcome,
    TrainingFailed,
    accumulate,
    at_least_one,
    loss_factor,
    on_host,
)
from llmexp.train.windows import sequences_of

_OTHERS = 8  # windows near the step whose gradient norms are the usual ones
_BEGINNING_TOKENS = 60  # of a document, to show which one it is


def run(loop: Loop, asked: dict[str, Any]) -> dict[str, Any]:
    """Do what is asked for, and return what was found.

    Asked for are: `step`; `rows`, the run's by step; `only_look`, at the step's window with the
    weights that are there; `lr` and `max_norm`, other values for the step; to `skip` its window;
    how many steps to take `after` it.
    """
    found: dict[str, Any] = {"from": loop.progress.step, "equal": [], "differs": None}
    found |= {"norms": {}, "losses": {}, "start": around(loop, asked["step"])}
    if not asked["only_look"]:
        windows = loop.windows(loop.progress.step)
        while loop.progress.step < asked["step"] - 1 and found["differs"] is None:
            _, outcome = take_step(loop, windows, Due())
            finish_step(loop)
            if not outcome.skipped:
                found["norms"][loop.progress.step] = outcome.grad_norm
                found["losses"][loop.progress.step] = outcome.loss
            _compare(found, asked["rows"], loop.progress.step, outcome)
        if found["differs"] is None:
            found |= look_into(loop, windows, asked, found)
    return found


def _take(loop: Loop, windows: Iterator[Window]) -> tuple[Outcome, str]:
    """Take a step of the run; return it, and why it ended the run if it did."""
    _, outcome = take_step(loop, windows, Due())
    try:
        finish_step(loop)
    except NotFinite as bad:
        return outcome, diagnosis.run(loop, bad)
    except TrainingFailed as error:
        return outcome, str(error)
    return outcome, ""


def _compare(found: dict[str, Any], rows: dict[str, Any], step: int, outcome: Outcome) -> None:
    """Compare a step with its row bit by bit, where the run has one."""
    row = rows.get(str(step))
    if row is None:
        return
    figures = {"train/loss": outcome.loss, "grad_norm": outcome.grad_norm}
    for key, value in figures.items():
        if key in row and row[key] != value:
            found["differs"] = {"step": step, "figure": key, "row": row[key], "replayed": value}
            return
    found["equal"].append(step)


def look_into(
    loop: Loop, windows: Iterator[Window], asked: dict[str, Any], found: dict[str, Any]
) -> dict[str, Any]:
    """Return what the step is made of, take it, and return what became of the loss."""
    window = next(windows)
    with measuring(loop):
        norm, sequences = by_sequence(loop, window)
    here: dict[str, Any] = {"sequences": sequences}
    later, ended = list[Any](), ""
    if asked["skip"]:
        loop.progress.step += 1
    else:
        setup = loop.setup
        if asked["max_norm"] is not None:
            clip = dataclasses.replace(loop.config.clip, max_norm=asked["max_norm"])
            rule = ByNorm(clip, setup.mesh, setup.model, setup.optimizers)
            loop.setup = dataclasses.replace(setup, clipping=rule)
        if asked["lr"] is not None:
            base = setup.optimizers[0].param_groups[0]["initial_lr"]
            rate = asked["lr"] / base
            loop.setup = dataclasses.replace(
                loop.setup, rate_factor=lambda updates: rate, stage_rate=lambda step: 1.0
            )
        outcome, ended = _take(loop, itertools.chain([window], windows))
        loop.setup = setup
        _compare(found, asked["rows"], loop.progress.step, outcome)
        here |= {"lr": outcome.lr} | figures_of(loop, outcome, norm)
        for figures_at in loop.features.on("last_step"):
            here |= figures_at()
        if not ended:
            with measuring(loop):
                here["loss_after"] = _known(loss_and_norm(loop, window)[0])  # None: a rate too high
    last = min(loop.progress.step + asked["after"], loop.run.max_steps)
    while not ended and loop.progress.step < last:
        outcome, ended = _take(loop, windows)
        if not outcome.skipped:
            later.append([loop.progress.step, outcome.loss, outcome.grad_norm])
    return {"here": here, "later": later} | ({"ended": ended} if ended else {})


def figures_of(loop: Loop, outcome: Outcome, norm: float) -> dict[str, Any]:
    """Return the figures of the step; what is not finite is None.

    `norm`: of its gradient, measured at a loss scale that does not overflow.
    """
    found = {"loss": _known(outcome.loss), "grad_norm": _known(outcome.grad_norm)}
    if not outcome.skipped:
        return found | {"grad_norm_post_clip": outcome.grad_norm_post_clip}
    refused = " or ".join(feature.refuses for feature in loop.features if feature.refuses)
    how = FINDINGS.get(outcome.code) or refused or "a finding of a hook"
    if outcome.code in (BAD_LOSS, BAD_NORM):
        how += " that is not finite"
        if loop.setup.scaler.enabled:
            how += f" at the loss scale {outcome.loss_scale:g}"
            found["grad_norm"] = _known(norm)
    return found | {"skipped": how}


def _known(value: float) -> float | None:
    return value if math.isfinite(value) else None


def around(loop: Loop, step: int) -> dict[str, Any]:
    """Return loss and gradient norm of the step's window, and of others near it, at one state.

    Windows are those before the step, or after it where these are too few. What is not finite is
    None.
    """
    begin, end = step - 1 - _OTHERS, step + _OTHERS
    begin, end = max(loop.run.first_step, begin), min(loop.run.max_steps, end)
    wanted = [i for i in range(begin, end) if i != step - 1][:_OTHERS]
    figures = dict[int, list[float]]()
    with measuring(loop):
        for window in itertools.islice(loop.windows(begin), end - begin):
            if window.step in wanted or window.step == step - 1:
                figures[window.step] = loss_and_norm(loop, window)
    others = [pair for i, pair in figures.items() if i in wanted and math.isfinite(pair[1])]
    return {"window": [_known(figure) for figure in figures[step - 1]], "others": others}


@contextlib.contextmanager
def measuring(loop: Loop) -> Iterator[None]:
    """Compute without dropout and compiled graphs; leave no gradient and the loss scale behind."""
    scaler = loop.setup.scaler
    scale = scaler.value
    mesh.share_buffers(loop.mesh, loop.setup.model)
    try:
        with evaluation_mode(loop.setup.model), torch.compiler.set_stance("force_eager"):
            yield
    finally:
        loop.setup.zero_gradients()
        scaler.value = scale


def differentiate(loop: Loop, window: Window, weight: Tensor) -> tuple[float, list[Tensor], float]:
    """Compute a window's loss, summed over the ranks, its gradient of true scale, and its norm."""
    setup = loop.setup
    setup.zero_gradients()
    nll = float(on_host(mesh.total_(setup.mesh, accumulate(setup, window, weight))))
    gradients = setup.gradients
    setup.scaler.unscale([mesh.local_part(g) for g in gradients])
    return nll, gradients, float(mesh.global_norm(setup.mesh, gradients))


def loss_and_norm(loop: Loop, window: Window) -> list[float]:
    """Return mean loss and gradient norm of a window; its gradient stays.

    In fp16 the loss scale falls as far as the gradient needs to be finite.
    """
    setup = loop.setup
    while True:
        count, weight = loss_factor(setup, window)
        nll, _, norm = differentiate(loop, window, weight)
        loss = nll / float(at_least_one(count))
        scale = float(setup.scaler.value)
        if math.isfinite(norm) or not math.isfinite(loss) or not setup.scaler.enabled or scale <= 1:
            return [loss, norm]
        setup.scaler.value = setup.scaler.value / 2


def by_sequence(loop: Loop, window: Window) -> tuple[float, list[dict[str, Any]]]:
    """Return a window's gradient norm, and loss, norm and share of each sequence, on all ranks.

    The share is <g_i, g> / <g, g>, of the sequence's part g_i of the window's gradient g: shares
    add up to 1. What is not finite is None. Each sequence is a window of its own, on one rank,
    while the others have no target.
    """
    setup, joined = loop.setup, loop.mesh
    total = loss_and_norm(loop, window)[1]
    whole = [g.detach().clone() for g in setup.gradients]
    weight = loss_factor(setup, window)[1]
    rows = [
        (t[None], g[None]) for batch in window.micro_batches for t, g in zip(*batch, strict=True)
    ]
    begin, starts = sequences_of(loop.parts, window.step + 1)
    found: list[dict[str, Any]] = []
    for owner, number in itertools.product(range(joined.dp_size), range(len(rows))):
        tokens_1t, targets_1t = rows[number]
        if owner != joined.dp_rank:
            targets_1t = torch.full_like(targets_1t, IGNORE_INDEX)
        alone = Window(-1, [(tokens_1t, targets_1t)], 0, 0)
        nll, gradients, norm = differentiate(loop, alone, weight)
        inner = float(mesh.inner(joined, gradients, whole))
        share = inner / total**2 if total and math.isfinite(total) else 0 * total
        with precision.autocast(setup.arithmetic, joined.device):
            operands = (x.to(joined.device) for x in (tokens_1t, targets_1t))
            each_t = setup.loss(*operands, each=True)[0]
        each_t = mesh.total_(joined, each_t.double())
        valid = mesh.total_(joined, (targets_1t[0] != IGNORE_INDEX).double().to(joined.device))
        targets = int(valid.sum())
        if len(found) < len(starts):
            start = starts[len(found)]
            found.append(
                {
                    "sequence": begin + len(found),
                    "first_token": start,
                    "targets": targets,
                    "loss": _known(nll / max(1, targets)),
                    "grad_norm": _known(norm),
                    "share": _known(share),
                    "documents": _documents_of(loop, start, each_t, valid),
                }
            )
    return total, found


def _documents_of(loop: Loop, start: int, each_t: Tensor, valid_t: Tensor) -> list[dict[str, Any]]:
    """Return the documents, or parts of them, of the sequence that begins at a token.

    Each has its first token, targets, their mean loss, and the beginning of its text.
    """
    tokenizer = loop.parts.tokenizer
    ids = loop.parts.corpus.train.read(start, len(each_t) + 1)
    last = ids[:-1] == tokenizer.eot_token if tokenizer.eot_token is not None else ids[:0]
    ends = (np.flatnonzero(last) + 1).tolist()
    edges = sorted({0, *ends, len(each_t)})
    nll, valid, has_meaning = each_t.cpu().numpy(), valid_t.cpu().numpy(), tokenizer.has_meaning()
    found = []
    for a, b in itertools.pairwise(edges):
        targets, begin = int(valid[a:b].sum()), ids[a : min(b, a + _BEGINNING_TOKENS)]
        begin = begin[begin < len(has_meaning)]  # prepared ids may be of another tokenizer
        text = tokenizer.decode(begin[has_meaning[begin]].tolist())
        loss = _known(float(nll[a:b].sum()) / targets) if targets else None
        found.append(
            {"first_token": start + a, "targets": targets, "loss": loss, "text": clean(text)}
        )
    return found
