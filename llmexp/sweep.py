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
from omegaconf import DictConfig, OmegaConf, open_dict

from llmexp import folder
from llmexp.config import Config, ConfigError, build, plain, refuse
from llmexp.process import DONE, PREEMPTED, REFUSED, die_with_parent

PLUGIN_MODULE = "hydra_plugins.llmexp"  # Hydra takes launchers from this package only; `register` puts ours there


@dataclass
class LocalConf:
    _target_: str = f"{PLUGIN_MODULE}.LocalLauncher"


@dataclass(frozen=True)
class Point:
    overrides: list[str]
    cfg: DictConfig
    config: Config
    label: str
    path: Path

    def request(self) -> dict[str, Any]:
        """What a worker needs to make the run."""
        from llmexp.launch import visible

        return {
            "config": plain(self.config),
            "folder": str(self.path),
            "fixed": True,
            "overrides": visible(self.overrides),
            "label": self.label,
            "group": str(self.path.parent),
        }

    def result(self, code: int) -> JobReturn:
        """For sweepers that optimise: the final validation loss of the run that ended with `code`, if it has one."""
        result = JobReturn(overrides=self.overrides, cfg=self.cfg, status=JobStatus.COMPLETED)
        summary = {} if code == REFUSED else folder.read_status(self.path).get("summary", {})
        result.return_value = summary.get("final val/loss", summary.get("final train/loss"))
        return result


