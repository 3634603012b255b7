"""Take tokenizers of other libraries and of the user's own, checked."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from llmexp.config.values import ConfigError
from llmexp.data.tokenizers.base import Tokenizer

# A tokenizer of the user's own needs these.
NEEDED = {
    "n_vocab": "the number of ids",
    "encode_batch": "a function: a list of texts to a list of ids for each",
    "decode": "a function: a list of ids to a text",
    "eot_token": "the id that stands between documents, or None",
    "byte_lengths": "for each id the bytes of text that it stands for, 0 for none",
}
PROBE = "The quick brown fox, 1234.5 (don't) jumps\n\n\tover  the lazy dog: "
PROBE += "Gr\u00fc\u00dfe, \u4f60\u597d! \U0001f600"
REPEATS = 40
MOST_ADDED = 16  # ids of its own that a tokenizer may put around a text


class CustomTokenizer(Tokenizer):
    """A tokenizer of the user's own, or of another library: an object with the parts in `NEEDED`.

    Raises ConfigError, naming the part, for an object that lacks one.
    """

    def __init__(self, given: Any) -> None:
        missing = [part for part in NEEDED if not hasattr(given, part)]
        if missing:
            needs = "; ".join(f"{part}: {what}" for part, what in NEEDED.items())
            lacks = f"{type(given).__name__} lacks {', '.join(missing)}"
            raise ConfigError("bad_own_part", f"{lacks}; a tokenizer has {needs}")
        self.given = given
        self.name = str(getattr(given, "name", type(given).__name__))
        self.n_vocab, self.eot_token = given.n_vocab, given.eot_token
        self.is_cuttable = bool(getattr(given, "is_cuttable", False))
        self._lock = threading.Lock()  # nobody promises that it may be called by several threads
        if not _whole(self.n_vocab) or self.n_vocab < 1:
            raise self._wrong("n_vocab", f" is {self.n_vocab!r}; it")
        end = self.eot_token
        if end is not None and not (_whole(end) and 0 <= end < self.n_vocab):
            raise self._wrong("eot_token", f" is {end!r}; it")
        lengths = np.asarray(given.byte_lengths)
        if lengths.shape != (self.n_vocab,) or lengths.dtype.kind not in "iu" or lengths.min() < 0:
            text = f"must hold {self.n_vocab:,} whole numbers: {NEEDED['byte_lengths']}"
            raise ConfigError("bad_own_part", f"{self.name}.byte_lengths {text}")
        self.byte_lengths = lengths.astype(np.int64)
        self.special_ids = [] if end is None else [end]
        self._one_by_one = True
        self.decode(self.encode_ordinary(PROBE))
        self._one_by_one = self._depends_on_others()

    def _wrong(self, part: str, how: str, more: str = "") -> ConfigError:
        return ConfigError("bad_own_part", f"{self.name}.{part}{how} must be {NEEDED[part]}{more}")

    def encode_all(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the ids of each text, all in one call where that changes no ids.

        The library may have threads of its own. Raises ConfigError for what `encode_batch` must not
        return.
        """
        if self._one_by_one:
            return [self._encode_batch([text])[0] for text in texts]
        return self._encode_batch(texts)

    def _depends_on_others(self) -> bool:
        """Return whether a text has other ids beside a longer one, as where the library pads.

        Raises ConfigError where a short text is padded, or a long one cut, even alone.
        """
        texts = (PROBE, PROBE * REPEATS)
        short, long = alone = self.encode_all(texts)
        if not all(map(np.array_equal, alone, self.encode_all(texts))):
            way = "switch off its sampling, such as BPE dropout"
            raise ConfigError(
                "bad_own_part", f"{self.name}.encode_batch gives a text other ids each time; {way}"
            )
        if len(short) > len(long) / REPEATS + MOST_ADDED:
            text = f"makes {len(short)} ids of a text and {len(long)} of {REPEATS} times that text"
            way = "with the library tokenizers by no_padding() and no_truncation()"
            text += f", so it pads texts or cuts them; turn both off, {way}"
            raise ConfigError("bad_own_part", f"{self.name}.encode_batch {text}")
        return not all(map(np.array_equal, alone, self._encode_batch(texts)))

    def _encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        with self._lock:
            found = self.given.encode_batch(list(texts))
        if not hasattr(found, "__len__") or len(found) != len(texts):
            counted = "one text" if len(texts) == 1 else f"{len(texts)} texts"
            raise self._wrong("encode_batch", "", f"; {counted} gave {found!r:.80}")
        checked = []
        for given in found:
            ids = np.asarray(given)
            whole = ids.ndim == 1 and ids.dtype.kind in "iu"
            if not ids.size:
                ids = np.empty(0, np.int64)
            elif not whole or ids.min() < 0 or ids.max() >= self.n_vocab:
                text = f"must return ids from 0 to {self.n_vocab - 1} (n_vocab - 1)"
                raise ConfigError(
                    "bad_own_part", f"{self.name}.encode_batch {text}, not {given!r:.80}"
                )
            checked.append(ids)
        return checked

    def decode(self, ids: list[int], **unused: Any) -> str:
        text = self.given.decode(ids)
        if not isinstance(text, str):
            raise self._wrong("decode", f" returned {text!r:.80}; it")
        return text

    def _deciding(self) -> Iterator[bytes]:
        """Yield its file, else what it was seen to do: a text's ids, the text of every id."""
        yield repr((self.n_vocab, self.eot_token, self.encode_ordinary(PROBE))).encode()
        yield self.byte_lengths.tobytes()
        if isinstance(content := getattr(self.given, "content", None), str | bytes):
            yield content.encode() if isinstance(content, str) else content
            return
        for token in range(self.n_vocab):
            try:
                yield repr(self.given.decode([token])).encode()
            except Exception:  # an id without a text of its own
                yield b"-"


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
