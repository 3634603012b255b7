"""The table of keys knows every key of a row."""

import json

from llmexp.metrics.keys import LOSSES, ROW_KEYS, TIMINGS
from tests.conftest import ROOT


def test_recorded_rows_have_keys_of_the_table_only():
    for file in (ROOT / "tests/golden/recorded").glob("*.json"):
        for run in json.loads(file.read_text())["runs"].values():
            for row in run["rows"]:
                assert row.keys() <= ROW_KEYS.keys()
    assert {*LOSSES, *TIMINGS} <= ROW_KEYS.keys()
    assert {key.better for key in ROW_KEYS.values()} == {"", "lower", "higher"}
