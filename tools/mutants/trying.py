"""Try one mutant in a copy of the tree: run tests, the quickest first, until one fails.

Time is that of the CPU, so that a busy machine calls no slow test hung.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import grimp

from tools.mutants import forked
from tools.mutants.places import ROOT, line_of

ONE_TEST_S = 300  # of the CPU, by all processes of one test; what exceeds it does not end
AT_WORK_S, WAITING_S = 3, 600  # less CPU than this in so many seconds: it waits for ever
POLL_S = 0.5
UNKNOWN_S = 60  # of a file of tests that was not measured
DIRECT = 3  # a file of tests that imports the mutant's kills it about so many times as often
TICK = os.sysconf("SC_CLK_TCK")


def descendants(pid: int) -> list[int]:
    """Return a process and all those below it."""
    parents = dict[int, int]()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, parent, *_ = stat.read_text().rpartition(")")[2].split()
            if state != "Z":  # has ended
                parents[int(stat.parent.name)] = int(parent)
    found = [pid]
    for above in found:
        found += [one for one, parent in parents.items() if parent == above]
    return found


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of a process and those below it, with children they awaited."""
    ticks = 0
    for one in descendants(pid):
        with contextlib.suppress(OSError):
            stat = Path(f"/proc/{one}/stat").read_text().rpartition(")")[2].split()
            ticks += sum(map(int, stat[11:15]))
    return ticks / TICK


