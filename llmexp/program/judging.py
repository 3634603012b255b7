"""Compare runs and evaluate checkpoints, as the commands do."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmexp.program.folder import Run, framed, named, words_of
from llmexp.settings.values import ConfigError
from llmexp.system.text import columns

if TYPE_CHECKING:
    from llmexp.compare.known import Step
    from llmexp.compare.records import Result
    from llmexp.laws.answer import Answer as FoundLaws


@dataclass(frozen=True)
class Answer:
    """The answer of a comparison: what `llmexp compare` prints, as data."""

    comparison: Result

    def __str__(self) -> str:
        from llmexp.compare import table

        return "\n".join(table.lines(self.comparison, columns()))

    @property
    def headline(self) -> str:
        """Return the result in one line."""
        return self.comparison.headline

    @property
    def problems(self) -> tuple[str, ...]:
        """Return what could not be read, in words."""
        return self.comparison.problems

    @cached_property
    def data(self) -> dict[str, Any]:
        """Return what `llmexp compare --json` prints."""
        from llmexp.compare import table

        return dict(json.loads(table.to_json(self.comparison)))

    def frame(self) -> Any:
        """Return the table that `llmexp compare --out FILE.csv` writes as a data frame.

        A row a setting; values have their own types.
        """
        from llmexp.compare import table

        return framed(table.columns_in_full(self.comparison))

    @cached_property
    def figures(self) -> dict[str, Any]:
        """Return the figures of the page by name, as plotly.graph_objects.Figure."""
        from llmexp.compare.page import sections

        wide = {"template": None, "margin": None}  # as plotly shows a figure of its own
        plots = [plot for part in sections(self.comparison) for plot in part.plots]
        return {p.name: p.figure.update_layout(wide, title=p.title) for p in plots}


def compare(  # noqa: PLR0913 (what the command takes)
    *paths: Any,
    align: str = "tokens",
    sort: str | None = None,
    negligible: float | None = None,
    target: str | None = None,
    figure: str | None = None,
    better: str | None = None,
    by: Sequence[str] = (),
    seed: str | None = None,
    curves: str | Path | None = None,
    filter: str | None = None,
) -> Answer:
    """Compare runs, sweeps, folders of them and globs, as `llmexp compare` does.

    Or tables of runs of others: files, or data frames of pandas or polars, whose `figure` is
    judged, `by` the keys of their settings and the one of their `seed`.

    Raises ConfigError for what the command refuses, such as a path without a run.
    """
    from llmexp.compare import comparing
    from llmexp.compare.strangers import Asked

    how: dict[str, Any] = {"align": align, "sort": sort, "negligible": negligible, "target": target}
    keys = [by] if isinstance(by, str) else list(by)
    asked = Asked(figure, better, keys, seed, curves, filter)
    try:
        comparison = comparing.compare(_paths(paths), **how, asked=asked)
    except ConfigError as error:
        text = _as_arguments(str(error), how | vars(asked))
        raise ConfigError(error.kind, text, error.key) from None
    if not comparison.settings:
        raise ConfigError("cannot_compare", comparing.no_runs_found(comparison))
    return Answer(comparison)


def _as_arguments(text: str, given: Mapping[str, Any]) -> str:
    """Return a refusal of flags with their names and values as a program has them."""
    for name, value in given.items():
        text = text.replace(f"--{name} {value}:", f"{name}={value!r}:")
        text = re.sub(rf"(for example .*?)--{name} (\S+)", rf"\1{name}='\2'", text)
        text = text.replace(f"--{name}", f"{name}=")
    return text


@dataclass(frozen=True)
class Laws:
    """Scaling laws: what `llmexp fit` prints, as data."""

    answer: FoundLaws

    def __str__(self) -> str:
        import io

        from llmexp.laws.words import show

        out = io.StringIO()
        show(self.answer, out, columns())
        return out.getvalue().rstrip()

    @property
    def headline(self) -> str:
        """Return the answer in short."""
        from llmexp.laws import words

        return words.headline(self.answer)

    @property
    def problems(self) -> tuple[str, ...]:
        """Return what could not be read, in words."""
        return self.answer.problems

    @cached_property
    def data(self) -> dict[str, Any]:
        """Return what `llmexp fit --json` prints."""
        from llmexp.laws import words

        return words.data(self.answer)


def fit(*paths: Any, form: str | None = None, by: str | None = None, count: str | None = None,
        predict: float | str | None = None) -> Laws:  # fmt: skip
    """Fit scaling laws to runs, sweeps, folders of them, globs and CSV files, as `llmexp fit` does.

    Raises ConfigError for what the command refuses, such as too few runs.
    """
    from llmexp.laws import answer

    how: dict[str, Any] = {"form": form, "by": by, "count": count, "predict": predict}
    try:
        return Laws(answer.fit(_paths(paths), **how))
    except ConfigError as error:
        raise ConfigError(error.kind, _as_arguments(str(error), how), error.key) from None


def next_step(*paths: Any, negligible: float | None = None) -> Step:
    """Return the one command that would tell most about runs, as `llmexp next` does."""
    from llmexp.cli.next import proposed

    return proposed(_paths(paths), negligible)


def _paths(given: Sequence[Any]) -> list[Any]:
    """Return the paths of runs, folders, globs and lists of them; without one: outputs.

    Data frames stay what they are.
    """
    found: list[Any] = []
    for path in given or ("outputs",):
        each = path if isinstance(path, (list, tuple)) else [path]
        paths = (one.path if isinstance(one, Run) else one for one in each)
        found += [one if hasattr(one, "columns") else Path(one) for one in paths]
    return found


@dataclass(frozen=True)
class Evaluation:
    """Losses of a checkpoint, or its scores in tasks.

    `data` is what `llmexp evaluate --json` prints.
    """

    data: dict[str, Any]

    def __str__(self) -> str:
        from llmexp.cli.evaluate import tables_of

        return tables_of(self.data)

    @property
    def sets(self) -> dict[str, dict[str, Any]]:
        """Return the figures of each validation set by its name.

        They are loss in nats, ppl, bits_per_byte where it is known, each with `_stderr`, and
        tokens.
        """
        return {one["set"]: one for one in self.data.get("sets", ())}

    @property
    def tasks(self) -> dict[str, dict[str, Any]]:
        """Return the figures of each task by its name.

        They are acc and acc_norm (shares), each with `_stderr`, and items.
        """
        return {one["task"]: one for one in self.data.get("tasks", ())}


def evaluate(run: Run | str | os.PathLike[str], overrides: Sequence[str] = (), *,
             tokens: int | str | None = None, by: str = "set", tasks: Sequence[str] = (),
             tasks_folder: str | os.PathLike[str] | None = None,
             weights: str = "model") -> Evaluation:  # fmt: skip
    """Evaluate RUN[@STEP] on its validation sets, on the data of the overrides, or in tasks.

    It does what `llmexp evaluate` does. `tokens`: of each set, or "all". Raises ConfigError.
    """
    from llmexp.cli.evaluate import evaluated, parsed_words

    more = {"tasks_folder": tasks_folder, "weights": weights, "tasks": tasks}
    words = words_of([named(run), *overrides], tokens=tokens, by=by, **more)
    return Evaluation(evaluated(parsed_words(words)))
