"""Make records of runs that llmexp did not train: what is a setting, the seed, the figure.

What is not given is guessed and said, or asked for; what the source does not know stays absent.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from llmexp.compare.records import Record, is_execution, one_spelling, own_seed
from llmexp.config.knobs import SEED
from llmexp.config.labels import parse_value
from llmexp.config.values import ConfigError, nearest
from llmexp.system.redact import cleaned
from llmexp.system.text import listed, number

_AXES = {
    "steps": "step steps iter iters iteration iterations global_step update",
    "tokens": "tokens tokens_seen num_tokens total_tokens consumed_tokens",
    "time": "seconds time_s train_time elapsed_s runtime",
}
# The figure that is judged where none is named, the first one that there is.
_USUAL = "val/loss val_loss valid_loss validation_loss eval/loss eval_loss loss"
_FIGURES = (
    "acc accuracy bpb created date duration elapsed eta flops gib hours mem memory mfu minutes nll "
    "perplexity ppl runtime score seconds speed tflops throughput time timestamp updated"
)
_LOWER = ("loss", "ppl", "perplexity", "bpb", "nll", "error", "time", "seconds", "bits", "step")
_HIGHER = "acc accuracy score mfu throughput reward speed"
_INDEX = ("index", "")  # of a frame, as it writes it
RUN_NAMES = ("run", "run_name", "run_id", "name", "id", "experiment", *_INDEX)
_STATES = {
    "finished": "finished completed complete done success succeeded ok",
    "running": "running pending queued",
    "failed": "failed failure crashed error diverged oom nan",
    "preempted": "killed preempted stopped cancelled canceled interrupted",
}
_PAIR = re.compile(r"([A-Za-z_][\w.]*)=([^,=/\s]+)")
_DATE = re.compile(r"\d{4}-\d\d-\d\d([T ].*)?")


@dataclass(frozen=True)
class Asked:
    """Holds the flags of a user about runs that llmexp did not train."""

    figure: str | None = None
    better: str | None = None
    by: Sequence[str] = ()
    seed: str | None = None
    curves: str | Path | None = None
    filter: str | None = None
    ends: bool = False  # a line is a run, unless a column names it

    @property
    def flags(self) -> list[str]:
        """Return the names of what is given."""
        return [f"--{name}" for name, value in vars(self).items() if value]


Row = dict[Any, Any]  # plain values by key


@dataclass
class OtherRun:
    """A run that llmexp did not train, as its source gives it."""

    name: str
    values: Row  # of the whole run: settings, seed, last figures
    state: str  # one of runs.folder.STATES, or empty
    rows: Sequence[Row]  # figures, steps and tokens at each look at it
    path: Path
    typed: bool = False  # its source tells settings from figures: `values` are no figures
    # of wandb: returns its rows that have all of some keys
    fetch: Callable[[Sequence[str]], Sequence[Row]] | None = None

    def __post_init__(self) -> None:
        self.values = cleaned(self.values)


def _words(key: str) -> list[str]:
    """Return the words of a key: val, loss of val/loss."""
    return [w for w in re.split(r"[^a-z0-9]+", key.lower()) if w]


def axis_in(key: str) -> str:
    """Return the axis that a key stands for, such as steps of train/global_step; else nothing."""
    last = key.lower().rpartition("/")[2].strip("_ ")
    return next((axis for axis, names in _AXES.items() if last in names.split()), "")


def names_seed(key: str) -> bool:
    return _words(key)[-1:] == ["seed"]


def of_figures(key: str) -> bool:
    """Tell whether a key is that of a figure by its name."""
    found = _words(key)
    rate = "per" in found or {"grad", "norm"} <= {*found}
    return rate or any(w in _FIGURES.split() or w.endswith("loss") for w in found)


def state_of(text: object) -> str:
    """Return the state that a source's word for it means; empty where that is not known."""
    word = str(text).strip().lower()
    return next((state for state, known in _STATES.items() if word in known.split()), "")


def said_by(path: Path) -> Row:
    """Return the settings that a path says, as lr=0.1,seed=1; else its name as one."""
    return {k: parse_value(v) for k, v in _PAIR.findall(str(path))} or {"run": path.name}


