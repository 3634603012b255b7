"""Workers as forks of a template: the same as processes that are started afresh, and nothing left.

What sweeps make of them is in tests/sweep/test_warm.py.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

from llmexp.system import workers
from llmexp.system.child import children, ended, kill_family
from tests.conftest import PATHS
from tests.tools import wait_for

FRESH_PROCESSES = True


@pytest.fixture(scope="module", autouse=True)
def _warm():
    """One template for all tests of this file."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("PYTHONPATH", PATHS)
        with workers.warm():
            yield


def environment(**more: str) -> dict[str, str]:
    """That of this process, but for what pytest changes with each test."""
    return {k: v for k, v in os.environ.items() if k != "PYTEST_CURRENT_TEST"} | more


def started(do: str, **more) -> subprocess.Popen:
    given = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "text": True}
    given |= {"env": environment(), **more}
    return workers.start_worker(do, module="own.facts", **given)


def only_template() -> workers.Template:
    return next(iter(workers._templates.values()))


def test_a_fork_is_as_a_process_that_was_started_afresh(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    env = environment(LLMEXP_ALLOW="own", RANK="3", CUDA_VISIBLE_DEVICES="1")

    def facts() -> tuple[bool, dict]:
        with started("facts", env=env) as process:
            return isinstance(process, workers.Forked), json.loads(process.stdout.read())

    forked, first = facts()
    with workers.warm(False):
        fresh, other = facts()
    assert (forked, fresh) == (True, False)
    own = first.pop("own"), other.pop("own")
    assert first == other
    assert (first["environment"], first["cwd"]) == (env, str(tmp_path))
    assert (first["parent"], [*first["files"]]) == (os.getpid(), ["0", "1", "2"])
    # each process draws other numbers of its own, two forks too
    assert len({*own[0], *own[1], *facts()[1]["own"]}) == 9


def test_exit_codes_signals_and_what_it_prints_are_those_of_a_child(tmp_path):
    processes = {code: started(str(code)) for code in (0, 2, 75)}
    assert {code: p.wait() for code, p in processes.items()} == {0: 0, 2: 2, 75: 75}
    for number in (signal.SIGTERM, signal.SIGKILL):
        process = started("sleep")
        assert process.stdout.readline() == "here\n"
        assert process.poll() is None
        assert process.pid in children(os.getpid())
        process.send_signal(number)
        assert process.wait() == process.poll() == -number
        process.send_signal(number)  # to nobody
        process.stdout.close()
    log = tmp_path / "log"
    log.write_text("before\n")
    process = workers.start_worker("no number", log=log, module="own.facts", env=environment())
    assert process.wait() == 1
    first, *_, last = log.read_text().splitlines()
    assert first == "before"
    assert last == "ValueError: invalid literal for int() with base 10: 'no number'"


def test_a_template_that_ended_is_started_again_and_if_it_ends_again_the_reason_is_known(
    monkeypatch, tmp_path
):
    """A log that cannot be opened is no fault of its own."""
    with workers.warm():
        assert started("7").wait() == 7
        template = only_template()
        kill_family(template.pid)
        process = started("7")
        assert isinstance(process, workers.Forked)
        assert process.wait() == 7
        assert only_template() is not template
        with pytest.raises(IsADirectoryError):
            workers.start_worker("0", log=tmp_path, module="own.facts", env=environment())
        process = started("0")
        assert (process.wait(), workers.why_fresh(process)) == (0, None)
        monkeypatch.setattr(workers.Template, "fork", mock.Mock(side_effect=OSError("no room")))
        for _ in range(2):
            process = started("0")
            assert (process.wait(), workers.why_fresh(process)) == (0, "no room")
            assert "no room" in workers._templates.values()


def test_nothing_is_left_of_two_hundred_forks():
    def open_files() -> int:
        return len(os.listdir("/proc/self/fd"))

    assert started("0", stdout=subprocess.DEVNULL).wait() == 0
    mine = Path(f"/proc/{only_template().pid}")

    def memory() -> int:
        words = (mine / "smaps_rollup").read_text().split()
        return int(words[words.index("Private_Dirty:") + 1])

    gc.collect()  # what earlier tests have left open closes here, not on the way
    before = open_files(), children(os.getpid()), len(os.listdir(mine / "fd"))
    kib = memory()
    for number in range(200):
        process = started(str(number % 100), stdout=subprocess.DEVNULL)
        assert isinstance(process, workers.Forked)
        assert process.wait() == number % 100
    assert (open_files(), children(os.getpid()), len(os.listdir(mine / "fd"))) == before
    assert memory() < kib + 4096


def test_a_template_and_its_forks_end_with_who_asked(tmp_path):
    script = """
import sys
from llmexp.system import workers
with workers.warm():
    worker = workers.start_worker("sleep", module="own.facts")
    template = next(iter(workers._templates.values()))
    print(worker.pid, template.pid, flush=True)
    sys.stdin.read()
"""
    parent = subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    pids = [int(word) for word in parent.stdout.readline().split()]
    assert parent.stdout.readline() == "here\n"
    parent.kill()
    parent.communicate()
    wait_for(lambda: all(map(ended, pids)))


def test_other_environments_have_other_templates_and_at_last_fresh_processes():
    kinds, whys = [], []
    for number in range(1, 5):
        process = started("0", env=environment(OMP_NUM_THREADS=str(number)))
        kinds.append(isinstance(process, workers.Forked))
        whys += filter(None, [workers.why_fresh(process)])
        assert process.wait() == 0
        process.stdout.close()
    # with the template of this environment, where threads are one
    most = workers._MOST - len({os.environ["OMP_NUM_THREADS"]} - set("1234"))
    assert kinds == [True] * most + [False] * (4 - most)
    assert whys == ["4 other environments have templates"] * (4 - most)
    # what torch sets once its compiler is imported makes no other environment
    process = started("0", env=environment(TORCHINDUCTOR_CACHE_DIR="/elsewhere"))
    assert (process.wait(), workers.why_fresh(process)) == (0, None)
    process.stdout.close()
