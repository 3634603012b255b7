"""`llmexp compare PATH...`: its arguments and where the answer goes."""

from __future__ import annotations

import argparse
import glob
import os
import sys
from pathlib import Path

from llmexp.compare import table
from llmexp.compare.comparing import ALIGNMENTS, NEGLIGIBLE, NO_RUN, compare
from llmexp.compare.records import Comparison
from llmexp.settings.values import ConfigError
from llmexp.system import fileio
from llmexp.system.child import DONE

_TEXTS = {"json": ".json", "csv": ".csv", "markdown": ".md"}
_PICTURES = {"html": ".html", "png": ".png"}


def run(arguments: list[str]) -> int:
    """Return exit code 0. Raises ConfigError, also where there is nothing to show, and OSError
    for a file that could not be written."""
    args = _arguments(arguments)
    wanted = _targets(args)
    comparison = compare(
        args.paths or ["outputs"],
        align=args.align,
        sort=args.sort,
        whole="html" in wanted,
        negligible=args.negligible,
    )
    for problem in comparison.problems:
        print(f"llmexp: {problem}", file=sys.stderr)
    if not comparison.entries:
        raise ConfigError(NO_RUN)
    for name, target in wanted.items():
        if target == "-":
            print(_text(name, comparison), end="")
        else:
            _write(name, comparison, Path(target))
            print(f"llmexp: wrote {target}", file=sys.stderr)
    if "-" not in wanted.values():
        table.show(comparison, sys.stdout, width=table.columns(), why=args.why)
    return DONE


def _write(name: str, comparison: Comparison, path: Path) -> None:
    """Write a form of the comparison into a file. Raises OSError in words."""
    try:
        if name == "png":
            from llmexp.compare.picture import write_png

            write_png(comparison, path)
        else:
            fileio.write_whole(path, _text(name, comparison))
    except OSError as error:
        example = f"name a file elsewhere, for example --{name} /tmp/{path.name}"
        raise OSError(
            f"--{name} {path}: could not be written: {error.strerror or error}; {example}"
        ) from error


def _targets(args: argparse.Namespace) -> dict[str, str]:
    """Return the file for each form that is asked for, - for standard output.

    What follows `--csv` and is no name of such a file is one more path to compare, and must not be
    overwritten. Raises ConfigError for a file that cannot be written.
    """
    wanted: dict[str, str] = {}
    for name, suffix in (_TEXTS | _PICTURES).items():
        target = getattr(args, name)
        if target is None:
            continue
        if target != "-" and not target.lower().endswith(suffix):
            if name in _PICTURES or not (os.path.lexists(target) or glob.glob(target)):
                text = f"the file's name must end in {suffix}; for example table{suffix}"
                raise ConfigError(f"--{name} {target}: {text}")
            args.paths.append(target)
            target = "-"
        wanted[name] = target
        path = Path(target)
        if target != "-" and not path.parent.is_dir():
            why = f"there is no folder {path.parent}"
        elif target != "-" and (path.is_dir() or not os.access(path.parent, os.W_OK)):
            why = "cannot be written"
        else:
            continue
        example = f"for example --{name} /tmp/{path.name}"
        raise ConfigError(f"--{name} {path}: {why}; {example}")
    if list(wanted.values()).count("-") > 1:
        text = "only one of --json, --csv and --markdown can go to standard output"
        raise ConfigError(f"{text}; name a file for others")
    return wanted


def _text(name: str, comparison: Comparison) -> str:
    if name == "html":
        from llmexp.compare.page import page

        return page(comparison)
    forms = {"json": table.to_json, "csv": table.to_csv, "markdown": table.to_markdown}
    return forms[name](comparison)


def _arguments(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="llmexp compare",
        description="Compare runs: which setting is best, by how much, and is the difference real.",
        epilog="Runs that are training are compared as far as they are. See docs/compare.md.",
    )
    parser.add_argument(
        "paths",
        nargs="*",
        metavar="PATH",
        help="runs, sweeps, folders of them, globs (default: outputs)",
    )
    parser.add_argument(
        "--align", default="tokens", help=f"what runs must have had alike: {', '.join(ALIGNMENTS)}"
    )
    parser.add_argument(
        "--sort", metavar="KEY", help="figure that orders the table, such as tokens_per_sec"
    )
    parser.add_argument(
        "--why", action="store_true", help="also what the result rests on, and notes on the runs"
    )
    parser.add_argument(
        "--negligible", metavar="NATS",
        help=f"a difference below this does not matter (default: that of the sweep, {NEGLIGIBLE})",
    )  # fmt: skip
    for name, suffix in _TEXTS.items():
        text = f"the table as {name}, on standard output or into a {suffix} file"
        parser.add_argument(f"--{name}", nargs="?", const="-", metavar="FILE", help=text)
    parser.add_argument("--html", metavar="FILE", help="a page in one file, figures and all")
    parser.add_argument("--png", metavar="FILE", help="the curves as a picture")
    return parser.parse_args(arguments)
