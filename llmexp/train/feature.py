"""Name what an optional part of a run may do: in a step, between the steps, and around them.

The loop knows its features by these methods alone, which it calls for each that has them in turn
(`Features.on`); a user's hooks hear the same events (`hooks`), and a user's own `Feature` can be
named as a hook. One that a run does not ask for is not made.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from llmexp import features
from llmexp.config.values import Plain
from llmexp.data.window import Window


class Feature:
    """Do nothing at any event; a feature overrides those that it needs.

    All ranks have the same features and come to the same events together: each may ask the others.
    """

    name = ""  # of its state in checkpoints; of a user's feature own_NAME, or own_ and its class
    refuses = ""  # what a step is whose update `judge` skips, in words
    peaks_every: int | None = None  # steps between those in which it holds most memory, for plans
    looks = False  # true: it looks into a backward pass, without which it has no step
    loop: Any = None  # the `Loop`, from `begin` on

    # In the thread that reads ahead; of one feature at most.

    def mark(self, tokens_rs: np.ndarray, first_row: int) -> int:
        """Return `Window.mark`, of the ids of this rank's rows; the first one is at `first_row`."""
        return 0

    # Of one step, in this order; on an accelerator nothing here may wait for it.

    def step_start(self, step: int) -> None:
        """Come before a step, counted from 1, and before its data are there."""

    def backward_start(self, window: Window) -> None:
        """Come before the first forward and backward pass, and before the step's random numbers."""

    def forward_start(self, targets_bt: Tensor) -> None:
        """Come before the forward pass of each micro-batch, with its targets on the device."""

    def around_backward(self, window: Window, number: int) -> AbstractContextManager[None]:
        """Return what stands around the backward pass of a micro-batch, counted from 1."""
        return nullcontext()

    def backward_end(self, window: Window) -> None:
        """Come when gradients are complete, reduced and of true scale, before they are measured."""

    def judge(self, skip: Any, loss: Any, norm: Tensor) -> Any:
        """Return whether the update is skipped, the same on all ranks; `skip`: it is already.

        On a CPU both are bools and `loss` a float, else all are tensors on the device. The feature
        prints a line for each step that it skips; such steps alone end no run.
        """
        return skip

    def updated(self, window: Window, skip: Any) -> None:
        """Come after the update, which was not made where `skip` is true: that of `judge`."""

    def figures(self, targets: Any, scale: Tensor) -> Plain:
        """Return 0-dim figures of the step, which are `Outcome.more` when it is read."""
        return {}

    def by_block(self) -> dict[str, dict[str, Tensor]]:
        """Return figures of the step by the names of blocks, where a feature writes such down."""
        return {}

    def step_end(self, window: Window, row: Plain | None) -> None:
        """Come after the step; `row`: what is known of its row, where one is due."""

    # On the host: during the next step, before its update, or at once where a row, a checkpoint or
    # something that is due needs it.

    def finished(self, outcome: Any) -> None:
        """Take the `Outcome` of the last step, now that the host has its figures."""

    # Between the steps; here the host may wait.

    def row(self, window: Window) -> Plain:
        """Return figures for the row of the last step if it has one, by names that are free."""
        return {}

    def measure(self, step: int, last: bool) -> Callable[[], dict[str, float]] | None:
        """Return what measures figures of a step, which has a row then; None: nothing is due."""
        return None

    def evaluate(self, losses: Callable[[str], dict[str, float]]) -> dict[str, float]:
        """Return losses of other weights: `losses` gives those of the model as it is, by a name."""
        return {}

    def evaluated(self, window: Window, row: Plain) -> None:
        """Come after an evaluation, with the row."""

    def row_ready(self, row: Plain) -> None:
        """Come last before a row is written; it may be added to."""

    def due(self, step: int, last: bool) -> Callable[[], None] | None:
        """Return what is to be done after the step, its row and its checkpoint, or None.

        The step is then finished before the next one.
        """
        return None

    def saved(self, step: int) -> None:
        """Come after a checkpoint is committed."""

    # Around the steps.

    def begin(self, loop: Any) -> None:
        """Begin; `loop` stands where the run goes on, with the weights and states of there."""
        self.loop = loop

    def train_start(self) -> None:
        """Come before the first step of this process."""

    def train_end(self) -> None:
        """Come after its last one."""

    def sync(self) -> None:
        """Bring to the disk what no checkpoint may be ahead of."""

    def close(self) -> None:
        """End, also where the run has failed."""

    def closed(self, summary: Plain, code: int) -> None:
        """Come last, with the figures of the run and its exit code, also where it has failed.

        An error here is a line."""

    # In a checkpoint.

    def state_dict(self) -> Plain:
        """Return plain values, of which those of rank 0 are kept; {}: it has no state.

        A checkpoint of a run without the feature has none: the feature then begins anew."""
        return {}

    def load_state_dict(self, state: Plain, anew: bool) -> None:
        """Take the state of a checkpoint; `anew`: of a fork to which it does not apply as it is."""

    def begins_anew(self, changed: Sequence[str]) -> bool:
        """Return whether a fork with these keys changed has other settings than its state's."""
        return False

    def tensors(self) -> dict[str, Tensor]:
        """Return tensors by the names of parameters; a file of the feature's name holds them."""
        return {}

    def begin_tensors(self) -> None:
        """Give its tensors first values, where a checkpoint has none of this feature."""

    # At the end, and in a plan.

    def summary(self) -> Plain:
        """Return figures for the summary of the run."""
        return {}

    def status(self) -> Plain:
        """Return what status.json holds under the feature's name."""
        return {}

    def words(self) -> list[tuple[str, str]]:
        """Return what the screen shows at the end: titles and texts."""
        return []

    def last_words(self) -> list[tuple[str, str]]:
        """Return the same of a finished run, from its model: all ranks call together."""
        return []

    def files(self) -> list[tuple[str, str]]:
        """Return titles and paths that rank 0 shows before that of the folder, unwrapped."""
        return []

    def commands(self) -> list[tuple[str, str]]:
        """Return titles and commands that rank 0 shows behind it."""
        return []

    def last_step(self) -> Plain:
        """Return what a replay tells of its last step."""
        return {}

    def timed(self) -> dict[str, Callable[[], object]]:
        """Return what a calibration times, by name: NAME_s."""
        return {}


