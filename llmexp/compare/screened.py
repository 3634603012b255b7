"""Say what a screen has found: which knobs matter, and what their effects may be mixed with."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from llmexp.compare.records import Result
from llmexp.compare.screening import Contrast, Screen, screen, spelled
from llmexp.settings.knobs import SEED
from llmexp.settings.labels import plural, short_value
from llmexp.system.text import amount


def screen_of(f: Result) -> Screen | None:
    """Return what the runs of a screen show, once all of them are there."""
    keys = [key for key in f.factors if key != SEED]
    if not f.ranked or not keys or not all(r.screen for r in f.runs):
        return None
    settings = [{key: r.values.get(key) for key in keys} for r in f.ranked]
    return screen(settings, [r.seeds for r in f.ranked])


def screen_line(f: Result, s: Screen) -> str:
    """Return the result of a screen in one line."""
    size = f"{plural(len(s.knobs), 'knob')} in {plural(s.runs, 'run')}"
    if not s.found:
        largest = next(iter(s.knobs))
        return f"No effect of {size} is told; the largest is {_effect(f, s, s.knobs[largest])}."
    effects = [_effect(f, s, s.knobs[key]) for key in s.found]
    rest = len(s.knobs) - len(effects)
    others = "other" if rest == 1 else f"{rest} others"
    more = f" No effect of the {others} is told." if rest else ""
    verb = "is" if len(effects) == 1 else "are"
    return f"{plural(len(effects), 'effect')} of {size} {verb} told: {'; '.join(effects)}.{more}"


def _effect(f: Result, s: Screen, c: Contrast) -> str:
    key, names = c.names[0], f.names
    better = s.better(key, f.metric.sign)
    worse = next(level for level in s.levels[key] if level is not better)
    side = f"{names[key]}={short_value(better)} instead of {short_value(worse)}"
    does = "lowers" if f.metric.sign > 0 else "raises"
    return f"{side} {does} {f.metric.title} by {amount(c.effect, c.half)}"


def mixed(f: Result) -> Iterator[str]:
    """Say how the knobs of a screen are confounded, and how to confirm what was found."""
    runs = [r for r in f.runs if r.screen]
    if not f.screen:
        if runs and len(runs) == len(f.runs):
            yield "A screen is judged once all of its runs are there, over the same seeds."
        return
    s, names = f.screen, f.names
    pairs = {key: spelled(p, names, " + ") for key, p in s.confounded.items() if p}
    with_pairs = [f"{names[key]} with {words}" for key, words in pairs.items()]
    if with_pairs:
        yield f"Resolution III: an effect may be that of a pair instead: {'; '.join(with_pairs)}."
    elif s.resolution == 4:
        groups = [spelled(c.names, names) for c in s.others if len(c.names) > 1]
        yield f"Resolution IV: no effect is that of a pair; pairs are mixed: {'; '.join(groups)}."
    else:
        yield "No effect is mixed with a pair, nor pairs with each other."
    if s.found:
        yield "llmexp next proposes the sweep that confirms what was found."


def as_data(s: Screen | None) -> dict[str, Any] | None:
    """Return a screen for JSON."""
    if s is None:
        return None
    rows = []
    for key, c in s.knobs.items():
        row = {"effect": c.effect, "half": c.half, "p": c.p, "found": c.found, "key": key}
        rows.append(row | {"levels": [*s.levels[key]], "confounded": [*s.confounded[key]]})
    return {"runs": s.runs, "resolution": s.resolution, "effects": rows}
