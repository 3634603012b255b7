"""Write the packages of docs/architecture.md, by their docstrings: `python -m tools.packages`."""

from __future__ import annotations

import ast
import configparser
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CONTRACTS = configparser.ConfigParser()
CONTRACTS.read(ROOT / ".importlinter")
PACKAGES = CONTRACTS["importlinter:contract:layers"]["layers"].split()[::-1]  # from the ground up
PARTS = {"data": ("data/sources", "data/tokenizers"), "train": ("train/assembly",)}
PAGE = ROOT / "docs/architecture.md"
BEGIN, END = "<!-- packages: python -m tools.packages -->\n", "<!-- end of packages -->\n"


def shown(name: str) -> str:
    """Return a row of the table: a package, and the first sentence of its docstring."""
    file = ROOT / "llmexp" / (f"{name}.py" if name.startswith("__") else f"{name}/__init__.py")
    text = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    first = " ".join(text.partition("\n\n")[0].split())
    return f"| `{name}` | {first} |\n"


def table() -> str:
    """Return the table of all packages, from the ground up; folders follow what they belong to."""
    names = [name for package in PACKAGES for name in (package, *PARTS.get(package, ()))]
    return "| package | |\n|---|---|\n" + "".join(map(shown, names))


def written(page: str) -> str:
    """Return the page with its table as it is now."""
    before, begin, rest = page.partition(BEGIN)
    return before + begin + "\n" + table() + "\n" + END + rest.partition(END)[2]


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
