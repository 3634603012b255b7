"""Copy the rows of metrics.jsonl to a tracker of `stores`: by a thread while a run trains, or all
at once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from llmexp import config, rundir
from llmexp.tracker.fields import Fields
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
