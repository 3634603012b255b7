"""`make quick` runs the tests that a change needs: those nearest to it by their imports first."""

import pytest

from tests.conftest import ROOT
from tools.quick import NAMED, near


@pytest.mark.parametrize(
    ("file", "first"),
    [
        ("tests/test_rows.py", "tests/test_rows.py"),
        ("llmexp/optim/schedule.py", "tests/test_schedule.py"),
        ("llmexp/verify/page.css", "tests/verify/"),
        ("llmexp/verify/gone.py", "tests/verify/"),
        ("tools/packages.py", "tests/test_docs.py"),
        ("docs/scaling-laws.md", "tests/test_docs.py"),
    ],
)
def test_the_nearest_tests_are_among_the_first(file, first):
    assert any(test.startswith(first) for test in near([file])[:9])


def test_a_room_is_near_to_each_of_its_files_and_what_is_named_is_there():
    found = near(["llmexp/compare/inference.py", "docs/scaling-laws.md"])
    assert {f"tests/compare/{p.name}" for p in ROOT.glob("tests/compare/test_*.py")} <= {*found}
    assert all((ROOT / test).exists() for tests in NAMED.values() for test in tests)
