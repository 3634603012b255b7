"""Run `llmexp fit PATH...`: read its arguments, print the laws."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from llmexp.cli.compare import check_file, write_file
from llmexp.laws.answer import FORMS, fit
from llmexp.laws.points import COUNTS
from llmexp.laws.table import show, to_json
from llmexp.settings.values import Parser
from llmexp.system.child import DONE
from llmexp.system.redact import warn
from llmexp.system.text import columns


def main(arguments: list[str]) -> int:
    """Fit, print the answer, and return exit code 0. Raises ConfigError for what has no law."""
    args = _arguments(arguments)
    if args.html:
        check_file("--html", args.html, (".html",))
    answer = fit(args.paths, form=args.form, by=args.by, count=args.count, predict=args.predict)
    for problem in answer.problems:
        warn(problem)
    if args.html:
        from llmexp.laws.page import page

        write_file("--html", args.html, page(answer))
    if args.json:
        print(to_json(answer), end="")
    else:
        show(answer, sys.stdout, columns(), args.why)
    return DONE


def _arguments(arguments: list[str]) -> argparse.Namespace:
    parser = Parser(
        prog="llmexp fit",
        description="Fit scaling laws: the best size for a budget, the loss there, and what a "
        "change saves at other scales.",
        epilog="See docs/laws.md.",
    )
    parser.add_argument(
        "paths", nargs="+", metavar="PATH",
        help="runs, sweeps, folders of them, globs; or a CSV file with N, D, loss (and C)",
    )  # fmt: skip
    parser.add_argument(
        "--form", metavar="FORM",
        help=f"{', '.join(FORMS)} (default: a surface, or a power law where there is one axis)",
    )  # fmt: skip
    parser.add_argument(
        "--by", metavar="KEY", help="axis of a power law: tokens, flops, parameters or a knob"
    )
    parser.add_argument(
        "--count", metavar="COUNT",
        help=f"how N counts parameters: {', '.join(COUNTS)} (default: head, without embeddings)",
    )  # fmt: skip
    parser.add_argument("--predict", metavar="C", help="FLOPs to predict at, such as 1e16")
    parser.add_argument("--why", action="store_true", help="also what the answer rests on")
    parser.add_argument(
        "--html", type=Path, metavar="FILE", help="also write the page, such as --html laws.html"
    )
    parser.add_argument("--json", action="store_true", help="print everything as JSON instead")
    return parser.parse_args(arguments)
