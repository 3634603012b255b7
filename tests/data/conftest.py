import importlib
from types import ModuleType

import pytest

from llmexp.data.tokenizers.base import Tokenizer

from .common import encoding


@pytest.fixture(scope="session")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return encoding("gpt2", tmp_path_factory.getbasetemp() / "tiktoken")


@pytest.fixture(scope="session", params=["gpt2", "cl100k_base", "o200k_base"])
def bpe(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return encoding(request.param, tmp_path_factory.getbasetemp() / "tiktoken")


@pytest.fixture(scope="session")
def datasets() -> ModuleType:
    """The library of that name, which is slow to import."""
    return importlib.import_module("datasets")
