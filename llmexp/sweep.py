"""Sweeps: our Hydra launcher, one fresh worker process a point, in one folder.

All points are checked, by a process of its own, before any of them starts and before anything is written.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from hydra._internal.hydra import Hydra
from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus
from hydra.errors import HydraException
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, open_dict

from llmexp import folder
from llmexp.config import Config, ConfigError, build
from llmexp.process import DONE, PREEMPTED, REFUSED, die_with_parent

PLUGIN_MODULE = "hydra_plugins.llmexp"  # Hydra takes launchers from this package only; `register` puts ours there


@dataclass
class LocalConf:
    _target_: str = f"{PLUGIN_MODULE}.LocalLauncher"


class LocalLauncher(Launcher):
    """Runs the points of a sweep one after the other on this machine; a point that fails touches no other."""

    __module__ = PLUGIN_MODULE

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self.config, self.hydra_context = config, hydra_context

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Raises KeyboardInterrupt when a signal stopped a point: the points after it do not start."""
        from llmexp.launch import Worker, say, visible

        points, refused = load_points(self.hydra_context.config_loader, self.config, job_overrides, initial_job_idx)
        if refused:
            raise ConfigError("no point was started, because\n  " + "\n  ".join(reasons(refused)))
        results = []
        for point in points:
            say(f"--- {point.path.name}: {' '.join(point.overrides)}")
            request = {
                "config": dataclasses.asdict(point.config),
                "folder": str(point.path),
                "fixed": True,
                "overrides": visible(point.overrides),
                "label": point.label,
                "group": str(point.path.parent),
            }
            worker = Worker()
            code, path = worker.run(request)
            FINISHED.append((point, code))
            if worker.stopped:
                raise KeyboardInterrupt
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
    Plugins.instance().register(LocalLauncher)  # first: it imports hydra_plugins where plugins are installed
    package = sys.modules.setdefault("hydra_plugins", ModuleType("hydra_plugins"))
    module = ModuleType(PLUGIN_MODULE)
    vars(module)["LocalLauncher"] = LocalLauncher
    vars(package)["llmexp"] = sys.modules[PLUGIN_MODULE] = module
    ConfigStore.instance().store(group="hydra/launcher", name="local", node=LocalConf, provider="llmexp")


def label(overrides: Sequence[str], swept: Sequence[str]) -> str:
    """The swept keys with their values, in shell-safe characters."""
    chosen = [o for o in overrides if o.partition("=")[0] in swept]
    text = ",".join(f"{o.partition('=')[0].rpartition('.')[2]}={o.partition('=')[2]}" for o in chosen)
    return re.sub(r"[^A-Za-z0-9._,+-]+", "_", text.replace("=", "_"))[:120].strip("._-") or "point"


def load_points(
    loader: Any, base: DictConfig, job_overrides: Sequence[Sequence[str]], first: int
) -> tuple[list[Point], list[tuple[str, str]]]:
    """Every point that composes and divides, and (name, reason) of each one that is refused."""
    from llmexp.launch import chosen_folder, typed, user_errors
    from llmexp.run import solve_batch

    chosen_folder(base, "hydra.sweep.dir")  # read once: ${now:} is then the same in all points
    keys = [o.partition("=")[0] for o in job_overrides[0]] if job_overrides else []
    swept = [k for k in keys if len({o for job in job_overrides for o in job if o.partition("=")[0] == k}) > 1]
    points: list[Point] = []
    refused: list[tuple[str, str]] = []
    for number, overrides in enumerate(job_overrides, first):
        name = label(overrides, swept)
        try:
            with user_errors(loader, overrides):
                cfg = loader.load_sweep_config(base, list(overrides))
                with open_dict(cfg):
                    cfg.hydra.job.id, cfg.hydra.job.num, cfg.hydra.job.name = str(number), number, name
            path = chosen_folder(cfg, "hydra.sweep.dir") / chosen_folder(cfg, "hydra.sweep.subdir")
            config = typed(cfg)
            solve_batch(config.batch, config.parallelism.nproc_per_node or 1)
            if config.checkpoint.resume == "never" and folder.is_run(path):
                raise ConfigError(f"{path}: holds a run already; with checkpoint.resume=auto it is gone on with")
            if any(p.path == path for p in points):
                raise ConfigError(f"hydra.sweep.subdir: two points resolve to the folder {path}")
        except ConfigError as error:
            refused.append((f"{number}-{name}", str(error)))
            continue
        points.append(Point(list(overrides), cfg, config, name, path))
    return points, refused


def expand(hydra: Hydra, cfg: DictConfig, overrides: Sequence[str]) -> list[list[str]]:
    """The overrides of each point of the grid, as Hydra's basic sweeper makes them. Raises ConfigError."""
    from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
    from hydra.core.override_parser.overrides_parser import OverridesParser

    from llmexp.launch import user_errors

    fixed = cfg.hydra.sweeper.get("params") or {}
    parser = OverridesParser.create(config_loader=hydra.config_loader)
    with user_errors():
        parsed = parser.parse_overrides([f"{k!s}={v}" for k, v in fixed.items()] + list(overrides))
        for override in parsed:
            if override.is_sweep_override() and not override.is_discrete_sweep():
                raise HydraException(
                    f"{override.input_line}: a sweep needs values to try, for example "
                    f"{override.get_key_element()}=0.1,0.2"
                )
        grid: list[list[str]] = BasicSweeper.split_arguments(parsed, None)[0]
    return grid


