"""Try one mutant in a copy of the tree: run tests, the quickest first, until one fails.

Time is that of the CPU, so that a busy machine calls no slow test hung.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import grimp

from tools.mutants.places import ROOT, line_of

ONE_TEST_S = 300  # of the CPU, by all processes of one test; what exceeds it does not end
AT_WORK_S, WAITING_S = 3, 600  # less CPU than this in so many seconds: it waits for ever
POLL_S = 0.5
COPY, TOLD = "MUTANTS_COPY", "MUTANTS_TOLD"  # in the environment of all processes of a try
UNKNOWN_S = 60  # of a file of tests that was not measured
DIRECT = 3  # a file of tests that imports the mutant's kills it about so many times as often
TICK = os.sysconf("SC_CLK_TCK")


def cpu_seconds(copy: Path) -> float:
    """Return the CPU time of all processes that try in this copy, and of children they awaited."""
    mark, ticks = f"{COPY}={copy}".encode(), 0
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark in (process / "environ").read_bytes().split(b"\0"):
                stat = (process / "stat").read_text().rpartition(")")[2].split()
                ticks += sum(map(int, stat[11:15]))
    return ticks / TICK


def kill_all(copy: Path) -> None:
    mark = f"{COPY}={copy}".encode()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark in (process / "environ").read_bytes().split(b"\0"):
                os.kill(int(process.name), signal.SIGKILL)


class Try:
    """Run files of tests in a copy, in their order, to the first failure.

    `failed` is that test, "" where all pass; `seconds` the CPU time of each file.
    """

    def __init__(self, copy: Path, tests: list[str], exit_first: bool = True) -> None:
        self._copy, self._told = copy, copy.parent / "told.jsonl"
        self.failed, self._read = "", 0
        self.seconds: dict[str, float] = defaultdict(float)
        self._told.write_text("")
        pytest = [sys.executable, "-m", "pytest", "-q", "--tb=no", "-p", "no:cacheprovider"]
        more = ["-p", "tools.mutants.told", *(["-x"] if exit_first else [])]
        cache = {"PYTHONDONTWRITEBYTECODE": "1", "LLMEXP_TEST_CACHE": f"{copy}-cache"}
        ours = {COPY: str(copy), TOLD: str(self._told), "PYTHONPATH": str(copy)}
        with (copy.parent / "pytest.log").open("w") as log:
            process = subprocess.Popen(
                [*pytest, *more, *tests], cwd=copy, env=os.environ | cache | ours,
                stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
            )  # fmt: skip
        try:
            self._watch(process, tests[0])
        finally:
            kill_all(copy)
            process.wait()
        if not self.failed and process.returncode not in (0, 5):  # 5: all of its tests are slow
            self.failed = f"{tests[0]} (exit code {process.returncode})"

    def _watch(self, process: subprocess.Popen[bytes], file: str) -> None:
        now = began = worked = 0.0
        since, last = time.monotonic(), f"{file}, its first test"
        while process.poll() is None:
            time.sleep(POLL_S)
            now = cpu_seconds(self._copy) or now
            for last, outcome in self._news():
                file = last.partition("::")[0]
                self.seconds[file] += now - began
                began = now
                if outcome == "failed" and not self.failed:
                    self.failed = last
            if not worked <= now <= worked + AT_WORK_S:
                worked, since = now, time.monotonic()
            if now - began > ONE_TEST_S or time.monotonic() - since > WAITING_S:
                self.failed = self.failed or f"{file} (does not end, after {last})"
                break
        self.seconds[file] += now - began
        self.failed = self.failed or next((n for n, end in self._news() if end == "failed"), "")

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


def fate(copy: Path, mutant: dict[str, Any], tests: list[str]) -> dict[str, Any]:
    """Return what becomes of a mutant: killed (by which test, in how long), survived or gone."""
    path = copy / mutant["file"]
    code = path.read_text(encoding="utf-8") if path.exists() else ""
    if (at := line_of(code, mutant)) is None:
        return {"fate": "gone"}
    before, length = code.splitlines(), len(mutant["old"].splitlines())
    after = [*before[:at], *mutant["new"].splitlines(), *before[at + length :], ""]
    path.write_text("\n".join(after), encoding="utf-8")
    try:
        tried = Try(copy, [test for test in tests if (copy / test).exists()])
    finally:
        path.write_text(code, encoding="utf-8")
    result = {"fate": "killed", "by": tried.failed} if tried.failed else {"fate": "survived"}
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
