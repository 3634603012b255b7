"""Find spikes in a run's loss and gradient norm, and record each with its run-up layer by layer.

A spike begins with a step above the robust limits of the trailing window (`outliers.limits`),
and lasts until a step is within them and its loss is at or below the window's median before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llmexp.features.layers.figures import row_of
from llmexp.features.layers.train import LayerByLayer
from llmexp.features.outliers.limits import Limits, describe
from llmexp.features.outliers.train import Outliers
from llmexp.features.spikes.config import FOLDER
from llmexp.system.fileio import Unwritable, write_json
from llmexp.train.assembly.assemble import Parts
from llmexp.train.feature import Feature
from llmexp.train.state import Loop
from llmexp.train.step import BAD_LOSS, BAD_NORM, EMPTY, Outcome, Setup
from llmexp.train.windows import sequences_of

CALM = 5  # the first of the recorded steps, whose largest value is a module's level
RISE = 2  # a norm has risen that is more than this many times its level


def make(parts: Parts, setup: Setup) -> Spikes:
    (layers,) = (f for f in setup.features if isinstance(f, LayerByLayer))
    (outliers,) = (f for f in setup.features if isinstance(f, Outliers))
    made = Spikes(layers)
    outliers.watchers.append(made.follow)
    return made


class Spikes(Feature):
    """Follow spikes; what is counted is a fork's own."""

    name = "spikes"
    loop: Loop

    def __init__(self, layers: LayerByLayer) -> None:
        self._layers = layers
        self.spikes = 0
        self.spike_tokens = 0  # target tokens of all ranks from each spike until its loss was back
        self.spike_level: float | None = None  # to which the loss has to come back; None: there
        self.rose_first: dict[str, int] = {}  # by module: how many spikes it rose first in

    def follow(self, outcome: Outcome, limits: Limits | None) -> None:
        """Take a finished step; write spikes/STEP.json and a line where a spike begins with it.

        `limits`: the robust ones that held for the step. A step that overflowed begins no spike and
        ends none. Raises Unwritable.
        """
        if outcome.code == EMPTY:
            return
        known, above = outcome.code not in (BAD_LOSS, BAD_NORM), False
        if known and limits is not None:
            above = outcome.loss > limits.loss[1] or outcome.grad_norm > limits.norm[1]
        if above and limits is not None and self.spike_level is None:
            self.spikes += 1
            self.spike_level = sum(limits.loss) / 2
            self._record(outcome, limits)
        level = self.spike_level
        if known and not above and level is not None and outcome.loss <= level:
            self.spike_level = None
        if self.spike_level is not None:
            self.spike_tokens += int(outcome.target_tokens)

    def _record(self, outcome: Outcome, limits: Limits) -> None:
        """Write what is known of a spike, the last steps layer by layer among it, and say it."""
        loop, step = self.loop, self.loop.progress.step
        steps = [{"step": at} | row_of(taken) for at, taken in self._layers.last]
        first = rose_first(steps)
        if first is not None:
            count = self.rose_first.get(first["module"], 0)
            self.rose_first[first["module"]] = count + 1
        if not loop.main:
            return
        begin, starts = sequences_of(loop.parts, step)
        folder = loop.path / FOLDER
        try:
            folder.mkdir(exist_ok=True)
        except OSError as error:
            raise Unwritable(error.errno, error.strerror, str(folder)) from error
        write_json(
            folder / f"{step}.json",
            {
                "step": step,
                "loss": outcome.loss,
                "grad_norm": outcome.grad_norm,
                "limits": {"loss": limits.loss, "grad_norm": limits.norm},
                "sequences": [begin, begin + len(starts)],
                "first_tokens": starts,
                "rose_first": first,
                "steps": steps,
            },
        )
        why = describe(limits, outcome.loss, outcome.grad_norm)
        loop.console.line(f"step {step:,} is a spike: {why}; {what_rose(steps, first)}")

    def summary(self) -> dict[str, Any]:
        return {"spikes": self.spikes, "spike_tokens": self.spike_tokens}

    def status(self) -> dict[str, Any]:
        found = self.summary()
        if self.rose_first:
            module = max(self.rose_first, key=lambda name: self.rose_first[name])
            found["rose_first"] = {"module": module, "spikes": self.rose_first[module]}
        return found

    def words(self) -> list[tuple[str, str]]:
        if first := self.status().get("rose_first"):
            return [("rose first", f"{first['module']}, in {first['spikes']} of the spikes")]
        return []

    def begins_anew(self, changed: Sequence[str]) -> bool:
        return True

    def state_dict(self) -> dict[str, Any]:
        found = self.summary() | {"spike_level": self.spike_level}
        return found | {"rose_first": dict(self.rose_first)}

    def load_state_dict(self, state: dict[str, Any], anew: bool) -> None:
        for name in () if anew else ("spikes", "spike_tokens", "spike_level", "rose_first"):
            setattr(self, name, state[name])


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
        return f"{len(steps)} measured steps do not show which module rose first"
    if first is None:
        return f"no module rose to {RISE} times its level before"
    figure = {"grad_norm": "gradient", "update_norm": "update"}[first["figure"]]
    where = f"{first['module']} rose first, at step {first['step']:,}"
    return f"{where} (norm of its {figure}, {first['times']:.3g} times its level)"
