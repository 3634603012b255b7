"""A run in its folder, read as far as it is."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmexp import features
from llmexp.api.calling import called
from llmexp.config.sections import Config
from llmexp.config.values import ConfigError, nearest
from llmexp.folders import rundir
from llmexp.folders.folder import RunFolder
from llmexp.folders.rows import read_rows
from llmexp.system.text import framed

if TYPE_CHECKING:
    import numpy as np
    from torch import nn

    from llmexp.data.tokenizers.base import Tokenizer


@dataclass(frozen=True)
class Run:
    """A run in its folder.

    Nothing is kept in memory: a run in training is read as far as it has come.
    """

    path: Path

    @property
    def config(self) -> Config:
        """Return config.yaml, typed: run.config.train.max_steps, run.config.model["d_model"]."""
        return rundir.built_config(self.path)

    @property
    def facts(self) -> dict[str, Any]:
        """Return run.json: every derived number."""
        return rundir.read_run(self.path)

    @property
    def status(self) -> dict[str, Any]:
        """Return status.json: state, exit code, error, summary."""
        return rundir.read_status(self.path)

    @property
    def state(self) -> str:
        """Return queued, running, finished, failed, preempted or crashed, as `llmexp runs` does."""
        return RunFolder(self.path).state

    @property
    def summary(self) -> dict[str, Any]:
        """Return the figures that the run ended with; empty before."""
        return dict(self.status.get("summary") or {})

    @property
    def steps(self) -> list[int]:
        """Return the steps of the checkpoints, the newest last."""
        return rundir.saved_steps(self.path)

    def rows(self, *keys: str) -> Any:
        """Return the values of a key, for the rows that have all of the keys, as a numpy array.

        For several keys it is a list of arrays of one length; without a key return the rows, as
        dicts. Raises ConfigError for a key of no row.
        """
        import numpy as np

        rows = read_rows(self.path / rundir.METRICS)
        if not keys:
            return rows
        known = {key for row in rows for key in row}
        for key in keys:
            if rows and key not in known:
                raise ConfigError(
                    "unknown_row", f"{key}: no row of {self.path} has it.{nearest(key, known)}"
                )
        found = [row for row in rows if all(key in row for key in keys)]
        columns: list[np.ndarray] = [np.array([row[key] for row in found]) for key in keys]
        return columns if len(keys) > 1 else columns[0]

    def frame(self) -> Any:
        """Return the rows as a data frame, a column for each key: of pandas, else of polars."""
        return framed(self.rows())

    def layers(self) -> Any:
        """Return the figures layer by layer as a data frame, a row for each module of each step.

        It is empty where `metrics.layers_every` was null; the columns are in docs/diagnostics.md.
        """
        read_layers = features.merged("api", "FIGURES").get("layers", lambda path: ())
        return framed(list(read_layers(self.path)))

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """Return the tokenizer that the run was trained with."""
        from llmexp.train.assembly.inputs import build_tokenizer

        return build_tokenizer(self.config.tokenizer)

    def model(self, step: int | None = None, weights: str = "model") -> nn.Module:
        """Return the model with the weights of a checkpoint, on the CPU, in evaluation mode.

        `step` None: the newest whole checkpoint. `weights="ema"`: the average of the weights.
        """
        from llmexp.folders.naming import named_checkpoint
        from llmexp.train.assembly.opening import open_run

        return open_run(*named_checkpoint(self._at(step)), weights).model.eval()

    def sample(
        self, prompt: str = "", tokens: int = 200, *, step: int | None = None, **how: Any
    ) -> str:
        """Return a text as `llmexp sample` does: `temperature`, `top_k`, `seed`, `weights`."""
        found = called("sample")(self._at(step), prompt=prompt, tokens=tokens, **how)
        return str(found.text)

    def __fspath__(self) -> str:
        return str(self.path)

    def _at(self, step: int | None) -> str:
        return str(self.path) if step is None else f"{self.path}@{step}"


def load(path: str | os.PathLike[str]) -> Run:
    """Return the run of a folder. Raises ConfigError where there is none."""
    run = Run(Path(path))
    rundir.check_plain(run.path)
    rundir.read_config(run.path)
    return run
