"""How a run ended, by its status and by how its processes left: the whole table, and what is then
recorded."""

import fcntl
import itertools
import json
import signal
import socket
import threading

import pytest

from llmexp.folders import ending, rundir
from llmexp.folders.ending import ENDING_RULES, Left, conclude_run, how_it_left, rule_for, state_now
from llmexp.system.child import DONE, FAILED, PREEMPTED, REFUSED

STATES = ("", "queued", "running", "finished", "failed", "preempted")
# Each word: nobody stopped it and nobody is at work there; nobody stopped it, but somebody is at
# work there; its watcher stopped it; it stopped it, but somebody is at work there.
# = keeps the state, F failed, R failed (refused), P preempted, C cut.
TABLE = """
             ""    queued  running  finished  failed  preempted
WELL         FF==  FF==    FFP=     ====      ====    ====
REFUSED      R=R=  R=R=    R=R=     ====      ====    R=R=
BAD          FFFF  FFFF    FFFF     ====      ====    FFFF
STOPPED      FF==  FF==    FFP=     ====      ====    ====
KILLED       FFFF  FFFF    FFFF     ====      FFFF    FFFF
ENDED        FFFF  FFFF    FFFF     ====      FFFF    FFFF
GONE         FFFF  FFFF    F=F=     ====      ====    ====
UNKNOWN      ====  ====    C=C=     ====      ====    ====
"""
LETTERS = {
    ("", FAILED): "=", ("failed", FAILED): "F", ("failed", REFUSED): "R",
    ("preempted", FAILED): "P", ("crashed", FAILED): "C",
}  # fmt: skip
EXPECTED = {
    (state, Left[line.split()[0]]): word
    for line in TABLE.strip().splitlines()[1:]
    for state, word in zip(STATES, line.split()[1:], strict=True)
}


def test_every_way_to_leave_every_state_is_in_the_table():
    used = set()
    for (state, left), word in EXPECTED.items():
        cases = itertools.product((False, True), repeat=2)
        found = [rule_for(state or None, left, stopped=s, held=h) for s, h in cases]
        assert "".join(LETTERS[r.state, r.exit_code] for r in found) == word, (state, left)
        assert all(bool(rule.cause) == bool(rule.state) for rule in found)
        used |= {*found}
    assert len(EXPECTED) == len(STATES) * len(Left)
    assert used == {*ENDING_RULES}


@pytest.mark.parametrize(
    ("code", "left"),
    [
        (0, Left.WELL), (75, Left.WELL), (2, Left.REFUSED), (1, Left.BAD), (3, Left.BAD),
        (130, Left.STOPPED), (143, Left.STOPPED), (-signal.SIGTERM, Left.STOPPED),
        (-signal.SIGUSR2, Left.STOPPED), (-signal.SIGKILL, Left.KILLED),
        (-signal.SIGBUS, Left.KILLED),
    ],
)  # fmt: skip
def test_an_exit_code_tells_how_a_process_left(code, left):
    assert how_it_left(code) is left


@pytest.mark.parametrize(
    ("state", "code", "more", "expected", "error"),
    [
        ("running", 0, {}, ("failed", FAILED), "exit code 0 before its last step"),
        ("running", 75, {"stopped": True}, ("preempted", FAILED), "stopped before it could save"),
        ("running", 1, {}, ("failed", FAILED), "ended with exit code 1 and reported no error"),
        ("running", 1, {"cause": "its last line"}, ("failed", FAILED), "its last line"),
        ("queued", 2, {"cause": "its config"}, ("failed", REFUSED), "its config"),
        ("running", -9, {}, ("failed", FAILED), "signal 9 (SIGKILL; out of memory?)"),
        ("preempted", 75, {}, ("preempted", PREEMPTED), None),
        ("finished", -9, {}, ("finished", DONE), None),
        ("failed", 3, {}, ("failed", FAILED), "its own"),
        ("failed", 2, {}, ("failed", REFUSED), "its own"),
    ],
)  # fmt: skip
def test_an_end_that_a_run_could_not_record_is_recorded(
    tmp_path, state, code, more, expected, error
):
    rundir.write_status(tmp_path, state, error="its own" if state == "failed" else None)
    before = rundir.read_status(tmp_path)
    end = conclude_run(tmp_path, how_it_left(code), code=code, **more)
    assert (end.state, end.exit_code) == expected
    assert end.error is None if error is None else error in end.error
    status = rundir.read_status(tmp_path)
    if end.found:
        assert status.pop("ended") >= before["updated"]
        recorded = {"state": end.state, "error": end.error, "exit_code": end.exit_code}
        assert status.items() >= recorded.items()
    else:
        assert status == before


@pytest.mark.parametrize("lock", [".lock", ".lock-ranks"])
def test_a_run_that_another_process_is_at_work_in_is_left_alone(tmp_path, lock):
    rundir.write_status(tmp_path, "running", host=socket.gethostname())
    before = rundir.read_status(tmp_path)
    with rundir.locked(tmp_path, lock):
        for left in (Left.REFUSED, Left.GONE):
            assert not conclude_run(tmp_path, left).found
        assert state_now(tmp_path, before) == "running"
    assert rundir.read_status(tmp_path) == before
    assert state_now(tmp_path, before) == "crashed"
    assert conclude_run(tmp_path, Left.GONE, cause="the job is gone").error == "the job is gone"


def test_a_look_at_a_lock_however_slow_refuses_nobody(tmp_path):
    """On a busy machine a process may be held up while it looks whether a folder is locked."""
    with open(tmp_path / ".lock", "a") as look:
        fcntl.flock(look, fcntl.LOCK_SH)
        threading.Timer(0.6, fcntl.flock, (look, fcntl.LOCK_UN)).start()
        with rundir.locked(tmp_path):
            assert rundir.is_locked(tmp_path)


def test_a_state_that_is_not_running_is_as_it_was_written(tmp_path):
    for state in (None, 3, "odd", "queued", "finished"):
        (tmp_path / "status.json").write_text(json.dumps({"state": state}))
        found = state_now(tmp_path, rundir.read_status(tmp_path))
        assert found == (state if isinstance(state, str) else "")


def test_a_full_disk_hides_no_end(tmp_path, monkeypatch):
    rundir.write_status(tmp_path, "running")
    monkeypatch.setattr(rundir, "write_json", lambda *_: (_ for _ in ()).throw(OSError("no room")))
    assert conclude_run(tmp_path, Left.KILLED, code=-11).state == "failed"
    assert rundir.read_status(tmp_path)["state"] == "running"


def test_what_is_left_and_the_knob_that_lets_a_run_go_on_are_quoted(tmp_path):
    assert ending.what_is_left(tmp_path, "") == "no checkpoint yet; to continue: the same command"
    (tmp_path / "config.yaml").write_text("parallelism: {nnodes: 1}\n")
    said = ending.what_is_left(tmp_path, "resumed, " + ending.GOES_ON.format("a=$(x)"))
    assert said.endswith(f"llmexp resume {tmp_path} 'a=$(x)'")
