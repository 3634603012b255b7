from pathlib import Path

import pytest

from tests.conftest import TINY, Result
from tests.faults.helpers import SETTINGS
from tests.runs import Runs


@pytest.fixture(scope="session")
def settings(tokens: Path) -> list[str]:
    return [*TINY, *SETTINGS, f"data.train_files=[{tokens}]"]


@pytest.fixture(scope="session")
def whole(runs: Runs, tokens: Path) -> Result:
    """The run that nothing disturbs."""
    return runs(*SETTINGS, f"data.train_files=[{tokens}]")
