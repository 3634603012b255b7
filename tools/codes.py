"""Print the codes of all refusals: `python -m tools.codes > docs/codes.txt`."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from llmexp.settings.values import code_of

PACKAGE = Path(__file__).parents[1] / "llmexp"
MAKE = (
    "ConfigError",
    "TooManyFiles",
    "refuse",
    "wrong",
)  # the last one: a refusal that a caller hands down


def places() -> Iterator[tuple[str, str]]:
    """Yield the module and the function of each refusal in the source."""
    for path in sorted(PACKAGE.rglob("*.py")):
        name = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
        module = name.removesuffix(".__init__")

        def visit(node: ast.AST, function: str, module: str = module) -> Iterator[tuple[str, str]]:
            for child in ast.iter_child_nodes(node):
                inner = child.name if isinstance(child, ast.FunctionDef) else function
                called = child.func if isinstance(child, ast.Call) else None
                if isinstance(called, ast.Name) and called.id in MAKE and inner not in MAKE:
                    yield module, inner
                yield from visit(child, inner)

        yield from visit(ast.parse(path.read_text(encoding="utf-8")), "")


def codes() -> dict[str, set[tuple[str, str]]]:
    """Return the places of each code."""
    found: dict[str, set[tuple[str, str]]] = {}
    for module, function in places():
        found.setdefault(code_of(module, function), set()).add((module, function))
    return found


if __name__ == "__main__":
    print("\n".join(sorted(codes())))
