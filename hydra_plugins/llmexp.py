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
        """Take the knobs, which `llmexp.sweep.launchers` reads from the config itself."""

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        self.hydra_context = hydra_context

    def launch(
        self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int
    ) -> Sequence[JobReturn]:
        """Run one batch of a sweeper that chooses its points; a grid does not come here."""
        from llmexp.sweep import search  # Hydra imports this file for each command

        return search.launch(self.hydra_context.config_loader, job_overrides, initial_job_idx)


class SlurmLauncher(LocalLauncher):
    """Run the points of a sweep as Slurm jobs."""


class RayLauncher(LocalLauncher):
    """Run the points of a sweep as tasks of a Ray cluster."""
