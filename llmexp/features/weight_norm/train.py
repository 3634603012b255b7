from __future__ import annotations

import math

from llmexp import mesh
from llmexp.config.values import Plain
from llmexp.data.window import Window
from llmexp.train.assembly.assemble import Parts
from llmexp.train.checkpointing import not_finite, save_what_can_be
from llmexp.train.feature import Feature
from llmexp.train.loop import publish
from llmexp.train.state import Loop
from llmexp.train.step import Setup

EVERY = 10  # rows


def make(parts: Parts, setup: Setup) -> WeightNorm:
    return WeightNorm()


class WeightNorm(Feature):
    """Measure the weights in each tenth row, and before they are evaluated."""

    name = "weight_norm"
    loop: Loop

    def row(self, window: Window) -> Plain:
        loop, each = self.loop, EVERY * self.loop.config.train.log_every
        if not loop.evaluates and (window.step + 1) % each:
            return {}
        weights = [parameter.detach() for parameter in loop.setup.parameters]
        return {"weight_norm": float(mesh.global_norm(loop.mesh, weights))}

    def step_end(self, window: Window, row: Plain | None) -> None:
        if row is not None and not math.isfinite(row.get("weight_norm", 0.0)):
            publish(self.loop, row)
            save_what_can_be(self.loop)
            raise not_finite(self.loop, "the weights, as their norm shows")
