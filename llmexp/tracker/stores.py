"""Keep the rows of a run in a tracker, by four calls: start, position, rows, finish.

The trackers here are those besides wandb; no other file imports their packages.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import logging
import math
import os
import shlex
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmexp.config.commands import how_to_install
from llmexp.config.values import ConfigError, flatten, hint
from llmexp.system.child import DONE, PREEMPTED
from llmexp.tracker.fields import Fields


@dataclass(frozen=True)
class End:
    """The end of a run."""

    summary: dict[str, Any]
    exit_code: int
    complete: bool = True  # whether metrics.jsonl has all its rows
    rows: int = 0  # of the run and its parents
    last_step: int = -1


class Store:
    """Keep the rows of a run. Any call may raise; what was given before `finish` is then there."""

    def start(self, fields: Fields, run_dir: Path) -> str:
        """Open the run, new or as it is there; return where its reader finds it."""
        raise NotImplementedError

    def position(self) -> int:
        """Return the step of the last row that it has, -1 where it has none."""
        return -1

    def rows(self, rows: Sequence[dict[str, Any]]) -> None:
        """Keep rows of metrics.jsonl."""
        raise NotImplementedError

    def finish(self, end: End) -> int | None:
        """Keep the figures of the end, and close the run.

        Return how many rows are there, None where they are not counted.
        """
        raise NotImplementedError

    def give_up(self, *, kill: bool) -> None:
        """Leave a call that failed or hangs; `kill` what it has started."""


def numbers(row: dict[str, Any]) -> dict[str, float]:
    """Return the finite numbers of a row."""
    given = {key: value for key, value in row.items() if isinstance(value, (int, float))}
    return {key: float(value) for key, value in given.items() if math.isfinite(value)}


class TensorBoard(Store):
    """Write event files in RUN_DIR/tensorboard.

    They are written anew at each start, so they hold what metrics.jsonl holds, also after a resume
    from an earlier step.
    """

    def start(self, fields: Fields, run_dir: Path) -> str:
        from torch.utils.tensorboard import SummaryWriter

        where = run_dir / "tensorboard"
        shutil.rmtree(where, ignore_errors=True)
        self._writer = SummaryWriter(str(where), flush_secs=5)
        self._write_table("config", "key", flatten(fields.config))
        return str(where)

    def _write_table(self, title: str, head: str, values: dict[str, Any]) -> None:
        lines = (f"| {key} | {value} |" for key, value in values.items())
        self._writer.add_text(title, "\n".join((f"| {head} | value |", "|---|---|", *lines)))

    def rows(self, rows: Sequence[dict[str, Any]]) -> None:
        for row in rows:
            for key, value in numbers(row).items():  # float64, as in the row
                self._writer.add_scalar(
                    key, value, row["step"], new_style=True, double_precision=True
                )

    def finish(self, end: End) -> None:
        self._write_table("summary", "figure", end.summary)
        self._writer.close()


class MLflow(Store):
    """A run of the experiment that tracker.project names, at MLFLOW_TRACKING_URI."""

    KEY = "llmexp.run_id"  # the tag by which a run is found again
    POSITION = "tokens_seen"  # every row has it

    def start(self, fields: Fields, run_dir: Path) -> str:
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
        from mlflow import MlflowClient
        from mlflow.entities import Param

        logging.getLogger("mlflow").setLevel(logging.WARNING)
        client = self._client = MlflowClient()
        known = client.get_experiment_by_name(fields.project)
        experiment = known.experiment_id if known else client.create_experiment(fields.project)
        there = client.search_runs([experiment], f"tags.`{self.KEY}` = '{fields.run_id}'")
        if there:
            self._run = there[0].info.run_id
            client.set_terminated(self._run, "RUNNING")
            return f"mlflow run {self._run}"
        tags = {self.KEY: fields.run_id, "group": fields.group or "", "folder": str(run_dir)}
        self._run = client.create_run(experiment, run_name=fields.name, tags=tags).info.run_id
        params = [Param(k, str(v)[:500]) for k, v in flatten(fields.config).items()]
        for first in range(0, len(params), 100):  # at most in one call
            client.log_batch(self._run, params=params[first : first + 100])
        return f"mlflow run {self._run}"

    def position(self) -> int:
        history = self._client.get_metric_history(self._run, self.POSITION)
        return max((metric.step for metric in history), default=-1)

    def rows(self, rows: Sequence[dict[str, Any]]) -> None:
        from mlflow.entities import Metric

        for row in rows:
            now = int(time.time() * 1000)
            # In one call: a row is there as a whole or not at all.
            metrics = [Metric(key, value, now, row["step"]) for key, value in numbers(row).items()]
            self._client.log_batch(self._run, metrics=metrics)

    def finish(self, end: End) -> None:
        for key, value in numbers(end.summary).items():
            self._client.set_tag(self._run, f"summary.{key}", repr(value))
        state = {DONE: "FINISHED", PREEMPTED: "KILLED"}.get(end.exit_code, "FAILED")
        self._client.set_terminated(self._run, state)


class Trackio(Store):
    """A run of the project that tracker.project names, in Trackio's folder (TRACKIO_DIR)."""

    def start(self, fields: Fields, run_dir: Path) -> str:
        import trackio

        self._project, self._name = fields.project, f"{fields.name} {fields.run_id}"
        with contextlib.redirect_stdout(io.StringIO()):
            self._run = trackio.init(
                project=self._project,
                name=self._name,
                group=fields.group,
                config=fields.config,
                resume="allow",
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )
        return f"trackio show --project {shlex.quote(self._project)}, run {self._name}"

    def position(self) -> int:
        from trackio.sqlite_storage import SQLiteStorage

        found = SQLiteStorage.get_max_step_for_run(self._project, self._name)
        return -1 if found is None else int(found)

    def rows(self, rows: Sequence[dict[str, Any]]) -> None:
        for row in rows:
            given = {key: value for key, value in numbers(row).items() if key != "step"}
            self._run.log(given, step=row["step"])

    def finish(self, end: End) -> None:
        with contextlib.redirect_stdout(io.StringIO()):
            self._run.finish()


STORES: dict[str, type[Store]] = {"tensorboard": TensorBoard, "mlflow": MLflow, "trackio": Trackio}


def check_chosen(kind: str, also: Sequence[str]) -> None:
    """Raise ConfigError where a tracker of the config cannot be used."""
    check_stores([kind] if kind in STORES else [], "tracker")
    check_stores(also)
    if kind in also:
        raise ConfigError(
            "conflict", f"tracker.also={kind}: is what tracker={kind} chooses already"
        )


def check_stores(kinds: Sequence[str], key: str = "tracker.also") -> None:
    """Raise ConfigError for a tracker that there is not, or whose package is missing."""
    for kind in kinds:
        if kind not in STORES:
            raise ConfigError(
                "unknown_option",
                f"{key}={kind}: there is no such tracker.{hint(kind, STORES)} For example "
                f"{key}=[tensorboard]",
            )
        if importlib.util.find_spec(kind) is None:
            raise ConfigError(
                "missing_package",
                f"{key}={kind}: the package {kind} is not installed; to install it: "
                f"{how_to_install(kind)}",
            )
