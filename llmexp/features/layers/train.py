from __future__ import annotations

from collections import deque
from typing import Any

from llmexp import mesh
from llmexp.config.sections import knobs_of
from llmexp.data.window import Window
from llmexp.features.layers.config import Knobs, of_each_step
from llmexp.features.layers.figures import Layers, Taken, row_of
from llmexp.features.layers.reading import FILE
from llmexp.folders.rows import Rows
from llmexp.train.assembly.assemble import Parts
from llmexp.train.feature import Feature
from llmexp.train.state import Loop
from llmexp.train.step import Setup

STEPS_KEPT = 11  # a spike's and ten before


def make(parts: Parts, setup: Setup) -> LayerByLayer:
    every = knobs_of(parts.config, Knobs).layers_every
    return LayerByLayer(parts, setup, every, of_each_step(parts.config))


class LayerByLayer(Feature):
    """Take the figures of chosen steps, which wait on the device; write those asked for."""

    name, looks = "layers", True
    loop: Loop

    def __init__(self, parts: Parts, setup: Setup, every: int | None, always: bool) -> None:
        self.peaks_every = self._every = every
        self._always = always
        self._mesh, self._model, self._features = setup.mesh, setup.model, setup.features
        self._layers = Layers(setup.mesh, setup.loss, parts.precision)
        self.last: deque[tuple[int, Taken]] = deque(maxlen=STEPS_KEPT)  # by step, on the device
        self._lines: Rows | None = None

    def _wanted(self, step: int) -> bool:
        return self._every is not None and step % self._every == 0

    def _due(self, window: Window) -> bool:
        return self._always or self._wanted(window.step + 1)

    def backward_start(self, window: Window) -> None:
        if self._due(window):
            mesh.share_buffers(self._mesh, self._model)  # as they are when the step begins
            self._layers.look(window.micro_batches[0][0])

    def backward_end(self, window: Window) -> None:
        if self._due(window):
            self._layers.before_update()

    def updated(self, window: Window, skip: Any) -> None:
        if self._due(window):
            taken = self._layers.after_update()
            for figures_of in self._features.on("by_block"):
                taken |= figures_of()
            self.last.append((window.step + 1, taken))

    def step_end(self, window: Window, row: dict[str, Any] | None) -> None:
        if not self._wanted(window.step + 1):
            return
        figures, tokens_seen = row_of(self.last[-1][1]), self.loop.meter.tokens_seen()
        if self._lines is not None:
            self._lines.add({"step": window.step + 1, "tokens_seen": tokens_seen} | figures)
            self._lines.flush()

    def last_step(self) -> dict[str, Any]:
        return {"layers": row_of(self.last[-1][1])} if self.last else {}

    def begin(self, loop: Loop) -> None:
        super().begin(loop)
        if loop.main:
            self._lines = Rows(loop.path / FILE, loop.progress.step).open()

    def sync(self) -> None:
        if self._lines is not None:
            self._lines.sync()

    def close(self) -> None:
        if self._lines is not None:
            self._lines.close()
