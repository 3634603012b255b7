"""One source of documents, and which split a document belongs to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from llmexp.data.hub import hub_documents
from llmexp.data.readers import Counts, Document, documents

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
        for name, end in zip(
            (name for name, _ in self.shares), accumulate(s for _, s in self.shares), strict=True
        ):
            if at < end:
                return name
        return TRAIN

    def read(
        self, counts: Counts, skip_bad: bool, files: Sequence[str] | None = None
    ) -> Iterator[Document]:
        """Yield the documents, of some files or of all. Raises ValueError."""
        if self.hf is not None:
            name, key = self.hf, f"{self.key}.hf"
            yield from hub_documents(
                key, name, self.revision, self.split, self.text_key, skip_bad, counts
            )
        for place in self.files if files is None else files:
            yield from documents(f"{self.key}.files", place, self.text_key, skip_bad, counts)
