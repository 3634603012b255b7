"""Tell which runs are one ladder, and read its points: runs at their own ends."""

from __future__ import annotations

import math
import os
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from llmexp.compare.comparing import tokenizer_sha
from llmexp.compare.figures import broken, figures, task
from llmexp.compare.folding import folded
from llmexp.compare.judging import decays_at_last
from llmexp.compare.projects import fetch_figure
from llmexp.compare.reading import read
from llmexp.compare.records import TWIN, Record, is_execution
from llmexp.compare.sources import others
from llmexp.compare.strangers import Asked, OtherRun, Row, figure_of, in_order
from llmexp.compare.tables import is_table
from llmexp.config.knobs import SEED
from llmexp.config.labels import plural, short_label, short_value
from llmexp.config.rules import ONE_NUMBER, SHAPE_KEYS
from llmexp.config.values import ConfigError
from llmexp.folders.find import SweepFolder, find, looks_like_run, paths_of
from llmexp.run.budget import BUDGETS
from llmexp.system.text import Note, listed, number

COUNTS = {"head": "parameters_with_head", "all": "parameters", "blocks": "parameters_in_blocks"}
GIVEN = "given"  # how runs of others count parameters
DECAYED = 0.9  # a run whose last rate is more of its largest one has not come to its end
CELL = 1.03  # tokens of one length differ by less: budgets are exact to a step
_COLUMNS = {  # of runs of others, by the last part of their keys
    "N": "n parameters_with_head parameters params n_params num_params num_parameters model_size",
    "D": "d tokens tokens_seen num_tokens total_tokens max_tokens",
    "C": "c flops total_flops train_flops",
}
UNDECAYED = "learning rate not decayed, as that of the others is"
# A ladder varies these: they set no two ladders apart.
_SIZES = ("model.shape_rule", *ONE_NUMBER, *(f"model.{name}" for name in SHAPE_KEYS))
_SCALE = ("batch.", "fork.", *_SIZES, *BUDGETS, SEED)
Settings = Mapping[Record, Mapping[str, Any]]  # what of each config could set ladders apart


@dataclass(frozen=True, eq=False)
class LawPoint:
    """A run as a law sees it: sizes by how they are counted, tokens, FLOPs and loss."""

    name: str
    sizes: Mapping[str, float]
    tokens: float
    flops: float
    loss: float
    values: Mapping[str, Any] = field(default_factory=dict)  # its config, or its line of a file
    record: Record | None = None

    def along(self, key: str, count: str) -> float | None:
        """Return a figure that a law may be over: parameters, tokens, flops, or a knob."""
        own = {"parameters": self.sizes[count], "tokens": self.tokens, "flops": self.flops}
        return own[key] if key in own else number(self.values.get(key))


