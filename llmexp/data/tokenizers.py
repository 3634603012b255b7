"""Make text into ids: tiktoken's encodings, bytes, and tokenizers of the user's own.

A tokenizer is a `tiktoken.Encoding`, or an object with the parts in `PARTS`, as a
`CustomTokenizer`.
"""

from __future__ import annotations

import functools
import hashlib
import struct
import threading
from collections.abc import Sequence
from concurrent.futures import Future, wait
from typing import Annotated, Any

import numpy as np
import tiktoken

from llmexp.settings.parts import TokenizerKnobs
from llmexp.settings.values import ConfigError, knob, nearest, refuse

END_OF_TEXT = "<|endoftext|>"
# A tokenizer of the user's own needs these.
PARTS = {
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


class CustomTokenizer:
    """A tokenizer of the user's own, with the methods of a `tiktoken.Encoding` that are used here.

    All others are the user's object's. Raises ValueError, naming the part, for an object that lacks
    one.
    """

    def __init__(self, given: Any) -> None:
        missing = [part for part in PARTS if not hasattr(given, part)]
        if missing:
            needs = "; ".join(f"{part}: {what}" for part, what in PARTS.items())
            lacks = f"{type(given).__name__} lacks {', '.join(missing)}"
            raise ConfigError(f"{lacks}; a tokenizer has {needs}")
        self.given = given
        self.name = str(getattr(given, "name", type(given).__name__))
        self.n_vocab, self.eot_token = given.n_vocab, given.eot_token
        self._lock = threading.Lock()  # nobody promises that it may be called by several threads
        if not _whole(self.n_vocab) or self.n_vocab < 1:
            raise self._wrong("n_vocab", f" is {self.n_vocab!r}; it")
        end = self.eot_token
        if end is not None and not (_whole(end) and 0 <= end < self.n_vocab):
            raise self._wrong("eot_token", f" is {end!r}; it")
        lengths = np.asarray(given.byte_lengths)
        if lengths.shape != (self.n_vocab,) or lengths.dtype.kind not in "iu" or lengths.min() < 0:
            text = f"must hold {self.n_vocab:,} whole numbers: {PARTS['byte_lengths']}"
            raise ConfigError(f"{self.name}.byte_lengths {text}")
        self.byte_lengths = lengths.astype(np.int64)
        self.decode(self.encode_ordinary(PROBE))
        self._one_by_one = self._depends_on_others()

    def _wrong(self, part: str, how: str, more: str = "") -> ValueError:
        return ValueError(f"{self.name}.{part}{how} must be {PARTS[part]}{more}")

    def __getattr__(self, name: str) -> Any:
        if name == "given":
            raise AttributeError(name)
        return getattr(self.given, name)

    def __reduce__(self) -> tuple[Any, ...]:  # the lock stays here
        return CustomTokenizer, (self.given,)

    def encode_all(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the ids of each text, all in one call where that changes no ids.

        The library may have threads of its own. Raises ValueError for what `encode_batch` must not
        return.
        """
        if self._one_by_one:
            return [self.encode_to_numpy(text) for text in texts]
        return self._encode_batch(texts)

    def _depends_on_others(self) -> bool:
        """Return whether a text has other ids beside a longer one, as where the library pads.

        Raises ValueError where a short text is padded, or a long one cut, even alone.
        """
        texts = (PROBE, PROBE * REPEATS)
        short, long = alone = [self.encode_to_numpy(text) for text in texts]
        if len(short) > len(long) / REPEATS + MOST_ADDED:
            text = f"makes {len(short)} ids of a text and {len(long)} of {REPEATS} times that text"
            way = "with the library tokenizers by no_padding() and no_truncation()"
            text += f", so it pads texts or cuts them; turn both off, {way}"
            raise ConfigError(f"{self.name}.encode_batch {text}")
        return not all(map(np.array_equal, alone, self._encode_batch(texts)))

    def _encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        with self._lock:
            found = self.given.encode_batch(list(texts))
        if not hasattr(found, "__len__") or len(found) != len(texts):
            counted = "one text" if len(texts) == 1 else f"{len(texts)} texts"
            raise self._wrong("encode_batch", "", f"; {counted} gave {found!r:.80}")
        return [self._checked(ids) for ids in found]

    def _checked(self, given: Any) -> np.ndarray:
        ids = np.asarray(given)
        if ids.size == 0:
            return np.empty(0, np.int64)
        whole = ids.ndim == 1 and ids.dtype.kind in "iu"
        if not whole or ids.min() < 0 or ids.max() >= self.n_vocab:
            text = f"must return ids from 0 to {self.n_vocab - 1} (n_vocab - 1)"
            raise ConfigError(f"{self.name}.encode_batch {text}, not {given!r:.80}")
        return ids

    def encode_to_numpy(self, text: str, **unused: Any) -> np.ndarray:
        return self._encode_batch([text])[0]

    def encode_ordinary(self, text: str) -> list[int]:
        ids: list[int] = self.encode_to_numpy(text).tolist()
        return ids

    def decode(self, ids: list[int], **unused: Any) -> str:
        text = self.given.decode(ids)
        if not isinstance(text, str):
            raise self._wrong("decode", f" returned {text!r:.80}; it")
        return text

    def identity(self) -> str:
        """Return a digest of what it was seen to do: the text of every id, a text's ids."""
        known = self.n_vocab, self.eot_token, self.encode_ordinary(PROBE)
        digest = hashlib.sha256(repr(known).encode())
        digest.update(self.byte_lengths.tobytes())
        for token in range(self.n_vocab):
            try:
                digest.update(repr(self.given.decode([token])).encode())
            except Exception:  # an id without a text of its own
                digest.update(b"-")
        return digest.hexdigest()


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


Tokenizer = tiktoken.Encoding | CustomTokenizer


def as_tokenizer(found: Any) -> Tokenizer:
    """Return what a tokenizer's function made, ready for use.

    Raises ValueError for what is no tokenizer.
    """
    return (
        found if isinstance(found, tiktoken.Encoding | CustomTokenizer) else CustomTokenizer(found)
    )


def byte_level() -> tiktoken.Encoding:
    """Return a token per byte: byte b has id b, the end-of-text token has id 256.

    It needs no file and no network.
    """
    return tiktoken.Encoding(
        name="bytes",
        pat_str=r"[\s\S]+",
        mergeable_ranks={bytes([b]): b for b in range(256)},
        special_tokens={END_OF_TEXT: 256},
        explicit_n_vocab=257,
    )


def pretrained(
    name: Annotated[str, knob("name of the encoding", "gpt2")],
    download_timeout_s: TokenizerKnobs.download_timeout_s = 8.0,
) -> tiktoken.Encoding:
    """Return the published encoding `name`, from tiktoken's cache or, once, from the network.

    Raises ValueError for an unknown name, and when the encoding is neither cached nor there within
    `download_timeout_s` seconds.
    """
    known = tiktoken.list_encoding_names()
    if name not in known:
        near = nearest(str(name), known)
        text = f"there is no such encoding.{near} Known: {', '.join(known)}"
        raise refuse("tokenizer.name", name, text)
    # tiktoken sets no timeout of its own: a network that swallows packets would hold it for minutes
    found: Future[tiktoken.Encoding] = Future()

    def ask() -> None:
        try:
            found.set_result(tiktoken.get_encoding(name))
        except BaseException as error:
            found.set_exception(error)

    threading.Thread(target=ask, name="llmexp-download", daemon=True).start()
    wait([found], download_timeout_s)
    if found.done() and found.exception() is None:
        return found.result()
    why = f"no answer within {download_timeout_s:g} s"
    why = type(found.exception()).__name__ if found.done() else why
    text = f"its files are neither cached nor could they be downloaded ({why})"
    way = "set the environment variable TIKTOKEN_CACHE_DIR to a folder that holds them"
    raise refuse("tokenizer.name", name, f"{text}; {way}, or choose tokenizer=bytes")


def is_byte_level(encoding: Tokenizer) -> bool:
    """Return whether text becomes its UTF-8 bytes, one id per byte and equal to it."""
    if isinstance(encoding, CustomTokenizer):
        return False
    ranks = encoding._mergeable_ranks
    return len(ranks) == 256 and all(ranks.get(bytes([b])) == b for b in range(256))


def end_of_text(encoding: Tokenizer) -> int | None:
    """Return the id between documents; None where there is no such token."""
    if isinstance(encoding, CustomTokenizer):
        return encoding.eot_token
    special = encoding._special_tokens
    if len(special) == 1:  # of a file, whatever it is called
        return next(iter(special.values()))
    return special.get(END_OF_TEXT)


def end_of_text_id(encoding: Tokenizer) -> int:
    """Return the id between documents. Raises ValueError where the encoding has no such token."""
    if (found := end_of_text(encoding)) is None:
        text = f"{encoding.name} has no end-of-text token, which stands between documents"
        way = f"add {END_OF_TEXT} to its special tokens"
        if names := getattr(encoding, "special_names", []):
            way += f", or take one that it has ({', '.join(names[:8])}): "
            way += f"'tokenizer.end_of_text=\"{names[-1]}\"'"
        raise ConfigError(f"tokenizer: {text}; {way}")
    return found


def token_byte_lengths(encoding: Tokenizer) -> np.ndarray:
    """Return int64 [n_vocab]: the bytes of text that each id stands for.

    They are 0 for special tokens and ids without a meaning.
    """
    if isinstance(encoding, CustomTokenizer):
        return encoding.byte_lengths
    lengths = np.zeros(encoding.n_vocab, dtype=np.int64)
    ranks = encoding._mergeable_ranks
    ids = np.fromiter(ranks.values(), np.int64, len(ranks))
    lengths[ids] = np.fromiter(map(len, ranks), np.int64, len(ranks))
    return lengths


def has_meaning(encoding: Tokenizer) -> np.ndarray:
    """Return bool [n_vocab]: whether an id stands for bytes or is a special token.

    No text can be made of another.
    """
    found: np.ndarray = token_byte_lengths(encoding) > 0
    if not isinstance(encoding, CustomTokenizer):
        found[[*encoding._special_tokens.values()]] = True
    elif encoding.eot_token is not None:
        found[encoding.eot_token] = True
    return found


def identified(tokenizer: Tokenizer) -> dict[str, str]:
    """Return what shards note of the tokenizer that made them."""
    return {"name": tokenizer.name, "sha256": tokenizer_identity(tokenizer)}


@functools.lru_cache(maxsize=4)  # a tenth of a second for 100,000 ids, and asked for several times
def tokenizer_identity(encoding: Tokenizer) -> str:
    """Return a digest of all that decides how text becomes ids: the name alone does not."""
    if isinstance(encoding, CustomTokenizer):
        return encoding.identity()
    ranks = encoding._mergeable_ranks
    known = encoding._pat_str, sorted(encoding._special_tokens.items())
    digest = hashlib.sha256(repr(known).encode())
    digest.update(b"".join(struct.pack("<q", len(token)) + token for token in ranks))
    digest.update(np.fromiter(ranks.values(), np.int64, len(ranks)).tobytes())
    return digest.hexdigest()
