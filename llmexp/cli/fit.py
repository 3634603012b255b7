"""`llmexp fit PATH...`: scaling laws of runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, ClassVar

from llmexp.cli.compare import Figure, Filter
from llmexp.cli.running import Out, Paths, Printed, check_out, paths_of, write_out
from llmexp.config.values import choice
from llmexp.scaling import answer, words
from llmexp.scaling.answer import FORMS
from llmexp.scaling.ladders import COUNTS


class Laws(Printed):
    """Scaling laws: what `llmexp fit` prints, as data."""

    words: ClassVar[Any] = words


def _page(found: answer.Fits) -> str:
    from llmexp.scaling.page import page  # imports plotly

    return page(found)


_FORMS: dict[str, Callable[[answer.Fits], Any]] = {".html": _page, ".json": words.data}


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