class Forks:
    """A process in a copy of the tree whose forks are pytest: `tools.mutants.forked`."""

    def __init__(self, copy: Path) -> None:
        self.copy, self.log = copy, copy.parent / "pytest.log"
        ours = {"PYTHONPATH": str(copy), "LLMEXP_ROOM": " " * forked.ROOM}
        cache = {"LLMEXP_TEST_CACHE": f"{copy}-cache"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tools.mutants.forked", " " * forked.ROOM],
            cwd=copy, env=os.environ | cache | ours, text=True, bufsize=1,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        self.pid = self._process.pid

    def start(self, arguments: list[str], told: str) -> None:
        assert self._process.stdin
        request = {"arguments": arguments, "log": str(self.log), "told": told}
        self._process.stdin.write(json.dumps(request) + "\n")

    def ended(self) -> int | None:
        """Return the exit code of the try; None while it runs."""
        assert self._process.stdout
        ready, _, _ = select.select([self._process.stdout], [], [], POLL_S)
        return int(self._process.stdout.readline()) if ready else None

    def kill_rest(self) -> None:
        """Kill what a try has left."""
        while len(left := descendants(self.pid)) > 1:
            for one in left[1:]:
                with contextlib.suppress(OSError):
                    os.kill(one, signal.SIGKILL)
            time.sleep(0.05)

    def end(self) -> None:
        self.kill_rest()
        self._process.kill()
        self._process.wait()


class Try:
    """Run files of tests in a copy, in their order, to the first failure.

    `failed` is that test, "" where all pass; `seconds` the CPU time of each file. It ends after
    `limit_s` of CPU time, `limited` then.
    """

    def __init__(
        self, forks: Forks, tests: list[str], limit_s: float = math.inf, exit_first: bool = True
    ) -> None:
        self._forks, self._told = forks, forks.copy.parent / "told.jsonl"
        self.failed, self._read, self.limited, self._limit_s = "", 0, False, limit_s
        self.seconds: dict[str, float] = defaultdict(float)
        self._told.write_text("")
        options = ["-q", "--tb=no", "-p", "no:cacheprovider", "-p", "tools.mutants.told"]
        began = cpu_seconds(forks.pid)
        forks.start([*options, *(["-x"] if exit_first else []), *tests], str(self._told))
        code = self._watch(tests[0], began)
        forks.kill_rest()
        if code is None:
            forks.ended()
        if not (self.failed or self.limited) and code not in (0, 5):  # 5: all of its tests are slow
            self.failed = f"{tests[0]} (exit code {code})"

    def _watch(self, file: str, began: float) -> int | None:
        start, worked, since, last = began, began, time.monotonic(), f"{file}, its first test"
        while (code := self._forks.ended()) is None:
            now = cpu_seconds(self._forks.pid)
            for last, outcome in self._news():
                file = last.partition("::")[0]
                self.seconds[file] += now - began
                began = now
                if outcome == "failed" and not self.failed:
                    self.failed = last
            if now > worked + AT_WORK_S:
                worked, since = now, time.monotonic()
            if now - began > ONE_TEST_S or time.monotonic() - since > WAITING_S:
                self.failed = self.failed or f"{file} (does not end, after {last})"
                break
            if now - start > self._limit_s:
                self.limited = True
                break
        self.seconds[file] += cpu_seconds(self._forks.pid) - began
        self.failed = self.failed or next((n for n, end in self._news() if end == "failed"), "")
        return code

    def _news(self) -> list[tuple[str, str]]:
        """Return the tests that have ended since it was asked last, with how they did."""
        lines = self._told.read_text().splitlines()
        new, self._read = lines[self._read :], len(lines)
        return [tuple(json.loads(line)) for line in new]


def chosen(mutant: dict[str, Any], tests: list[str], seconds: dict[str, float]) -> list[str]:
    """Return the files of tests for a mutant: its last killer, then the quickest first.

    These are those of its group, and those that import its file.
    """
    module = mutant["file"].removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    above = graph().find_modules_that_directly_import(module) if module in graph().modules else ()
    direct = {f"{name.replace('.', '/')}.py" for name in above if ".test_" in name}
    killer = mutant.get("by", "").partition("::")[0].split(" ")[0]

    def order(test: str) -> tuple[bool, float]:
        cost = seconds.get(test, UNKNOWN_S)
        return test != killer, cost / (DIRECT if test in direct else 1)

    return sorted({*tests, *direct, *filter(None, [killer])}, key=order)


GRAPH: list[Any] = []


def graph() -> Any:
    """Return which modules import which, read once."""
    if not GRAPH:
        GRAPH.append(grimp.build_graph("llmexp", "tests", cache_dir=None))
    return GRAPH[0]


CLOCK = itertools.count(1_000_000_000)  # bytecode is known by the second of its source


def put(path: Path, code: str) -> None:
    path.write_text(code, encoding="utf-8")
    second = next(CLOCK)
    os.utime(path, (second, second))


def fate(
    forks: Forks, mutant: dict[str, Any], tests: list[str], limit_s: float = math.inf
) -> dict[str, Any]:
    """Return what becomes of a mutant: killed (by which test, in how long), survived or gone.

    It is `open` where the tests took longer than `limit_s` of CPU time.
    """
    path = forks.copy / mutant["file"]
    code = path.read_text(encoding="utf-8") if path.exists() else ""
    if (at := line_of(code, mutant)) is None:
        return {"fate": "gone"}
    before, length = code.splitlines(), len(mutant["old"].splitlines())
    after = [*before[:at], *mutant["new"].splitlines(), *before[at + length :], ""]
    put(path, "\n".join(after))
    try:
        there = [test for test in tests if (forks.copy / test.partition("::")[0]).exists()]
        tried = Try(forks, there, limit_s)
    finally:
        put(path, code)
    result = {"fate": "open" if tried.limited else "survived"}
    if tried.failed:
        result = {"fate": "killed", "by": tried.failed}
    return result | {"cpu_s": round(sum(tried.seconds.values()))}


def copied(folder: Path) -> Path:
    """Return a copy of the working tree, less what git ignores, beside a link to ../shared."""
    copy = folder / "llmexp"
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, names.split("\0")):
        if (ROOT / name).exists():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, copy / name)
    (folder / "shared").symlink_to(ROOT.parent / "shared")
    return copy
