"""Sweeps: our Hydra launcher, one fresh worker process a point, in one folder."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra._internal.hydra import Hydra
from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, open_dict

from llmexp import folder
from llmexp.config import Config, ConfigError


@dataclass
class LocalConf:
    _target_: str = "llmexp.sweep.LocalLauncher"


class LocalLauncher(Launcher):
    """Runs the points of a sweep one after the other on this machine; a point that fails touches no other."""

    def __init__(self) -> None:
        self.points: list[tuple[str, int]] = []  # (folder, exit code) of what has run

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self.config, self.hydra_context = config, hydra_context

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        from llmexp.launch import Worker, visible

        points, refused = load_points(self.hydra_context.config_loader, self.config, job_overrides, initial_job_idx)
        if refused:
            raise ConfigError("; ".join(refused))
        results = []
        for point in points:
            print(f"--- {point.path.name}: {' '.join(point.overrides)}", flush=True)
            request = {
                "config": dataclasses.asdict(point.config),
                "folder": str(point.path),
                "fixed": True,
                "overrides": visible(point.overrides),
                "label": point.label,
                "group": str(point.path.parent),
            }
            code, path = Worker().run(request)
            FINISHED.append((point, code))
            result = JobReturn(overrides=point.overrides, cfg=point.cfg, status=JobStatus.COMPLETED)
            result.return_value = objective(path)
            results.append(result)
        return results


@dataclass(frozen=True)
class Point:
    overrides: list[str]
    cfg: DictConfig
    config: Config
    label: str
    path: Path


FINISHED: list[tuple[Point, int]] = []  # points of this process's sweep with their exit codes


def register() -> None:
    """Makes `hydra/launcher=local` known to Hydra."""
    Plugins.instance().register(LocalLauncher)
    ConfigStore.instance().store(group="hydra/launcher", name="local", node=LocalConf, provider="llmexp")


def label(overrides: Sequence[str], swept: Sequence[str]) -> str:
    """The swept keys with their values, in shell-safe characters."""
    chosen = [o for o in overrides if o.partition("=")[0] in swept]
    text = ",".join(f"{o.partition('=')[0].rpartition('.')[2]}={o.partition('=')[2]}" for o in chosen)
    return re.sub(r"[^A-Za-z0-9._,+-]+", "_", text.replace("=", "_"))[:120].strip("._-") or "point"


def load_points(
    loader: Any, base: DictConfig, job_overrides: Sequence[Sequence[str]], first: int
) -> tuple[list[Point], list[str]]:
    """Every point that composes and divides, and a line for each one that is refused."""
    from llmexp.launch import typed, user_errors
    from llmexp.run import solve_batch

    keys = [o.partition("=")[0] for o in job_overrides[0]] if job_overrides else []
    swept = [k for k in keys if len({o for job in job_overrides for o in job if o.partition("=")[0] == k}) > 1]
    points: list[Point] = []
    refused: list[str] = []
    for number, overrides in enumerate(job_overrides, first):
        name = label(overrides, swept)
        try:
            with user_errors():
                cfg = loader.load_sweep_config(base, list(overrides))
                with open_dict(cfg):
                    cfg.hydra.job.id, cfg.hydra.job.num, cfg.hydra.job.name = str(number), number, name
                path = Path(cfg.hydra.sweep.dir) / str(cfg.hydra.sweep.subdir)
            config = typed(cfg)
            solve_batch(config.batch, config.parallelism.nproc_per_node or 1)
        except ConfigError as error:
            refused.append(f"point {number} ({' '.join(overrides)}): {error}")
            continue
        if any(p.path == path for p in points):
            refused.append(f"point {number}: hydra.sweep.subdir: two points resolve to the folder {path}")
        points.append(Point(list(overrides), cfg, config, name, path))
    return points, refused


def expand(hydra: Hydra, cfg: DictConfig, overrides: Sequence[str]) -> list[list[str]]:
    """The overrides of each point of the grid, as Hydra's basic sweeper makes them."""
    from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
    from hydra.core.override_parser.overrides_parser import OverridesParser

    fixed = cfg.hydra.sweeper.get("params") or {}
    parser = OverridesParser.create(config_loader=hydra.config_loader)
    parsed = parser.parse_overrides([f"{k!s}={v}" for k, v in fixed.items()] + list(overrides))
    return BasicSweeper.split_arguments(parsed, None)[0]


def sweep(hydra: Hydra, cfg: DictConfig, overrides: Sequence[str]) -> int:
    """Runs a sweep through Hydra's sweeper; a table at the end; exit code 1 if a point did not finish."""
    from llmexp.launch import CONFIG_NAME, user_errors

    if str(cfg.hydra.sweeper.get("_target_", "")).endswith("BasicSweeper"):
        _, refused = load_points(hydra.config_loader, cfg, expand(hydra, cfg, overrides), 0)
        if refused:  # all points are looked at before any starts
            raise ConfigError("no point was started, because\n  " + "\n  ".join(refused))
        folder.check_writable(Path(cfg.hydra.sweep.dir))
    FINISHED.clear()
    with user_errors(hydra):
        hydra.multirun(
            CONFIG_NAME, task_function=lambda _: None, overrides=list(overrides), with_log_configuration=False
        )
    print_table()
    return 0 if all(code == 0 for _, code in FINISHED) else 1


def objective(path: Path | None) -> float | None:
    """The final validation loss of a run, for sweepers that optimise; None when there is none."""
    summary = folder.read_status(path).get("summary", {}) if path is not None else {}
    return summary.get("final val/loss", summary.get("final train/loss"))


def print_table() -> None:
    """State and final losses of every point."""
    from rich.console import Console
    from rich.table import Table

    table = Table("run", "state", "train loss", "val loss", "tokens/s", box=None)
    for point, code in FINISHED:
        status = folder.read_status(point.path)
        summary = status.get("summary", {})
        figures = [summary.get(k) for k in ("final train/loss", "final val/loss")]
        rate = summary.get("tokens_per_sec")
        table.add_row(
            point.path.name,
            status.get("state", f"refused (exit {code})"),
            *("" if f is None else f"{f:.4f}" for f in figures),
            "" if rate is None else f"{rate:,.0f}",
        )
    Console().print(table)
    if FINISHED:
        print(f"folder {FINISHED[0][0].path.parent}")
