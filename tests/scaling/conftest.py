"""Fewer draws where figures of intervals do not matter: tests stay cheap."""

import pytest

from llmexp.scaling import law


@pytest.fixture
def few_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(law, "DRAWS", 200)
