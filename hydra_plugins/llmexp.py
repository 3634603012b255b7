"""Launchers that conf/hydra/launcher names; Hydra looks for them in this namespace package."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig


class LocalLauncher(Launcher):
    """Run the points of a sweep on this machine."""

    def __init__(self, **knobs: Any) -> None:
        """Take the knobs, which `llmexp.sweep.running` reads from the config itself."""

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        raise NotImplementedError

    def launch(
        self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int
    ) -> Sequence[JobReturn]:
        raise NotImplementedError


class SlurmLauncher(LocalLauncher):
    """Run the points of a sweep as Slurm jobs."""


class RayLauncher(LocalLauncher):
    """Run the points of a sweep as tasks of a Ray cluster."""
