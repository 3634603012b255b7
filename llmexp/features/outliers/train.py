from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from llmexp import mesh
from llmexp.config.sections import knobs_of
from llmexp.data.window import Window
from llmexp.features.outliers.config import Knobs
from llmexp.features.outliers.limits import LASTING, Judge, Limits, describe
from llmexp.train.assembly.assemble import Parts
from llmexp.train.feature import Feature, starting
from llmexp.train.state import Loop
from llmexp.train.step import Outcome, Setup

KEPT = 100  # steps that were outliers


def make(parts: Parts, setup: Setup) -> Outliers:
    chosen = knobs_of(parts.config, Knobs)
    assert chosen.outlier_sigma is not None
    judge = Judge(chosen.outlier_sigma, chosen.outlier_window)
    return Outliers(setup.mesh, judge, chosen.skip_outliers)


class Outliers(Feature):
    """Count the steps above the limits of those before, and skip their updates if asked."""

    name, refuses = "outliers", "an outlier"
    loop: Loop

    def __init__(self, joined: mesh.Mesh, judge: Judge, skip: bool) -> None:
        self._mesh, self._judge, self._skip = joined, judge, skip
        self.count, self._steps = 0, list[int]()
        # told of each finished step, with robust limits that held for it
        self.watchers: list[Callable[[Outcome, Limits | None], None]] = []

    def judge(self, skip: Any, loss: Any, norm: Tensor) -> Any:
        limits = self._judge.limits  # by the finished steps: all before this one
        if limits is None or not self._skip:
            return skip
        return judged(self._mesh, skip, loss, norm, limits)

    def finished(self, outcome: Outcome) -> None:
        step, limits = self.loop.progress.step, self._judge.limits
        held = limits is None or limits.hold(outcome.loss, outcome.grad_norm)
        if limits is not None and outcome.is_finite and not held:
            self.count += 1
            self._steps = [*self._steps, step][-KEPT:]
            skipped = "; its update was skipped" if outcome.skipped else ""
            why = describe(limits, outcome.loss, outcome.grad_norm)
            self.loop.console.line(f"step {step:,} is an outlier: {why}{skipped}")
        for watch in self.watchers:
            watch(outcome, self._judge.robust())
        if outcome.is_finite:
            skipped_here = outcome.skipped and not held  # not by another feature
            self._judge.add(outcome.loss, outcome.grad_norm, skipped=skipped_here)
            if self._judge.skipped == LASTING:
                words = f"{LASTING} in a row: this level counts as usual from now on"
                self.loop.console.line(words)
        if any(stage.first_step == step for stage in self.loop.run.stages[1:]):
            self._judge.forget()  # the next step has another batch, and other norms

    def row(self, window: Window) -> dict[str, Any]:
        return {"outlier_steps": self.count}

    def summary(self) -> dict[str, Any]:
        return {"outlier_steps": self.count}

    def begins_anew(self, changed: Sequence[str]) -> bool:
        """With other data or batches other losses and norms are usual."""
        batches = "batch.real_batch_size", "batch.sequence_length", "batch.ramp"
        return bool(starting(changed, "data.", *batches))

    def state_dict(self) -> dict[str, Any]:
        counts = {"outlier_count": self.count, "outlier_steps": self._steps}
        return self._judge.state_dict() | counts

    def load_state_dict(self, state: dict[str, Any], anew: bool) -> None:
        self.count, self._steps = state["outlier_count"], state["outlier_steps"]
        if not anew:
            self._judge.load_state_dict(state)


def judged(joined: mesh.Mesh, skip: Any, loss: Any, norm: Tensor, limits: Limits) -> Any:
    """Return whether all ranks skip a step, outliers included; `Outliers.finished` must agree."""
    if isinstance(skip, bool):
        return mesh.any_rank(joined, skip or not limits.hold(loss, float(norm)))[0]
    loss_64, norm_64 = loss.double(), norm.double()  # as `Limits.hold` compares them
    above = (loss_64 > limits.loss[1]) | (norm_64 > limits.norm[1])
    return mesh.maximum(joined, (skip | above).int()) > 0
