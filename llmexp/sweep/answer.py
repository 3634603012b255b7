"""End a sweep: its ledger, and the answer that it prints."""

from __future__ import annotations

from collections.abc import Callable

from llmexp.compare import reading, table, throughput
from llmexp.compare.comparing import compare
from llmexp.compare.table import columns
from llmexp.runs import ledger as ledgers
from llmexp.runs import rundir
from llmexp.runs.find import find
from llmexp.sweep import show
from llmexp.sweep.current import Current
from llmexp.tracker.sync import upload_command


def conclude(current: Current, say: Callable[[str], None]) -> None:
    """End the ledger; print the answer, why points did not finish, and where everything is."""
    ledger = current.ledger
    states = {e.state for e in ledger.points if e.rung is None} - {"infeasible"}
    all_done = states <= {"finished"} and (current.grid or not current.stopped)
    ledger.state = "finished" if all_done else "preempted" if current.stopped else "failed"
    ledger.save()
    say("")
    lines: list[str] = []
    try:
        lines = report(current)
    except Exception as error:  # the runs are recorded, so an error here is only printed
        # its repr may hold a page
        say(f"no comparison: {type(error).__name__}: {ledgers.one_line(str(error))}")
    for line in lines or [show.results_table(ledger)]:
        say(line)
    for line in show.unfinished(ledger):
        say(line)
    if upload := upload_command(ledger.path):
        say(f"upload {upload}")
    say(f"folder {ledger.path}")


def report(current: Current) -> list[str]:
    """Compare the points that ran, write the page or the table of rates, and return the answer.

    It is empty where fewer than two ran or none finished.
    """
    ledger = current.ledger
    states = {e.folder: e.state for e in ledger.points if rundir.is_run(ledger.path / e.folder)}
    ran = [state for state in states.values() if state not in ("queued", "infeasible")]
    if len(ran) < 2 or "finished" not in ran:
        return []
    from llmexp.compare.page import write_beside

    if current.settings.report == "throughput":
        cells = throughput.write(reading.read(find([ledger.path])[0]), ledger.path)
        return [show.table(cells, left=2), f"table  {ledger.path / 'throughput.csv'}"]
    comparison = compare([ledger.path], negligible=ledger.negligible)
    written = write_beside(comparison, ledger.path)
    damage = [f"llmexp: {problem}" for problem in comparison.problems]
    return [*table.lines(comparison, columns()), *damage, f"page   {written}"]
