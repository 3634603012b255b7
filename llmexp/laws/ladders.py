"""Tell which runs are one ladder, and take the best setting of each size and length."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from llmexp.compare.folding import folded
from llmexp.compare.reading import read
from llmexp.compare.records import Record, is_execution, listed
from llmexp.laws.points import Ladder, Point, points_of, read_csv
from llmexp.run.budget import BUDGETS
from llmexp.runs.find import SweepFolder, find, looks_like_run
from llmexp.settings.knobs import SEED
from llmexp.settings.labels import plural, short_label, short_value
from llmexp.settings.values import ConfigError

LEAST = 3  # runs of a ladder
CELL = 1.03  # tokens of one length differ by less: budgets are exact to a step
# A ladder varies these: they set no two ladders apart.
_SCALE = ("batch.", "fork.", "model.depth", "model.size", "model.shape_rule", *BUDGETS, SEED)


def ladders(paths: Sequence[str | Path], axis: str | None = None) -> tuple[list[Ladder], list[str]]:
    """Return the ladders under the paths, in order, and what could not be read.

    Runs are of two ladders if they differ in a word (such as the optimizer), or if they lie under
    different paths and differ in a number that each path has one value of. Budgets, batches, seeds
    and the model's sizes make none. `axis`: a knob that a law is to be over.
    """
    found: list[Ladder] = []
    runs: dict[Path, tuple[int, tuple[Path, SweepFolder]]] = {}
    problems: list[str] = []
    for i, path in enumerate(paths):
        if Path(path).suffix.lower() == ".csv" and Path(path).is_file():
            found.append(read_csv(Path(path)))
            continue
        of_path, more = find([path])
        problems += more
        place = -1 if looks_like_run(Path(path)) else i
        for run in of_path:
            runs.setdefault(run[0].resolve(), (place, run))
    records = read([run for _, run in runs.values()])
    problems += [f"{r.name}: {p}" if r.name not in p else p for r in records for p in r.problems]
    points, out = points_of(records)
    places = dict(zip(records, [place for place, _ in runs.values()], strict=True))
    groups = _apart(points, places)
    large = [g for g in groups if len(g) >= LEAST] or groups[:1]
    names = _names(large, paths, places)
    own = [_ladder(name, group, axis) for name, group in zip(names, large, strict=True)]
    for group in groups:
        if group not in large:
            out.setdefault("too few for a law of their own", []).extend(p.name for p in group)
    if own:
        own[0].out |= out
    if not found and not own:
        why = "; ".join(f"{listed(names)}: {reason}" for reason, names in out.items())
        text = f"there is no run to fit{f' ({why})' if why else ''}"
        raise ConfigError("\n".join([*problems, f"{text}; for example llmexp fit outputs/default"]))
    return [*found, *own], problems


def _setting(point: Point) -> dict[str, Any]:
    """Return what of a run's config could set ladders apart."""
    assert point.record is not None
    config, fork = point.record.config, bool(point.record.parent)
    skipped = (*_SCALE, "schedule.") if fork else _SCALE  # a cooldown is of its trunk's ladder
    return {k: v for k, v in config.items() if not k.startswith(skipped) and not is_execution(k)}


def _apart(points: Sequence[Point], places: Mapping[Record, int]) -> list[list[Point]]:
    """Return the points of each ladder."""
    settings = {p: _setting(p) for p in points}
    forks = any(p.record and p.record.parent for p in points)
    words: dict[tuple[object, int], list[Point]] = defaultdict(list)
    for p, s in settings.items():
        kept = {k: v for k, v in s.items() if isinstance(v, (str, bool))}
        kept = {k: v for k, v in kept.items() if not (forks and k.startswith("schedule."))}
        assert p.record is not None
        words[frozenset(kept.items()), places[p.record]].append(p)
    found: list[tuple[object, dict[str, Any], list[Point]]] = []
    for (word, _), group in words.items():
        alike = _alike([settings[p] for p in group])
        for other, before, ladder in found:
            both = alike.keys() & before.keys()
            if word == other and all(alike[k] == before[k] for k in both):
                ladder += group
                break
        else:
            found.append((word, alike, list(group)))
    return [ladder for _, _, ladder in found]


def _alike(settings: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the values that all settings share."""
    first = settings[0]
    return {k: v for k, v in first.items() if all(s.get(k) == v for s in settings)}


def _names(
    groups: Sequence[Sequence[Point]], paths: Sequence[str | Path], places: Mapping[Record, int]
) -> list[str]:
    """Name ladders by what sets them apart, or by their paths."""
    alike = [_alike([_setting(p) for p in group]) for group in groups]
    keys = [k for k in (alike[0] if alike else {}) if len({repr(a.get(k)) for a in alike}) > 1]
    options = {k.partition(".")[0] for k in keys if k.endswith("._target_")}
    keys = [k for k in keys if k.endswith("._target_") or k.partition(".")[0] not in options]
    if len(keys) == 1 and keys[0].endswith("._target_"):
        return [short_value(a.get(keys[0])) for a in alike]
    names = [short_label({k: a.get(k) for k in keys}) for a in alike]
    if 0 < len(keys) < 4 and len(set(names)) == len(names):
        return names
    firsts = [places[g[0].record] for g in groups if g[0].record]
    names = [Path(paths[i]).name if i >= 0 else "runs" for i in firsts]
    return (
        names if len(set(names)) == len(names) else [f"{n} ({i + 1})" for i, n in enumerate(names)]
    )


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
