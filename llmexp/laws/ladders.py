"""Tell which runs are one ladder, and take the best setting of each size and length."""

from __future__ import annotations

import glob
import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from llmexp.compare.folding import folded
from llmexp.compare.reading import read
from llmexp.compare.records import is_execution, listed
from llmexp.laws.points import Ladder, Point, points_of, read_csv, undecayed
from llmexp.run.budget import BUDGETS
from llmexp.runs.find import SweepFolder, find, looks_like_run
from llmexp.settings.knobs import SEED
from llmexp.settings.labels import plural, short_label, short_value
from llmexp.settings.rules import ONE_NUMBER, SIZES
from llmexp.settings.values import ConfigError

UNDECAYED = "learning rate not decayed, as that of the others is"
CELL = 1.03  # tokens of one length differ by less: budgets are exact to a step
# A ladder varies these: they set no two ladders apart.
_SIZES = ("model.shape_rule", *ONE_NUMBER, *(f"model.{name}" for name in SIZES))
_SCALE = ("batch.", "fork.", *_SIZES, *BUDGETS, SEED)


def ladders(paths: Sequence[str | Path], axis: str | None = None) -> tuple[list[Ladder], list[str]]:
    """Return the ladders under the paths, in order, and what could not be read.

    Runs are of two ladders if they differ in a word (such as the optimizer), or if they lie under
    different paths and differ in a number that each path has one value of. Budgets, batches, seeds
    and the model's sizes make none. `axis`: a knob that a law is to be over.
    """
    found: list[Ladder] = []
    origins: list[Path] = []  # of the ladders
    runs: dict[Path, tuple[Path, SweepFolder]] = {}
    places: dict[Path, str] = {}
    problems: list[str] = []
    for path in _expanded(paths):
        if _is_csv(path):
            found.append(read_csv(path))
            origins.append(path)
            continue
        of_path, more = find([path])
        problems += more
        for run in of_path:
            runs.setdefault(run[0].resolve(), run)
            places.setdefault(run[0], "runs" if looks_like_run(path) else str(path))
    records = read(list(runs.values()))
    problems += [f"{r.name}: {p}" if r.name not in p else p for r in records for p in r.problems]
    points, out = points_of(records)
    groups = _apart(points, places)
    for name, group in zip(_names(groups, places), groups, strict=True):
        if held := undecayed(group):  # a loss before the decay is no loss of such a budget
            out[UNDECAYED] = [p.name for p in held]
        found.append(_ladder(name, [p for p in group if p not in held], axis))
        found[-1].out, out = {**out}, {}
        origins.append(Path(_place(group, places)))
    for ladder, name in zip(found, _told_apart([f.name for f in found], origins), strict=True):
        ladder.name = name
    if not found:
        why = "; ".join(f"{listed(names)}: {reason}" for reason, names in out.items())
        text = f"there is no run to fit{f' ({why})' if why else ''}"
        raise ConfigError("\n".join([*problems, f"{text}; for example llmexp fit outputs/default"]))
    return found, problems


def _is_csv(path: Path) -> bool:
    return path.suffix.lower() == ".csv" and path.is_file()


def _expanded(paths: Sequence[str | Path]) -> list[Path]:
    """Return the paths; in place of a glob that matches CSV files, what it matches."""
    found: list[Path] = []
    for path in paths:
        exact = os.path.lexists(path)
        names = [] if exact else [Path(n) for n in sorted(glob.glob(str(path), recursive=True))]
        found += names if any(map(_is_csv, names)) else [Path(path)]
    return found


def _place(group: Sequence[Point], places: Mapping[Path, str]) -> str:
    return places[group[0].record.path] if group[0].record else ""


def _told_apart(names: Sequence[str], paths: Sequence[Path]) -> list[str]:
    """Return the names, those that are equal with the folders in which their paths differ."""
    found = list(names)
    for name in {n for n in names if names.count(n) > 1}:
        same = [i for i, n in enumerate(names) if n == name]
        folders = {i: paths[i].resolve().parent for i in same}
        common = os.path.commonpath(folders.values())
        for i, folder in folders.items():
            found[i] = str(folder.relative_to(common) / name)
    return [f"{n} ({i})" if found.count(n) > 1 else n for i, n in enumerate(found, 1)]


