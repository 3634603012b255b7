"""Labels beside token files, as Hugging Face's: the id itself, or -100 where it is no target."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from llmexp.data.cache import cached
from llmexp.data.files import allow_open_files, files_fingerprint
from llmexp.data.matching import match_files
from llmexp.data.stream import TokenStream, sample_digest
from llmexp.data.token_files import open_tokens
from llmexp.settings.values import refuse

NO_TARGET = -100
BLOCK_LABELS = 1 << 20  # labels that are compared at a time


def add_labels(
    given: Mapping[str, Any],
    streams: Sequence[TokenStream],
    paths: Mapping[str, Sequence[Path]],
    arrays: Mapping[Path, np.ndarray],
    cache: Path,
) -> dict[str, Any]:
    """Give each stream the labels of its knob, if any, and return what identifies them.

    Raises ValueError.
    """
    if given["data.val_labels"] is not None and len(streams) < 2:
        text = "there are no data.val_files; the labels of training cover what is held out of it"
        raise refuse("data.val_labels", given["data.val_labels"], text, "null")
    found = {}
    for (key, patterns), stream, some in zip(given.items(), streams, paths.values(), strict=False):
        if patterns is not None:
            ids = {path: arrays[path] for path in some}
            stream.labels, found[key.removeprefix("data.")] = read_labels(key, patterns, ids, cache)
    return found


def read_labels(
    key: str, patterns: Any, ids: Mapping[Path, np.ndarray], cache: Path
) -> tuple[TokenStream, dict[str, str]]:
    """Return the labels of token files, and what identifies their content. Raises ValueError.

    They have a file of as many labels for each of `ids`, in the same order. Label i belongs to id
    i: nothing is shifted.
    """
    paths = match_files(key, patterns, [])
    if len(paths) != len(ids):
        text = f"{len(paths)} files of labels do not fit {len(ids)} token files"
        raise refuse(key, patterns, f"{text}; one for each is needed, in the same order")
    allow_open_files(len(paths) + len(ids))
    arrays = {path: open_tokens(key, path, None) for path in paths}
    pairs = list(zip(arrays.items(), ids.items(), strict=True))
    for (path, array), (beside, there) in pairs:
        if array.dtype.kind != "i":
            text = f"labels are signed integers in .npy, so that -100 fits; these are {array.dtype}"
            raise refuse(key, path, text)
        if len(array) != len(there):
            text = f"{len(array):,} labels do not fit the {len(there):,} ids of {beside}"
            raise refuse(key, path, text)

    def scan() -> bool:
        for (path, array), (beside, there) in pairs:
            _check(key, path, array, beside, there)
        return True

    cached(cache, "labels", key, [*paths, *ids], scan)
    digests = {path: sample_digest(TokenStream([array])) for path, array in arrays.items()}
    return TokenStream(arrays.values()), files_fingerprint(digests)


def _check(key: str, path: Path, labels: np.ndarray, beside: Path, ids: np.ndarray) -> None:
    """Raise ValueError for a label that is neither the id at its place nor NO_TARGET."""
    for start, some in TokenStream([labels]).blocks(BLOCK_LABELS):
        there = ids[start : start + BLOCK_LABELS]
        if len(wrong := np.flatnonzero((some != there) & (some != NO_TARGET))):
            at = int(wrong[0])
            text = f"label {int(some[at])} at position {start + at:,} is neither -100 nor the id "
            text += f"there, {int(there[at])} of {beside}; labels are not shifted: label i is id i"
            raise refuse(key, path, text)
