"""Open the trackers that a run's config names."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from threading import Thread
from typing import Any

from llmexp import config, rundir
from llmexp.fileio import read_json
from llmexp.tracker.copies import Copy
from llmexp.tracker.fields import given_run_id, run_fields
from llmexp.tracker.mirror import Mirror
from llmexp.tracker.stores import STORES


class Trackers:
    """The trackers of a run: none, one or several. Ranks but the first have none."""

    def __init__(self, open_ones: Sequence[Mirror] = ()) -> None:
        self._open = tuple(open_ones)

    def finish(self, summary: dict[str, Any], exit_code: int) -> None:
        """Wait for all at once, so that several dead ones cost no more than one."""
        end = (summary, exit_code)
        waiting = [Thread(target=t.finish, args=end, daemon=True) for t in self._open]
        for thread in waiting:
            thread.start()
        for thread in waiting:
            thread.join()


def open_trackers(run_dir: Path, chosen: config.Config, say: Callable[[str], None]) -> Trackers:
    """Start mirroring the run of a folder, which has its config and its record; return at once,
    before a tracker's package is even imported.

    A run that a tracker has already is continued, and rows that it has are not sent again.
    """
    kinds = list(dict.fromkeys([chosen.tracker.kind, *chosen.tracker.also]))
    if kinds == ["none"]:
        return Trackers()
    recorded = read_json(run_dir / rundir.RUN)
    fields = run_fields(run_dir, config.plain(chosen), recorded)
    found: list[Mirror] = []
    if "wandb" in kinds:
        point = bool(recorded.get("label"))
        run_id, unused = given_run_id(run_dir, fields.run_id, point, os.environ)
        if unused:
            say(f"wandb: {unused}")
        found.append(Mirror(chosen.tracker, run_dir, replace(fields, run_id=run_id), say))
    copies = [kind for kind in kinds if kind in STORES]
    return Trackers([*found, *(Copy(k, chosen.tracker, run_dir, fields, say) for k in copies)])
