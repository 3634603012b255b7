"""What the data tests share."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from llmexp.data.tokenizers import Tokenizer, pretrained

SHARED = Path(__file__).resolve().parents[2] / "../shared"


def encoding(name: str, folder: Path) -> Tokenizer:
    """A published encoding from a copy of the shared files in `folder` (tiktoken deletes what it
    finds damaged)."""
    if not (SHARED / "tiktoken").is_dir():
        pytest.skip("the tokenizer files are not there")
    if not folder.exists():
        shutil.copytree(SHARED / "tiktoken", folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(os.environ, "TIKTOKEN_CACHE_DIR", str(folder))
        return pretrained(name)
