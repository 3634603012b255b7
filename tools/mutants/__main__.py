"""Plant small faults in copies of the tree, one at a time, and see which test finds each.

`draw` writes mutants.json anew: the operators of cosmic-ray, by plan.toml. `run` tries its mutants
and writes back what became of each. It ends with 1 where a mutant that was killed lives.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import json
import os
import queue
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
RECORD = HERE / "mutants.json"
SEED = 0
# Changes that show nothing: `int | None` of an annotation, the type of an exception, ...
NOT = ("BitOr", "RemoveDecorator", "ExceptionReplacer", "VariableReplacer", "VariableInserter")
LONGEST_S = 240  # of one file of tests; a mutant that hangs is killed by it
Place = tuple[str, Path, int, str, int]  # kind of change, file, line, operator, its number


def groups() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = tomllib.loads((HERE / "plan.toml").read_text())["group"]
    return found


def recorded() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(RECORD.read_text(encoding="utf-8"))
    return found


def record(mutants: list[dict[str, Any]]) -> None:
    text = json.dumps(mutants, indent=1, ensure_ascii=False)
    RECORD.write_text(f"{text}\n", encoding="utf-8")


def places_in(path: Path) -> list[Place]:
    """Return the places of a file that the operators of cosmic-ray can change."""
    from cosmic_ray.ast import ast_nodes, get_ast
    from cosmic_ray.plugins import get_operator, operator_names

    nodes = list(ast_nodes(get_ast(path.read_text(encoding="utf-8"))))
    places = list[Place]()
    for name in operator_names():
        if any(part in name for part in NOT):
            continue
        operator = get_operator(name)()
        found = (place for node in nodes for place in operator.mutation_positions(node))
        kind = name.rpartition("/")[2].split("_")[0]
        places += [(kind, path, start[0], name, n) for n, (start, _) in enumerate(found)]
    return places


def mutant_at(place: Place) -> dict[str, Any] | None:
    """Return the mutant of a place: the lines of the file that it changes, before and after.

    None for the decorator of a class, such as frozen=False.
    """
    from cosmic_ray.mutating import mutate_code
    from cosmic_ray.plugins import get_operator

    _, path, _, name, number = place
    code = path.read_text(encoding="utf-8")
    before = code.splitlines()
    after = (mutate_code(code, get_operator(name)(), number) or code).splitlines()
    codes = difflib.SequenceMatcher(None, before, after, False).get_opcodes()
    changed = [code[1:] for code in codes if code[0] != "equal"]
    if not changed:
        return None
    (begin, _, new_begin, _), (_, end, _, new_end) = changed[0], changed[-1]
    old = before[begin:end]
    if old[0].lstrip().startswith("@"):
        return None
    return {
        "file": str(path.relative_to(ROOT)),
        "line": begin + 1,
        "nth": sum(before[i : i + len(old)] == old for i in range(begin)),  # such lines before it
        "operator": name.rpartition("/")[2],
        "old": "\n".join(old),
        "new": "\n".join(after[new_begin:new_end]),
    }


def draw() -> None:
    """Write the mutants of each group: kinds of changes in turn, at most one a line."""
    drawn = list[dict[str, Any]]()
    for group in groups():
        rng, lines, tally = random.Random(f"{SEED} {group['name']}"), set[Any](), Counter[str]()
        paths = sorted({path for pattern in group["files"] for path in ROOT.glob(pattern)})
        places = [place for path in paths for place in places_in(path)]
        rng.shuffle(places)
        turns = {place: tally[place[0]] for place in places if not tally.update([place[0]])}
        found = list[dict[str, Any]]()
        for place in sorted(places, key=turns.__getitem__):
            if len(found) == group["mutants"]:
                break
            if place[1:3] not in lines and (mutant := mutant_at(place)):
                lines.add(place[1:3])
                found.append({"group": group["name"], **mutant})
        drawn += found
        print(f"{group['name']}: {len(found)} of {len(places):,} places")
    record(drawn)


def planted(code: str, mutant: dict[str, Any]) -> str | None:
    """Return the code with the mutant in it; None where its lines are no longer there."""
    before, old = code.splitlines(), mutant["old"].splitlines()
    places = [i for i in range(len(before)) if before[i : i + len(old)] == old]
    if len(places) <= mutant["nth"]:
        return None
    at = places[mutant["nth"]]
    return "\n".join([*before[:at], *mutant["new"].splitlines(), *before[at + len(old) :], ""])


def fate(copy: Path, mutant: dict[str, Any], tests: list[str]) -> dict[str, Any]:
    """Return what becomes of a mutant: killed (by which test, in how long), survived or gone."""
    path = copy / mutant["file"]
    code = path.read_text(encoding="utf-8") if path.exists() else ""
    mutated = planted(code, mutant)
    if mutated is None:
        return {"fate": "gone"}
    if killer := mutant.get("by", "").partition("::")[0].split(" ")[0]:  # that of the last time
        tests = [killer, *(test for test in tests if test != killer)]
    path.write_text(mutated, encoding="utf-8")
    began = time.monotonic()
    try:
        found = next(filter(None, (first_failure(copy, test) for test in tests)), "")
    finally:
        path.write_text(code, encoding="utf-8")
    result = {"fate": "killed", "by": found} if found else {"fate": "survived"}
    return result | {"seconds": round(time.monotonic() - began)}


def first_failure(copy: Path, test: str) -> str:
    """Return the first test of a file that fails; "" where all pass."""
    if not (copy / test).exists():
        return ""
    pytest = [sys.executable, "-m", "pytest", "-x", "-q", "--tb=no", "-p", "no:cacheprovider"]
    cache = {"PYTHONDONTWRITEBYTECODE": "1", "LLMEXP_TEST_CACHE": f"{copy}-cache"}
    process = subprocess.Popen(
        [*pytest, "-rfE", test], cwd=copy, env=os.environ | cache, text=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        start_new_session=True,
    )  # fmt: skip
    try:
        out, _ = process.communicate(timeout=LONGEST_S)
    except subprocess.TimeoutExpired:
        return f"{test} (does not end)"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    if process.returncode in (0, 5):  # 5: all of its tests are slow
        return ""
    lines = [line for line in out.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    where = lines[0].split(" - ")[0].partition(" ")[2] if lines else ""
    return where or f"{test} (exit code {process.returncode})"


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


def run(mutants: list[dict[str, Any]], processes: int) -> bool:
    """Try mutants in copies of the tree; write each result at once. Return whether none escaped."""
    every, tests = recorded(), {group["name"]: group["tests"] for group in groups()}
    waiting: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    for mutant in mutants:
        waiting.put(next(entry for entry in every if entry == mutant))
    lock, escaped = threading.Lock(), list[str]()

    def work(folder: Path) -> None:
        copy = copied(folder)
        with contextlib.suppress(queue.Empty):
            while True:
                mutant = waiting.get_nowait()
                result = fate(copy, mutant, tests[mutant["group"]])
                where = f"{mutant['file']}:{mutant['line']}"
                with lock:
                    if mutant.get("fate") == "killed" and result["fate"] == "survived":
                        escaped.append(where)
                    for key in ("fate", "by", "seconds"):
                        mutant.pop(key, None)
                    mutant |= result
                    record(every)
                    print(f"{result['fate']:9}{where}  {result.get('by', '')}", flush=True)

    with contextlib.ExitStack() as stack:
        names = [tempfile.TemporaryDirectory(prefix="mutants-") for _ in range(processes)]
        folders = [Path(stack.enter_context(name)) for name in names]
        threads = [threading.Thread(target=work, args=(folder,)) for folder in folders]
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
    parser.add_argument("what", choices=["draw", "run"])
    parser.add_argument("--group", help="only mutants of this group of plan.toml")
    parser.add_argument("--fate", help="only those that were killed, survived, gone or none (yet)")
    parser.add_argument("--sample", type=int, help="only so many, at random")
    parser.add_argument("--processes", type=int, default=2)
    chosen = parser.parse_args()
    if chosen.what == "draw":
        draw()
        return 0
    if not RECORD.exists():
        parser.error(f"{RECORD.name} is not there yet; draw the mutants first: make mutants-drawn")
    mutants = [m for m in recorded() if chosen.group in (None, m["group"])]
    mutants = [m for m in mutants if chosen.fate in (None, m.get("fate", "none"))]
    random.shuffle(mutants)
    return 0 if run(mutants[: chosen.sample], chosen.processes) else 1


if __name__ == "__main__":
    sys.exit(main())
