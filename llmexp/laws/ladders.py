"""Tell which runs are one ladder, and take the best setting of each size and length."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from llmexp.compare.folding import folded
from llmexp.compare.reading import read
from llmexp.compare.records import Record, is_execution
from llmexp.laws.points import CELL, Ladder, LawPoint, decayed, law_points, read_csv
from llmexp.run.budget import BUDGETS
from llmexp.runs.find import SweepFolder, find, looks_like_run, paths_of
from llmexp.settings.knobs import SEED
from llmexp.settings.labels import plural, short_label, short_value
from llmexp.settings.rules import ONE_NUMBER, SHAPE_KEYS
from llmexp.settings.values import ConfigError
from llmexp.system.text import listed

UNDECAYED = "learning rate not decayed, as that of the others is"
# A ladder varies these: they set no two ladders apart.
_SIZES = ("model.shape_rule", *ONE_NUMBER, *(f"model.{name}" for name in SHAPE_KEYS))
_SCALE = ("batch.", "fork.", *_SIZES, *BUDGETS, SEED)
Settings = Mapping[Record, Mapping[str, Any]]  # what of each config could set ladders apart


def ladders(paths: Sequence[str | Path], axis: str | None = None) -> tuple[list[Ladder], list[str]]:
    """Return the ladders under the paths, in order, and what could not be read.

    Runs are of two ladders if they differ in a word (such as the optimizer), or if they lie under
    different paths and differ in a number that each path has one value of. Budgets, batches, seeds
    and the model's sizes make none. `axis`: a knob that a law is to be over.
    """
    found: list[Ladder] = []
    files: set[Path] = set()
    runs: dict[Path, tuple[Path, SweepFolder]] = {}
    places: dict[Path, Path] = {}
    problems: list[str] = []
    for given in paths:
        names = paths_of(given)
        of_files = any(name.suffix.lower() == ".csv" for name in names)
        for path in names if of_files else [Path(given)]:
            if path.suffix.lower() == ".csv" and path.is_file():
                if path.resolve() not in files:  # paths may name one twice
                    found.append(read_csv(path))
                files.add(path.resolve())
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
    named = _names(groups, settings, origins)
    for (name, apart), group, origin in zip(named, groups, origins, strict=True):
        held = [r for r in group if not decayed(r)]
        if 0 < len(held) < len(group):  # a loss before the decay is no loss of such a budget
            out[UNDECAYED] = [r.name for r in held]
            group = [r for r in group if r not in held]
        ladder = Ladder(name, [], out, origin=origin, apart=apart)
        found.append(_ladder(ladder, group, points, axis))
        out = {}
    if not found:
        why = "; ".join(f"{listed(names)}: {reason}" for reason, names in out.items())
        text = f"there is no run to fit{f' ({why})' if why else ''}"
        raise ConfigError(
            "cannot_fit", "\n".join([*problems, f"{text}; for example llmexp fit outputs/default"])
        )
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
) -> list[tuple[str, str]]:
    """Name ladders by what sets them apart, or by their paths, with what sets these apart."""
    alike = [_alike(group, settings) for group in groups]
    values = {key: {repr(a.get(key)) for a in alike} for some in alike for key in some}
    keys = [key for key, found in values.items() if len(found) > 1]
    options = {k.partition(".")[0] for k in keys if k.endswith("._target_")}
    keys = [k for k in keys if k.endswith("._target_") or k.partition(".")[0] not in options]
    if len(keys) > 3 or not keys:
        return [(origin.name, listed(keys)) for origin in origins]
    told = [{key: a.get(key) for key in keys} for a in alike]
    one = len(keys) == 1 and options
    return [(short_value(t[keys[0]]) if one else short_label(t), "") for t in told]


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
        ladder.notes.append(
            f"Of each size and length the setting with the lowest loss is a point; "
            f"{plural(others, 'other setting')} {'is' if others == 1 else 'are'} none."
        )
    return ladder
