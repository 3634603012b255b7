"""Run points where the launcher says: on this machine, as Slurm jobs, or as tasks of Ray."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from omegaconf import DictConfig, OmegaConf

from llmexp.compose.environment import refuse_secrets
from llmexp.compose.errors import user_errors
from llmexp.settings.labels import plural
from llmexp.settings.values import ConfigError
from llmexp.sweep import ray, slurm
from llmexp.sweep.current import Current
from llmexp.sweep.local import Local
from llmexp.sweep.matching import Task
from llmexp.sweep.show import Display

PLUGINS = "hydra_plugins.llmexp."
NAMES = {"LocalLauncher": "local", "SlurmLauncher": "slurm", "RayLauncher": "ray"}
KNOBS: dict[str, Any] = {"slurm": slurm, "ray": ray}  # modules with `Knobs` and `check`


class Launcher(Protocol):
    """A place where points run."""

    pause_s: float  # between two looks

    def start(self, waiting: list[Task]) -> None:
        """Start what there is room for, and take it from the list."""

    def poll(self) -> bool:
        """Record what has changed; return whether anything is left to wait for."""

    def stop(self, number: int) -> int:
        """Pass a signal on; return how many runs are under way and save a checkpoint first."""

    def cancel_waiting(self) -> None:
        """Take back what has not begun."""


def check_launcher(cfg: DictConfig) -> str:
    """Return local, slurm or ray; its knobs are checked. Raises ConfigError."""
    target = str(cfg.hydra.launcher.get("_target_"))
    name = NAMES.get(target.removeprefix(PLUGINS))
    if name is None:
        text = f"does not run here; it is one of {', '.join(NAMES.values())}"
        raise ConfigError(f"hydra/launcher: {target} {text}")
    if name in KNOBS:
        launcher_knobs(name, cfg)
    return name


def launcher_knobs(name: str, cfg: DictConfig) -> Any:
    """Return the checked knobs of the launcher. Raises ConfigError."""
    launcher = cfg.hydra.launcher
    with user_errors():
        given = OmegaConf.masked_copy(launcher, [k for k in launcher if k != "_target_"])
        typed = OmegaConf.create({"hydra": {"launcher": OmegaConf.structured(KNOBS[name].Knobs)}})
        OmegaConf.set_readonly(typed.hydra.launcher, False)  # as the dataclass is frozen
        merged = OmegaConf.merge(typed, {"hydra": {"launcher": given}})
        knobs: Any = OmegaConf.to_object(merged.hydra.launcher)
    refuse_secrets(dataclasses.asdict(knobs), "hydra.launcher")  # the jobs' scripts are files
    KNOBS[name].check(knobs)
    return knobs


def run_tasks(
    current: Current, tasks: list[Task], at_work: list[slurm.Submitted], display: Display
) -> None:
    """Run tasks where the launcher says; wait for them and for jobs of an earlier command."""
    launcher: Launcher
    if current.launcher == "local":
        launcher = Local(current, tasks)
        display.slots(launcher.slots)
    elif current.launcher == "ray":
        launcher = ray.Ray(current, launcher_knobs("ray", current.cfg), tasks)
    else:
        knobs = launcher_knobs("slurm", current.cfg)
        launcher = slurm.Slurm(current, knobs, at_work, display.line)
    drive(launcher, list(tasks), current, display)


def drive(launcher: Launcher, waiting: list[Task], current: Current, display: Display) -> None:
    """Run the waiting tasks until all have ended.

    None starts after a signal, which is passed on, or after a failure that ends the sweep.
    """
    passed_on, cancelled, left = 0, False, True
    while left:
        for number in current.signals[passed_on:]:
            saving = launcher.stop(number)
            if saving and not passed_on:
                verb = "saves" if saving == 1 else "save"
                display.line(f"stopping: {saving} under way {verb} a checkpoint first")
            passed_on += 1
        if current.halted and not cancelled:
            cancelled = True
            launcher.cancel_waiting()
        if not current.over:
            launcher.start(waiting)
        left = launcher.poll() or bool(waiting and not current.over)
        display.tick()
        time.sleep(launcher.pause_s if left else 0)


def at_work(
    current: Current, tasks: Sequence[Task], say: Callable[[str], None]
) -> list[slurm.Submitted]:
    """Return jobs of an earlier command for these tasks that have not ended, in Slurm."""
    if current.launcher != "slurm":
        return []
    jobs = slurm.live_jobs(tasks)
    if jobs:
        verb = "is" if len(jobs) == 1 else "are"
        say(f"{plural(len(jobs), 'job')} submitted before {verb} still there")
    return jobs
