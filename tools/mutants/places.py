"""Find a mutant's lines: in its function, or wherever that has moved to."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def functions(code: str) -> Iterator[tuple[str, int, int]]:
    """Give each function and class: its dotted name, its first line from 0, the line after it."""

    def inside(node: ast.AST, above: str) -> Iterator[tuple[str, int, int]]:
        for child in ast.iter_child_nodes(node):
            name = above
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                name = f"{above}.{child.name}".strip(".")
                yield name, child.lineno - 1, child.end_lineno or child.lineno
            yield from inside(child, name)

    yield "", 0, len(code.splitlines())
    yield from inside(ast.parse(code), "")


def function_at(code: str, line: int) -> str:
    """Return the name of the innermost function around a line (from 0); "" outside of all."""
    around = [name for name, begin, end in functions(code) if begin <= line < end]
    return around[-1]


def lines_of(code: str, function: str, old: list[str]) -> list[int]:
    """Return where the lines stand in a function, or in the whole file where it has none such."""
    before = code.splitlines()
    spans = [(b, e) for name, b, e in functions(code) if name == function]
    begin, end = spans[0] if spans else (0, 0)
    return [i for i in range(begin, end) if before[i : i + len(old)] == old]


def line_of(code: str, mutant: dict[str, Any]) -> int | None:
    """Return the line (from 0) at which a mutant changes its file; None where it is gone."""
    found = lines_of(code, mutant["function"], mutant["old"].splitlines())
    return found[mutant["nth"]] if len(found) > mutant["nth"] else None


def moved(mutant: dict[str, Any], codes: dict[str, str]) -> dict[str, Any] | None:
    """Return the mutant with the place that its lines have now; None where they are gone.

    First in its function, then in one of the same name in another file, then anywhere: there the
    lines have to stand once in all files.
    """
    old, last = mutant["old"].splitlines(), mutant["function"].rpartition(".")[2]
    home = {mutant["file"]: codes[mutant["file"]]} if mutant["file"] in codes else {}
    for code in home.values():
        if (line := line_of(code, mutant)) is not None:
            return mutant | {"line": line + 1}
    named = [
        (file, name)
        for file, code in codes.items()
        for name, _, _ in functions(code)
        if last and name.rpartition(".")[2] == last
    ]
    for places in (named, [(file, "") for file in home], [(file, "") for file in codes]):
        found = [(file, at) for file, name in places for at in lines_of(codes[file], name, old)]
        if len(found) == 1:
            (file, at) = found[0]
            function = function_at(codes[file], at)
            nth = lines_of(codes[file], function, old).index(at)
            return mutant | {"file": file, "function": function, "line": at + 1, "nth": nth}
    return None
