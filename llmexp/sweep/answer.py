"""End a sweep: its record, its comparison, and why runs did not finish."""

from __future__ import annotations

from llmexp.compare import reading, table, throughput
from llmexp.compare.comparing import compare
from llmexp.folders import rundir
from llmexp.sweep import show
from llmexp.sweep.current import Current
from llmexp.system.child import say
from llmexp.system.text import aligned, columns, one_line
from llmexp.tracker.answer import deliver
from llmexp.tracker.sync import upload_command


def conclude(current: Current) -> None:
    """End the ledger; print the answer, why points did not finish, and where everything is."""
    ledger = current.ledger
    states = {e.state for e in ledger.points if e.rung is None} - {"infeasible"}
    # else a signal came before a search, or the next look, could ask for more
    known = current.grid and not current.knobs.decide
    all_done = states <= {"finished"} and (known or not current.stopped)
    ledger.state = "finished" if all_done else "preempted" if current.stopped else "failed"
    ledger.save()
    say("")
    lines: list[str] = []
    try:
        lines = report_sweep(current)
    except Exception as error:  # the runs are recorded, so an error here is only printed
        # its repr may hold a page
        say(f"no comparison: {type(error).__name__}: {one_line(str(error))}")
    for line in [*(lines or [show.results_table(ledger)]), *show.unfinished(ledger)]:
        say(line)
    if upload := upload_command(ledger.path):
        say(f"upload {upload}")
    say(f"folder {ledger.path}")


def report_sweep(current: Current) -> list[str]:
    """Compare the points that ran, write the page or the table of rates, and return the answer.

    It is empty where fewer than two ran or none finished.
    """
    ledger = current.ledger
    states = [e.state for e in ledger.points if rundir.is_run(ledger.path / e.folder)]
    ran = [state for state in states if state not in ("queued", "infeasible")]
    if len(ran) < 2 or "finished" not in ran:
        return []
    if current.knobs.report == "throughput":
        cells = throughput.write(reading.runs_in(ledger.path), ledger.path)
        return [aligned(cells, left=2), f"table  {ledger.path / 'throughput.csv'}"]
    from llmexp.compare.page import mirrored, write_beside

    comparison = compare([ledger.path])
    written = write_beside(comparison, ledger.path)
    damage = [f"llmexp: {problem}" for problem in comparison.problems]
    lines = [*table.lines(comparison, columns()), *damage, f"page   {written}"]
    sent = deliver(ledger.path, lambda: mirrored(comparison), lambda: current.stopped)
    return [*lines, sent] if sent else lines
