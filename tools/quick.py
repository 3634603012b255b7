"""Run the tests that are nearest to what changed, for a minute: `make quick`.

Changed is what differs from main, and what is not committed. A file of tests is near by what it
imports, and to all of its room, whose commands it runs in processes of their own.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import grimp

ROOT = Path(__file__).resolve().parents[1]
LIMIT_S = 50
MOST = 25  # files of tests: collecting them takes time, too
NAMED = {  # what is not imported
    "conf/": ["tests/test_shipped.py", "tests/test_knobs.py", "tests/models/test_model_configs.py"],
    "docs/": ["tests/test_docs.py", "tests/test_habits.py"],
    "launchers/": ["tests/sweep/test_slurm.py"],
    "": ["tests/test_habits.py", "tests/test_docs.py"],
}


def changed(base: str) -> list[str]:
    """Return the files that differ from where this branch left `base`, and those new to git."""

    def git(*words: str) -> list[str]:
        return subprocess.run(
            ["git", *words], cwd=ROOT, check=True, capture_output=True, text=True
        ).stdout.splitlines()

    (begin,) = git("merge-base", "HEAD", base)
    return [*git("diff", "--name-only", begin), *git("ls-files", "-o", "--exclude-standard")]


def near(files: Iterable[str]) -> list[str]:
    """Return the files of tests for changed files, the nearest first."""
    found: dict[str, int] = {}
    graph = grimp.build_graph("llmexp", "tests", "tools", cache_dir=None)
    for file in files:
        module = file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        while module not in graph.modules and module.count(".") > 1:
            module = module.rpartition(".")[0]  # of page.css: its room
        if module not in graph.modules:
            place = next(start for start in NAMED if file.startswith(start))
            found |= {test: min(found.get(test, 9), n) for n, test in enumerate(NAMED[place])}
            continue
        distances = {module: 0}
        for name in (queue := [module]):
            for above in graph.find_modules_that_directly_import(name) - distances.keys():
                distances[above] = distances[name] + 1
                queue.append(above)
        for name in (name for name in graph.modules if ".test_" in name):
            same = name.split(".")[:2] == ["tests", *module.split(".")[1:2]]
            if same or name in distances:
                test = f"{name.replace('.', '/')}.py"
                distance = min(distances.get(name, 9), 2 if same else 9)
                found[test] = min(found.get(test, 9), distance)
    return sorted(found, key=lambda test: (found[test], test))


def main(base: str = "main") -> int:
    tests = [test for test in near(changed(base)) if (ROOT / test).exists()]
    if not tests:
        print("nothing changed that a test is for")
        return 0
    command = [sys.executable, "-m", "pytest", "-x", "-p", "tools.quick", *tests[:MOST]]
    process = subprocess.Popen(command, cwd=ROOT)
    with contextlib.suppress(subprocess.TimeoutExpired, KeyboardInterrupt):
        return process.wait(LIMIT_S)
    process.send_signal(signal.SIGINT)
    code = process.wait()
    print(f"stopped after {LIMIT_S} s; {len(tests[MOST:])} more files are farther from the change")
    return 0 if code == 2 else code  # 2: interrupted, and nothing has failed


# ---- Of the pytest that it starts ----

left: dict[str, None] = {}


def pytest_collection_finish(session: Any) -> None:
    left.update(dict.fromkeys(item.nodeid for item in session.items))


def pytest_runtest_logfinish(nodeid: str) -> None:
    left.pop(nodeid, None)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Name the files of which something was left out."""
    files = dict.fromkeys(test.partition("::")[0] for test in left)
    if files:
        terminalreporter.write_line(f"left out {len(left)} tests, in {' '.join(files)}")


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
