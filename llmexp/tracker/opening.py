"""Open the trackers that a run's config names."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from llmexp.runs import rundir
from llmexp.settings import config
from llmexp.system.fileio import read_json
from llmexp.tracker.fields import given_run_id, run_fields
from llmexp.tracker.mirror import Mirror


class Trackers:
    """The trackers of a run: none, one or several. Ranks but the first have none."""

    def __init__(self, open_ones: Sequence[Mirror] = ()) -> None:
        self._open = tuple(open_ones)

    def finish(self, summary: dict[str, Any], exit_code: int) -> None:
        """Wait for all at once, so that several dead ones cost no more than one."""
        with ThreadPoolExecutor() as pool:
            for tracker in self._open:
                pool.submit(tracker.finish, summary, exit_code)


def open_trackers(run_dir: Path, chosen: config.Config, say: Callable[[str], None]) -> Trackers:
    """Start mirroring the run of a folder, which has its config and its record.

    Return at once, before a tracker's package is even imported. A run that a tracker has already is
    continued, and rows that it has are not sent again.
    """
    settings = chosen.tracker
    kinds = [kind for kind in dict.fromkeys([settings.kind, *settings.also]) if kind != "none"]
    if settings.mode == "auto" and os.environ.get("WANDB_MODE") == "disabled":
        kinds = [kind for kind in kinds if kind != "wandb"]
    if not kinds:
        return Trackers()
    recorded = read_json(run_dir / rundir.RUN)
    fields = run_fields(run_dir, config.plain(chosen), recorded)
    found: list[Mirror] = []
    for kind in kinds:
        named = fields
        if kind == "wandb":
            point = bool(recorded.get("label"))
            run_id, unused = given_run_id(run_dir, fields.run_id, point, os.environ)
            if unused:
                say(f"wandb: {unused}")
            named = replace(fields, run_id=run_id)
        found.append(Mirror(kind, settings, run_dir, named, say))
    return Trackers(found)
