"""Where the points of a sweep run: our Hydra launchers local, slurm and ray, which differ in `execute` only."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf

from llmexp import folder
from llmexp.config import ConfigError
from llmexp.labels import plural
from llmexp.sweep import main
from llmexp.sweep.current import Current
from llmexp.sweep.ledger import Entry, Ledger
from llmexp.sweep.local import Job, run_all, visible_devices
from llmexp.sweep.points import Point
from llmexp.sweep.show import Display, name_of

PLUGIN_MODULE = "hydra_plugins.llmexp"  # Hydra takes launchers from this package only; `register` puts ours there


@dataclass
class LocalConf:
    _target_: str = f"{PLUGIN_MODULE}.LocalLauncher"


class LocalLauncher(Launcher):
    """Runs the points of a sweep on this machine."""

    __module__ = PLUGIN_MODULE

    def __init__(self, **knobs: Any) -> None:
        """The knobs are read from the config, in `check_launcher`."""

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self.hydra_context = hydra_context

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Only sweepers other than Hydra's basic one come here."""
        return main.launch(self.hydra_context.config_loader, job_overrides, initial_job_idx)


class SlurmLauncher(LocalLauncher):
    """Runs the points of a sweep as Slurm jobs."""

    __module__ = PLUGIN_MODULE


class RayLauncher(LocalLauncher):
    """Runs the points of a sweep as tasks of a Ray cluster."""

    __module__ = PLUGIN_MODULE


NAMES = {"LocalLauncher": "local", "SlurmLauncher": "slurm", "RayLauncher": "ray"}


def register() -> None:
    """Makes our launchers known to Hydra; the knobs of slurm and ray are in conf/."""
    plugins = Plugins.instance()  # first: it imports hydra_plugins where plugins are installed
    package = sys.modules.setdefault("hydra_plugins", ModuleType("hydra_plugins"))
    module = ModuleType(PLUGIN_MODULE)
    for launcher in (LocalLauncher, SlurmLauncher, RayLauncher):
        plugins.register(launcher)
        setattr(module, launcher.__name__, launcher)
    vars(package)["llmexp"] = sys.modules[PLUGIN_MODULE] = module
    ConfigStore.instance().store(group="hydra/launcher", name="local", node=LocalConf, provider="llmexp")


def check_launcher(cfg: DictConfig) -> str:
    """local, slurm or ray; their knobs are checked. Raises ConfigError."""
    target = str(cfg.hydra.launcher.get("_target_"))
    name = NAMES.get(target.removeprefix(f"{PLUGIN_MODULE}."))
    if name is None:
        raise ConfigError(f"hydra/launcher: {target} does not run here; it is one of {', '.join(NAMES.values())}")
    if name == "slurm":
        slurm_settings(cfg)
    if name == "ray":
        ray_settings(cfg)
    return name


def settings_as(kind: type, cfg: DictConfig) -> Any:
    """The knobs of the launcher as the dataclass `kind`. Raises ConfigError."""
    from llmexp.launch import refuse_secrets, user_errors

    with user_errors():
        given = OmegaConf.masked_copy(cfg.hydra.launcher, [k for k in cfg.hydra.launcher if k != "_target_"])
        typed = OmegaConf.create({"hydra": {"launcher": OmegaConf.structured(kind)}})
        OmegaConf.set_readonly(typed.hydra.launcher, False)  # as the dataclass is frozen
        settings: Any = OmegaConf.to_object(OmegaConf.merge(typed, {"hydra": {"launcher": given}}).hydra.launcher)
    refuse_secrets(dataclasses.asdict(settings), "hydra.launcher")  # the jobs' scripts are files
    return settings


def slurm_settings(cfg: DictConfig) -> Any:
    from llmexp import slurm

    settings = settings_as(slurm.Settings, cfg)
    slurm.check(settings)
    return settings


def ray_settings(cfg: DictConfig) -> Any:
    from llmexp.sweep import ray

    settings = settings_as(ray.Settings, cfg)
    ray.check(settings)
    return settings


