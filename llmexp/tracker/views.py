"""Save a workspace in wandb for a sweep: curves over tokens, a line a setting, seeds as bands."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path

from llmexp.config.commands import how_to_install
from llmexp.config.knobs import is_seed
from llmexp.folders.find import runs_under
from llmexp.folders.folder import RunFolder
from llmexp.tracker.fields import Fields, read_position, run_fields, write_position
from llmexp.tracker.wandb import JOB_TYPE, MARKS

PANELS = ("val/loss", "train/loss", "grad_norm", "lr")
MISSING = (
    "no saved workspace: the package wandb-workspaces is not installed; to install it: "
    f"{how_to_install('wandb_workspaces')}"
)


def is_installed() -> bool:
    """Return whether a workspace can be saved."""
    return importlib.util.find_spec("wandb_workspaces") is not None


def workspace(sweep: Path) -> str:
    """Return where the workspace of a sweep is whose answer is there; the first call saves it.

    Raises what wandb raises.
    """
    position = read_position(sweep)
    assert position is not None
    if position.workspace is None:
        folder = next(RunFolder(run) for run in runs_under(sweep) if read_position(run))
        fields = run_fields(sweep, folder.config, folder.facts)
        keys = [key for key in folder.facts.get("swept") or () if not is_seed(key)]
        # of a group, such as optimizer, the function that it names
        keys = [k if k in folder.flat_config else f"{k}._target_" for k in keys]
        project = (position.uploaded or {}).get("project") or fields.project
        fields = replace(fields, project=project, entity=position.entity)
        position = replace(position, workspace=save_workspace(fields, keys))
        write_position(sweep, position)
    return str(position.workspace)


def save_workspace(fields: Fields, keys: list[str]) -> str:
    """Save a workspace for the runs of a group, by the keys of their config, and return its URL."""
    from wandb_workspaces.reports.v2 import LinePlot
    from wandb_workspaces.workspaces import (
        Config,
        Metric,
        RunsetSettings,
        Section,
        Workspace,
        WorkspaceSettings,
    )

    panels = [
        LinePlot(x="tokens_seen", y=[key], groupby_aggfunc="mean", groupby_rangefunc="minmax")
        for key in PANELS
    ]
    view = Workspace(
        entity=fields.entity or "",
        project=fields.project,
        name=fields.group or fields.name,
        sections=[Section(name="sweep", panels=panels, is_open=True)],
        settings=WorkspaceSettings(x_axis="tokens_seen", max_runs=100),
        runset_settings=RunsetSettings(
            filters=[Metric("Group") == fields.group, Metric("JobType") != JOB_TYPE],
            groupby=[Config(key) for key in keys] or [Metric("Group")],
            pinned_columns=[f"summary:{key}" for key in MARKS],
        ),
    )
    return str(view.save().url)