def _forks(points: Sequence[Point]) -> bool:
    return any(p.record and p.record.parent for p in points)


def _settings(points: Sequence[Point], forks: bool) -> list[dict[str, Any]]:
    """Return what of the config of each run could set ladders apart."""
    configs = [p.record.config if p.record else {} for p in points]
    skipped = (*_SCALE, "schedule.") if forks else _SCALE  # a cooldown is of its trunk's ladder
    return [
        {k: v for k, v in c.items() if not k.startswith(skipped) and not is_execution(k)}
        for c in configs
    ]


def _apart(points: Sequence[Point], places: Mapping[Path, str]) -> list[list[Point]]:
    """Return the points of each ladder."""
    groups: dict[object, list[Point]] = defaultdict(list)
    forks = _forks(points)
    for p, setting in zip(points, _settings(points, forks), strict=True):
        words = frozenset((k, v) for k, v in setting.items() if isinstance(v, (str, bool)))
        groups[words, places[p.record.path] if p.record else ""].append(p)
    found: list[list[Point]] = []
    for group in groups.values():
        for ladder in found:
            one, other = _alike(group, forks), _alike(ladder, forks)
            if all(one[k] == other[k] for k in one.keys() & other.keys()) and _words(one) == _words(
                other
            ):
                ladder += group
                break
        else:
            found.append(group)
    return found


def _alike(points: Sequence[Point], forks: bool) -> dict[str, Any]:
    """Return the values that the settings of all points share."""
    first, *others = _settings(points, forks)
    return {k: v for k, v in first.items() if all(s.get(k) == v for s in others)}


def _words(setting: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in setting.items() if isinstance(v, (str, bool))}


def _names(groups: Sequence[Sequence[Point]], places: Mapping[Path, str]) -> list[str]:
    """Name ladders by what sets them apart, or by their paths."""
    forks = any(map(_forks, groups))
    alike = [_alike(group, forks) for group in groups]
    keys = [k for k in (alike[0] if alike else {}) if len({repr(a.get(k)) for a in alike}) > 1]
    options = {k.partition(".")[0] for k in keys if k.endswith("._target_")}
    keys = [k for k in keys if k.endswith("._target_") or k.partition(".")[0] not in options]
    names = [short_label({k: a.get(k) for k in keys}) for a in alike]
    if len(keys) == 1 and keys[0].endswith("._target_"):
        names = [short_value(a.get(keys[0])) for a in alike]
    elif not 0 < len(keys) < 4:
        names = [Path(_place(group, places)).name for group in groups]
    return names


def _ladder(name: str, points: Sequence[Point], axis: str | None) -> Ladder:
    """Return the ladder of the points: of each size and length the setting with the lowest loss.

    With an axis, of each of its values.
    """
    by_record = {p.record: p for p in points}
    cells: list[tuple[object, float, list[list[Point]]]] = []
    groups = [[by_record[r] for r in g] for g in folded([r for r in by_record if r is not None])]
    for group in sorted(groups, key=lambda g: (str(_cell(g[0], axis)), g[0].tokens)):
        cell, tokens = _cell(group[0], axis), group[0].tokens
        if cells and cells[-1][0] == cell and tokens < CELL * cells[-1][1]:
            cells[-1][2].append(group)
        else:
            cells.append((cell, tokens, [group]))
    best = [min(cell, key=_mean_loss) for _, _, cell in cells]
    ladder = Ladder(name, [p for group in best for p in group])
    if others := sum(len(cell) - 1 for _, _, cell in cells):
        ladder.notes.append(
            f"Of each size and length the setting with the lowest loss is a point; "
            f"{plural(others, 'other setting')} {'is' if others == 1 else 'are'} none."
        )
    return ladder


def _cell(point: Point, axis: str | None) -> tuple[float, object]:
    return max(point.sizes.values()), point.values.get(axis or "")


def _mean_loss(group: Sequence[Point]) -> float:
    return sum(p.loss for p in group) / len(group)
