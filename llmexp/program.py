"""Drive llmexp from a program: `import llmexp` offers what stands here (docs/python.md).

Each function calls what a command calls; torch, numpy and plotly are imported where they are used.
"""

from __future__ import annotations

import contextlib
import csv
import importlib
import io
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmexp import rundir
from llmexp.child import DONE, PREEMPTED, REFUSED
from llmexp.config import Config, ConfigError, nearest

if TYPE_CHECKING:
    import numpy as np
    from torch import nn

    from llmexp.compare.records import Comparison
    from llmexp.data.tokenizers import Tokenizer


@dataclass(frozen=True)
class Run:
    """A run in its folder. Nothing is kept in memory: a run that is training is read as far as it
    is."""

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
        """Return queued, running, finished, failed, preempted or cut, as `llmexp runs` does."""
        from llmexp.compare.reading import state_of

        return state_of(self.path, self.status)

    @property
    def summary(self) -> dict[str, Any]:
        """Return the figures that the run ended with; empty before."""
        return dict(self.status.get("summary") or {})

    @property
    def steps(self) -> list[int]:
        """Return the steps of the checkpoints, the newest last."""
        return rundir.saved_steps(self.path)

    def rows(self, *keys: str) -> Any:
        """Return the values of the rows that have all of the keys: a numpy array, or for several
        keys a list of arrays of one length. Without a key return the rows, as dicts. Raises
        ConfigError for a key of no row."""
        import numpy as np

        rows = rundir.read_rows(self.path / rundir.METRICS)
        if not keys:
            return rows
        known = {key for row in rows for key in row}
        for key in keys:
            if rows and key not in known:
                raise ConfigError(f"{key}: no row of {self.path} has it.{nearest(key, known)}")
        found = [row for row in rows if all(key in row for key in keys)]
        columns: list[np.ndarray] = [np.array([row[key] for row in found]) for key in keys]
        return columns if len(keys) > 1 else columns[0]

    def frame(self) -> Any:
        """Return the rows as a data frame, a column for each key: of pandas, else of polars."""
        return framed(self.rows())

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """Return the tokenizer that the run was trained with."""
        from llmexp.assembly.inputs import build_tokenizer, filled

        return build_tokenizer(filled(self.config))[0]

    def model(self, step: int | None = None, weights: str = "model") -> nn.Module:
        """Return the model with the weights of a checkpoint (None: the newest whole one), on the
        CPU, in evaluation mode. `weights="ema"`: their average."""
        from llmexp.assembly.opening import open_run
        from llmexp.naming import named_checkpoint

        return open_run(*named_checkpoint(self._at(step)), warn, weights).model.eval()

    def sample(self, prompt: str = "", tokens: int = 200, *, step: int | None = None,
               temperature: float = 0.8, top_k: int = 50, seed: int = 0,
               weights: str = "model") -> str:  # fmt: skip
        """Return a text as `llmexp sample` does."""
        from llmexp.cli.sample import text_of

        return text_of(self._at(step), prompt, tokens, temperature, top_k, seed, weights)

    def _at(self, step: int | None) -> str:
        return str(self.path) if step is None else f"{self.path}@{step}"


def load(path: str | os.PathLike[str]) -> Run:
    """Return the run of a folder. Raises ConfigError where there is none."""
    run = Run(Path(path))
    rundir.check_plain(run.path)
    rundir.read_config(run.path)
    return run


def warn(text: str) -> None:
    print(f"llmexp: {text}", file=sys.stderr)


def framed(columns: Any) -> Any:
    """Return a data frame of pandas, else of polars. Raises ImportError without both."""
    for name, more in (("pandas", {}), ("polars", {"infer_schema_length": None})):
        with contextlib.suppress(ModuleNotFoundError):
            return importlib.import_module(name).DataFrame(columns, **more)
    raise ImportError("a data frame needs pandas or polars: pip install pandas")


