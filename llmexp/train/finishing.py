"""Finish a step: read its outcome, count it, or end the run with words for what went wrong."""

from __future__ import annotations

import math

from llmexp import mesh
from llmexp.folders.ending import COMES_AGAIN, goes_on
from llmexp.train.checkpointing import save_what_can_be
from llmexp.train.state import Loop
from llmexp.train.step import (
    BAD_LOSS,
    BAD_NORM,
    EMPTY,
    SKIPPED,
    Outcome,
    TrainingFailed,
)


class NotFinite(TrainingFailed):
    """A step has figures that are not finite; a second pass over it tells where they begin."""


FINDINGS = {EMPTY: "no valid target", BAD_LOSS: "a loss", BAD_NORM: "a gradient norm"}


def finish_step(loop: Loop) -> int:
    """Read the outcome of the last step, unless that is done, and count the step.

    Return the number of applied updates. Raises TrainingFailed where the run cannot go on.
    """
    progress, outcome = loop.progress, loop.outcome
    if outcome is None:
        return progress.updates
    loop.outcome = None
    code = outcome.read().code
    loss = math.nan if code in (EMPTY, BAD_LOSS) else outcome.loss
    if loop.rows is not None:
        norm = math.nan if outcome.skipped else outcome.grad_norm
        loop.rows.add_step(loss, outcome.target_tokens, norm, outcome.lr)
    loop.features.at("finished", outcome)
    if outcome.skipped:
        count_skipped(loop, outcome, code)
    else:
        progress.updates += 1
        progress.consecutive_skips = 0
    if math.isfinite(loss):
        progress.loss, progress.least_loss = (progress.step, loss), min(progress.least_loss, loss)
    return progress.updates


def count_skipped(loop: Loop, outcome: Outcome, code: int) -> None:
    """Count a skipped update, and say so. Raises TrainingFailed where the run cannot go on."""
    progress = loop.progress
    # without a loss scale a figure that is not finite ends the run, below
    if code in (EMPTY, SKIPPED) or loop.setup.scaler.enabled:
        progress.skipped_steps += 1
        progress.consecutive_skips += 1
    if end := reason_to_end(loop, outcome, code):
        raise end
    if code != SKIPPED:  # of which the feature prints more
        how = "" if code == EMPTY else " that overflowed fp16"
        text = f"step {progress.step:,} has {FINDINGS[code]}{how}; its update was skipped"
        loop.console.line(text)


def reason_to_end(loop: Loop, outcome: Outcome, code: int) -> TrainingFailed | None:
    """Return why the run cannot go on after a skipped update; None where it can.

    All ranks are here, and the checkpoint that is on its way is finished.
    """
    progress, scaler = loop.progress, loop.setup.scaler
    overflowed, limit = code in (BAD_LOSS, BAD_NORM), loop.config.train.max_consecutive_skips
    not_finite = overflowed and not scaler.enabled
    scale_gone = overflowed and scaler.enabled and float(scaler.value) < 1
    too_many = progress.consecutive_skips > limit and code != SKIPPED
    if not (not_finite or scale_gone or too_many):
        return None
    save_what_can_be(loop)
    if not_finite:
        ranks = mesh.ranks_where(loop.mesh, not math.isfinite(outcome.own_nll))
        where = f" on {mesh.numbered(ranks)}" if ranks else ""
        return NotFinite(
            f"step {progress.step} has {FINDINGS[code]} that is not finite{where}; the update was "
            "not applied"
        )
    if scale_gone:
        return NotFinite(
            f"the fp16 loss scale fell below 1 at step {progress.step}: these gradients do not fit "
            "fp16"
        )
    how = f" that overflowed fp16 at a loss scale of {2 * float(scaler.value):g}, which falls on"
    return TrainingFailed(
        f"{progress.consecutive_skips} updates in a row were skipped, the last at step "
        f"{progress.step} ({FINDINGS[code]}{how * overflowed}); train.max_consecutive_skips={limit}"
        f": resumed with a larger one, {goes_on('train.max_consecutive_skips', 2 * limit or 100)}"
    )


def none_applied(loop: Loop) -> str:
    """Return why a run ended without an update; a loss scale that falls goes on at a resume."""
    first, steps = loop.run.first_step, loop.progress.step
    text, scale = f"none of the {steps - first:,} steps applied an update:", loop.setup.scaler
    if scale.enabled and float(scale.value) < loop.config.precision.init_scale:
        text += f" they overflowed fp16, and the loss scale fell to {float(scale.value):g}; resumed"
        return f"{text} with a larger budget, {goes_on('train.max_steps', 2 * steps)}"
    return f"{text} no step had a valid target (as data.ignore_id may cause); {COMES_AGAIN}"
