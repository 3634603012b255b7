"""data=text: files of text, a corpus of one source."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from llmexp.config.labels import plural
from llmexp.config.values import knob
from llmexp.data.cache import cache_folder
from llmexp.data.files import files_fingerprint
from llmexp.data.matching import left_out_text
from llmexp.data.order import sequence_index
from llmexp.data.prepared import prepare_sources, warnings_of
from llmexp.data.remote import RemoteCache
from llmexp.data.sources.settings import Knobs
from llmexp.data.sources.shares import match_both, shared_tokens
from llmexp.data.stream import Corpus, TokenStream
from llmexp.data.tokenizers.base import Tokenizer
from llmexp.data.work import TRAIN, Source, works_of
from llmexp.system.text import size_text


@dataclass(frozen=True, kw_only=True)
class OneSource:
    """Documents of one source, with its share or another source for validation."""

    val_ratio: Knobs.val_ratio
    max_tokens: Knobs.max_tokens
    seed: Knobs.seed
    cache_dir: Knobs.cache_dir
    about = ""  # the description begins so

    def documents(self, remote: RemoteCache) -> list[Source]:
        """Return the sources that the knobs name."""
        raise NotImplementedError

    def source(self, key: str, paths: list[Path], whole: bool = False) -> Source:
        """Return files as a source: as they are, or in an order by `seed` with a share held out."""
        if whole:
            return Source("text", key, files=tuple(map(str, paths)))
        order = sequence_index(self.seed, np.arange(len(paths)), len(paths), True)
        shares = (("val", self.val_ratio),) if self.val_ratio else ()
        return Source("text", key, files=tuple(str(paths[i]) for i in order), shares=shares)

    def build(self, tokenizer: Tokenizer, *_: Any) -> Corpus:
        """Return the corpus, prepared. Raises ConfigError."""
        remote = RemoteCache(cache_folder(self.cache_dir))
        works = works_of(self.documents(remote), tokenizer, remote)
        trained, held_out = prepare_sources(works, remote)
        ready = trained["text"]
        most: tuple[int | None, int | None] = self.max_tokens, None
        if held_out:
            val = held_out["val"].streams[TRAIN]
        else:
            most = shared_tokens(self.max_tokens, self.val_ratio)
            val = ready.streams.get("val", TokenStream([]))
        train, val = (
            # without the last end-of-text token: it stands between two documents
            stream.part(0, max(0, min(len(stream) - 1, len(stream) if left is None else left)))
            for stream, left in zip((ready.streams[TRAIN], val), most, strict=True)
        )
        both = [ready, *held_out.values()]
        size = sum(sum(one.text_bytes.values()) for one in both)
        count = sum(one.counts.documents for one in both)
        description = f"{self.about}{plural(count, 'document')}, {size_text(size)} of text"
        if (files := sum(len(one.work.source.files) for one in both)) > 1:
            description += f" in {files:,} files"
        if empty := sum(one.counts.empty for one in both):
            description += f", {plural(empty, 'empty one')} left out"
        description += left_out_text(works[0].source.left_out)
        marks = [
            files_fingerprint({Path(name): one.content for name, one in work.inputs.items()})
            for work in works
        ]
        fingerprint: dict[str, Any] = {
            "tokenizer": tokenizer.name,
            "tokenizer_sha256": tokenizer.identity,
            "train_files": marks[0],
            "val_files": marks[1] if held_out else {},
            "max_tokens": self.max_tokens,
        }
        if not held_out:
            source = works[0].source
            fingerprint |= {
                "val_ratio": self.val_ratio,
                "val_is": "the last part of each file" if source.cuts_texts else "whole documents",
                "seed": self.seed if len(source.files) > 1 else None,
            }
        return Corpus(
            train=train,
            val=val or None,
            description=description,
            fingerprint=fingerprint,
            is_text=True,
            warnings=warnings_of(trained, held_out, remote),
        )


@dataclass(frozen=True, kw_only=True)
class text(OneSource):
    """Files of text, with the end-of-text token between documents.

    Without `val_files` the share `val_ratio` is for validation: of 100 files or more whole ones,
    chosen by their content, of fewer the last part of each. They are read in an order by `seed`
    then. A byte order mark at the start of a file is left out; everything else stays as it is.
    """

    train_files: Knobs.train_files
    val_files: Knobs.val_files
    plain: Annotated[
        bool, knob("each file is plain text, a document a file, also one like JSON", False)
    ] = False

    def documents(self, remote: RemoteCache) -> list[Source]:
        left = list[str]()
        train, *val = match_both(self.train_files, self.val_files, left).items()
        found = replace(self.source(*train, bool(val)), left_out=tuple(left), plain=self.plain)
        given = [replace(self.source(*one, True), name="val", held_out=True) for one in val]
        return [found, *(replace(one, plain=self.plain) for one in given)]