@dataclass(frozen=True)
class Answer:
    """The answer of a comparison: what `llmexp compare` prints, as data."""

    comparison: Comparison

    def __str__(self) -> str:
        from llmexp.compare import table

        return "\n".join(table.lines(self.comparison, table.columns()))

    @property
    def headline(self) -> str:
        """Return the result in one line."""
        return self.comparison.headline

    @property
    def problems(self) -> tuple[str, ...]:
        """Return what could not be read, in words."""
        return self.comparison.problems

    @cached_property
    def data(self) -> dict[str, Any]:
        """Return what `llmexp compare --json` prints."""
        from llmexp.compare import table

        return dict(json.loads(table.to_json(self.comparison)))

    def frame(self) -> Any:
        """Return what `llmexp compare --csv` prints as a data frame: a row a setting."""
        from llmexp.compare import table

        rows = list(csv.DictReader(io.StringIO(table.to_csv(self.comparison))))
        return framed({key: typed([row[key] for row in rows]) for key in rows[0]} if rows else {})

    @cached_property
    def figures(self) -> dict[str, Any]:
        """Return the figures of the page by name (losses, others, and one for each swept key), as
        plotly.graph_objects.Figure."""
        import plotly.graph_objects as go

        from llmexp.compare.plot_settings import maps, over_keys
        from llmexp.compare.plot_training import losses, others

        c, found = self.comparison, {}
        for plot in (losses(c), *over_keys(c), *maps(c), others(c)):
            if plot is None:
                continue
            figure = go.Figure(list(plot.traces)).update_layout(dict(plot.layout))
            for choice in plot.choices.values():
                figure.plotly_update(*choice.options[choice.chosen][1])
            found[plot.name] = figure.update_layout(title=plot.title)
        return found


def typed(texts: list[str]) -> list[Any]:
    """Return a column of a CSV as numbers, where all of it that is not empty is a number."""
    try:
        return [float(text) if text else None for text in texts]
    except ValueError:
        return texts


def compare(*paths: Any, align: str = "tokens",
            sort: str | None = None, negligible: float | None = None) -> Answer:  # fmt: skip
    """Compare runs, sweeps, folders of them and globs, as `llmexp compare` does. Raises ConfigError
    for what the command refuses, as paths without a run."""
    from llmexp.compare import comparing

    found: list[Path] = []
    for path in paths or ("outputs",):
        each = path if isinstance(path, (list, tuple)) else [path]
        found += [one.path if isinstance(one, Run) else Path(one) for one in each]
    comparison = comparing.compare(found, align=align, sort=sort, negligible=negligible)
    if not comparison.entries:
        raise ConfigError("\n".join((*comparison.problems, comparing.NO_RUN)))
    return Answer(comparison)


class RunFailed(RuntimeError):
    """A run, or a run of a sweep, that did not come to its end. `runs`: those that were made."""

    def __init__(self, text: str, exit_code: int, runs: list[Run]) -> None:
        super().__init__(text)
        self.exit_code, self.runs = exit_code, runs


def train(overrides: Sequence[str] = (), *, quiet: bool = False) -> Any:
    """Train as `llmexp train OVERRIDES` does, in a process of its own; return the run, of a sweep
    (-m) the list of its runs.

    Its lines are printed, without them (`quiet`) only errors. A run that train.stop_step stopped is
    returned too. Raises ConfigError for what is refused before training, RunFailed where a run did
    not come to its end.
    """
    if isinstance(overrides, str):
        raise TypeError(f"a list is needed: llmexp.train([{overrides!r}])")
    command = [sys.executable, "-m", "llmexp", "train", *overrides, "--json"]
    lines: list[str] = []
    with tempfile.TemporaryFile() as result:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=result, stderr=subprocess.PIPE
        )
        try:
            follow(process, lines, quiet)
        except KeyboardInterrupt:  # a notebook interrupts this process alone
            process.send_signal(signal.SIGINT)
            follow(process, lines, quiet)
            raise
        result.seek(0)
        text = result.read()
    code = process.returncode
    printed = [line.removeprefix("llmexp: ") for line in lines if line.startswith("llmexp: ")]
    why = "\n".join(printed) or f"llmexp train ended with exit code {code}"
    found: dict[str, Any] = {"path": "", "runs": []}
    if text or code == DONE:
        found = result_of(text, overrides)
    runs = [load(run["path"]) for run in found["runs"]]
    if code == REFUSED:
        raise ConfigError(why)
    if code not in (DONE, PREEMPTED):
        raise RunFailed(why, code, runs)
    sweep = len(runs) != 1 or Path(found["path"]) != runs[0].path
    return runs if sweep else runs[0]


def result_of(text: bytes, words: Sequence[str]) -> dict[str, Any]:
    """Return what `llmexp train --json` printed. Raises ConfigError for words that made it print
    something else and train nothing, as --help."""
    with contextlib.suppress(ValueError):
        found = json.loads(text)
        if isinstance(found, dict) and "runs" in found:
            return dict(found)
    flags = " ".join(word for word in words if word.startswith("-"))
    raise ConfigError(f"{flags}: trains no run; it is for the command line: llmexp train {flags}")


def follow(process: subprocess.Popen[bytes], lines: list[str], quiet: bool) -> None:
    """Print what the command prints, until it ends."""
    assert process.stderr is not None
    for raw in process.stderr:
        lines.append(raw.decode(errors="replace").rstrip("\n"))
        if not quiet:
            print(lines[-1], flush=True)
    process.wait()
