"""One source of documents: files, or a dataset of Hugging Face (a folder on this machine, or a name
on the hub at one commit); and which split a document belongs to."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from llmexp.data.places import Answers, in_time, need, next_in_time
from llmexp.data.readers import documents
from llmexp.data.records import Counts, Document, Found, counted, record_text
from llmexp.settings.values import refuse

TRAIN = "train"


@dataclass(frozen=True)
class Source:
    """A place that documents come from, with the share of each validation set in them."""

    key: str  # data.sources.NAME or data.val.NAME
    text_key: str
    files: tuple[str, ...] = ()  # paths or addresses, in order
    hf: str | None = None
    split: str = "train"
    revision: str | None = None  # the commit of a dataset on the hub
    shares: tuple[tuple[str, float], ...] = ()  # of validation sets; the rest is for training

    @property
    def splits(self) -> list[str]:
        return [TRAIN, *(name for name, _ in self.shares)]

    def split_of(self, digest: bytes) -> str:
        """Return the split of a document: a matter of its content alone, so it never moves."""
        at = int.from_bytes(digest[:8], "little") / 2**64
        ends = accumulate(share for _, share in self.shares)
        return next(
            (name for name, end in zip(self.splits[1:], ends, strict=True) if at < end), TRAIN
        )

    def read(
        self, counts: Counts, skip_bad: bool, files: Sequence[str] | None = None
    ) -> Iterator[Document]:
        """Yield the documents, of some files or of all. Raises ValueError."""
        if self.hf is not None:
            yield from counted(self._records(f"{self.key}.hf", self.hf), skip_bad, counts)
        for place in self.files if files is None else files:
            yield from documents(f"{self.key}.files", place, self.text_key, skip_bad, counts)

    def _records(self, key: str, name: str) -> Iterator[Found]:
        """Yield what is in a folder of `save_to_disk`, or under a name on the hub, as a stream."""
        datasets = need("datasets", key, f"reading {name}")
        if Path(name).is_dir():
            records = _of_folder(datasets, key, name, self.split)
        else:
            knobs: Any = {"revision": self.revision, "split": self.split, "streaming": True}
            table = in_time(key, name, lambda: datasets.load_dataset(name, **knobs))
            records = next_in_time(key, name, table)
        number = 0
        try:
            for number, record in enumerate(records, 1):
                yield record_text(f"{key}={name}, record {number:,}", record, self.text_key)
        except UnicodeDecodeError as error:  # the library decodes many records at a time
            text = f"after record {number:,} there is text that is not UTF-8 ({error.reason})"
            raise refuse(key, name, text) from None


def _of_folder(datasets: Any, key: str, name: str, split: str) -> Any:
    if not any(Path(name).glob("**/state.json")):
        files = f"{key.removesuffix('hf')}files={name}/*.parquet"
        text = f"this folder was not made by save_to_disk; for files in it use {files}"
        raise refuse(key, name, text)
    found = in_time(key, name, lambda: datasets.load_from_disk(name))
    parts = found if isinstance(found, dict) else {"train": found}
    if split not in parts:
        text = f"there is no split {split}; the splits are: {', '.join(parts)}"
        raise refuse(key, name, text)
    return parts[split]


def hub_identity(key: str, name: str, answers: Answers) -> tuple[str, str | None]:
    """Return what identifies the content of a dataset (the digests of a folder's files, or the
    commit on the hub), and the commit. Raises ValueError."""
    folder = Path(name)
    if folder.is_dir():
        paths = sorted(path for path in folder.rglob("*") if path.is_file())
        names = [str(path.relative_to(folder)) for path in paths]
        return json.dumps([names, answers.digests(paths)]), None

    def ask() -> str:
        hub = need("huggingface_hub", key, f"reading {name}")
        return str(in_time(key, name, lambda: hub.HfApi().dataset_info(name)).sha)

    commit = answers.get(key, f"hub {name}", ask)
    return f"{name}@{commit}", commit
