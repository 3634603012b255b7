"""Two recorded runs, compared bit by bit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmexp.metrics.keys import TIMINGS
from llmexp.verify import record, runs
from llmexp.verify.checks import Check, none_differ

_Found = tuple[list[str], int]  # what differs, of how many


@dataclass(frozen=True)
class RunPair:
    """The records of two runs, and their rows."""

    records: tuple[record.Records, record.Records]
    rows: tuple[list[dict[str, Any]], list[dict[str, Any]]]

    @classmethod
    def of(cls, first: Path, second: Path) -> RunPair:
        return cls(
            (record.read_records(first), record.read_records(second)),
            (runs.read_run_rows(first), runs.read_run_rows(second)),
        )

    def steps(self) -> Iterator[tuple[int, int, dict[str, Any], dict[str, Any]]]:
        """Yield (step, rank, record of the one run, record of the other), step by step.

        A record is empty where there is none.
        """
        a, b = self.records
        keys = {
            (step, rank) for side in (a, b) for rank, by_step in side.items() for step in by_step
        }
        for step, rank in sorted(keys):
            yield step, rank, a.get(rank, {}).get(step, {}), b.get(rank, {}).get(step, {})

    def differences(self, part: str) -> _Found:
        """Return the recorded entries of a part, such as "parameters", that differ.

        The earliest comes first; the number is that of all that were compared.
        """
        differing, count = [], 0
        for step, rank, one, other in self.steps():
            names, of = unequal(one.get(part, {}), other.get(part, {}))
            count += of
            differing += [f"step {step}, rank {rank}, {name}" for name in names]
        return differing, count

    def columns(self, *keys: str) -> _Found:
        """Return the figures that differ between the rows, by step.

        They are these `keys`, or all but those that say something about the machine.
        """
        first, second = (_figures(rows, keys) for rows in self.rows)
        return unequal(first, second)

    def recorded(self, what: str, part: str) -> Check:
        return none_differ(what, *self.differences(part))

    def figures(self, what: str, *keys: str) -> Check:
        return none_differ(what, *self.columns(*keys))


def _figures(rows: list[dict[str, Any]], keys: tuple[str, ...]) -> dict[str, str]:
    found = {}
    for row in rows:
        for key, value in row.items():
            if key in keys if keys else key not in TIMINGS:
                # The digits of a float give it back exactly.
                found[f"step {row['step']}, {key}"] = repr(value)
    return found


def unequal(a: dict[Any, str], b: dict[Any, str]) -> tuple[list[Any], int]:
    """Return the keys with values that differ, or that only one of them has, of how many."""
    keys = list(dict.fromkeys([*a, *b]))
    return [key for key in keys if a.get(key) != b.get(key)], len(keys)


def joined(*found: _Found) -> _Found:
    return [name for names, _ in found for name in names], sum(count for _, count in found)
