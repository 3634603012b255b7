"""Write the reference pages of the site: `python -m tools.reference FOLDER` (`make docs` does it).

They show declarations: the options and knobs of conf/, `--help` of each command, the keys of a row
and the kinds of refusals.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import yaml

from llmexp.__main__ import COMMANDS, run
from llmexp.config.kinds import MEANING
from llmexp.config.sections import conf_dir
from llmexp.config.values import Knob, flatten, override_value
from llmexp.metrics.keys import ROW_KEYS
from tests.tools import option
from tools import comments

TYPES = {int: "integer", float: "number", bool: "true or false", list: "list", dict: "mapping"}
MAIN = yaml.safe_load((conf_dir() / "config.yaml").read_text(encoding="utf-8"))
USUAL = {group: name for one in MAIN.pop("defaults")[1:] for group, name in one.items()}


@dataclass
class Row:
    """A knob of a section, with its value in each option that has it."""

    key: str
    knob: Knob
    values: dict[str, Any] = field(default_factory=dict)

    def cells(self, section: Section) -> Iterator[str]:
        """Yield name, meaning, type, value and options."""
        usual = section.usual if section.usual in self.values else next(iter(self.values))
        value, given = self.values[usual], [self.knob.example, *self.values.values()]
        kind = "word" if self.knob.choices else ""
        yield f"`{self.key}`"
        yield self.knob.meaning
        yield kind or next((TYPES[type(one)] for one in given if type(one) in TYPES), "text")
        yield f"`{override_value(value)}`"
        if section.options:
            whole = len(self.values) == len(section.options)
            yield "all" if whole else ", ".join(f"`{name}`" for name in self.values)


@dataclass
class Section:
    """A section of the config: what its options are for, and its knobs."""

    usual: str
    options: dict[str, str] = field(default_factory=dict)
    rows: dict[tuple[str, str], Row] = field(default_factory=dict)

    def text(self) -> str:
        """Return the tables."""
        found = table("option, ", ((f"`{k}`", v) for k, v in self.options.items()))
        columns = f"knob, what it does, type, default{', options' if self.options else ''}"
        rows = table(columns, (row.cells(self) for row in self.rows.values()))
        return "\n".join([found] * bool(self.options) + [rows] * bool(self.rows))


def table(columns: str, rows: Iterable[Iterable[str]]) -> str:
    """Return a table; a bar in a cell ends no cell, and <name> is no tag."""
    names = columns.split(", ")
    lines = (names, ["---"] * len(names), *rows)
    as_text = str.maketrans({"|": "&#124;", "<": "&lt;"})
    return "".join(f"| {' | '.join(c.translate(as_text) for c in line)} |\n" for line in lines)


def purpose(path: Path) -> str:
    """Return the comment that a file begins with."""
    lines = path.read_text(encoding="utf-8").splitlines()
    first = next((n for n, line in enumerate(lines) if not line.startswith("#")), len(lines))
    return " ".join(line.removeprefix("#").strip() for line in lines[:first])


def sections() -> dict[str, Section]:
    """Return the sections by their names, in the order of conf/config.yaml, groups after them."""
    found: dict[str, Section] = {}
    for path in comments.files():
        if path.parent.name == "base":
            continue
        group = comments.section_of(path) if path.parent != conf_dir() else ""
        place = "hydra.launcher" if group == "launcher" else group
        own = comments.arguments(path) if group else {}
        tree = option(str(path.relative_to(conf_dir()).with_suffix(""))) if group else flatten(MAIN)
        for name, value in tree.items():
            key = f"{place}.{name}" if group else name
            knob = own.get(name) or comments.KNOBS.get(key)
            if knob is None and not group:
                continue
            section = place or (key.partition(".")[0] if "." in key else "At the top")
            there = found.setdefault(section, Section(USUAL.get(group, "")))
            if group:
                there.options[path.stem] = purpose(path)
            if knob is not None:
                row = there.rows.setdefault((key, knob.meaning), Row(key, knob))
                row.values[path.stem] = value
    return found


def settings() -> str:
    """Return the page of all options and knobs."""
    text = (
        "# Options and knobs\n\nAs `conf/` and the declarations have them. `GROUP=OPTION` chooses"
        " an option, `KEY=VALUE` sets a knob. A default is that of the option that a plain"
        " `llmexp train` takes, or of the first that has the knob.\n"
    )
    for name, section in sections().items():
        text += f"\n## {name}\n\n{section.text()}"
    return text


def commands() -> str:
    """Return the page of `--help` of each command."""
    text = "# Commands\n\nWhat `llmexp COMMAND --help` prints.\n"
    for command in sorted(COMMANDS):
        out, wide = io.StringIO(), mock.patch.dict(os.environ, COLUMNS="80")
        with wide, contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
            run([command, "--help"])
        text += f"\n## {command}\n\n```\n{out.getvalue()}```\n"
    return text


def rows() -> str:
    """Return the page of the keys of a row."""
    cells = ((f"`{k.name}`", k.meaning, k.unit, k.better) for k in ROW_KEYS.values())
    about = "Of a row of `metrics.jsonl`. [Metrics](../docs/metrics.md#rows)"
    return (
        f"# Keys of rows\n\n{about} has the definitions.\n\n"
        f"{table('key, meaning, unit, better', cells)}"
    )


def kinds() -> str:
    """Return the page of the kinds of refusals."""
    about = "The `code` of an error as `--json` prints it, and `error.kind` in Python."
    link = "[Scripts and agents](../docs/automation.md)"
    cells = ((f"`{kind}`", meaning) for kind, meaning in MEANING.items())
    return f"# Kinds of refusals\n\n{about} {link} use it.\n\n{table('kind, meaning', cells)}"


PAGES = {"settings": settings, "commands": commands, "rows": rows, "kinds": kinds}

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for name, page in PAGES.items():
        (folder / f"{name}.md").write_text(page(), encoding="utf-8")
