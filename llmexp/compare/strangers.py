"""Make records of runs that llmexp did not train: what is a setting, the seed, the figure.

What is not given is guessed and said, or asked for; what the source does not know stays absent.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from llmexp.compare.records import Record, is_execution, own_seed
from llmexp.config.knobs import SEED
from llmexp.config.values import ConfigError, nearest
from llmexp.system.text import listed, number

_AXES = {
    "steps": ("step", "steps", "iter", "iters", "iteration", "iterations", "global_step", "update"),
    "tokens": ("tokens", "tokens_seen", "num_tokens", "total_tokens", "consumed_tokens"),
    "time": ("seconds", "time_s", "train_time", "elapsed_s", "runtime"),
}
# The figure that is judged where none is named, the first one that there is.
_USUAL = ("val/loss", "val_loss", "valid_loss", "validation_loss", "eval/loss", "eval_loss", "loss")
_FIGURES = (
    "acc", "accuracy", "bpb", "created", "date", "duration", "elapsed", "eta", "flops", "gib",
    "hours", "mem", "memory", "mfu", "minutes", "nll", "perplexity", "ppl", "runtime", "score",
    "seconds", "speed", "tflops", "throughput", "time", "timestamp", "updated",
)  # fmt: skip
_LOWER = ("loss", "ppl", "perplexity", "bpb", "nll", "error", "time", "seconds", "bits", "step")
_HIGHER = ("acc", "accuracy", "score", "mfu", "throughput", "reward", "speed")
_STATES = {
    "finished": "finished completed complete done success succeeded ok",
    "running": "running pending queued",
    "failed": "failed failure crashed error diverged oom nan",
    "preempted": "killed preempted stopped cancelled canceled interrupted",
}
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

    @property
    def flags(self) -> list[str]:
        """Return the names of what is given."""
        return [f"--{name}" for name, value in vars(self).items() if value]


@dataclass
class OtherRun:
    """A run that llmexp did not train, as its source gives it."""

    name: str
    values: Mapping[str, Any]  # settings and last figures by key
    state: str  # one of runs.folder.STATES, or empty
    curve: Mapping[str, np.ndarray] | None  # figures, steps and tokens, a value for each look
    path: Path
    # keys of `values` that are settings and no figures, where the source tells them apart
    config: Mapping[str, Any] | None = None


def _words(key: str) -> list[str]:
    """Return the words of a key: val, loss of val/loss."""
    return [w for w in re.split(r"[^a-z0-9]+", key.lower()) if w]


def axis_in(key: str) -> str:
    """Return the axis that a key stands for, such as steps of train/global_step; else nothing."""
    last = key.lower().rpartition("/")[2].strip("_ ")
    return next((axis for axis, names in _AXES.items() if last in names), "")


def names_seed(key: str) -> bool:
    return _words(key)[-1:] == ["seed"]


def of_figures(key: str) -> bool:
    """Tell whether a key is that of a figure by its name."""
    found = _words(key)
    rate = "per" in found or {"grad", "norm"} <= {*found}
    return rate or any(w in _FIGURES or w.endswith("loss") for w in found)


def state_of(text: object) -> str:
    """Return the state that a source's word for it means; empty where that is not known."""
    word = str(text).strip().lower()
    return next((state for state, known in _STATES.items() if word in known.split()), "")


def records_of(
    runs: Sequence[OtherRun], asked: Asked, figure: str, said: list[str]
) -> list[Record]:
    """Return runs as records. Raises ConfigError for what cannot be guessed and said."""
    better = _better(figure, asked.better)
    seed = asked.seed or _seed(runs, asked, said)
    by = asked.by or _settings(runs, figure, seed, said)
    names = Counter[str]()
    found = []
    # 1 and 1.0 are one value
    mixed = {k for k in by if any(isinstance(run.values.get(k), float) for run in runs)}
    for run in runs:
        names[run.name] += 1
        name = run.name if names[run.name] == 1 else f"{run.name} ({names[run.name]})"
        given = run.values.get(seed) if seed else None
        if isinstance(given, float) and given.is_integer():
            given = int(given)
        config = {key: run.values.get(key) for key in by}
        config |= {k: float(v) for k, v in config.items() if k in mixed and type(v) is int}
        config[SEED] = own_seed(name) if given is None else given
        columns, steps = _curve(run, figure, {*by, seed})
        facts: dict[str, Any] = {"better": {figure: better}}
        if {"steps", "tokens"} <= steps.keys():
            apart = [np.diff(steps[axis], prepend=0.0) for axis in ("tokens", "steps")]
            facts["tokens_per_step"] = float(np.max(apart[0] / np.maximum(apart[1], 1.0)))
        found.append(
            Record(
                path=run.path,
                name=name,
                sweep=None,
                state=run.state,
                config=config,
                facts=facts,
                status={},
                columns=columns,
                steps=steps,
                swept=tuple(by),
                foreign=True,
                measured=figure,
            )
        )
    if not any(np.isfinite(r.columns[figure]).any() for r in found):
        text = "no run has a number of that name; a decimal sign is a point, such as 2.9"
        raise ConfigError("cannot_compare", f"--figure {figure}: {text}")
    return found


