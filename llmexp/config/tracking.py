"""Fill the section `tracker` from wandb's own variables."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from llmexp.config.values import ConfigError

# wandb, a URL and a shell take such an id as it is.
SAFE_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
PROJECT = "llmexp"  # where neither the config nor the environment names one
# `wandb agent` sets both for the command that it starts
RUN_ID, SWEEP_ID = "WANDB_RUN_ID", "WANDB_SWEEP_ID"
VARIABLES = {
    "project": "WANDB_PROJECT",
    "entity": "WANDB_ENTITY",
    "name": "WANDB_NAME",
    "group": "WANDB_RUN_GROUP",
    "notes": "WANDB_NOTES",
    "tags": "WANDB_TAGS",
    "mode": "WANDB_MODE",
}
MODES = ("online", "offline", "dryrun", "disabled")


def with_environment(
    tracker: Mapping[str, Any], env: Mapping[str, str]
) -> tuple[dict[str, Any], list[str]]:
    """Return the section `tracker` filled from wandb's variables.

    Return also a line for each variable that is not used. The config goes before the environment,
    but for project and entity of a run that wandb's agent has started. Raises ConfigError for a
    value that wandb would not take.
    """
    filled, unused = dict(tracker), []
    _check_variables(env)
    for key, variable in VARIABLES.items():
        text = env.get(variable, "").strip()
        if not text or (key == "mode" and filled.get("kind") != "wandb"):  # others have no mode
            continue
        value: Any = text
        if key == "tags":
            value = [tag for tag in map(str.strip, text.split(",")) if tag]
        own = filled.get(key)
        if key in ("project", "entity") and SWEEP_ID in env:
            filled[key] = value
            if own not in (None, value):
                unused.append(
                    f"tracker.{key}={own} is not used: the run is wandb's agent's, of the {key} "
                    f"{value}"
                )
        elif own is None or own == []:
            filled[key] = value
        elif own not in (value, "auto"):  # auto asks for the variable when the mirror starts
            unused.append(
                f"{variable}={env[variable]} is not used: tracker.{key}={own} goes before it"
            )
    if env.get("WANDB_RESUME"):
        unused.append("WANDB_RESUME is not used: llmexp resume continues a run, here and there")
    filled["project"] = filled.get("project") or PROJECT
    return filled, unused


def _check_variables(env: Mapping[str, str]) -> None:
    mode, run_id = env.get("WANDB_MODE", "").strip(), env.get(RUN_ID)
    if mode and mode not in MODES:
        raise ConfigError(
            "unknown_option",
            f"WANDB_MODE={mode}: must be one of {', '.join(MODES)}; for example WANDB_MODE=offline",
        )
    if run_id and not SAFE_ID.fullmatch(run_id):
        raise ConfigError(
            "wrong_type",
            f"{RUN_ID}={run_id[:80]}: 1 to 64 letters, digits, _, . and - are needed; for example "
            "run-1",
        )
