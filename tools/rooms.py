"""Write the rooms of docs/architecture.md, by the packages' docstrings: `python -m tools.rooms`."""

from __future__ import annotations

import ast
import configparser
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CONTRACTS = configparser.ConfigParser()
CONTRACTS.read(ROOT / ".importlinter")
ROOMS = CONTRACTS["importlinter:contract:layers"]["layers"].split()[::-1]  # from the ground up
PARTS = {"data": ("data/sources", "data/tokenizers"), "train": ("train/assembly",)}
PAGE = ROOT / "docs/architecture.md"
BEGIN, END = "<!-- rooms: python -m tools.rooms -->\n", "<!-- end of rooms -->\n"


def shown(name: str) -> str:
    """One room: what it is for, and its files in reading order."""
    file = ROOT / "llmexp" / (f"{name}.py" if name.startswith("__") else f"{name}/__init__.py")
    text = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    said, order, files = text.partition("In reading order:")
    listed = f"\n\n```\n{files.strip()}\n```" if order else ""
    return f"### `{name}`\n\n{said.strip()}{listed}\n\n"


def rooms() -> str:
    """All rooms, from the ground up; folders behind the room that they are a part of."""
    names = [name for room in ROOMS for name in (room, *PARTS.get(room, ()))]
    return "".join(map(shown, names))


def written(page: str) -> str:
    """Return the page with its rooms as they are now."""
    before, begin, rest = page.partition(BEGIN)
    return before + begin + "\n" + rooms() + END + rest.partition(END)[2]


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