@dataclass
class Ladder:
    """Runs that one law is to fit, and what was left out of it: names by reason."""

    name: str
    points: list[LawPoint]
    out: dict[str, list[str]] = field(default_factory=dict)
    notes: list[Note] = field(default_factory=list)
    loss: str = "val loss"  # its name
    origin: Path = Path()  # where its runs lie
    apart: Sequence[str] = ()  # columns of words that set it apart from the others of its file

    def figures(self, count: str) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Return sizes, tokens, FLOPs and losses of the points."""
        rows = [(p.sizes[count], p.tokens, p.flops, p.loss) for p in self.points]
        sizes, tokens, flops, losses = np.array(rows, dtype=float).T
        return sizes, tokens, flops, losses


def counts_of(points: Sequence[LawPoint]) -> list[str]:
    """Return the ways to count parameters that all points know, the usual one first."""
    return [c for c in (*COUNTS, GIVEN) if points and all(p.sizes.get(c) for p in points)]


def law_points(records: Sequence[Record]) -> tuple[dict[Record, LawPoint], dict[str, list[str]]]:
    """Return the runs that are points, and the names of the others by reason."""
    out: dict[str, list[str]] = defaultdict(list)
    found = {}
    for r in records:
        point = _point(r)
        if isinstance(point, str):
            out[point].append(r.name)
        else:
            found[r] = point
    for reason, of in (("another validation text", task), ("another tokenizer", tokenizer_sha)):
        usual = Counter(map(of, found)).most_common(1)
        for r in [r for r in found if of(r) != usual[0][0]]:
            out[reason].append(found.pop(r).name)
    return found, dict(out)


def _point(r: Record) -> LawPoint | str:
    """Return a run as a point, or why it is none."""
    if r.config.get(TWIN):
        return "a twin of another run"
    if r.state != "finished":
        return r.state
    if r.rung is not None:
        return "left out by successive halving"
    if why := broken(r):
        return why
    losses = figures(r, "tokens", None)
    loss = losses.get("val/loss")
    tokens = r.facts.get("max_tokens") or losses.get("tokens_seen")
    sizes = {c: n for c, key in COUNTS.items() if (n := r.facts.get(key))}
    if not loss or loss <= 0 or not tokens or not sizes:
        return "without size, tokens or val loss"
    per_token = r.facts.get("flops_per_token") or 6 * sizes.get("head", max(sizes.values()))
    values = {**{k: v for k, v in r.facts.items() if number(v) is not None}, **r.config}
    return LawPoint(r.name, sizes, tokens, per_token * tokens, loss, values, r)


def decayed(r: Record) -> bool:
    """Tell whether a run has come to the end of its schedule."""
    kind = f"{r.config.get('optimizer._target_')} {r.config.get('optimizer.name')}"
    if "schedulefree" in kind.replace("_", "").lower():  # its average takes the decay's place
        return True
    known = r.steps["lr"][np.isfinite(r.steps["lr"])]
    if len(known) < 2 or known[-1] > known[:-1].max():  # no step is of the peak, or later
        return decays_at_last(r.config)
    return bool(known[-1] < DECAYED * known.max())


def of_others(given: Any, runs: Sequence[OtherRun], figure: str | None) -> list[Ladder]:
    """Return the ladders of runs that llmexp did not train, each run at its last loss.

    They need the columns N, D and a loss, or C in place of one of the first two. Words that several
    runs share set ladders apart. Raises ConfigError for what lacks a column.
    """
    asked, figure = figure, figure_of(runs, Asked(figure=figure), [], "which figure is the loss?")
    fetch_figure(runs, figure)
    where, lines = given if isinstance(given, Path) else Path("the frame"), list[Row]()
    for run in runs:
        ends = (row for row in in_order(run.rows)[::-1] if number(row.get(figure)) is not None)
        lines.append(run.values | next(ends, {}))
    columns, keys = {"loss": figure}, [*dict.fromkeys(k for line in lines for k in line)]
    for name, known in _COLUMNS.items():
        of = (k for word in known.split() for k in keys if re.split("[./]", k.lower())[-1] == word)
        if (key := next(of, None)) is not None:
            columns[name] = key
    lower = [k.lower() for k in keys]
    if twice := [k for k in columns.values() if lower.count(k.lower()) > 1]:
        raise ConfigError("bad_data", f"{where}: has the column {twice[0]} twice; leave one out")
    if len(columns) < 3:
        text = "needs the columns N (parameters), D (tokens) and loss, or C (FLOPs) in place of "
        text += "one of the first two; for example a first line N,D,loss"
        raise ConfigError("bad_data", f"{where}: {text}")
    texts = {k for line in lines for k, v in line.items() if isinstance(v, str)}
    several = {k for k in texts if 1 < len({line.get(k) for line in lines}) <= len(lines) / 2}
    words = [k for k in keys if k in several]
    found: dict[str, Ladder] = {}
    out: dict[str, list[str]] = defaultdict(list)
    for run, line in zip(runs, lines, strict=True):
        point = _point_of(run, line, columns, where)
        if isinstance(point, str):
            out[point].append(run.name)
            continue
        name = short_label({k: line.get(k) for k in words}) or where.stem
        new = Ladder(name, [], {} if found else out, origin=where, loss=figure, apart=words)
        found.setdefault(name, new).points.append(point)
    if not found:
        text = "has no line of numbers above 0; a line is a run: 1e6,2e7,3.1"
        raise ConfigError("bad_data", f"{where}: {text}")
    ladders = list(found.values())
    more = [k for k in keys if k.lower().endswith("loss") and k not in columns.values()]
    if more and not asked:
        text = f"{figure}, not {listed(more)}; chosen by its name, as no --figure is given"
        ladders[0].notes.append(("Figure", text))
    if is_table(given):
        ladders[0].notes += _folded(runs, columns.get("N"), where)
    return ladders


def _folded(runs: Sequence[OtherRun], size: str | None, where: Path) -> Iterator[Note]:
    """Say which lines of a table were taken as looks at one run.

    Raises ConfigError where they are of several sizes."""
    way = "to have each line be a run, leave out the column of names"
    for run in runs:
        if len({row.get(size) for row in run.rows} - {None}) > 1:
            text = f"has several values of {size}, and a run has one; {way}"
            raise ConfigError("bad_data", f"{where}: {run.name}: {text}")
    if (count := sum(len(run.rows) for run in runs)) > len(runs):
        lines = f"{plural(count, 'line')} of {plural(len(runs), 'run')}"
        yield "Lines", f"{lines}, each a point at its last; {way}"


def _point_of(run: OtherRun, line: Row, columns: Mapping[str, str], where: Path) -> LawPoint | str:
    """Return a run as a point, or why it is none. Raises ConfigError for a word in a number."""
    given = {name: line.get(key) for name, key in columns.items()}
    for name, value in given.items():
        if isinstance(value, (str, bool)):
            text = f"{columns[name]}={value}: must be a number; example 2.5e8"
            raise ConfigError("bad_data", f"{where}: {run.name}: {text}")
    if run.state not in ("finished", ""):
        return run.state
    at = {name: float(value or 0) for name, value in given.items()}
    if not all(0 < value < math.inf for value in at.values()):
        return "not finite, or not above 0"
    n = at.get("N") or _quotient(at["C"], at["D"])
    d = at.get("D") or _quotient(at["C"], n)
    return LawPoint(run.name, {GIVEN: n}, d, at.get("C") or 6 * n * d, at["loss"], line | at)


def _quotient(flops: float, divisor: float) -> float:
    """Return FLOPs / 6 / divisor, in which one size or budget is one number for all runs."""
    return float(f"{flops / 6 / divisor:.14g}")


def ladders(
    paths: Sequence[Any],
    axis: str | None = None,
    figure: str | None = None,
    chosen: str | None = None,
) -> tuple[list[Ladder], list[str]]:
    """Return the ladders under the paths, in order, and what could not be read.

    Runs are of two ladders if they differ in a word (such as the optimizer), or if they lie under
    different paths and differ in a number that each path has one value of. Budgets, batches, seeds
    and the model's sizes make none. `axis`: a knob that a law is to be over. `figure`: the
    loss of runs of others; `chosen`: which runs of wandb are taken.
    """
    found, seen, problems = list[Ladder](), set[Any](), list[str]()
    runs, places = dict[Path, tuple[Path, SweepFolder]](), dict[Path, Path]()
    for given in paths:
        names = [] if hasattr(type(given), "columns") else paths_of(given)
        for path in names if any(map(is_table, names)) else [given]:
            key = path.resolve() if isinstance(path, Path) else id(path)
            if key in seen:  # paths may name one twice
                continue
            seen.add(key)
            if strange := others(path, Asked(filter=chosen, ends=True)):
                found += of_others(path, strange, figure)
                continue
            of_path, more = find([path])
            problems += more
            for run in of_path:
                runs.setdefault(run[0].resolve(), run)
                places.setdefault(run[0], Path("runs") if looks_like_run(path) else path)
    records = read(list(runs.values()))
    problems += [f"{r.name}: {p}" if r.name not in p else p for r in records for p in r.problems]
    points, out = law_points(records)
    settings = _settings(list(points), axis)
    groups = _apart(settings, places)
    origins = [places[group[0].path] for group in groups]
    for name, group, origin in zip(_names(groups, settings, origins), groups, origins, strict=True):
        held = [r for r in group if not decayed(r)]
        if 0 < len(held) < len(group):  # a loss before the decay is no loss of such a budget
            out[UNDECAYED] = [r.name for r in held]
            group = [r for r in group if r not in held]
        found.append(_ladder(Ladder(name, [], out, origin=origin), group, points, axis))
        out = {}
    if not found:
        why = "; ".join(f"{listed(names)}: {reason}" for reason, names in out.items())
        text = f"there is no run to fit{f' ({why})' if why else ''}"
        text = "\n".join([*problems, f"{text}; for example llmexp fit outputs/default"])
        raise ConfigError("cannot_fit", text)
    _tell_apart(found)
    return found, problems


def _settings(runs: Sequence[Record], axis: str | None) -> Settings:
    """Return what of the config of each run could set ladders apart."""
    skipped = (*_SCALE, axis) if axis else _SCALE
    if any(r.parent for r in runs):
        skipped += ("schedule.",)  # a cooldown is of its trunk's ladder
    return {
        r: {k: v for k, v in r.config.items() if not k.startswith(skipped) and not is_execution(k)}
        for r in runs
    }


def _apart(settings: Settings, places: Mapping[Path, Path]) -> list[list[Record]]:
    """Return the runs of each ladder."""
    groups: dict[tuple[frozenset[Any], Path], list[Record]] = defaultdict(list)
    for r, setting in settings.items():
        words = frozenset((k, v) for k, v in setting.items() if isinstance(v, (str, bool)))
        groups[words, places[r.path]].append(r)
    found: list[tuple[frozenset[Any], list[Record]]] = []
    for (words, _), group in groups.items():
        own = _alike(group, settings)
        for of_words, ladder in found:
            other = _alike(ladder, settings)
            if words == of_words and all(own[k] == other[k] for k in own.keys() & other.keys()):
                ladder += group
                break
        else:
            found.append((words, group))
    return [group for _, group in found]


def _alike(runs: Sequence[Record], settings: Settings) -> dict[str, Any]:
    """Return the values that all runs share."""
    first, *others = (settings[r] for r in runs)
    return {k: v for k, v in first.items() if all(s.get(k) == v for s in others)}


def _names(
    groups: Sequence[Sequence[Record]], settings: Settings, origins: Sequence[Path]
) -> list[str]:
    """Name ladders by what sets them apart, or by their paths."""
    alike = [_alike(group, settings) for group in groups]
    values = {key: {repr(a.get(key)) for a in alike} for some in alike for key in some}
    keys = [key for key, found in values.items() if len(found) > 1]
    options = {k.partition(".")[0] for k in keys if k.endswith("._target_")}
    keys = [k for k in keys if k.endswith("._target_") or k.partition(".")[0] not in options]
    if len(keys) > 3 or not keys:
        return [origin.name for origin in origins]
    told = [{key: a.get(key) for key in keys} for a in alike]
    one = len(keys) == 1 and options
    return [short_value(t[keys[0]]) if one else short_label(t) for t in told]


def _tell_apart(found: Sequence[Ladder]) -> None:
    """Give ladders of one name the folders in which their paths differ, else numbers."""
    names = [ladder.name for ladder in found]
    for name in {n for n in names if names.count(n) > 1}:
        same = [ladder for ladder in found if ladder.name == name]
        folders = [ladder.origin.resolve().parent for ladder in same]
        common = os.path.commonpath(folders)
        for ladder, folder in zip(same, folders, strict=True):
            ladder.name = str(folder.relative_to(common) / name)
    names = [ladder.name for ladder in found]
    for i, ladder in enumerate(found, 1):
        ladder.name += f" ({i})" if names.count(ladder.name) > 1 else ""


def _ladder(
    ladder: Ladder, runs: Sequence[Record], points: Mapping[Record, LawPoint], axis: str | None
) -> Ladder:
    """Fill a ladder with the points of runs: of each size and length the best setting.

    That has the lowest mean loss. With an axis, of each of its values.
    """

    def size(group: Sequence[LawPoint]) -> tuple[float, object]:
        return max(group[0].sizes.values()), group[0].values.get(axis or "")

    groups = [[points[r] for r in group] for group in folded(runs)]
    cells: list[list[list[LawPoint]]] = []
    for group in sorted(groups, key=lambda g: (str(size(g)), g[0].tokens)):
        first = cells[-1][0] if cells else None
        if first and size(first) == size(group) and group[0].tokens < CELL * first[0].tokens:
            cells[-1].append(group)
        else:
            cells.append([group])
    best = [min(cell, key=lambda g: sum(p.loss for p in g) / len(g)) for cell in cells]
    ladder.points = [p for group in best for p in group]
    if others := len(groups) - len(cells):
        note = "Not the best of their size and length", plural(others, "other setting")
        ladder.notes.append(note)
    return ladder