def _keys(runs: Iterable[OtherRun]) -> list[str]:
    return list(dict.fromkeys(k for run in runs for k in (*run.values, *(run.curve or ()))))


def figure_of(runs: Sequence[OtherRun], asked: Asked, said: list[str]) -> str:
    """Return the figure that is judged. Raises ConfigError where it must be asked."""
    keys = _keys(runs)
    if asked.figure:
        return asked.figure
    for usual in _USUAL:
        if found := [k for k in keys if k.lower() == usual]:
            said.append(f"Figure: {found[0]} (--figure names another).")
            return found[0]
    numbers = [k for k in keys if of_figures(k)] or keys
    if len(numbers) == 1:
        return numbers[0]
    raise ConfigError(
        "missing_value",
        f"which figure is to be judged? Name it, such as --figure {(numbers or ['val_loss'])[0]}; "
        f"there are {listed(numbers, 20)}",
    )


def _better(figure: str, given: str | None) -> str:
    if given is not None:
        if given not in ("lower", "higher"):
            raise ConfigError(
                "unknown_option",
                f"--better {given}: lower or higher is needed; example --better lower",
            )
        return given
    found = _words(figure)
    if "per" not in found and any(w.endswith(_LOWER) for w in found):
        return "lower"
    if "per" in found or any(w in _HIGHER for w in found):
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
        text = "which seed tells the runs of one setting apart?"
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
    given = [run.config if run.config is not None else run.values for run in runs]
    keys = dict.fromkeys(k for values in given for k in values)
    known = [k for k in keys if k not in (figure, seed) and not names_seed(k)]
    found, open_, many = list[str](), list[str](), len(runs) > 2
    for key in _varying(runs, known):
        values = [v for run in runs if (v := run.values.get(key)) is not None]
        texts = any(isinstance(v, str) for v in values)
        shared = len(set(map(repr, values))) <= len(values) / 2
        config = runs[0].config is not None
        if axis_in(key) or all(_DATE.fullmatch(str(v)) for v in values):
            continue
        if is_execution(key) if config else of_figures(key):
            continue
        if texts and not shared and many and len(known) > 1:
            continue  # it names the run
        if shared or texts or config or not many:
            found.append(key)
        else:
            open_.append(key)
    if len(open_) == 1 and not found:
        found, open_ = open_, []
    if open_:
        raise ConfigError(
            "missing_value",
            f"which columns are settings, and which are figures? {listed(open_, 8)} may be either; "
            f"name all settings, such as --by {','.join([*found, *open_][:3])}",
        )
    if found:
        said.append(
            f"Settings: {listed(found, 8)}, what varies and is no figure (--by names them)."
        )
    return found


def _curve(
    run: OtherRun, figure: str, settings: Collection[str | None]
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Return the figures of a run at each of its looks, and their places by axis where known."""
    rows = run.curve
    if rows is None:
        last = {k: number(v) for k, v in run.values.items()}
        rows = {k: np.array([np.nan if v is None else v]) for k, v in last.items()}
    count = len(next(iter(rows.values()), ()))
    places = {axis: rows[k] for axis in _AXES for k in reversed(list(rows)) if axis_in(k) == axis}
    known = (places[a] for a in _AXES if a in places and np.isfinite(places[a]).any())
    first = next(known, np.arange(1.0, count + 1))
    order = np.argsort(first, kind="stable")
    order = order[np.isfinite(first[order])]
    last_ones = np.append(np.diff(first[order]) > 0, True)[: len(order)]
    order = order[last_ones]  # what was logged twice counts as it was logged last
    steps = {axis: at[order] for axis, at in places.items()}
    steps = {
        axis: at for axis, at in steps.items()
        if len(at) and np.isfinite(at).all() and (np.diff(at) >= 0).all() and at[-1] > 0
    }  # fmt: skip
    columns = {"step": np.arange(1.0, len(order) + 1)}
    for key, values in rows.items():
        column = np.where(np.abs(values[order]) < 1e300, values[order], np.nan)
        if key not in settings and not axis_in(key) and np.isfinite(column).any():
            columns[key] = column
    columns.setdefault(figure, np.full(len(order), np.nan))
    return columns, steps


def check_keys(runs: Sequence[OtherRun], asked: Asked) -> None:
    """Raise ConfigError for a key that no run has."""
    known = _keys(runs)
    for flag, keys in (("figure", [asked.figure]), ("seed", [asked.seed]), ("by", asked.by)):
        for key in filter(None, keys):
            if key not in known:
                text = f"no run has it.{nearest(key, known)} There are {listed(known, 20)}"
                raise ConfigError("unknown_row", f"--{flag} {key}: {text}")
