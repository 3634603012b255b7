"""Run files of tests in forks of the process that has collected them: `pytest --jobs 4`.

Imports and collection are paid for once."""

from __future__ import annotations

import os
import signal
import warnings
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any

import pytest


@dataclass
class Job:
    """A fork, what it has been given, and the test that it is at."""

    pid: int
    connection: Connection
    files: list[int]
    at: str = ""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--jobs", type=int, default=0, help="run files of tests in so many forks")


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    jobs = session.config.getoption("jobs")
    if not jobs or session.testsfailed or session.config.option.collectonly:
        return None
    files = [list(items) for _, items in groupby(session.items, lambda item: item.path)]
    left = deque(range(len(files)))
    running: list[Job] = []
    try:
        for number in range(min(jobs, len(files))):
            ours, theirs = Pipe()
            if (pid := os.fork()) == 0:
                _become(session, files, theirs, number)
            theirs.close()
            running.append(Job(pid, ours, []))
        while running:
            ready = wait([job.connection for job in running])
            for job in [job for job in running if job.connection in ready]:
                if not _heard(session, job, files, left):
                    running.remove(job)
            if session.shouldfail:
                raise session.Failed(session.shouldfail)
            if session.shouldstop:
                raise session.Interrupted(session.shouldstop)
    finally:
        for job in running:
            os.kill(job.pid, signal.SIGTERM)
            os.waitpid(job.pid, 0)
    return True


def _heard(
    session: pytest.Session, job: Job, files: list[list[pytest.Item]], left: deque[int]
) -> bool:
    """Take a message of a fork; return False for its end."""
    hook, config = session.config.hook, session.config
    try:
        kind, content = job.connection.recv()
    except EOFError:
        _, status = os.waitpid(job.pid, 0)
        if code := os.waitstatus_to_exitcode(status):
            text = f"the process of these tests ended with exit code {code}, at or after this test"
            where = (job.at.partition("::")[0], None, "")
            hook.pytest_runtest_logreport(
                report=pytest.TestReport(job.at, where, {}, "failed", text, "call")
            )
        return False
    if kind == "next":
        job.connection.send(left.popleft() if left else None)
    elif kind == "warning":
        told = warnings.WarningMessage(content[0], UserWarning, *content[1:3])
        given = {"warning_message": told, "when": "runtest", "nodeid": job.at, "location": None}
        hook.pytest_warning_recorded.call_historic(kwargs=given)
    elif kind == "report":
        report = hook.pytest_report_from_serializable(config=config, data=content)
        hook.pytest_runtest_logreport(report=report)
    else:
        job.at = content[0]
        getattr(hook, f"pytest_runtest_{kind}")(nodeid=content[0], location=content[1])
    return True


def _become(
    session: pytest.Session, files: list[list[pytest.Item]], parent: Connection, number: int
) -> None:
    """Run tests as they are handed out, then end this process."""
    code = 1
    try:
        config = session.config
        config.pluginmanager.unregister(config.pluginmanager.get_plugin("terminalreporter"))
        config.pluginmanager.register(_Sender(config, parent))
        capture = config.pluginmanager.get_plugin("capturemanager")
        capture.stop_global_capturing()  # its files are those of the other processes, too
        capture.start_global_capturing()
        factory = config._tmp_path_factory  # type: ignore[attr-defined]
        factory._basetemp = factory.getbasetemp() / f"job{number}"
        factory._basetemp.mkdir(mode=0o700)
        items = _handed_out(files, parent)
        item = next(items, None)
        while item is not None:
            following = next(items, None)
            config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            item = following
        code = 0
    finally:
        os._exit(code)


def _handed_out(files: list[list[pytest.Item]], parent: Connection) -> Iterator[pytest.Item]:
    while True:
        parent.send(("next", None))
        if (number := parent.recv()) is None:
            return
        yield from files[number]


class _Sender:
    """What the terminal and other plugins of the first process want to know."""

    def __init__(self, config: pytest.Config, parent: Connection) -> None:
        self.config, self.parent = config, parent

    def pytest_runtest_logstart(self, nodeid: str, location: Any) -> None:
        self.parent.send(("logstart", (nodeid, location)))

    def pytest_runtest_logfinish(self, nodeid: str, location: Any) -> None:
        self.parent.send(("logfinish", (nodeid, location)))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self.config.hook.pytest_report_to_serializable(config=self.config, report=report)
        self.parent.send(("report", data))

    def pytest_warning_recorded(self, warning_message: warnings.WarningMessage) -> None:
        told = warning_message
        text = f"{told.category.__name__}: {told.message}"
        self.parent.send(("warning", (text, told.filename, told.lineno)))
