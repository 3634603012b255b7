"""Run `llmexp next PATH...`: print the one command that would tell most about runs."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Sequence
from typing import Any

from llmexp.cli.compare import OF_OTHERS, of_others
from llmexp.compare.comparing import compare, no_runs_found
from llmexp.compare.known import Step
from llmexp.compare.next_step import propose
from llmexp.compare.strangers import Asked
from llmexp.laws.answer import positive
from llmexp.laws.narrowing import rung
from llmexp.settings.values import ConfigError, Parser
from llmexp.system.child import DONE
from llmexp.system.redact import warn
from llmexp.system.text import columns


def main(arguments: list[str]) -> int:
    """Print the step and return exit code 0, also where nothing is left to do; ConfigError: 2."""
    table = {
        "paths+": ("PATH", "a sweep, runs, folders, globs"),
        "--negligible": ("NATS", "as for llmexp compare"),
        "--predict": ("C", "of a ladder: FLOPs of the prediction to narrow"),
        **OF_OTHERS,
        "--json": "the step as JSON",
    }
    parser = Parser(
        "llmexp next",
        "Propose the one command that would tell most about runs, with its cost.",
        table,
        "Nothing is started. See docs/compare.md.",
    )
    args = parser.parse_args(arguments)
    step = proposed(args.paths, args.negligible, args.predict, of_others(args))
    print(json.dumps(step.data, indent=2, allow_nan=False) if args.json else wrapped(step))
    return DONE


def wrapped(step: Step) -> str:
    """Return a step at the width of the terminal; its command stays one line, to be copied."""
    wrap = textwrap.TextWrapper(columns(), break_long_words=False, break_on_hyphens=False)
    lines = str(step).splitlines()
    return "\n".join(line if line == step.command else wrap.fill(line) for line in lines)


def proposed(
    paths: Sequence[Any],
    negligible: float | str | None = None,
    predict: float | str | None = None,
    asked: Asked | None = None,
) -> Step:
    """Return the step that would tell most about the runs under the paths. Raises ConfigError."""
    predict = None if predict is None else positive(predict)
    found = compare(paths, negligible=negligible, asked=asked)
    if not found.settings:
        raise ConfigError("cannot_compare", no_runs_found(found, "next"))
    for problem in found.problems:
        warn(problem)
    step = propose(found)
    if step.rule in ("rest", "wait") or found.foreign:
        return step
    return rung(found, predict) or step
