from pathlib import Path

import pytest

from tests.conftest import TINY, Result, train
from tests.faults.helpers import SETTINGS


@pytest.fixture(scope="session")
def settings(tokens: Path) -> list[str]:
    return [*TINY, *SETTINGS, f"data.train_files=[{tokens}]"]


@pytest.fixture(scope="session")
def whole(settings: list[str], tmp_path_factory: pytest.TempPathFactory) -> Result:
    """The run that nothing disturbs."""
    return train(tmp_path_factory.mktemp("whole"), "run", *settings)
