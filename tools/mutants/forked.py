"""Run pytest in forks of one process that has imported what tests and commands import, but llmexp.

`python -m tools.mutants.forked` reads a line of JSON for each try: the arguments of pytest, the
file for what it prints and that of `tools.mutants.told`. It answers with the exit code. Its imports
are most of what a test costs.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import json
import os
import re
import select
import signal
import socket
import sys
from pathlib import Path
from typing import Any

ROOM = 1000  # characters, for the command that a fork shows
SUBREAPER = 36  # of prctl(2)
OTHERS = "hypothesis hydra torch torch.nn.functional torch.utils.serialization.config numpy.ma"


def preload() -> None:
    """Import the packages that tests/forks.py names: it is read, as its import is llmexp's."""
    text = Path("tests/forks.py").read_text(encoding="utf-8")
    named = re.search(r'PRELOADED = """(.*?)"""', text, re.DOTALL)
    assert named is not None
    for name in (*OTHERS.split(), *named[1].split()):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


def become_template(asked: socket.socket) -> None:
    """Wait until a test starts a command, then serve its forks as `python -m tests.forks` does."""
    select.select([asked], [], [])
    from llmexp.system import workers
    from tests import forks

    os.environ["PYTHONPATH"] = forks.PATHS
    sys.path[1:1] = forks.PATHS.split(os.pathsep)
    forks.preload()
    workers.serve_forks(asked.detach())


class Ready:
    """A plugin of pytest that gives tests.forks the template that waits beside it."""

    def __init__(self, asking: socket.socket, pid: int) -> None:
        self._asking, self._pid = asking, pid

    def pytest_configure(self) -> None:
        from llmexp.system import workers
        from tests import forks

        ready, first = workers.Template.__new__(workers.Template), forks.template
        ready._socket, ready.pid = self._asking, self._pid
        waiting = [ready]
        forks.template = functools.cache(lambda: waiting.pop() if waiting else first())


def attempt(arguments: list[str], log: str, told: str) -> int:
    """Become pytest with these arguments, in a session of its own."""
    import pytest

    os.setsid()
    os.environ["MUTANTS_TOLD"] = told
    with open(log, "wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    asking, asked = socket.socketpair()
    asking.settimeout(300)
    if (pid := os.fork()) == 0:
        asking.close()
        os.setpgid(0, 0)
        become_template(asked)
    asked.close()
    return pytest.main(arguments, plugins=[Ready(asking, pid)])


def main() -> None:
    ctypes.CDLL(None).prctl(SUBREAPER, 1)  # what a try leaves stays below this process
    sys.path.insert(0, os.getcwd())
    preload()
    requests: Any = os.fdopen(os.dup(0), encoding="utf-8")
    null = os.open(os.devnull, os.O_RDWR)
    answers: Any = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(null, 0)
    while line := requests.readline():
        request = json.loads(line)
        if (pid := os.fork()) == 0:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            code = 3
            try:
                code = attempt(**request)
            finally:
                sys.stdout.flush()
                os._exit(code)
        _, status = os.waitpid(pid, 0)
        answers.write(json.dumps(os.waitstatus_to_exitcode(status)) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
