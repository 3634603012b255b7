"""One source of documents, and the split that each of its documents belongs to.

A source is a list of files, or a dataset of Hugging Face: a folder on this machine, or a name on
the hub at one commit.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from llmexp.data.readers import documents
from llmexp.data.records import Counts, Document, Found, count_records, record_text, split_document
from llmexp.data.remote import RemoteCache, need_package, reading
from llmexp.settings.values import refuse

TRAIN = "train"
FEW_FILES = 100  # plain text files: too few for whole ones to make up a share


@dataclass(frozen=True)
class Source:
    """A place that documents come from, and the share of each validation set in them."""

    key: str  # the knob that names it: data.train_files, data.sources.NAME.hf
    text_key: str = "text"
    files: tuple[str, ...] = ()  # paths or addresses, in order
    hf: str | None = None
    split: str = TRAIN  # of the dataset
    revision: str | None = None  # the commit of a dataset on the hub
    shares: tuple[tuple[str, float], ...] = ()  # of validation sets; the rest is for training
    weight: float | None = None
    skip_bad: bool = False  # leave out records that cannot be read, instead of refusing them
    cuts_texts: bool = False  # a plain text file gives its last part to the shares

    @property
    def splits(self) -> list[str]:
        return [TRAIN, *(name for name, _ in self.shares)]

    def split_of(self, digest: bytes) -> str:
        """Return the split of a whole document, which depends on its content alone."""
        at = int.from_bytes(digest[:8], "little") / 2**64
        ends = accumulate(share for _, share in self.shares)
        pairs = zip(self.splits[1:], ends, strict=True)
        return next((name for name, end in pairs if at < end), TRAIN)

    def read(self, counts: Counts, files: Sequence[str] | None = None) -> Iterator[Document]:
        """Yield the documents of some files, or of all, each with its split. Raises ValueError."""
        for document in self._whole(counts, self.files if files is None else files):
            if self.cuts_texts and document.characters:
                yield from split_document(
                    document, self.splits, [share for _, share in self.shares]
                )
            else:
                document.split = self.split_of(document.digest)
                yield document

    def _whole(self, counts: Counts, files: Sequence[str]) -> Iterator[Document]:
        if self.hf is not None:
            yield from count_records(self._records(self.hf), self.skip_bad, counts)
        for place in files:
            yield from documents(self.key, place, self.text_key, self.skip_bad, counts)

    def _records(self, name: str) -> Iterator[Found]:
        """Yield the records of a folder of `save_to_disk`, or of a name on the hub."""
        datasets = need_package("datasets", self.key, f"reading {name}")
        if Path(name).is_dir():
            records = _of_folder(datasets, self.key, name, self.split)
        else:
            knobs: Any = {"revision": self.revision, "split": self.split, "streaming": True}
            with reading(self.key, name):
                records = datasets.load_dataset(name, **knobs)
        number = 0
        try:
            with reading(self.key, name):
                for number, record in enumerate(records, 1):
                    where = f"{self.key}={name}, record {number:,}"
                    yield record_text(where, record, self.text_key)
        except UnicodeDecodeError as error:  # the library decodes many records at a time
            text = f"after record {number:,} there is text that is not UTF-8 ({error.reason})"
            raise refuse(self.key, name, text) from None


def _of_folder(datasets: Any, key: str, name: str, split: str) -> Any:
    """Return one split of a folder that `save_to_disk` wrote. Raises ValueError."""
    if not any(Path(name).glob("**/state.json")):
        files = f"{key.removesuffix('hf')}files={name}/*.parquet"
        text = f"this folder was not made by save_to_disk; for files in it use {files}"
        raise refuse(key, name, text)
    with reading(key, name):
        found = datasets.load_from_disk(name)
    parts = found if isinstance(found, dict) else {"train": found}
    if split not in parts:
        text = f"there is no split {split}; the splits are: {', '.join(parts)}"
        raise refuse(key, name, text)
    return parts[split]


def hub_identity(key: str, name: str, remote: RemoteCache) -> tuple[str, str | None]:
    """Return what identifies the content of a dataset, and its commit if it is on the hub.

    A folder is identified by the digests of its files. Raises ValueError.
    """
    folder = Path(name)
    if folder.is_dir():
        paths = sorted(path for path in folder.rglob("*") if path.is_file())
        names = [str(path.relative_to(folder)) for path in paths]
        return json.dumps([names, remote.digests(paths)]), None

    def ask() -> str:
        hub = need_package("huggingface_hub", key, f"reading {name}")
        with reading(key, name):
            return str(hub.HfApi().dataset_info(name).sha)

    commit = remote.get(key, f"hub {name}", ask)
    return f"{name}@{commit}", commit
