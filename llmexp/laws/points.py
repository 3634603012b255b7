"""Read the points of a ladder: runs at their own ends, or lines of a CSV file."""

from __future__ import annotations

import csv
import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from llmexp.compare.comparing import tokenizer_sha
from llmexp.compare.figures import broken, figures, task
from llmexp.compare.judging import decays_at_last
from llmexp.compare.records import TWIN, Record
from llmexp.settings.kinds import kind_of_error
from llmexp.settings.values import ConfigError
from llmexp.system.text import number

COUNTS = {"head": "parameters_with_head", "all": "parameters", "blocks": "parameters_in_blocks"}
GIVEN = "given"  # how a CSV file counts parameters
DECAYED = 0.9  # a run whose last rate is more of its largest one has not come to its end
CELL = 1.03  # tokens of one length differ by less: budgets are exact to a step
_COLUMNS = ("N", "D", "C", "loss")


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
    notes: list[str] = field(default_factory=list)
    origin: Path = Path()  # where its runs lie
    apart: str = ""  # what sets it apart from other ladders

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
        if (reason := _unfit(r)) or (point := _point(r)) is None:
            out[reason or "without size, tokens or val loss"].append(r.name)
        else:
            found[r] = point
    for reason, of in (("another validation text", task), ("another tokenizer", tokenizer_sha)):
        usual = Counter(map(of, found)).most_common(1)
        for r in [r for r in found if of(r) != usual[0][0]]:
            out[reason].append(found.pop(r).name)
    return found, dict(out)


def _unfit(r: Record) -> str:
    """Return why a run is no point; empty where it may be one."""
    if r.config.get(TWIN):
        return "a twin of another run"
    if r.state != "finished":
        return r.state
    if r.rung is not None:
        return "left out by successive halving"
    return broken(r)


def _point(r: Record) -> LawPoint | None:
    losses = figures(r, "tokens", None)
    loss = losses.get("val/loss")
    tokens = r.facts.get("max_tokens") or losses.get("tokens_seen")
    sizes = {c: n for c, key in COUNTS.items() if (n := r.facts.get(key))}
    if not loss or loss <= 0 or not tokens or not sizes:
        return None
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


def read_csv(path: Path) -> Ladder:
    """Return the points of a CSV file with the columns N, D and loss, and C where it has it.

    Raises ConfigError for a file that lacks one, or holds what is no number.
    """
    known = {c.lower(): c for c in _COLUMNS}
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file, skipinitialspace=True)
            heads = [h.strip() for h in reader.fieldnames or ()]
            reader.fieldnames = heads = [known.get(h.lower(), h) for h in heads]
            lines = [(reader.line_num, line) for line in reader]
    except OSError as error:
        raise ConfigError(kind_of_error(error), f"{path}: cannot be read: {error}") from None
    except (UnicodeDecodeError, csv.Error) as error:
        text = "its first line names the columns, such as N,D,loss"
        raise ConfigError(
            "damaged_file", f"{path}: is no CSV file in UTF-8 ({error}); {text}"
        ) from None
    if twice := [c for c in _COLUMNS if heads.count(c) > 1]:
        raise ConfigError("bad_data", f"{path}: has the column {twice[0]} twice; leave one out")
    columns = [c for c in _COLUMNS if c in heads]
    if "loss" not in columns or len(columns) < 3:
        raise ConfigError(
            "bad_data",
            f"{path}: needs the columns N (parameters), D (tokens) and loss, or C (FLOPs) in place "
            "of one of the first two; for example a first line N,D,loss",
        )
    ladder = Ladder(path.stem, [], origin=path)
    for place, line in lines:
        if any(line.pop(None, ())):
            text = f"has more values than the {len(heads)} columns; a decimal sign is a point: 2.9"
            raise ConfigError("bad_data", f"{path}: line {place}: {text}")
        values = {head: _number(text) for head, text in line.items()}
        for c in columns:
            if values[c] is None:
                text = f"{c}={line[c] or ''}: must be a number; example 2.5e8"
                raise ConfigError("bad_data", f"{path}: line {place}: {text}")
        given = {c: values[c] or 0.0 for c in columns}
        label = f"line {place}"
        if not all(0 < v < math.inf for v in given.values()):
            ladder.out.setdefault("not finite, or not above 0", []).append(label)
            continue
        n = given.get("N") or given["C"] / 6 / given["D"]
        d = given.get("D") or given["C"] / 6 / n
        flops = given.get("C") or 6 * n * d
        ladder.points.append(LawPoint(label, {GIVEN: n}, d, flops, given["loss"], values))
    if not ladder.points:
        raise ConfigError(
            "bad_data", f"{path}: has no line of numbers above 0; a line is a run: 1e6,2e7,3.1"
        )
    return ladder


def _number(text: str | None) -> float | None:
    try:
        return float(text or "")
    except (TypeError, ValueError):
        return None