def records_of(
    runs: Sequence[OtherRun], asked: Asked, figure: str, said: list[str]
) -> list[Record]:
    """Return runs as records. Raises ConfigError for what cannot be guessed and said."""
    better = {figure: _better(figure, asked.better)}
    seed = asked.seed or _seed(runs, asked, said)
    by = tuple(asked.by or _settings(runs, figure, seed, said))
    names, found = Counter[str](), list[Record]()
    for run in runs:
        names[run.name] += 1
        name = run.name if names[run.name] == 1 else f"{run.name} ({names[run.name]})"
        config = {k: run.values.get(k) for k in by}
        given = run.values.get(seed) if seed else None
        whole = isinstance(given, float) and given.is_integer()
        config[SEED] = own_seed(name) if given is None else int(given) if whole else given
        columns, steps = _curve(run.rows, figure, {*by, seed})
        facts: dict[str, Any] = {"better": better, "not_finite": _not_finite(run.rows, figure)}
        if {"steps", "tokens"} <= steps.keys():
            more, of = (np.diff(steps[axis], prepend=0.0) for axis in ("tokens", "steps"))
            facts["tokens_per_step"] = float(np.max(more / np.maximum(of, 1.0)))
        known: dict[str, Any] = {"columns": columns, "steps": steps, "swept": by}
        known |= {"foreign": True, "measured": figure}
        found.append(Record(run.path, name, None, run.state, config, facts, {}, **known))
    if not any(np.isfinite(r.columns[figure]).any() for r in found):
        text = "no run has a number of that name; a decimal sign is a point, such as 2.9"
        raise ConfigError("cannot_compare", f"--figure {figure}: {text}")
    return one_spelling(found)


def _not_finite(rows: Sequence[Row], figure: str) -> str:
    """Return the figure that a run ended with, such as nan, where it is not finite; else nothing.

    Where a number comes after it, as in a log that has nan between evaluations, it says nothing.
    """
    given = [y for row in rows if isinstance(y := row.get(figure), float | int)]
    finite = [math.isfinite(y) for y in given]
    ended = finite.index(False) if False in finite else len(given)
    return "" if any(finite[ended:]) else "".join(map(str, given[ended:][:1]))


def _keys(runs: Iterable[OtherRun]) -> list[str]:
    return list(dict.fromkeys(k for run in runs for row in (run.values, *run.rows) for k in row))


def figure_of(
    runs: Sequence[OtherRun],
    asked: Asked,
    said: list[str],
    question: str = "which figure is to be judged?",
) -> str:
    """Return the figure that is judged, or that is the loss of a law.

    Raises ConfigError with the `question` where it must be asked, and for what no run has.
    """
    keys = _keys(runs)
    given = [("figure", asked.figure), ("seed", asked.seed), *(("by", key) for key in asked.by)]
    for flag, key in given:
        if key and key not in keys:
            text = f"no run has it.{nearest(key, keys)} There are {listed(keys, 20)}"
            raise ConfigError("unknown_row", f"--{flag} {key}: {text}")
    if asked.figure:
        return asked.figure
    for usual in _USUAL.split():
        if found := [k for k in keys if k.lower() == usual]:
            said.append(f"Figure: {found[0]} (--figure names another).")
            return found[0]
    left = [k for k in keys if k not in {*asked.by, asked.seed}]
    numbers = [k for k in left if of_figures(k)]
    # what may be a figure, if it need be
    numbers = numbers or [k for k in left if not (names_seed(k) or axis_in(k))] or keys
    if len(numbers) == 1:
        return numbers[0]
    raise ConfigError(
        "missing_value",
        f"{question} Name it, such as --figure {(numbers or ['val_loss'])[0]}; "
        f"there are {listed(numbers, 20)}",
    )


def _better(figure: str, given: str | None) -> str:
    if given in ("lower", "higher"):
        return given
    if given is not None:
        text = "lower or higher is needed; example --better lower"
        raise ConfigError("unknown_option", f"--better {given}: {text}")
    found = _words(figure)
    if "per" not in found and any(w.endswith(_LOWER) for w in found):
        return "lower"
    if "per" in found or any(w in _HIGHER.split() for w in found):
        return "higher"
    raise ConfigError(
        "missing_value",
        f"--figure {figure}: is it better when lower or higher? Say so: --better lower",
    )


