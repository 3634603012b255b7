"""How a sweep's points end, what they are called, and what it says where it cannot write."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys

import pytest

from llmexp.folders import rundir
from llmexp.folders.ledger import LOCK, Ledger, LedgerEntry, is_running
from llmexp.sweep import local, running, show, slurm
from llmexp.sweep.answer import conclude
from llmexp.sweep.local import record_left
from tests.conftest import HANG_S, TINY, llmexp
from tests.sweep.running import (
    PAIR,
    current_sweep,
    new_point,
    quiet_display,
    run_locally,
    stand_in,
)

UNSAVED = "stopped before it could save"
ALONE = "a signal that was not for the whole sweep stopped it"


def test_a_sweep_that_ends_does_not_say_that_it_is_running(tmp_path):
    """It holds its lock until its answer is written; others may take it for running so long."""
    ask = "import sys; from llmexp.folders.ledger import *; print(is_running(Path(sys.argv[1])))"
    with rundir.locked(tmp_path, LOCK):
        assert not is_running(tmp_path)
        done = subprocess.run([sys.executable, "-c", ask, tmp_path], capture_output=True)
        assert done.stdout == b"True\n", done.stderr
    assert not is_running(tmp_path)


def test_a_check_whose_command_is_gone_says_nothing():
    reader, writer = os.pipe()
    os.close(reader)
    check = [sys.executable, "-P", "-m", "llmexp.sweep.check"]
    piped = {"input": b'{"compose": [{}]}\n', "stdout": writer, "stderr": subprocess.PIPE}
    done = subprocess.run(check, **piped, timeout=HANG_S)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.parametrize(
    ("state", "code", "stopped", "stop_step", "after", "reason"),
    [
        ("running", 0, False, None, "failed", "exit code 0 before"),
        ("running", 75, False, None, "failed", "exit code 75 before"),
        ("running", 75, True, None, "preempted", UNSAVED),
        ("running", 143, True, None, "preempted", UNSAVED),
        ("running", -9, False, None, "failed", "SIGKILL"),
        ("preempted", 75, False, None, "preempted", ALONE),
        ("preempted", 75, True, None, "preempted", None),
        ("preempted", 75, False, 7, "preempted", None),  # at a rung of halving
        ("preempted", 75, False, 6, "preempted", None),  # it had been past it
        ("preempted", 75, False, 8, "preempted", ALONE),
        ("finished", 0, False, None, "finished", None),
    ],
)
def test_a_point_that_ends_before_its_last_step_has_a_reason(
    tmp_path, state, code, stopped, stop_step, after, reason
):
    (tmp_path / "config.yaml").write_text(f"train: {{stop_step: {json.dumps(stop_step)}}}")
    rundir.write_status(tmp_path, state, summary={"steps": 7})
    record_left(tmp_path, code, "", stopped=stopped)
    status = rundir.read_status(tmp_path)
    assert status["state"] == after
    assert (reason or "") in status.get("error", "")
    assert (reason is None) == ("error" not in status)


def test_a_run_that_another_command_trains_is_left_as_it_is(tmp_path):
    rundir.write_status(tmp_path, "running", host=socket.gethostname())
    before = rundir.read_status(tmp_path)
    with rundir.locked(tmp_path):
        record_left(tmp_path, 2, "", stopped=False)
    assert rundir.read_status(tmp_path) == before
    # nobody trains there: it was refused for a reason of its own
    (tmp_path / local.STDERR).write_text("a line\nllmexp: of its own\n")
    record_left(tmp_path, 2, "", stopped=False)
    status = rundir.read_status(tmp_path)
    assert (status["state"], "of its own" in status["error"]) == ("failed", True)


def test_a_sweep_goes_on_while_ranks_of_a_killed_process_save(tmp_path, monkeypatch):
    """The ranks of one point save until another point has ended, or for 10 s."""
    goes_on, late = tmp_path / "goes-on", tmp_path / "late"
    saves = f"for _ in {{1..100}}; do [ -e {goes_on} ] && exit; sleep 0.1; done; touch {late}"
    killed = f"exec 9> $0/.lock-ranks; flock 9; ({saves}) & kill -9 $$"
    stand_in(monkeypatch, f"[ -e $0/other ] && exec sleep 0.5; {killed}")
    current = current_sweep(tmp_path, max_parallel=2)
    points = [new_point(current, name) for name in ("0-a", "1-b")]
    (points[1].path / "other").touch()
    seen: list[str] = []
    ended = current.ended
    monkeypatch.setattr(current, "ended", lambda entry: (seen.append(entry.label), ended(entry)))
    display = quiet_display()
    display.tick = lambda: points[1].entry.state == "failed" and goes_on.touch()
    running.drive(local.Local(current, points), list(points), current, display)
    assert not late.exists()
    assert seen == ["b", "a"]  # its end is that of its ranks
    assert "SIGKILL" in rundir.read_status(points[0].path)["error"]


@pytest.mark.parametrize("begins", [True, False])
def test_a_job_that_begins_while_the_others_are_cancelled_keeps_its_end(
    tmp_path, monkeypatch, begins
):
    """Of two jobs of Slurm one fails; by its status the other is still queued, but it may begin."""
    current = current_sweep(tmp_path, launcher="slurm", stop_on_failure=True)
    failing, other = (new_point(current, name) for name in ("0-a", "1-b"))
    rundir.write_status(failing.path, "failed", error="of its own", exit_code=3)
    rundir.write_status(other.path, "queued", started=1.0)
    jobs = {"1": ("RUNNING", "n1"), "2": ("PENDING", "None")}

    def cancel(*command):
        assert command == ("scancel", "--state=PENDING", "2")
        if begins:
            rundir.write_status(other.path, "running", started=2.0)
            rundir.write_status(other.path, "finished", exit_code=0)
        jobs["2"] = ("CANCELLED", "")

    monkeypatch.setattr(slurm, "SETTLE_S", 0.0)
    monkeypatch.setattr(slurm, "states", lambda: jobs)
    monkeypatch.setattr(slurm, "client", cancel)
    for point, job in ((failing, "1"), (other, "2")):
        (point.path / slurm.JOB).write_text(json.dumps({"job_id": job}))
    launcher = slurm.Slurm(current, [failing, other], quiet_display())
    launcher.pause_s = 0
    jobs["1"] = ("FAILED", "")
    running.drive(launcher, [], current, quiet_display())
    after = "finished" if begins else "queued"
    assert [e.state for e in current.ledger.points] == ["failed", after]
    assert rundir.read_status(other.path)["state"] == after


def test_a_signal_after_the_last_point_changes_nothing(tmp_path):
    """A grid whose points have all finished is done; a search, or a look, might ask for more."""
    kinds = (({}, "finished"), ({"grid": False}, "preempted"), ({"decide": True}, "preempted"))
    for kind, state in kinds:
        current = current_sweep(tmp_path, signals=[signal.SIGTERM], **kind)
        current.ledger.points = [LedgerEntry(0, "a", "0-a", None, [], state="finished")]
        conclude(current)
        assert current.ledger.state == state


def test_a_point_that_cannot_be_started_failed_and_one_on_the_cpu_takes_no_device(
    tmp_path, monkeypatch
):
    """A folder is in the place of what the first one's processes print; the second one's four ranks
    are beside two devices, which a run on four could never have."""
    stand_in(monkeypatch, "true")
    current = current_sweep(tmp_path)
    tasks = [new_point(current, "0-a", ranks=4), new_point(current, "1-b", ranks=2, devices=2)]
    run_locally(current, tasks)
    assert [task.entry.attempts for task in tasks] == [1, 1]
    monkeypatch.undo()
    task = new_point(current, "2-c")
    (task.path / local.STDERR).mkdir()
    run_locally(current, [task])
    status = rundir.read_status(task.path)
    assert (task.entry.state, status["state"], status["exit_code"]) == ("failed", "failed", 2)
    assert "Is a directory" in status["error"]


def test_the_table_of_points_that_failed_has_their_last_losses(tmp_path):
    """A disk that was full kept their rows and no summary."""
    entry = LedgerEntry(0, "a", "0-a", None, [], state="failed")
    (tmp_path / "0-a").mkdir()
    rows = '{"step": 1, "train/loss": 3.5, "val/loss": 3.25}\n{"step": 2, "train/loss": 3.0}\n'
    (tmp_path / "0-a" / "metrics.jsonl").write_text(rows)
    table = show.results_table(Ledger(tmp_path, "s", "g", "local", [], [], points=[entry]))
    assert table.splitlines()[1].split() == ["0", "a", "failed", "3.0000", "3.2500"]


FACTS = ["{", "[1]", "[" * 200_000, '{"max_steps": "x"}', '{"max_steps": true}', "{}"]
WRONG = ['"x"', "[1]", "{}", "NaN", "Infinity", "1e309", "true", "null", "-1e308", "9" * 400]


@pytest.mark.parametrize("wrong", WRONG, ids=[w[:9] for w in WRONG])
def test_damaged_figures_of_a_point_do_not_end_its_sweep(tmp_path, capsys, wrong):
    """Nor does the live table of a terminal, which shows what failed in an earlier command too."""
    states = ("queued", "running", "finished", "failed", "preempted", "infeasible")
    entries = [LedgerEntry(n, "x", f"{n}-x", None, [], state=states[n % 6]) for n in range(13)]
    ledger = Ledger(tmp_path, "s", "g", "local", [], [], points=entries)
    figures = ("final val/loss", "final train/loss", "latest val/loss", "mean tokens_per_sec")

    def filled(keys: tuple[str, ...]) -> str:
        return "{" + ", ".join(f'"{key}": {wrong}' for key in keys) + "}"

    for n, entry in enumerate(entries):
        path = tmp_path / entry.folder
        path.mkdir()
        (path / "config.yaml").write_text("name: x\n")
        (path / "run.json").write_text(FACTS[n % len(FACTS)])
        summary = wrong if n % 2 else filled(figures)
        more = filled(("started", "ended", "exit_code", "error"))[1:]
        status = f'{{"state": "{entry.state}", "summary": {summary}, {more}'
        (path / "status.json").write_text(status if n < 12 else "[" * 200_000)
        row = '{"step": 3, ' + filled(("train/loss", "tokens_per_sec", "eta"))[1:]
        (path / "metrics.jsonl").write_text((row if n % 3 else "[" * 9_000) + "\n")
    display = show.Display(ledger).__enter__()
    ledger.save()
    for look in (False, True):
        for entry in entries:
            if look:
                ledger.look(entry, alive=True)
            assert show.line_of(entry, ledger).startswith(f"{entry.number} ")
        assert "\n1 " in display.view()
        assert "\n1 " in show.results_table(ledger)
    display.tick()
    json.loads((tmp_path / "sweep.json").read_text(), parse_constant=pytest.fail)


def test_a_folder_that_cannot_be_written_is_named_by_its_key(tmp_path, runs):
    runs.copy(tmp_path / "d" / "s", "-m", *PAIR)
    mount = ["mount", "--bind", "-o", "ro", "d", "d"]
    bound = subprocess.run(mount, cwd=tmp_path, capture_output=True, text=True)
    if bound.returncode:
        pytest.skip(f"no read-only mount here: {bound.stderr.strip()}")
    new = ["-m", *TINY, *PAIR, "hydra.sweep.dir=d/new"]
    commands = {"train": new, "plan": new, "resume": ["d/s"]}
    try:
        done = {name: llmexp(name, *words, cwd=tmp_path) for name, words in commands.items()}
    finally:
        subprocess.run(["umount", "-l", "d"], cwd=tmp_path, check=True)
    keys = {"train": "hydra.sweep.dir=d/new", "plan": "hydra.sweep.dir=d/new"}
    for name, refused in done.items():
        assert (refused.code, "Traceback" in refused.err) == (2, False)
        last = refused.err.splitlines()[-1]
        assert last.startswith(f"llmexp: {keys.get(name, 'sweep.resume=d/s')}: ")
