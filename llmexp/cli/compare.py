"""Run `llmexp compare PATH...`: read its arguments and send the answer where they say."""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path

from llmexp.compare import table
from llmexp.compare.comparing import NEGLIGIBLE, compare, no_runs_found
from llmexp.compare.figures import UNITS
from llmexp.compare.records import Result
from llmexp.compare.sources import ONLINE
from llmexp.compare.strangers import Asked
from llmexp.settings.kinds import Kind
from llmexp.settings.values import ConfigError, Parser
from llmexp.system import fileio
from llmexp.system.child import DONE
from llmexp.system.redact import warn
from llmexp.system.text import columns
from llmexp.tracker.reading import send_marks


def main(arguments: list[str]) -> int:
    """Compare runs, print and write the answer, and return exit code 0.

    Raises ConfigError for arguments that cannot be followed and where there is no run to show, and
    OSError for a file that could not be written.
    """
    parser = Parser(
        "llmexp compare",
        "Compare runs: which setting is best, by how much, and is the difference real.",
        _ARGUMENTS,
        "Runs that are training are compared as far as they are. See docs/compare.md.",
    )
    args = parser.parse_args(arguments)
    for path in args.out:
        check_file("--out", path, tuple(_FORMS))
    comparison = compare(
        args.paths or ["outputs"],
        align=args.align,
        sort=args.sort,
        negligible=args.negligible,
        target=args.target,
        asked=of_others(args),
    )
    if not comparison.settings:
        raise ConfigError("cannot_compare", no_runs_found(comparison))
    for problem in comparison.problems:
        warn(problem)
    if args.answer:
        marks = {str(path): mark for path, mark in table.marks_of(comparison).items()}
        there = {p.removeprefix(ONLINE): m for p, m in marks.items() if p.startswith(ONLINE)}
        send_marks(there)
    for path in args.out:
        write_file("--out", path, _FORMS[path.suffix.lower()](comparison))
    if args.json:
        print(table.to_json(comparison), end="")
    else:
        table.show(comparison, sys.stdout, width=columns(), why=args.why)
    return DONE


def of_others(args: Namespace) -> Asked:
    """Return what the command line says about runs that llmexp did not train."""
    by = [key.strip() for key in (args.by or "").split(",") if key.strip()]
    return Asked(args.figure, args.better, by, args.seed, args.curves, args.filter)


def _page(comparison: Result) -> str:
    """Return the page; plotly is imported only where one is asked for."""
    from llmexp.compare.page import page

    return page(comparison)


_FORMS: dict[str, Callable[[Result], str]] = {
    ".json": table.to_json, ".csv": table.to_csv, ".md": table.to_markdown, ".html": _page,
}  # fmt: skip


def check_file(flag: str, path: Path, forms: Sequence[str]) -> None:
    """Raise ConfigError for a file that cannot be written, before anything is read."""
    if path.suffix.lower() not in forms:
        kind: Kind = "unknown_option"
        why = (
            f"the file's name must end in {', '.join(forms)}; for example {flag} table{min(forms)}"
        )
    elif not path.parent.is_dir():
        kind = "unknown_file"
        why = f"there is no folder {path.parent}; for example {flag} /tmp/{path.name}"
    elif path.is_dir() or not os.access(path.parent, os.W_OK):
        kind = "disk"
        why = f"cannot be written; for example {flag} /tmp/{path.name}"
    else:
        return
    raise ConfigError(kind, f"{flag} {path}: {why}")


def write_file(flag: str, path: Path, text: str) -> None:
    """Write a file that a flag names; raise OSError in words."""
    try:
        fileio.write_whole(path, text)
    except OSError as error:
        example = f"name a file elsewhere, for example {flag} /tmp/{path.name}"
        raise OSError(
            f"{flag} {path}: could not be written: {error.strerror or error}; {example}"
        ) from error
    warn(f"wrote {path}")


OF_OTHERS = {
    "--figure": ("KEY", "of tables: the figure that is judged, such as val_loss"),
    "--better": ("WAY", "whether it is better when lower or higher"),
    "--by": ("KEYS", "of tables: the settings, such as lr,clip (default: what varies)"),
    "--seed": ("KEY", "of tables: the seed"),
    "--curves": ("FILE", "of a table with a line a run: its curves, by run and step or tokens"),
    "--filter": ("KEY=VALUE", "of wandb: runs to take, such as config.lr=0.1, or its JSON"),
}
_ARGUMENTS = {
    "paths*": (
        "PATH",
        "runs, sweeps, folders of them, globs (default: outputs); or runs of others: FILE.csv, "
        ".jsonl, .parquet, wandb:ENTITY/PROJECT[/GROUP], wandb/offline-run-*",
    ),
    "--align": (None, f"what runs must have had alike: {', '.join(UNITS)}", "tokens"),
    "--sort": ("KEY", "figure that orders the table, such as tokens_per_sec"),
    "--why": "also what the result rests on, and notes on the runs",
    "--negligible": (
        "NATS",
        f"a difference below this does not matter (default: that of the sweep, {NEGLIGIBLE})",
    ),
    "--target": (
        "KEY=NUMBER",
        "compare by where runs first reach a figure, such as val/loss=3.28",
    ),
    **OF_OTHERS,
    "--answer": "also write the marks into the summaries of the runs of wandb",
    "--json": "print everything as JSON instead",
    "--out": {
        "action": "append",
        "default": [],
        "type": Path,
        "metavar": "FILE",
        "help": "also write the table as FILE.json, FILE.csv or FILE.md, or the page as FILE.html; "
        "may be given several times",
    },
}