class LocalLauncher(Launcher):
    """Runs the points of a sweep one after the other on this machine; a point that fails touches no other."""

    __module__ = PLUGIN_MODULE

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self.config, self.hydra_context = config, hydra_context

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Raises KeyboardInterrupt when a signal stopped a point: the points after it do not start."""
        from llmexp.launch import Worker, say

        points = all_points(self.hydra_context.config_loader, self.config, job_overrides, initial_job_idx)
        for point in points:
            refuse_hosts(point.config, "for several use hydra/launcher=slurm")
        results = []
        for point in points:
            say(f"--- {point.path.name}: {' '.join(point.overrides)}")
            worker = Worker()
            code, _ = worker.run(point.request())
            FINISHED.append((point, code))
            if worker.stopped:
                raise KeyboardInterrupt
            results.append(point.result(code))
        return results


class SlurmLauncher(Launcher):
    """Runs the points of a sweep as Slurm jobs and waits for them all."""

    __module__ = PLUGIN_MODULE

    def __init__(self, **knobs: Any) -> None:
        """The knobs are read from the config, in `slurm_settings`."""

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self.config, self.hydra_context = config, hydra_context

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """A point whose job of an earlier sweep in this folder is still there is waited for, not submitted again.

        Raises KeyboardInterrupt when a signal ended the waiting: the jobs go on.
        """
        from llmexp import slurm
        from llmexp.launch import say

        settings = slurm_settings(self.config)
        points = all_points(self.hydra_context.config_loader, self.config, job_overrides, initial_job_idx)
        jobs = slurm.live_jobs([p.path for p in points])
        new = [p for p in points if p.path not in jobs]
        answers = ask({"queue": [p.request() for p in new]}) if new else []
        refused = {p.path: reason for p, reason in zip(new, answers, strict=True) if reason}
        for path, reason in refused.items():
            say(f"{path.name}  not started: {reason}")
        waiting = [p for p in new if folder.read_status(p.path).get("state") == "queued" and p.path not in refused]
        if waiting and (note := slurm.fixed_here(waiting[0].config, waiting[0].path)):
            say(f"note: {note}")
        where = Path(str(self.config.hydra.sweep.dir)) / "slurm"
        submitted = slurm.submit([p.path for p in waiting], settings, where, name=f"llmexp-{points[0].config.name}")
        earlier = f", {len(jobs)} submitted before are still there" if jobs else ""
        say(f"{len(submitted)} jobs submitted{earlier}; what their processes print is in {where}")
        jobs |= submitted
        try:
            slurm.wait(jobs, say)
        except KeyboardInterrupt:
            whole = dict.fromkeys(job.partition("_")[0] for job in jobs.values())
            say(f"the jobs go on without this command; to cancel them: scancel {' '.join(whole)}")
            raise
        finally:
            codes = [REFUSED if p.path in refused else slurm.exit_code(p.path) for p in points]
            FINISHED.extend(zip(points, codes, strict=True))
        return [p.result(code) for p, code in zip(points, codes, strict=True)]


def slurm_settings(cfg: DictConfig) -> Any:
    """The knobs of hydra/launcher=slurm, checked. Raises ConfigError."""
    from llmexp import slurm
    from llmexp.launch import refuse_secrets, user_errors

    with user_errors():
        given = OmegaConf.masked_copy(cfg.hydra.launcher, [k for k in cfg.hydra.launcher if k != "_target_"])
        typed = OmegaConf.create({"hydra": {"launcher": OmegaConf.structured(slurm.Settings)}})
        OmegaConf.set_readonly(typed.hydra.launcher, False)  # as the dataclass is frozen
        settings = OmegaConf.to_object(OmegaConf.merge(typed, {"hydra": {"launcher": given}}).hydra.launcher)
    assert isinstance(settings, slurm.Settings)
    refuse_secrets(dataclasses.asdict(settings), "hydra.launcher")  # the jobs' scripts are files
    slurm.check(settings)
    return settings


FINISHED: list[tuple[Point, int]] = []  # points of this process's sweep with their exit codes


def register() -> None:
    """Makes our launchers known to Hydra; the knobs of slurm are in conf/."""
    Plugins.instance().register(LocalLauncher)  # first: it imports hydra_plugins where plugins are installed
    Plugins.instance().register(SlurmLauncher)
    package = sys.modules.setdefault("hydra_plugins", ModuleType("hydra_plugins"))
    module = ModuleType(PLUGIN_MODULE)
    vars(module).update(LocalLauncher=LocalLauncher, SlurmLauncher=SlurmLauncher)
    vars(package)["llmexp"] = sys.modules[PLUGIN_MODULE] = module
    ConfigStore.instance().store(group="hydra/launcher", name="local", node=LocalConf, provider="llmexp")


def refuse_hosts(config: Config, instead: str = "for several, --queue makes the run's folder and says how") -> None:
    """Raises ConfigError for a run on several hosts, which cannot be started from here."""
    if (nodes := config.parallelism.nnodes) > 1:
        raise refuse("parallelism.nnodes", nodes, f"this command starts ranks on this host only; {instead}", 1)


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
    from llmexp.run import solve_batch, solve_layout

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
            if (ranks := config.parallelism.nproc_per_node) is not None:  # else the devices decide, which torch counts
                solve_batch(config.batch, solve_layout(config.parallelism, ranks).dp_size)
            if config.checkpoint.resume == "never" and folder.is_run(path):
                raise ConfigError(f"{path}: holds a run already; with checkpoint.resume=auto it is gone on with")
            if any(p.path == path for p in points):
                raise ConfigError(f"hydra.sweep.subdir: two points resolve to the folder {path}")
        except ConfigError as error:
            refused.append((f"{number}-{name}", str(error)))
            continue
        points.append(Point(list(overrides), cfg, config, name, path))
    return points, refused


def all_points(loader: Any, base: DictConfig, job_overrides: Sequence[Sequence[str]], first: int) -> list[Point]:
    """Every point. Raises ConfigError when one is refused."""
    points, refused = load_points(loader, base, job_overrides, first)
    if refused:
        raise no_start(refused)
    return points


def no_start(refused: Sequence[tuple[str, str]]) -> ConfigError:
    return ConfigError("no point was started, because\n  " + "\n  ".join(reasons(refused)))


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


def is_slurm(cfg: DictConfig) -> bool:
    """Whether the points become Slurm jobs."""
    return str(cfg.hydra.launcher.get("_target_")) == f"{PLUGIN_MODULE}.SlurmLauncher"


def sweep(hydra: Hydra, cfg: DictConfig, overrides: Sequence[str], arguments: Sequence[str]) -> int:
    """Runs a sweep through Hydra's sweeper; a table at the end. `arguments`: the command line, for the way to go on.

    Exit code: 0; 1 if a point did not finish; 75 when a signal stopped it. Raises ConfigError.
    """
    from llmexp.launch import CONFIG_NAME, chosen_folder, fixed_folder, say, user_errors

    where, in_slurm = chosen_folder(cfg, "hydra.sweep.dir"), is_slurm(cfg)
    folder.check_writable(where)
    if in_slurm:
        slurm_settings(cfg)
    if is_grid(cfg):
        points, refused = load_points(hydra.config_loader, cfg, expand(hydra, cfg, overrides), 0)
        for point in [] if in_slurm else points:
            refuse_hosts(point.config, "for several use hydra/launcher=slurm")
        refused += [] if refused else check(points)
        if refused:
            raise no_start(refused)
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
    """(name, reason) of each point that would be refused. Prepares the points' data, which the runs need anyway."""
    found = ask({"check": [p.request() for p in points]})
    return [(p.path.name, reason) for p, reason in zip(points, found, strict=True) if reason]


def ask(question: dict[str, list[dict[str, Any]]]) -> list[str | None]:
    """The answers of a process of its own (the end of this file), so that torch and the device stay out of this one."""
    command = [sys.executable, "-P", "-m", "llmexp.sweep"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, process_group=0) as child:
        try:
            answer, _ = child.communicate(json.dumps(question))
        finally:
            child.kill()
    if child.returncode != 0:
        raise ConfigError(f"the check of the sweep's points ended with exit code {child.returncode}")
    answers: list[str | None] = json.loads(answer)
    return answers


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


if __name__ == "__main__":  # what `ask` starts; a reason or null for each request
    die_with_parent()
    ((purpose, requests),) = json.load(sys.stdin).items()
    from llmexp.assemble import assemble
    from llmexp.train import worker

    found: list[str | None] = []
    with contextlib.redirect_stdout(sys.stderr):
        for request in requests:
            try:
                parts = assemble(build(request["config"]), write=True)
                if purpose == "queue":
                    path, fresh = worker.open_folder(parts, request)
                    if fresh or not worker.is_finished(path):
                        with folder.locked(path):
                            worker.record(path, parts, request, "queued")
                found.append(None)
            except ConfigError as error:
                found.append(str(error))
    json.dump(found, sys.stdout)