def is_grid(cfg: DictConfig) -> bool:
    """Whether Hydra's own sweeper makes the points, so that they are known beforehand."""
    return str(cfg.hydra.sweeper.get("_target_", "")).endswith("BasicSweeper")


def sweep(hydra: Hydra, cfg: DictConfig, overrides: Sequence[str], arguments: Sequence[str]) -> int:
    """Runs a sweep through Hydra's sweeper; a table at the end. `arguments`: the command line, for the way to go on.

    Exit code: 0; 1 if a point did not finish; 75 when a signal stopped it. Raises ConfigError.
    """
    from llmexp.launch import CONFIG_NAME, chosen_folder, fixed_folder, say, user_errors

    where = chosen_folder(cfg, "hydra.sweep.dir")
    folder.check_writable(where)
    if is_grid(cfg):
        points, refused = load_points(hydra.config_loader, cfg, expand(hydra, cfg, overrides), 0)
        refused += [] if refused else check(points)
        if refused:
            raise ConfigError("no point was started, because\n  " + "\n  ".join(reasons(refused)))
    if not fixed_folder(overrides, "hydra.sweep.dir"):
        where = folder.claim(where, fixed=False)  # two sweeps of the same second get two folders
        overrides = [*overrides, f"hydra.sweep.dir={quoted(str(where))}"]
    FINISHED.clear()
    stopped = False
    try:
        with user_errors(hydra.config_loader, overrides):
            hydra.multirun(
                CONFIG_NAME, task_function=lambda _: None, overrides=list(overrides), with_log_configuration=False
            )
    except KeyboardInterrupt:
        stopped = True
    say(results_table())
    say(f"folder {where}")
    if stopped:
        again = [a for a in arguments if not a.startswith(("hydra.sweep.dir=", "checkpoint.resume="))]
        again += [f"hydra.sweep.dir={quoted(str(where))}", "checkpoint.resume=auto"]
        say(f"stopped; to go on: llmexp train {shlex.join(again)}")
        return PREEMPTED
    return 0 if all(code == DONE for _, code in FINISHED) else 1


def quoted(text: str) -> str:
    """`text` as the value of an override: in quotes where Hydra's grammar needs them."""
    if re.fullmatch(r"[A-Za-z0-9_./-]+", text):
        return text
    return "'" + text.replace("\\'", "\\\\'").replace("'", "\\'") + "'"


def reasons(refused: Sequence[tuple[str, str]]) -> list[str]:
    """A line for each reason, with the first of the points that share it."""
    lines = []
    for reason in dict.fromkeys(reason for _, reason in refused):
        names = [name for name, other in refused if other == reason]
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        lines.append(f"{', '.join(names[:3])}{more}: {reason}")
    return lines


def check(points: Sequence[Point]) -> list[tuple[str, str]]:
    """(name, reason) of each point that would be refused. A process of its own looks, so that torch and the device stay
    out of this one; it prepares the data of the points, which the runs need anyway."""
    request = json.dumps([dataclasses.asdict(p.config) for p in points])
    command = [sys.executable, "-P", "-m", "llmexp.sweep"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, process_group=0) as child:
        try:
            answer, _ = child.communicate(request)
        finally:
            child.kill()
    if child.returncode != 0:
        raise ConfigError(f"the check of the sweep's points ended with exit code {child.returncode}")
    return [(p.path.name, reason) for p, reason in zip(points, json.loads(answer), strict=True) if reason]


def objective(path: Path | None) -> float | None:
    """The final validation loss of a run, for sweepers that optimise; None when there is none."""
    summary = folder.read_status(path).get("summary", {}) if path is not None else {}
    return summary.get("final val/loss", summary.get("final train/loss"))


def results_table() -> str:
    """State and final figures of every point that started."""
    rows = [("run", "state", "train loss", "val loss", "tokens/s")]
    for point, code in FINISHED:
        status = {} if code == REFUSED else folder.read_status(point.path)
        summary = status.get("summary", {})
        losses = [summary.get(f"final {key}") for key in ("train/loss", "val/loss")]
        rate = summary.get("mean tokens_per_sec")
        row = (
            point.path.name,
            status.get("state", f"not started (exit {code})"),
            *("" if loss is None else f"{loss:.4f}" for loss in losses),
            "" if rate is None else f"{rate:,.0f}",
        )
        rows.append(row)
    return table(rows, left=2)


def table(rows: Sequence[Sequence[str]], left: int) -> str:
    """Aligned columns, never cut: the first `left` ones to the left, figures to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [f"{row[i]:<{w}}" if i < left else f"{row[i]:>{w}}" for i, w in enumerate(widths)]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


if __name__ == "__main__":  # the process that `check` starts: configs in, reasons out
    die_with_parent()
    configs = [build(plain) for plain in json.load(sys.stdin)]
    from llmexp.assemble import assemble

    found: list[str | None] = []
    with contextlib.redirect_stdout(sys.stderr):
        for config in configs:
            try:
                assemble(config, write=True)
                found.append(None)
            except ConfigError as error:
                found.append(str(error))
    json.dump(found, sys.stdout)
