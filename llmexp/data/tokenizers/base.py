"""Say what a tokenizer is.

A function of conf/tokenizer returns a `Tokenizer`, a `tiktoken.Encoding`, or an object with the
parts in `own.NEEDED`; `as_tokenizer` makes a `Tokenizer` of each.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from llmexp.config.values import ConfigError
from llmexp.system.text import first_of

END_OF_TEXT = "<|endoftext|>"


class Tokenizer:
    """Text to ids and back; all that is not here is asked of the library's object, `given`."""

    given: Any
    name: str
    n_vocab: int
    eot_token: int | None  # the id between documents
    byte_lengths: np.ndarray  # int64 [n_vocab]: bytes of text that each id stands for, 0 for none
    special_ids: Sequence[int]  # known ones that stand for no bytes, such as `eot_token`
    is_byte_level = False  # text becomes its UTF-8 bytes, one id per byte and equal to it
    is_cuttable = False  # `encode.BOUNDARY` holds: a cut there changes no ids
    counts_bytes = False  # the byte lengths of the ids of any text add up to the bytes of the text

    def __getattr__(self, name: str) -> Any:
        if name == "given":
            raise AttributeError(name)
        return getattr(self.given, name)

    def __reduce__(self) -> tuple[Any, ...]:
        return as_tokenizer, (self.given,)

    def encode_all(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the ids of each text."""
        raise NotImplementedError

    def encode_ordinary(self, text: str) -> list[int]:
        """Return the ids of a text, in which no name of a special token counts."""
        return self.encode_all([text])[0].tolist()

    def encode_documents(
        self, texts: Sequence[str], last_ends: bool
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return (the ids of all texts, where each text stops in them).

        The end-of-text id follows each text; the last one only if it ends its document.
        """
        end, found = self.end_of_text(), self.encode_all(texts)
        ended = [np.append(ids, end) for ids in found[: len(found) - (not last_ends)]]
        ended += found[len(ended) :]
        ids = np.concatenate(ended) if ended else np.empty(0, np.int64)
        return ids, np.cumsum([len(one) for one in ended], dtype=np.int64)

    def end_of_text(self) -> int:
        """Return the id between documents. Raises ConfigError where there is no such token."""
        if self.eot_token is None:
            text = f"{self.name} has no end-of-text token, which stands between documents"
            way = f"add {END_OF_TEXT} to its special tokens"
            if names := getattr(self, "special_names", []):
                way += f", or take one that it has ({first_of(names, 8)}): "
                way += f"'tokenizer.end_of_text=\"{names[-1]}\"'"
            raise ConfigError("wrong_tokenizer", f"tokenizer: {text}; {way}")
        return self.eot_token

    def has_meaning(self) -> np.ndarray:
        """Return bool [n_vocab]: whether an id stands for bytes or is a special token.

        No text can be made of another.
        """
        found = self.byte_lengths > 0
        found[[*self.special_ids]] = True
        return found

    @functools.cached_property  # a tenth of a second for 100,000 ids, and asked for several times
    def identity(self) -> str:
        """Return a digest of all that decides how text becomes ids: the name alone does not."""
        digest = hashlib.sha256()
        for part in self._deciding():
            digest.update(part)
        return digest.hexdigest()

    def _deciding(self) -> Iterator[bytes]:
        raise NotImplementedError


def as_tokenizer(found: Any) -> Tokenizer:
    """Return what a tokenizer's function made, ready for use.

    Raises ConfigError for what is no tokenizer.
    """
    known = any(kind.__module__.startswith("tiktoken.") for kind in type(found).__mro__)
    module, kind = ("tiktoken", "TiktokenTokenizer") if known else ("own", "CustomTokenizer")
    return getattr(importlib.import_module(f"{__package__}.{module}"), kind)(found)
