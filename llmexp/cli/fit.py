"""`llmexp fit PATH...`: scaling laws of runs."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, TextIO

from llmexp.cli.compare import Figure, Filter
from llmexp.cli.running import Out, Paths, check_out, paths_of, write_out
from llmexp.config.values import choice
from llmexp.scaling import answer, words
from llmexp.scaling.answer import FORMS
from llmexp.scaling.ladders import COUNTS
from llmexp.system.text import columns


@dataclass(frozen=True)
class Laws:
    """Scaling laws: what `llmexp fit` prints, as data."""

    answer: answer.Answer
    why: bool = False

    def show(self, to: TextIO | None = None) -> None:
        """Print the answer as wide as the terminal is."""
        words.show(self.answer, to or sys.stdout, columns(), self.why)

    def __str__(self) -> str:
        out = io.StringIO()
        self.show(out)
        return out.getvalue().rstrip("\n")

    @property
    def headline(self) -> str:
        """Return the answer in short."""
        return words.headline(self.answer)

    @property
    def problems(self) -> tuple[str, ...]:
        """Return what could not be read, in words."""
        return self.answer.problems

    @cached_property
    def data(self) -> dict[str, Any]:
        """Return what `llmexp fit --json` prints."""
        return words.data(self.answer)


def _page(found: answer.Answer) -> str:
    from llmexp.scaling.page import page  # imports plotly

    return page(found)


_FORMS: dict[str, Callable[[answer.Answer], str]] = {".html": _page, ".json": words.to_json}


def fit(
    *paths: Paths,
    form: Annotated[
        str | None,
        choice("default: a surface, or a power law where there is one axis", " | ".join(FORMS)),
    ] = None,
    by: Annotated[
        str | None, "KEY", "axis of a power law: tokens, flops, parameters or a knob"
    ] = None,
    count: Annotated[
        str | None,
        choice("how N counts parameters (default: head, without embeddings)", " | ".join(COUNTS)),
    ] = None,
    predict: Annotated[
        str | None,
        "C",
        "FLOPs to predict at, such as 1e16 (with --by a value of it), or a size and tokens: "
        "N=1e9,D=2e10",
    ] = None,
    figure: Figure = None,
    filter: Filter = None,
    why: Annotated[bool, "also what the answer rests on"] = False,
    out: Out = (),
) -> Laws:
    """Fit scaling laws: the best size for a budget, the loss there, and what a change saves.

    A PATH may be a table with N, D, loss (and C), or wandb:ENTITY/PROJECT. FILE is .json or the
    page, .html. See
    docs/scaling-laws.md.
    """
    check_out(out, _FORMS)
    how: dict[str, Any] = {"form": form, "by": by, "count": count, "predict": predict}
    found = answer.fit(paths_of(paths), figure=figure, filter=filter, **how)
    write_out(out, _FORMS, found)
    return Laws(found, why)
