"""Text files as documents: found, hashed, split into training and validation, read piece by
piece."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from llmexp.data.files import refuse_packed, remembered, sha256_of, state_of
from llmexp.data.order import sequence_index
from llmexp.data.readers import BOM, decoded
from llmexp.data.stream import DataChanged
from llmexp.settings.values import refuse


@dataclass(frozen=True)
class Document:
    """Bytes [start, stop) of a UTF-8 text file, between characters."""

    path: Path
    start: int  # after the byte order mark
    stop: int
    content: str  # sha256 of the whole file
    state: tuple[int, int]  # `state_of` the file, from before it was hashed

    @property
    def size(self) -> int:
        return self.stop - self.start


def find_documents(key: str, paths: list[Path], cache: Path, write: bool) -> list[Document]:
    """Return the files that are not empty. Raises ValueError when all are, or one that is the only
    one."""
    states = [state_of(p) for p in paths]  # before the hashing: from here on a change is noticed
    contents = remembered(cache, "sha256", None, paths, lambda: sha256_of(paths), write)
    documents = []
    for path, state, content in zip(paths, states, contents, strict=True):
        refuse_packed(key, path)
        with open(path, "rb") as file:
            start = len(BOM) if file.read(len(BOM)) == BOM else 0
        if state[0] > start:
            documents.append(Document(path, start, state[0], content, state))
    if not documents:
        if len(paths) == 1:
            raise refuse(key, paths[0], "the file is empty")
        raise ValueError(f"{key}: all {len(paths)} files are empty, {paths[0]} is the first")
    return documents


def split(documents: list[Document], val_ratio: float, seed: int) -> dict[str, list[Document]]:
    """Return the documents one after the other, cut where the share `val_ratio` of their bytes is
    left.

    For a single ASCII file this is text[:int(n * (1 - val_ratio))]. Several are shuffled by `seed`
    before.
    """
    count = len(documents)
    if count > 1:
        order = sequence_index(seed, np.arange(count), count, True)
        documents = [documents[i] for i in order]
    left = int(sum(d.size for d in documents) * (1 - val_ratio))
    found: dict[str, list[Document]] = {"train": [], "val": []}
    for document in documents:
        at = document.start + min(max(0, left), document.size)
        if 0 < left < document.size:
            at = _character_start(document, at)
        if at > document.start:
            found["train"].append(replace(document, stop=at))
        if at < document.stop:
            found["val"].append(replace(document, start=at))
        left -= document.size
    return found


def _character_start(document: Document, at: int) -> int:
    """Return the start of the UTF-8 character that the byte `at` belongs to."""
    with open(document.path, "rb") as file:
        first = max(document.start, at - 3)
        file.seek(first)
        around = file.read(at - first + 1)
    while len(around) > 1 and around[-1] & 0xC0 == 0x80:
        around = around[:-1]
    return first + len(around) - 1


def blocks(document: Document) -> Iterator[str]:
    """Yield the text of a document in blocks."""
    try:
        with open(document.path, "rb") as file:
            file.seek(document.start)
            yield from decoded(file, document.start, document.stop)
    except UnicodeError as error:
        raise ValueError(f"{document.path}: {error}") from None
    except EOFError:
        raise ValueError(f"{document.path}: the file became shorter while it was read") from None
    except OSError as error:
        raise ValueError(f"{document.path}: cannot be read: {error.strerror}") from None


def refuse_changed(documents: list[Document]) -> None:
    """Raise DataChanged for a file that is not any more what was hashed."""
    for path, state in {d.path: d.state for d in documents}.items():
        if state_of(path) != state:
            text = "this text file changed while it was being prepared; start again"
            raise DataChanged(f"{path}: {text}")
