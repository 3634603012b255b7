"""Read runs wherever they are, as records: run folders, tables, data frames."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llmexp.compare.reading import read
from llmexp.compare.records import Record
from llmexp.compare.strangers import Asked, check_keys, records_of
from llmexp.compare.tables import is_table, runs_of
from llmexp.runs.find import find
from llmexp.settings.values import ConfigError


def gathered(given: Sequence[Any], asked: Asked) -> tuple[list[Record], list[str], list[str]]:
    """Return runs as records, what could not be read, and what was guessed about them."""
    tables = [one for one in given if is_table(one)]
    folders = [one for one in given if not is_table(one)]
    if asked.flags and not tables:
        text = "is of tables of runs; run folders say it themselves, and --sort orders these"
        raise ConfigError(
            "idle_knob", f"{asked.flags[0]}: {text}; for example llmexp compare runs.csv"
        )
    found, problems = find(folders)
    records, said = read(found), list[str]()
    if runs := [run for one in tables for run in runs_of(one, asked)]:
        check_keys(runs, asked)
        others, said = records_of(runs, asked)
        records += others
    return records, problems, said
