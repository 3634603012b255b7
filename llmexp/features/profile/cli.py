from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from llmexp.config.sections import Config, knobs_of
from llmexp.config.values import refuse
from llmexp.features.profile.config import Knobs
from llmexp.folders import rundir


def check_resume(config: Config, path: Path, given: Sequence[str]) -> None:
    """Raise ConfigError for a trace of steps that the run has behind it."""
    first, step = knobs_of(config, Knobs).profile_start, rundir.newest_step(path)
    key = "train.profile_start"
    if key in given and first is not None and step is not None and first <= step:
        text = f"is not after the checkpoint that the run resumes from, which is of step {step}"
        raise refuse("out_of_range", key, first, text, step + 1)
