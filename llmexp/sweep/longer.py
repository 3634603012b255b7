"""Lengthen all points of a sweep; refuse another value of any other key that they share."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

from llmexp.compose.app import typed
from llmexp.run.budget import BUDGETS
from llmexp.runs import ledger as ledgers
from llmexp.runs.ledger import Entry, Ledger
from llmexp.settings.config import Config, plain
from llmexp.settings.knobs import essence
from llmexp.settings.labels import shown
from llmexp.settings.values import ConfigError, flatten, refuse
from llmexp.sweep.current import Current
from llmexp.sweep.matching import as_begun, entries_of
from llmexp.sweep.points import Point, no_start, with_devices
from llmexp.sweep.settings import Sweep
from llmexp.sweep.twins import is_twin


def lengthened(current: Current, points: Sequence[Point]) -> dict[str, str]:
    """Return the folders of the points that become longer, by the identities of the points.

    Raises ConfigError where one cannot, and for another value of any other key that all points of
    the sweep share: new points come from values of swept keys.
    """
    if not ledgers.is_sweep(current.where):
        return {}
    ledger = ledgers.read(current.where)
    known = entries_of(ledger, points)
    new = [point for point in points if point.identity not in known]
    there = composed(ledger, new, current.settings)
    found: dict[str, str] = {}
    asked: list[Point] = []
    for point in new:
        swept = {key.lstrip("+") for key in (*point.swept, *ledger.swept)}
        whole = flat_of(point.config)
        same = (e for e, flat in there if without_budget(flat) == without_budget(whole))
        entry = None if swept & set(BUDGETS) else next(same, None)
        if entry is None:
            refuse_shared(ledger, point, whole, [flat for _, flat in there], swept)
        else:
            found[point.identity] = entry.folder
            placed = dataclasses.replace(point, path=ledger.path / entry.folder)
            asked.append(dataclasses.replace(placed, config=as_begun(placed, longer=True)))
    if asked and current.settings.halving is not None:
        text = "decides by shares of the old budget; to train all points on"
        raise refuse("sweep.halving", current.settings.halving, text, "null")
    _, refused = current.checker.check(asked, "lengthen")
    if refused:
        raise no_start(refused)
    return found


def composed(
    ledger: Ledger, new: Sequence[Point], settings: Sweep
) -> list[tuple[Entry, dict[str, Any]]]:
    """Return the points of the ledger that still compose, each with its flat config."""
    found = []
    if new and (compose := new[0].composer) is not None:
        for entry in ledger.points:
            if entry.state != "infeasible" and not is_twin(entry):
                with contextlib.suppress(Exception):  # files that it needs may be gone
                    config = typed(compose(entry.overrides, entry.label))
                    found.append((entry, flat_of(with_devices(config, settings))))
    return found


def flat_of(config: Config) -> dict[str, Any]:
    return essence(flatten(plain(config)))


def without_budget(flat: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in flat.items() if key not in BUDGETS}


def refuse_shared(
    ledger: Ledger,
    point: Point,
    flat: Mapping[str, Any],
    others: Sequence[Mapping[str, Any]],
    swept: set[str],
) -> None:
    """Raise ConfigError where a point has another value of a key that all others share."""
    if not others or "experiment" in swept:
        return
    for key, value in flat.items():
        section, values = key.partition(".")[0], {repr(other.get(key)) for other in others}
        if key in swept or section in swept or key in BUDGETS or len(values) > 1:
            continue
        if repr(value) in values:
            continue
        old = others[0].get(key)
        way = "new points come from keys with several values, others from a sweep of their own"
        if key.endswith("._target_"):
            raise ConfigError(f"{section}: all points of {ledger.path} share another one; {way}")
        text = f"all points of {ledger.path} have {shown(old)}; {way}"
        both = f"{shown(old)},{shown(value)}"
        raise refuse(key, value, text, both if re.fullmatch(r"[\w.,+-]+", both) else None)
