"""Fewer draws where figures of intervals do not matter: tests stay cheap."""

from __future__ import annotations

import pytest

from llmexp.laws.bootstrap import Ensemble


@pytest.fixture
def few_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Ensemble.__init__, "__defaults__", (0, 200))
