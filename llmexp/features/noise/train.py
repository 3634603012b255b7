from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor

from llmexp.config.sections import knobs_of
from llmexp.data.window import Window
from llmexp.features.noise.config import Knobs
from llmexp.features.noise.scale import NoiseScale, SmallGradient
from llmexp.train.assembly.assemble import Parts
from llmexp.train.feature import Feature
from llmexp.train.state import Loop
from llmexp.train.step import Outcome, Setup


def make(parts: Parts, setup: Setup) -> Noise:
    every = knobs_of(parts.config, Knobs).noise_scale_every
    assert every is not None
    return Noise(setup, every, parts.run.sequence_length)


class Noise(Feature):
    """Measure a small gradient in every so many steps; the host learns of it with the outcome."""

    name = "noise"
    loop: Loop

    def __init__(self, setup: Setup, every: int, sequence_length: int) -> None:
        self.peaks_every, self._parameters = every, setup.parameters
        self._small, self.scale = SmallGradient(setup.mesh, every), NoiseScale(sequence_length)

    def around_backward(self, window: Window, number: int) -> AbstractContextManager[None]:
        if number > 1 or not self._small.due(window.step + 1):
            return nullcontext()
        return self._small.watching(window.micro_batches, self._parameters)

    def figures(self, targets: Any, scale: Tensor) -> dict[str, Any]:
        return self._small.take(targets, scale)

    def finished(self, outcome: Outcome) -> None:
        if "small_square" in outcome.more and outcome.is_finite:
            small = outcome.more["small_square"], outcome.more["small_targets"]
            self.scale.add(*small, outcome.grad_norm**2, outcome.target_tokens)

    def row(self, window: Window) -> dict[str, Any]:
        return self.scale.figures()

    def summary(self) -> dict[str, Any]:
        return self.scale.figures()

    def status(self) -> dict[str, Any]:
        if not self.scale.measurements:
            return {}
        found = {k.removeprefix("noise_scale_"): v for k, v in self.scale.figures().items()}
        more = {"measurements": self.scale.measurements, "verdict": self._verdict()}
        return found | more

    def words(self) -> list[tuple[str, str]]:
        return [("noise scale", self._verdict())] if self.scale.measurements else []

    def _verdict(self) -> str:
        return self.scale.verdict(*batch_now(self.loop))

    def begins_anew(self, changed: Sequence[str]) -> bool:
        return "batch.sequence_length" in changed  # of which its sums are

    def state_dict(self) -> dict[str, Any]:
        return self.scale.state_dict()

    def load_state_dict(self, state: dict[str, Any], anew: bool) -> None:
        if not anew:
            self.scale.load_state_dict(state)


def batch_now(loop: Loop) -> tuple[int, float | None]:
    """Return the sequences of the last step; with a ramp also how many of them are targets.

    The second is not known of a fork before its first step."""
    run, step = loop.run, loop.progress.step
    if not run.ramp or step == run.first_step:
        return run.stage_at(step).real_batch_size, None
    size = run.stage_at(step - 1).real_batch_size
    tokens = run.tokens_at(step) - run.begin.tokens
    return size, size * (loop.meter.tokens_seen() - run.begin.tokens_seen) / tokens
