"""Tell the files of training from those of validation, and hold the tokens of both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from llmexp.data.matching import match_files


def shared_tokens(max_tokens: int | None, val_ratio: float) -> tuple[int | None, int | None]:
    """Return how many tokens to train on and to validate on; None: all there are."""
    if max_tokens is None:
        return None, None
    train = round(max_tokens * (1 - val_ratio))
    return train, max_tokens - train


def match_both(train_files: Any, val_files: Any, left: list[str]) -> dict[str, list[Path]]:
    """Return the files by knob; those for validation only where they are asked for.

    `left` gets what is left out.
    """
    found = {"data.train_files": match_files("data.train_files", train_files, left)}
    if val_files is not None:
        found["data.val_files"] = match_files("data.val_files", val_files, left)
    return found