class Features(list[Feature]):
    """Hold the features of a run in the order in which they act."""

    def __init__(self) -> None:
        super().__init__()
        self._on: dict[str, list[Callable[..., Any]]] = {}

    def acting(self, event: str) -> list[Feature]:
        """Return those that do something at an event."""
        return [f for f in self if getattr(type(f), event) is not getattr(Feature, event)]

    def on(self, event: str) -> list[Callable[..., Any]]:
        """Return their methods for it, worked out once."""
        if event not in self._on:
            self._on[event] = [getattr(feature, event) for feature in self.acting(event)]
        return self._on[event]

    def at(self, event: str, *given: Any) -> None:
        """Have each act at an event."""
        for act in self.on(event):
            act(*given)

    def by_name(self, event: str) -> Plain:
        """Return what each that has something returns, by its name."""
        return {f.name: found for f in self.acting(event) if (found := getattr(f, event)())}


def own_name(kind: type[Feature]) -> str:
    """Return the name of a user's feature in checkpoints: none of the project's begins so."""
    return f"own_{kind.name or kind.__name__.lower()}"


def starting(keys: Sequence[str], *starts: str) -> list[str]:
    """Return the keys that begin so."""
    return [key for key in keys if key.startswith(starts)]


def look_back(path: Path, step: int) -> list[Callable[[], None]]:
    """Read what features have left in a run's folder; return what removes that after a step.

    Nothing is written before all files are read. Raises ConfigError for damage.
    """
    leaving = (part for part in features.parts("folders") if hasattr(part, "LEFT"))
    return [part.look_back(path, step) for part in leaving if (path / part.LEFT).exists()]
