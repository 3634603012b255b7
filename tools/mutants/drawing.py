"""Draw mutants: the operators of cosmic-ray, on the files of plan.toml."""

from __future__ import annotations

import difflib
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tools.mutants.places import ROOT, function_at, lines_of

SEED = 0
# Changes that show nothing: `int | None` of an annotation, the type of an exception, ...
NOT = ("BitOr", "RemoveDecorator", "ExceptionReplacer", "VariableReplacer", "VariableInserter")
Place = tuple[str, Path, int, str, int]  # kind of change, file, line, operator, its number


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
    old, function = before[begin:end], function_at(code, begin)
    if old[0].lstrip().startswith("@"):
        return None
    return {
        "file": str(path.relative_to(ROOT)),
        "function": function,
        "line": begin + 1,
        "nth": lines_of(code, function, old).index(begin),  # such lines of the function before it
        "operator": name.rpartition("/")[2],
        "old": "\n".join(old),
        "new": "\n".join(after[new_begin:new_end]),
    }


def drawn(group: dict[str, Any], known: set[tuple[str, int]]) -> Iterator[dict[str, Any]]:
    """Give mutants of a group: kinds of changes in turn, at most one a line, none of `known`."""
    rng, lines, tally = random.Random(f"{SEED} {group['name']}"), set(known), Counter[str]()
    paths = sorted({path for pattern in group["files"] for path in ROOT.glob(pattern)})
    places = [place for path in paths for place in places_in(path)]
    rng.shuffle(places)
    turns = {place: tally[place[0]] for place in places if not tally.update([place[0]])}
    for place in sorted(places, key=turns.__getitem__):
        at = (str(place[1].relative_to(ROOT)), place[2])
        if at not in lines and (mutant := mutant_at(place)):
            lines.add(at)
            yield {"group": group["name"], **mutant}
