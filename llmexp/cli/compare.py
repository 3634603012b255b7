"""`llmexp compare PATH...`: which setting is best, and is the difference real."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Annotated, Any, ClassVar

from llmexp.cli.running import (
    Out,
    Paths,
    Printed,
    check_out,
    paths_of,
    words_in,
    write_out,
)
from llmexp.compare import comparing, table
from llmexp.compare.comparing import NEGLIGIBLE
from llmexp.compare.figures import UNITS
from llmexp.compare.projects import send_marks
from llmexp.compare.records import Result
from llmexp.compare.strangers import Asked
from llmexp.config.values import ConfigError, choice, knob
from llmexp.system.text import framed

MinEffect = Annotated[
    float | None,
    knob(
        f"nats below which a difference does not matter (default: that of the sweep, {NEGLIGIBLE})",
        NEGLIGIBLE,
        at_least=0,
        below=10**6,
    ),
]
# About tables of runs that llmexp did not train.
Figure = Annotated[str | None, "KEY", "of tables: the figure that is judged, such as val_loss"]
Better = Annotated[str | None, choice("whether it is better when", "lower | higher")]
By = Annotated[
    Sequence[str], "KEYS", "of tables: the settings, such as lr,clip (default: what varies)"
]
Seed = Annotated[str | None, "KEY", "of tables: the seed"]
Curves = Annotated[
    str | None,
    "FILE",
    "of a table with a line a run: its curves, by run and step or tokens",
]
Filter = Annotated[
    str | None, "KEY=VALUE", "of wandb: runs to take, such as config.lr=0.1, or its JSON"
]


class Answer(Printed):
    """The answer of a comparison: what `llmexp compare` prints, as data."""

    words: ClassVar[Any] = table

    @property
    def comparison(self) -> Result:
        """Return all that was found."""
        found: Result = self.found
        return found

    def frame(self) -> Any:
        """Return the table of `--out FILE.csv` as a data frame: a row a setting, typed values."""
        return framed(table.columns_in_full(self.comparison))

    @cached_property
    def figures(self) -> dict[str, Any]:
        """Return the figures of the page by name, as plotly.graph_objects.Figure."""
        from llmexp.compare.page import sections

        wide = {"template": None, "margin": None}  # as plotly shows a figure of its own
        plots = [plot for part in sections(self.comparison) for plot in part.plots]
        return {p.name: p.figure.update_layout(wide, title=p.title) for p in plots}


def _page(comparison: Result) -> str:
    from llmexp.compare.page import page  # imports plotly

    return page(comparison)


_FORMS: dict[str, Callable[[Result], Any]] = {
    ".json": table.data, ".csv": table.to_csv, ".md": table.to_markdown, ".html": _page,
}  # fmt: skip


def compare(
    *paths: Paths,
    align: Annotated[str, choice("what runs must have had alike", " | ".join(UNITS))] = "tokens",
    sort: Annotated[
        str | None, "KEY", "figure that orders the table, such as tokens_per_sec"
    ] = None,
    min_effect: MinEffect = None,
    target: Annotated[
        str | None, "KEY=NUMBER", "compare by where runs first reach it, such as val/loss=3.28"
    ] = None,
    figure: Figure = None,
    better: Better = None,
    by: By = (),
    seed: Seed = None,
    curves: Curves = None,
    filter: Filter = None,
    answer: Annotated[bool, "also write the marks into the summaries of the runs of wandb"] = False,
    why: Annotated[bool, "also what the result rests on, and notes on the runs"] = False,
    out: Out = (),
) -> Answer:
    """Compare runs: which setting is best, by how much, and is the difference real.

    Runs that are training are compared as far as they are. FILE is a table, .json, .csv or .md, or
    the page, .html. A PATH may also be of runs of others: FILE.csv, .jsonl,
    .parquet, wandb:ENTITY/PROJECT[/GROUP], wandb/offline-run-*. See docs/compare.md.
    """
    check_out(out, _FORMS)
    how: dict[str, Any] = {"align": align, "sort": sort, "min_effect": min_effect}
    asked = Asked(figure, better, words_in(by), seed, curves, filter)
    found = runs_compared(paths, "compare", target=target, asked=asked, **how)
    if answer:
        send_marks(table.marks_of(found))
    write_out(out, _FORMS, found)
    return Answer(found, why)


def runs_compared(paths: Sequence[Any], command: str, **how: Any) -> Result:
    """Return the comparison of the runs under some paths. Raises ConfigError without a run."""
    found = comparing.compare(paths_of(paths), **how)
    if not found.settings:
        raise ConfigError("cannot_compare", comparing.no_runs_found(found, command))
    return found
