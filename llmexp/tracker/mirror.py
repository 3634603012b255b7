"""Send the rows of metrics.jsonl to a tracker: by a thread while a run trains, or all at once.

In a fork those of its parents in lineage.jsonl, which have lower steps, go first.
Training neither waits nor fails, whatever a tracker does; an error is one line.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from llmexp import features
from llmexp.config import sections
from llmexp.config.commands import command
from llmexp.folders import rundir
from llmexp.folders.rows import LINEAGE
from llmexp.system.text import one_line
from llmexp.tracker.fields import Fields, given_run_id, owe, run_fields
from llmexp.tracker.stores import STORES, End, Store
from llmexp.tracker.wandb import Wandb, may_have_login

INTERVAL_S = 1.0  # between two looks at metrics.jsonl
# Files with further figures of steps, and what is sent of a line.
BESIDE: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = features.merged("tracker", "BESIDE")


class TrackerError(Exception):
    """Report why a run could not be uploaded, in one line."""


@dataclass(frozen=True)
class Sent:
    """The result of a transfer."""

    rows: int  # in lineage.jsonl and metrics.jsonl
    sent: int
    where: str
    there: int | None  # how many the tracker has, where it counts them

    def lacking(self) -> str:
        """Return a sentence about rows that did not arrive; empty where none is known to lack."""
        if self.there is None or self.there >= self.rows:
            return ""
        return f"the server has {self.there} of {self.rows} rows"


@dataclass
class NewRows:
    """Read the rows of a file as they are written; it may not be there yet."""

    path: Path
    at: int = 0  # bytes that were read

    def read(self) -> list[dict[str, Any]]:
        """Return the rows that were written since the last call."""
        if not self.path.exists():
            return []
        with open(self.path, "rb") as file:
            file.seek(self.at)
            lines, _, _ = file.read().rpartition(b"\n")  # the last one is still being written
        self.at += len(lines) + bool(lines)
        return [json.loads(line) for line in lines.splitlines()]


def open_store(kind: str, *training: Any) -> Store:
    """Return a tracker for a run that is over, or in `training`: what `Wandb` needs to know."""
    return Wandb(*training) if kind == "wandb" else STORES[kind]()


def transfer(
    store: Store, run_dir: Path, fields: Fields, over: threading.Event, end: Callable[[], End]
) -> Sent:
    """Send the rows that the tracker lacks until the run is `over`, then its end."""
    where = store.start(fields, run_dir)
    lineage, new = NewRows(run_dir / LINEAGE), NewRows(run_dir / rundir.METRICS)
    after = store.position()
    beside = [(NewRows(run_dir / name), figures) for name, figures in BESIDE.items()]
    further = dict[int, dict[str, Any]]()  # by step
    rows, sent, last_step, ended = 0, 0, -1, False
    while not ended:
        ended = over.wait(INTERVAL_S)  # before the read, which then gets the last rows too
        if found := lineage.read() + new.read():
            rows, last_step = rows + len(found), found[-1]["step"]
            # those of a step are written before its row
            for lines, figures in beside:
                for line in lines.read():
                    further.setdefault(line["step"], {}).update(figures(line))
        lacking = [row | further.pop(row["step"], {}) for row in found if row["step"] > after]
        further = {step: known for step, known in further.items() if step > last_step}
        if lacking:
            store.rows(lacking)
            sent += len(lacking)
    there = store.finish(replace(end(), rows=rows, last_step=last_step))
    return Sent(rows, sent, where, there)


def upload(kind: str, run_dir: Path, fields: Fields, end: End) -> Sent:
    """Send what the tracker does not have yet of a run that is over, and its end; wait for it.

    Raises TrackerError when not all that was sent is there: the same call again sends the rest.
    """
    store, over = open_store(kind), threading.Event()
    over.set()
    try:
        done = transfer(store, run_dir, fields, over, lambda: end)
    except BaseException as error:  # Ctrl-C too must not wait for what hangs
        store.give_up(kill=True)
        if isinstance(error, Exception):
            raise TrackerError(one_line(error)) from None
        raise
    if done.sent and done.lacking():
        raise TrackerError(done.lacking())
    return done


@dataclass
class Mirror:
    """Mirror a run while it trains, in a thread of its own.

    No method raises, and only `finish` waits. `say` gets at most one line, from another thread.
    """

    kind: str
    settings: sections.Tracker
    run_dir: Path
    fields: Fields
    say: Callable[[str], None]

    def __post_init__(self) -> None:
        self._timeout_s = self.settings.finish_timeout_s
        self._store = open_store(self.kind, self.settings, self._fail)
        self._over, self._end, self._failed = threading.Event(), End({}, 0), False
        self._size_before = (self.run_dir / rundir.METRICS).stat().st_size
        self._thread = threading.Thread(target=self._work, name="tracker", daemon=True)
        self._thread.start()

    def finish(self, summary: dict[str, Any], exit_code: int) -> None:
        """Write `summary`, close the run and wait for its upload, `finish_timeout_s` at most."""
        self._end = End(summary, exit_code)
        self._over.set()
        self._thread.join(self._timeout_s)
        if self._thread.is_alive():
            self._fail(f"not done after {self._timeout_s:g} s; left behind")
            self._store.give_up(kill=False)

    def _fail(self, text: str) -> None:
        """Report what happened, once: the reader needs the first cause, not its echoes."""
        if not self._failed:
            self._failed = True
            there = () if self.kind == "wandb" else ("--to", self.kind)
            again = command("sync", self.run_dir, *there)
            with contextlib.suppress(Exception):
                rest = f"metrics.jsonl has every row, to upload them: {again}"
                self.say(f"{self.kind}: {text}; {rest}")

    def _work(self) -> None:
        try:
            path = self.run_dir / rundir.METRICS
            # importing wandb would hold up the first steps: wait for the first row of this process
            while path.stat().st_size == self._size_before and not self._over.wait(INTERVAL_S):
                pass
            done = transfer(self._store, self.run_dir, self.fields, self._over, lambda: self._end)
            if done.lacking():
                self._fail(done.lacking())
        except Exception as error:  # none is worth a training run
            self._fail(f"stopped ({one_line(error)})")
            self._store.give_up(kill=False)


def finish_all(mirrors: Sequence[Mirror], summary: dict[str, Any], exit_code: int) -> None:
    """Wait for all at once, so that several dead ones cost no more than one."""
    with ThreadPoolExecutor() as pool:
        for one in mirrors:
            pool.submit(one.finish, summary, exit_code)


def open_mirrors(
    run_dir: Path, chosen: sections.Config, say: Callable[[str], None]
) -> list[Mirror]:
    """Start mirroring the run of a folder, which has its config and its record.

    Return at once, before a tracker's package is even imported. A run that a tracker has already is
    continued, and rows that it has are not sent again.
    """
    settings = chosen.tracker
    kinds = [kind for kind in dict.fromkeys([settings.kind, *settings.also]) if kind != "none"]
    if settings.mode == "auto" and os.environ.get("WANDB_MODE") == "disabled":
        kinds = [kind for kind in kinds if kind != "wandb"]
    if not kinds:
        return []
    recorded = rundir.read_run(run_dir)
    fields = run_fields(run_dir, sections.plain(chosen), recorded)
    found = []
    for kind in kinds:
        named = fields
        if kind == "wandb":
            point = bool(recorded.get("label"))
            run_id, unused = given_run_id(run_dir, fields.run_id, point, os.environ)
            if unused:
                say(f"wandb: {unused}")
            named = replace(fields, run_id=run_id)
            nobody_asked = settings.mode == "auto" and not os.environ.get("WANDB_MODE")
            if nobody_asked and not may_have_login():  # it need not even be imported
                with contextlib.suppress(OSError):  # `llmexp sync` finds the run all the same
                    owe(run_dir, run_id)
                continue
        found.append(Mirror(kind, settings, run_dir, named, say))
    return found