def _varying(runs: Sequence[OtherRun], keys: Iterable[str]) -> list[str]:
    return [k for k in keys if len({repr(run.values.get(k)) for run in runs}) > 1]


def _seed(runs: Sequence[OtherRun], asked: Asked, said: list[str]) -> str | None:
    """Return the key of the seed; None where there is none, so that each run has its own."""
    known = [k for k in _keys(runs) if names_seed(k) and k not in asked.by]
    if SEED in known:
        return SEED
    several = _varying(runs, known)
    if len(several) > 1:
        text = "which column is the seed?"
        raise ConfigError(
            "missing_value", f"{text} Name it: --seed {several[0]}; there are {listed(several, 8)}"
        )
    if not known:
        said.append(
            "Seeds: none are named, so each run counts as one of its own, shared with no other "
            "(--seed KEY names them)."
        )
        return None
    return (several or known)[0]


def _settings(
    runs: Sequence[OtherRun], figure: str, seed: str | None, said: list[str]
) -> Sequence[str]:
    """Return the keys that vary and are no figures.

    Numbers are told from figures by their names, and by values that several runs share. Raises
    ConfigError where that tells nothing.
    """
    typed = runs[0].typed
    keys = dict.fromkeys(k for run in runs if run.typed or not typed for k in run.values)
    no = is_execution if typed else of_figures
    known = [
        k for k in keys if k not in (figure, seed) and not (names_seed(k) or axis_in(k) or no(k))
    ]
    found, unclear = list[str](), list[str]()
    for key in (vary := _varying(runs, known)):
        values = [v for run in runs if (v := run.values.get(key)) is not None]
        shared, named = len(set(map(repr, values))) <= len(values) / 2, key.lower() in RUN_NAMES
        if key.lower() in _INDEX or all(_DATE.fullmatch(str(v)) for v in values):
            continue
        if named or any(isinstance(v, str) for v in values):
            alone = len(vary) == 1 and not (named and seed)
            if shared or alone or (len(runs) < 3 and not named):  # else it names the run
                found.append(key)
        else:
            (found if shared or typed or len(runs) < 3 else unclear).append(key)
    if len(unclear) > 1 or (found and unclear):
        text = "which columns are settings, and which are figures? "
        text += f"{listed(unclear, 8)} may be either; name all settings, such as --by "
        raise ConfigError("missing_value", text + ",".join([*found, *unclear][:3]))
    if found := found or unclear:
        said.append(
            f"Settings: {listed(found, 8)}, what varies and is not a figure (--by names them)."
        )
    return found


def in_order(rows: Sequence[Row]) -> Sequence[Row]:
    """Return rows by their steps, tokens or seconds, else as they are."""
    of = {axis_in(k): k for row in rows for k, v in row.items() if number(v) is not None}
    key = next((of[axis] for axis in _AXES if axis in of), None)
    return sorted(rows, key=lambda row: number(row.get(key)) or 0.0) if key else rows


def _curve(
    rows: Sequence[Row], figure: str, settings: Collection[str | None]
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Return the figures of a run at each of its looks, and their places by axis where known."""
    table, count = dict[str, np.ndarray](), len(rows)
    for key in dict.fromkeys(k for row in rows for k in row):
        column = np.array([number(row.get(key)) for row in rows], dtype=float)  # None is NaN
        if np.isfinite(column).any():
            table[key] = column
    # the first of an axis counts, wandb's own (_step) after all others
    places = dict[str, np.ndarray]()
    for key in sorted(table, key=lambda k: k.startswith("_")):
        places.setdefault(axis_in(key), table[key])
    places.pop("", None)
    first = next((places[a] for a in _AXES if a in places), np.arange(1.0, count + 1))
    known, last = np.unique(first[::-1], return_index=True)
    order = count - 1 - last[np.isfinite(known)]  # what was logged twice counts as it was last
    steps = {
        axis: at for axis, where in places.items()
        if len(at := np.maximum(where[order], 0.0)) and (np.diff(at) >= 0).all() and at[-1] > 0
    }  # fmt: skip
    figures = {k: v[order] for k, v in table.items() if k not in settings and not axis_in(k)}
    empty = {figure: np.full(len(order), np.nan)}
    return {"step": np.arange(1.0, len(order) + 1)} | empty | figures, steps
