"""Find a checkpoint by its name on a command line; without torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from llmexp.config.values import ConfigError, choice, pasteable
from llmexp.folders import rundir
from llmexp.metrics.keys import OTHER_WEIGHTS

WEIGHTS = ("model", *OTHER_WEIGHTS)  # of a checkpoint
_WORDS = {name: words for name, (words, _) in OTHER_WEIGHTS.items()} | {"model": "what was trained"}
# Arguments of commands that open a run.
Name = Annotated[str, "RUN[@STEP]", "run folder; without a step its newest checkpoint"]
Names = Annotated[str, "RUN[@STEP]", "more of them"]
Weights = Annotated[
    str,
    choice("; ".join(map(": ".join, _WORDS.items())), " | ".join(WEIGHTS)),
]


def named_checkpoint(text: str) -> tuple[Path, int | None]:
    """Return the folder and the step of RUN@STEP; no step for RUN, whose newest checkpoint it is.

    Raises ConfigError where there is no such run, or no such checkpoint.
    """
    path, at, step = Path(text), "", ""
    if not path.exists() and "@" in text:  # a folder may have an @ in its name
        run, at, step = text.rpartition("@")
        path = Path(run)
    rundir.check_plain(path)
    if not rundir.is_run(path):
        rundir.read_config(path)  # raises
    if not at:
        return path, None
    if not (steps := rundir.saved_steps(path)):
        raise ConfigError("no_checkpoint", f"{path}: has no checkpoint yet")
    if not (step.isdecimal() and int(step) in steps):
        raise ConfigError(
            "no_checkpoint",
            f"{text}: there is no checkpoint of step {step or '(none given)'}; there are those of "
            f"{', '.join(map(str, steps))}; for example {pasteable(f'{path}@{steps[-1]}')}",
        )
    return path, int(step)
