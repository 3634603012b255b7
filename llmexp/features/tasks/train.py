from __future__ import annotations

from collections.abc import Callable

from llmexp import mesh
from llmexp.config.sections import knobs_of
from llmexp.features.tasks.config import Knobs
from llmexp.metrics.keys import SCORES
from llmexp.optim import eval_weights
from llmexp.tasks import scoring
from llmexp.train.assembly.assemble import Parts
from llmexp.train.feature import Feature
from llmexp.train.step import Setup, TrainingFailed


def make(parts: Parts, setup: Setup) -> Tasks:
    return Tasks(parts, setup, knobs_of(parts.config, Knobs).tasks_every)


class Tasks(Feature):
    """Put scores of tasks into the row of a step; all ranks share the items."""

    def __init__(self, parts: Parts, setup: Setup, every: int | None) -> None:
        self._parts, self._setup, self._every = parts, setup, every

    def measure(self, step: int, last: bool) -> Callable[[], dict[str, float]] | None:
        due = last or (self._every is not None and step % self._every == 0)
        return self.scores if due else None

    def timed(self) -> dict[str, Callable[[], object]]:
        return {"tasks": self.scores}

    def scores(self) -> dict[str, float]:
        """Return the scores by the keys of a row, such as task/NAME/acc."""
        row, parts, setup = dict[str, float](), self._parts, self._setup
        tokens = parts.run.micro_batch_size * parts.run.sequence_length
        mesh.share_buffers(setup.mesh, setup.model)
        with eval_weights.evaluating(setup.optimizers, setup.module):
            for task in parts.prepared["tasks"]:
                given = task, setup.loss, setup.mesh, parts.precision, tokens
                try:
                    found, _ = scoring.score_task(*given)
                except ValueError as error:
                    raise TrainingFailed(str(error)) from None
                row |= {f"{SCORES}{task.name}/{key}": value for key, value in found.items()}
        return row