def at_work(current: Current, points: Sequence[Point], say: Callable[[str], None]) -> dict[Path, str]:
    """Slurm jobs of an earlier command for these points that have not ended."""
    if current.launcher != "slurm":
        return {}
    from llmexp import slurm

    jobs = slurm.live_jobs([p.path for p in points])
    if jobs:
        say(f"{plural(len(jobs), 'job')} submitted before {'is' if len(jobs) == 1 else 'are'} still there")
    return jobs


def execute(
    current: Current,
    ledger: Ledger,
    queued: Sequence[tuple[Point, Entry]],
    jobs: dict[Path, str],
    display: Display,
) -> None:
    """Runs the queued points where the launcher says, and waits for them and `jobs`, or until a signal stops it."""
    by_path = {ledger.path / e.folder: e for e in ledger.points}

    def look(path: Path, alive: bool = False) -> None:
        ledger.look(by_path[path], alive)

    def begun(path: Path) -> None:
        entry = by_path[path]
        ledger.update(entry, state="running", attempts=entry.attempts + 1, started=time.time(), ended=None)

    facts = current.knobs
    todo = [Job(p.path, facts[e.folder]["ranks"], cuda=facts[e.folder]["devices"] > 0) for p, e in queued]
    if current.launcher == "local":
        s = current.settings
        devices = visible_devices(max((facts[e.folder]["devices"] for _, e in queued), default=0))
        display.slots(s.max_parallel or max(1, len(devices)))

        run_all(
            todo, devices, current.stop, max_parallel=s.max_parallel, devices_per_run=s.devices_per_run,
            stop_on_failure=s.stop_on_failure, silence_s=s.silence_s, begun=lambda job: begun(job.path),
            ended=lambda job: look(job.path), tick=display.tick, say=display.line,
        )  # fmt: skip
        return
    if current.launcher == "ray":
        from llmexp.sweep import ray

        ray.run_all(
            todo, ray_settings(current.cfg), current.stop,
            max_parallel=current.settings.max_parallel, stop_on_failure=current.settings.stop_on_failure,
            begun=begun, look=look, tick=display.tick, say=display.line,
        )  # fmt: skip
        return
    from llmexp import slurm

    if todo:
        if note := slurm.fixed_here(queued[0][0].config, queued[0][0].path):
            display.line(f"note: {note}")
        settings = slurm_settings(current.cfg)
        where = folder.claim(ledger.path / "slurm", False, "hydra.sweep.dir")  # new: jobs unpickle what is there
        submitted = slurm.submit([job.path for job in todo], settings, where, name=f"llmexp-{ledger.name}")
        for path in submitted:
            ledger.update(by_path[path], attempts=by_path[path].attempts + 1)
        display.line(f"{plural(len(submitted), 'job')} submitted; what their processes print is in {where}")
        jobs = jobs | submitted

    cancelled: dict[Path, Any] = {}  # with when their runs were queued; one that begins all the same renews that
    left = set(jobs)

    def tick() -> None:
        for path in left:  # a job runs before its run says so
            look(path, alive=True)
        display.tick()

    def changed(path: Path, job: str, text: str, over: bool) -> None:
        if over and path in cancelled and folder.read_status(path).get("started") == cancelled[path]:
            folder.write_status(path, "queued", error=None, exit_code=None, ended=None)
        if over:
            left.discard(path)
        look(path, alive=not over)
        if over:
            current.reasons.add(by_path[path].folder)
        display.line(f"{job:<12} {name_of(by_path[path], ledger.swept)}  {text}")
        if over and by_path[path].state == "failed" and current.settings.stop_on_failure and not cancelled:
            found = {p: folder.read_status(p) for p in left}
            cancelled.update((p, s.get("started")) for p, s in found.items() if s.get("state") == "queued")
            slurm.cancel_pending([jobs[p] for p in cancelled])

    try:
        if current.stop.requested:  # while they were submitted
            raise KeyboardInterrupt
        slurm.wait(jobs, changed, display.line, tick)
        for path in jobs:
            look(path)
    except KeyboardInterrupt:
        current.stop.requested = True
        tick()
        whole = dict.fromkeys(job.partition("_")[0] for job in jobs.values())
        display.line(f"the jobs go on without this command; to cancel them: scancel {' '.join(whole)}")
