"""Warn of points whose losses will not compare, before anything is spent."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence

from llmexp.compare import budgets
from llmexp.redact import redacted
from llmexp.run.budget import BUDGETS
from llmexp.sweep.settings import Sweep
from llmexp.sweep.show import fitted


def warn(spent: Sequence[budgets.Spent], settings: Sweep, arguments: Sequence[str]) -> None:
    """Warn on standard error of points whose losses will not compare."""
    if settings.report == "throughput":  # no losses are of interest there
        return
    for line in budgets.warning(spent, lambda budget: command_with(arguments, budget)):
        print(redacted(fitted(line, sys.stderr) if line[0] != " " else line), file=sys.stderr)


def command_with(arguments: Sequence[str], budget: str) -> str:
    """Return the same command with another budget, into a folder of its own."""
    replaced = (*(f"{key}=" for key in BUDGETS), "hydra.sweep.dir=")
    return (
        f"llmexp train {shlex.join([a for a in arguments if not a.startswith(replaced)])} {budget}"
    )
