"""The table of faults names tests that are there."""

import re

from tests.conftest import ROOT


def test_every_fault_has_its_test():
    rows = [
        line
        for line in (ROOT / "tests/faults/README.md").read_text().splitlines()
        if line.startswith("| ")
    ]
    rows = [row for row in rows if not row.startswith("| fault |")]
    assert len(rows) > 50
    for row in rows:
        named = re.findall(r"`([\w/]+\.py)::(\w+)`", row.split(" | ")[-1])
        rows_of = re.findall(r"`(refusals/\w+\.yaml)`", row.split(" | ")[-1])
        assert named or rows_of, row
        assert all((ROOT / "tests" / file).exists() for file in rows_of), row
        for file, name in named:
            assert f"\ndef {name}(" in (ROOT / "tests" / file).read_text(), row
