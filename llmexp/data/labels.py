"""Labels beside token files, as Hugging Face's: the id itself, or -100 where it is no target."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from llmexp.config.values import refuse
from llmexp.data.cache import cached
from llmexp.data.files import allow_open_files, files_fingerprint
from llmexp.data.matching import match_files
from llmexp.data.stream import TokenStream, sample_digest
from llmexp.data.token_files import open_tokens

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

    They have a file of as many labels for each of ids, in the same order. Label i belongs to id i:
    nothing is shifted. Raises ValueError.
    """
    if given["data.val_labels"] is not None and len(streams) < 2:
        text = "there are no data.val_files; the labels of training cover what is held out of it"
        raise refuse("idle_knob", "data.val_labels", given["data.val_labels"], text, "null")
    found = {}
    for (key, patterns), stream, some in zip(given.items(), streams, paths.values(), strict=False):
        if patterns is None:
            continue
        files = match_files(key, patterns, [])
        if len(files) != len(some):
            text = f"{len(files)} files of labels do not fit {len(some)} token files"
            raise refuse(
                "conflict", key, patterns, f"{text}; one for each is needed, in the same order"
            )
        allow_open_files(len(files) + len(some))
        labels = {path: open_tokens(key, path, None) for path in files}
        _check(key, labels, {path: arrays[path] for path in some}, cache)
        stream.labels = TokenStream(labels.values())
        digests = {path: sample_digest(TokenStream([array])) for path, array in labels.items()}
        found[key.removeprefix("data.")] = files_fingerprint(digests)
    return found


def _check(
    key: str, labels: Mapping[Path, np.ndarray], ids: Mapping[Path, np.ndarray], cache: Path
) -> None:
    """Raise ValueError for a label that is neither the id at its place nor NO_TARGET."""
    pairs = list(zip(labels.items(), ids.items(), strict=True))
    for (path, array), (beside, there) in pairs:
        if array.dtype.kind != "i":
            text = f"labels are signed integers in .npy, so that -100 fits; these are {array.dtype}"
            raise refuse("bad_data", key, path, text)
        if len(array) != len(there):
            text = f"{len(array):,} labels do not fit the {len(there):,} ids of {beside}"
            raise refuse("bad_data", key, path, text)

    def scan() -> None:
        for (path, array), (beside, ids_there) in pairs:
            for start, some in TokenStream([array]).blocks(BLOCK_LABELS):
                there = ids_there[start : start + BLOCK_LABELS]
                if len(wrong := np.flatnonzero((some != there) & (some != NO_TARGET))):
                    at = int(wrong[0])
                    text = f"label {int(some[at])} at position {start + at:,} is neither -100 nor "
                    text += f"the id there, {int(there[at])} of {beside}; labels are not shifted: "
                    raise refuse("bad_data", key, path, f"{text}label i is id i")

    cached(cache, "labels", key, [*labels, *ids], scan)
