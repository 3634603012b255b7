"""Find spikes in a run's loss and gradient norm, and record each with its run-up layer by layer.

A spike begins with a step above the robust limits of the trailing window (see `metrics.outliers`),
and lasts until a step is within them and its loss is at or below the window's median before it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from llmexp.metrics import outliers
from llmexp.metrics.outliers import Limits
from llmexp.runs.rundir import SPIKES
from llmexp.system.fileio import Unwritable, write_json
from llmexp.train.layers import row_of
from llmexp.train.state import Loop
from llmexp.train.step import BAD_LOSS, BAD_NORM, Outcome
from llmexp.train.windows import sequences_of

CALM = 5  # the first of the recorded steps, whose largest value is a module's level
RISE = 2  # a norm has risen that is more than this many times its level


def follow_spike(loop: Loop, seen: Outcome, limits: Limits | None) -> None:
    """Take a finished step; write spikes/STEP.json and a line where a spike begins with it.

    `limits`: the robust ones that held for the step. A step that overflowed begins no spike and
    ends none. Raises Unwritable.
    """
    progress, known = loop.progress, seen.code not in (BAD_LOSS, BAD_NORM)
    above = False
    if known and limits is not None:
        above = seen.loss > limits.loss[1] or seen.grad_norm > limits.norm[1]
    if above and limits is not None and progress.spike_level is None:
        progress.spikes += 1
        progress.spike_level = sum(limits.loss) / 2
        record_spike(loop, seen, limits)
    level = progress.spike_level
    if known and not above and level is not None and seen.loss <= level:
        progress.spike_level = None
    if progress.spike_level is not None:
        progress.spike_tokens += int(seen.target_tokens)


def record_spike(loop: Loop, seen: Outcome, limits: Limits) -> None:
    """Write what is known of a spike, the last steps layer by layer among it, and say it."""
    progress = loop.progress
    steps = [{"step": step} | row_of(taken) for step, taken in loop.last_layers]
    first = rose_first(steps)
    if first is not None:
        count = progress.rose_first.get(first["module"], 0)
        progress.rose_first[first["module"]] = count + 1
    if not loop.out.main:
        return
    begin, starts = sequences_of(loop.parts, progress.step)
    folder = loop.out.path / SPIKES
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise Unwritable(error.errno, error.strerror, str(folder)) from error
    write_json(
        folder / f"{progress.step}.json",
        {
            "step": progress.step,
            "loss": seen.loss,
            "grad_norm": seen.grad_norm,
            "limits": {"loss": limits.loss, "grad_norm": limits.norm},
            "sequences": [begin, begin + len(starts)],
            "first_tokens": starts,
            "rose_first": first,
            "steps": steps,
        },
    )
    why = outliers.describe(limits, seen.loss, seen.grad_norm)
    loop.out.console.line(f"step {progress.step:,} is a spike: {why}; {what_rose(steps, first)}")


def rose_first(steps: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Return which module rose first before a spike; None where none did, or steps are too few.

    A module rises where the norm of its gradient or of its update is more than RISE times the
    largest of the first CALM steps. Of several that rise at the same step it is the one that rises
    most.
    """
    for row in steps[CALM:]:
        risen = []
        for figure in ("grad_norm", "update_norm"):
            for module, value in row[figure].items():
                level = max(calm[figure].get(module, 0.0) for calm in steps[:CALM])
                if level > 0 and value > RISE * level:
                    risen.append((value / level, module, figure))
        if risen:
            times, module, figure = max(risen)
            return {"module": module, "figure": figure, "step": row["step"], "times": times}
    return None


def what_rose(steps: list[dict[str, Any]], first: dict[str, Any] | None) -> str:
    """Return what rose first in the steps before, for a line."""
    if len(steps) <= CALM:  # since a resume
        return f"{len(steps)} measured steps do not tell which module rose first"
    if first is None:
        return f"no module rose to {RISE} times its level before"
    figure = {"grad_norm": "gradient", "update_norm": "update"}[first["figure"]]
    where = f"{first['module']} rose first, at step {first['step']:,}"
    return f"{where} (norm of its {figure}, {first['times']:.3g} times its level)"


def spike_totals(loop: Loop) -> dict[str, Any]:
    """Return the number of spikes, the tokens until the loss was back, and what rose first."""
    progress = loop.progress
    if not loop.config.metrics.spikes:
        return {}
    found: dict[str, Any] = {"spikes": progress.spikes, "spike_tokens": progress.spike_tokens}
    if progress.rose_first:
        module = max(progress.rose_first, key=lambda name: progress.rose_first[name])
        found["rose_first"] = {"module": module, "spikes": progress.rose_first[module]}
    return found


def forget_after(path: Path, step: int) -> None:
    """Remove the records of spikes after a step from a run's folder, as its rows are."""
    for file in (path / SPIKES).glob("*.json"):
        if file.stem.isdigit() and int(file.stem) > step:
            file.unlink()
