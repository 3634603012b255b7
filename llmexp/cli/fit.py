"""Run `llmexp fit PATH...`: read its arguments, print the laws."""

from __future__ import annotations

import sys
from pathlib import Path

from llmexp.cli.compare import check_file, write_file
from llmexp.laws.answer import FORMS, fit
from llmexp.laws.ladders import COUNTS
from llmexp.laws.words import show, to_json
from llmexp.settings.values import Parser
from llmexp.system.child import DONE
from llmexp.system.redact import warn
from llmexp.system.text import columns

_ARGUMENTS = {
    "paths+": (
        "PATH",
        "runs, sweeps, folders of them, globs; or a CSV file with N, D, loss (and C)",
    ),
    "--form": (
        "FORM",
        f"{', '.join(FORMS)} (default: a surface, or a power law where there is one axis)",
    ),
    "--by": ("KEY", "axis of a power law: tokens, flops, parameters or a knob"),
    "--count": (
        "COUNT",
        f"how N counts parameters: {', '.join(COUNTS)} (default: head, without embeddings)",
    ),
    "--predict": ("C", "FLOPs to predict at, such as 1e16, or a size and tokens: N=1e9,D=2e10"),
    "--why": "also what the answer rests on",
    "--html": ("FILE", "also write the page, such as --html laws.html", Path),
    "--json": "print everything as JSON instead",
}


def main(arguments: list[str]) -> int:
    """Fit, print the answer, and return exit code 0. Raises ConfigError for what has no law."""
    parser = Parser(
        "llmexp fit",
        "Fit scaling laws: the best size for a budget, the loss there, and what a change saves at "
        "other scales.",
        _ARGUMENTS,
        "See docs/laws.md.",
    )
    args = parser.parse_args(arguments)
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
