"""Run the points of a sweep where its launcher says: on this machine, as Slurm jobs, or as tasks of
Ray."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from llmexp import rundir
from llmexp.compose.environment import refuse_secrets
from llmexp.compose.errors import user_errors
from llmexp.config import ConfigError
from llmexp.labels import plural
from llmexp.sweep import ray, slurm
from llmexp.sweep.current import Current
from llmexp.sweep.ledger import Entry, Ledger
from llmexp.sweep.local import Job, run_all, visible_devices
from llmexp.sweep.points import Point
from llmexp.sweep.show import Display, name_of

PLUGINS = "hydra_plugins.llmexp."
NAMES = {"LocalLauncher": "local", "SlurmLauncher": "slurm", "RayLauncher": "ray"}


def check_launcher(cfg: DictConfig) -> str:
    """local, slurm or ray; their knobs are checked. Raises ConfigError."""
    target = str(cfg.hydra.launcher.get("_target_"))
    name = NAMES.get(target.removeprefix(PLUGINS))
    if name is None:
        raise ConfigError(
            f"hydra/launcher: {target} does not run here; it is one of {', '.join(NAMES.values())}"
        )
    if name == "slurm":
        slurm_settings(cfg)
    if name == "ray":
        ray_settings(cfg)
    return name


def settings_as(kind: type, cfg: DictConfig) -> Any:
    """Return the knobs of the launcher as the dataclass `kind`. Raises ConfigError."""
    with user_errors():
        given = OmegaConf.masked_copy(
            cfg.hydra.launcher, [k for k in cfg.hydra.launcher if k != "_target_"]
        )
        typed = OmegaConf.create({"hydra": {"launcher": OmegaConf.structured(kind)}})
        OmegaConf.set_readonly(typed.hydra.launcher, False)  # as the dataclass is frozen
        settings: Any = OmegaConf.to_object(
            OmegaConf.merge(typed, {"hydra": {"launcher": given}}).hydra.launcher
        )
    refuse_secrets(dataclasses.asdict(settings), "hydra.launcher")  # the jobs' scripts are files
    return settings


def slurm_settings(cfg: DictConfig) -> Any:
    settings = settings_as(slurm.Settings, cfg)
    slurm.check(settings)
    return settings


def ray_settings(cfg: DictConfig) -> Any:
    settings = settings_as(ray.Settings, cfg)
    ray.check(settings)
    return settings


def at_work(
    current: Current, points: Sequence[Point], say: Callable[[str], None]
) -> dict[Path, str]:
    """Slurm jobs of an earlier command for these points that have not ended."""
    if current.launcher != "slurm":
        return {}
    jobs = slurm.live_jobs([p.path for p in points])
    if jobs:
        say(
            f"{plural(len(jobs), 'job')} submitted before {'is' if len(jobs) == 1 else 'are'} "
            "still there"
        )
    return jobs


def execute(
    current: Current,
    ledger: Ledger,
    queued: Sequence[tuple[Point, Entry]],
    jobs: dict[Path, str],
    display: Display,
) -> None:
    """Run the queued points where the launcher says, and wait for them and `jobs`, or until a
    signal stops it."""
    by_path = {ledger.path / e.folder: e for e in ledger.points}

    def look(path: Path, alive: bool = False) -> None:
        ledger.look(by_path[path], alive)

    def begun(path: Path) -> None:
        entry = by_path[path]
        ledger.update(
            entry, state="running", attempts=entry.attempts + 1, started=time.time(), ended=None
        )

    facts = current.knobs
    todo = [
        Job(p.path, facts[e.folder]["ranks"], cuda=facts[e.folder]["devices"] > 0)
        for p, e in queued
    ]
    if current.launcher == "local":
        s = current.settings
        devices = visible_devices(max((facts[e.folder]["devices"] for _, e in queued), default=0))
        display.slots(s.max_parallel or max(1, len(devices)))

        run_all(
            todo, devices, current.stop, max_parallel=s.max_parallel,
            devices_per_run=s.devices_per_run,
            stop_on_failure=s.stop_on_failure, silence_s=s.silence_s,
            begun=lambda job: begun(job.path),
            ended=lambda job: look(job.path), tick=display.tick, say=display.line,
        )  # fmt: skip
        return
    if current.launcher == "ray":
        ray.run_all(
            todo, ray_settings(current.cfg), current.stop,
            max_parallel=current.settings.max_parallel,
            stop_on_failure=current.settings.stop_on_failure,
            begun=begun, look=look, tick=display.tick, say=display.line,
        )  # fmt: skip
        return
    if todo:
        if note := slurm.fixed_here(queued[0][0].config, queued[0][0].path):
            display.line(f"note: {note}")
        settings = slurm_settings(current.cfg)
        # new: jobs unpickle what is there
        where = rundir.claim(ledger.path / "slurm", False, "hydra.sweep.dir")
        submitted = slurm.submit(
            [job.path for job in todo], settings, where, name=f"llmexp-{ledger.name}"
        )
        for path in submitted:
            ledger.update(by_path[path], attempts=by_path[path].attempts + 1)
        display.line(
            f"{plural(len(submitted), 'job')} submitted; what their processes print is in {where}"
        )
        jobs = jobs | submitted

    cancelled: dict[
        Path, Any
    ] = {}  # with when their runs were queued; one that begins all the same renews that
    left = set(jobs)

    def tick() -> None:
        for path in left:  # a job runs before its run says so
            look(path, alive=True)
        display.tick()

    def changed(path: Path, job: str, text: str, over: bool) -> None:
        if (
            over
            and path in cancelled
            and rundir.read_status(path).get("started") == cancelled[path]
        ):
            rundir.write_status(path, "queued", error=None, exit_code=None, ended=None)
        if over:
            left.discard(path)
        look(path, alive=not over)
        if over:
            current.reasons.add(by_path[path].folder)
        display.line(f"{job:<12} {name_of(by_path[path], ledger.swept)}  {text}")
        if (
            over
            and by_path[path].state == "failed"
            and current.settings.stop_on_failure
            and not cancelled
        ):
            found = {p: rundir.read_status(p) for p in left}
            cancelled.update(
                (p, s.get("started")) for p, s in found.items() if s.get("state") == "queued"
            )
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
        display.line(
            f"the jobs go on without this command; to cancel them: scancel {' '.join(whole)}"
        )
