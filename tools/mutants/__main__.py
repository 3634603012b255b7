"""Plant small faults in copies of the tree, one at a time, and see which test finds each.

`mend` finds the mutants of mutants.json where their lines are now, names those that are gone, and
draws as many as a group of plan.toml lacks. `measure` writes the CPU time of each file of tests
into seconds.json. `run` tries mutants, by the quickest tests first, and writes back what became
of each. It ends with 1 where a mutant that was killed lives. `equivalent` are those that change
nothing which a test on a CPU could see; `by` says why.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import itertools
import json
import math
import queue
import random
import sys
import tempfile
import threading
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tools.mutants import drawing, places, trying

ROOT, HERE = places.ROOT, Path(__file__).resolve().parent
RECORD, SECONDS = HERE / "mutants.json", HERE / "seconds.json"
FATE = ("fate", "by", "cpu_s")


def groups() -> list[dict[str, Any]]:
    """Return the groups of plan.toml, with files of tests in place of folders."""
    found: list[dict[str, Any]] = tomllib.loads((HERE / "plan.toml").read_text())["group"]
    for group in found:
        names = [
            sorted((ROOT / test).rglob("test_*.py")) or [ROOT / test] for test in group["tests"]
        ]
        group["tests"] = [str(path.relative_to(ROOT)) for name in names for path in name]
    return found


def read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def write(path: Path, tree: Any) -> None:
    path.write_text(f"{json.dumps(tree, indent=1, ensure_ascii=False)}\n", encoding="utf-8")


def mend() -> None:
    """Find each mutant where its lines are now, and draw those that groups lack."""
    texts = {str(p.relative_to(ROOT)): p.read_text("utf-8") for p in ROOT.glob("llmexp/**/*.py")}
    kept = list[dict[str, Any]]()
    for mutant in read(RECORD) if RECORD.exists() else ():
        where = f"{mutant['file']}:{mutant['line']} {mutant['function']}"
        found = places.moved(mutant, texts)
        if found is None:
            print(f"lost   {where}: {mutant['old'].strip()}")
            continue
        if found["file"] != mutant["file"]:
            print(f"moved  {where} -> {found['file']}:{found['line']}")
        kept.append(found)
    known = {(mutant["file"], mutant["line"]) for mutant in kept}
    there = Counter(mutant["group"] for mutant in kept)
    if not (draws := importlib.util.find_spec("cosmic_ray") is not None):
        print("no others are drawn: make mutants-mended installs what draws them")
    for group in groups():
        for test in group["tests"]:
            if not (ROOT / test).exists():
                print(f"plan.toml: {group['name']}: {test} is not there")
        lacking = group["mutants"] - there[group["name"]] if draws else 0
        if lacking <= 0:  # reading the places of a group takes a while
            continue
        for mutant in itertools.islice(drawing.drawn(group, known), lacking):
            print(f"drawn  {mutant['file']}:{mutant['line']}: {mutant['old'].strip()}")
            kept.append(mutant)
    order = [group["name"] for group in groups()]
    write(RECORD, sorted(kept, key=lambda mutant: order.index(mutant["group"])))
    print(f"{len(kept)} mutants")


@contextlib.contextmanager
def copies(number: int) -> Iterator[list[trying.Forks]]:
    with contextlib.ExitStack() as stack:
        names = [tempfile.TemporaryDirectory(prefix="mutants-") for _ in range(number)]
        copied = [trying.copied(Path(stack.enter_context(name))) for name in names]
        forks = [trying.Forks(copy) for copy in copied]
        for one in forks:
            stack.callback(one.end)
        yield forks


def measure() -> None:
    """Write the CPU time of each file of tests that the plan names."""
    tests = sorted({test for group in groups() for test in group["tests"]})
    known = read(SECONDS) if SECONDS.exists() else {}
    with copies(1) as (forks,):
        for test in tests:
            tried = trying.Try(forks, [test], exit_first=False)
            known[test] = round(sum(tried.seconds.values()))
            print(f"{known[test]:4} s  {test}  {tried.failed}", flush=True)
            write(SECONDS, {name: known[name] for name in tests if name in known})


def run(mutants: list[dict[str, Any]], processes: int, limit_s: float) -> bool:
    """Try mutants in copies of the tree; write each result at once. Return whether none escaped."""
    every, tests = read(RECORD), {group["name"]: group["tests"] for group in groups()}
    seconds = read(SECONDS) if SECONDS.exists() else {}
    waiting: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    for mutant in mutants:
        waiting.put(next(entry for entry in every if entry == mutant))
    lock, escaped = threading.Lock(), list[str]()

    def work(forks: trying.Forks) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                mutant = waiting.get_nowait()
                with lock:
                    files = trying.chosen(mutant, tests[mutant["group"]], seconds)
                result = trying.fate(forks, mutant, files, limit_s)
                where = f"{mutant['file']}:{mutant['line']}"
                with lock:
                    if mutant.get("fate") == "killed" and result["fate"] in ("survived", "open"):
                        escaped.append(where)
                    for key in FATE:
                        mutant.pop(key, None)
                    mutant |= result
                    write(RECORD, every)
                    took = f"{result.get('cpu_s', 0):4} s"
                    print(f"{result['fate']:9}{took}  {where}  {result.get('by', '')}", flush=True)

    with copies(processes) as every_forks:
        threads = [threading.Thread(target=work, args=(forks,)) for forks in every_forks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    print(dict(Counter(mutant.get("fate", "not tried") for mutant in every)))
    for place in escaped:
        print(f"was killed and lives: {place}")
    return not escaped


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.mutants", description=__doc__)
    parser.add_argument("what", choices=["mend", "measure", "run"])
    parser.add_argument("--group", help="only mutants of this group of plan.toml")
    parser.add_argument("--fate", help="only those killed, survived, open, ... or none (yet)")
    parser.add_argument("--sample", type=int, help="only so many, at random")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--limit-s", type=float, default=math.inf, help="of CPU time, a mutant")
    asked = parser.parse_args()
    if asked.what != "run":
        {"mend": mend, "measure": measure}[asked.what]()
        return 0
    mutants = [m for m in read(RECORD) if asked.group in (None, m["group"])]
    mutants = [m for m in mutants if asked.fate in (None, m.get("fate", "none"))]
    random.shuffle(mutants)
    return 0 if run(mutants[: asked.sample], asked.processes, asked.limit_s) else 1


if __name__ == "__main__":
    sys.exit(main())
