"""Open the trackers that a run's config names, and copy rows to one of `stores`: by a thread while
the run trains, or all at once."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from threading import Thread
from typing import Any

from llmexp.runs import rundir
from llmexp.settings import config
from llmexp.system.fileio import read_json
from llmexp.tracker.fields import Fields, given_run_id, run_fields
from llmexp.tracker.mirror import INTERVAL_S, End, Mirror, NewRows, TrackerError, one_line
from llmexp.tracker.stores import STORES, Store


class Copy(Mirror):
    """Copies a run while it trains. No method raises, and only `finish` waits."""

    def __init__(
        self,
        kind: str,
        settings: config.Tracker,
        run_dir: Path,
        fields: Fields,
        say: Callable[[str], None],
    ) -> None:
        self.name, self.to = kind, f" --to {kind}"
        super().__init__(settings, run_dir, fields, say)

    def _mirror(self) -> None:
        self._wait_for_a_row()
        store = STORES[self.name]()
        store.start(self._fields, self._run_dir)
        rows, after = NewRows(self._run_dir / rundir.METRICS), store.position()
        while not self._over.wait(INTERVAL_S):
            send(store, rows, after)
        send(store, rows, after)
        store.finish(self._end.summary, self._end.exit_code)

    def _leave_behind(self) -> None:
        """Nothing is left to end: the thread ends with the process."""


def send(store: Store, rows: NewRows, after: int) -> int:
    """Send the rows that were written since the last call and follow step `after`; return how many
    these are."""
    new = [row for row in rows.read() if row["step"] > after]
    for row in new:
        store.row(row)
    return len(new)


def copy(kind: str, run_dir: Path, fields: Fields, end: End) -> tuple[int, str]:
    """Send what the tracker does not have yet of a run that is over, and its end: (rows sent,
    where they are). Raises TrackerError."""
    try:
        store = STORES[kind]()
        where = store.start(fields, run_dir)
        sent = send(store, NewRows(run_dir / rundir.METRICS), store.position())
        store.finish(end.summary, end.exit_code)
    except Exception as error:
        raise TrackerError(one_line(error)) from None
    return sent, where


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
