"""Make text into ids: tiktoken's encodings, bytes, and tokenizers of the user's own.

A function of conf/tokenizer returns a `tiktoken.Encoding`, or an object with the parts in `NEEDED`;
`as_tokenizer` makes a `Tokenizer` of either.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import struct
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from typing import Annotated, Any

import numpy as np
import tiktoken
import tiktoken.load

from llmexp.settings.parts import TokenizerKnobs
from llmexp.settings.values import ConfigError, knob, nearest, refuse
from llmexp.system.text import first_of

END_OF_TEXT = "<|endoftext|>"
# Encodings and split patterns for which `encode.BOUNDARY` holds. A .tiktoken file does not say how
# text is split before the bytes of a piece are merged. The expressions mean the same to tiktoken
# and to tokenizers, where {1,3}+ would be a repetition.
PUBLISHED = ("gpt2", "r50k_base", "p50k_base", "cl100k_base", "o200k_base")
PATTERNS = {
    "gpt2": r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s",
    "cl100k_base": (
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}| ?[^\s\p{L}\p{N}]++[\r\n]*+"
        r"|\s++$|\s*[\r\n]|\s+(?!\S)|\s"
    ),
}
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
_READ_FILE = tiktoken.load.read_file
MOST_ADDED = 16  # ids of its own that a tokenizer may put around a text


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
        ids: list[int] = self.encode_all([text])[0].tolist()
        return ids

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
            raise ConfigError(f"tokenizer: {text}; {way}")
        return self.eot_token

    def has_meaning(self) -> np.ndarray:
        """Return bool [n_vocab]: whether an id stands for bytes or is a special token.

        No text can be made of another.
        """
        found: np.ndarray = self.byte_lengths > 0
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


class TiktokenTokenizer(Tokenizer):
    """An encoding of tiktoken."""

    counts_bytes = True

    def __init__(self, given: tiktoken.Encoding) -> None:
        self.given, self.name, self.n_vocab = given, given.name, given.n_vocab
        self._ranks, self._special = given._mergeable_ranks, given._special_tokens
        # the only special token of a file ends documents, whatever it is called
        alone = next(iter(self._special.values())) if len(self._special) == 1 else None
        self.eot_token = self._special.get(END_OF_TEXT) if alone is None else alone
        self.is_byte_level = self._ranks == {bytes([b]): b for b in range(256)}
        self.is_cuttable = given.name in PUBLISHED or given._pat_str in PATTERNS.values()
        self.special_ids = list(self._special.values())
        self.byte_lengths = np.zeros(self.n_vocab, dtype=np.int64)
        self.byte_lengths[[*self._ranks.values()]] = [*map(len, self._ranks)]

    def encode_all(self, texts: Sequence[str]) -> list[np.ndarray]:
        if self.is_byte_level:
            return [np.frombuffer(text.encode(), np.uint8) for text in texts]
        return [self.given.encode_to_numpy(text, disallowed_special=()) for text in texts]

    def encode_documents(
        self, texts: Sequence[str], last_ends: bool
    ) -> tuple[np.ndarray, np.ndarray]:
        """Encode all texts by one call: a thread waits for the interpreter lock after each."""
        end = self.end_of_text()
        name = next(text for text, number in self._special.items() if number == end)
        overlaps = any(name.endswith(name[:size]) for size in range(1, len(name)))
        if not texts or self.is_byte_level or overlaps:
            return super().encode_documents(texts, last_ends)
        joined = name.join(texts) + name * last_ends
        ids = self.given.encode_to_numpy(joined, allowed_special={name}, disallowed_special=())
        stops = np.flatnonzero(ids == end) + 1
        if not last_ends:
            stops = np.append(stops, len(ids))
        if len(stops) == len(texts):
            return ids, stops
        # the name of the token is in a document, where it is ordinary text
        return super().encode_documents(texts, last_ends)

    def _deciding(self) -> Iterator[bytes]:
        yield repr((self.given._pat_str, sorted(self._special.items()))).encode()
        yield b"".join(struct.pack("<q", len(token)) + token for token in self._ranks)
        yield np.fromiter(self._ranks.values(), np.int64, len(self._ranks)).tobytes()


class CustomTokenizer(Tokenizer):
    """A tokenizer of the user's own, or of another library: an object with the parts in `NEEDED`.

    Raises ConfigError, naming the part, for an object that lacks one.
    """

    def __init__(self, given: Any) -> None:
        missing = [part for part in NEEDED if not hasattr(given, part)]
        if missing:
            needs = "; ".join(f"{part}: {what}" for part, what in NEEDED.items())
            lacks = f"{type(given).__name__} lacks {', '.join(missing)}"
            raise ConfigError(f"{lacks}; a tokenizer has {needs}")
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
            raise ConfigError(f"{self.name}.byte_lengths {text}")
        self.byte_lengths = lengths.astype(np.int64)
        self.special_ids = [] if end is None else [end]
        self._one_by_one = True
        self.decode(self.encode_ordinary(PROBE))
        self._one_by_one = self._depends_on_others()

    def _wrong(self, part: str, how: str, more: str = "") -> ConfigError:
        return ConfigError(f"{self.name}.{part}{how} must be {NEEDED[part]}{more}")

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
            raise ConfigError(f"{self.name}.encode_batch gives a text other ids each time; {way}")
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


def as_tokenizer(found: Any) -> Tokenizer:
    """Return what a tokenizer's function made, ready for use.

    Raises ConfigError for what is no tokenizer.
    """
    if isinstance(found, Tokenizer):
        return found
    return (
        TiktokenTokenizer(found) if isinstance(found, tiktoken.Encoding) else CustomTokenizer(found)
    )


def byte_level() -> Tokenizer:
    """Return a token per byte: byte b has id b, the end-of-text token has id 256.

    It needs no file and no network.
    """
    ranks = {bytes([b]): b for b in range(256)}
    special = {END_OF_TEXT: 256}
    return as_tokenizer(
        tiktoken.Encoding(
            "bytes",
            pat_str=r"[\s\S]+",
            mergeable_ranks=ranks,
            special_tokens=special,
            explicit_n_vocab=257,
        )
    )


def pretrained(
    name: Annotated[str, knob("name of the encoding", "gpt2")],
    download_timeout_s: TokenizerKnobs.download_timeout_s = 8.0,
) -> Tokenizer:
    """Return the published encoding `name`, from tiktoken's cache or, once, from the network.

    The cache is read first, however long that takes: `download_timeout_s` limits the wait for the
    network alone. Raises ValueError for an unknown name, and when the encoding is in neither.
    """
    known = tiktoken.list_encoding_names()
    if name not in known:
        near = nearest(str(name), known)
        text = f"there is no such encoding.{near} Known: {', '.join(known)}"
        raise refuse("tokenizer.name", name, text)

    def fetched(blobpath: str) -> bytes:
        """Return a file of the network. Raises TimeoutError."""
        importlib.import_module("requests")  # which tiktoken would import while we wait
        found: Future[bytes] = Future()

        def ask() -> None:
            try:
                found.set_result(_READ_FILE(blobpath))
            except BaseException as error:
                found.set_exception(error)

        threading.Thread(target=ask, name="llmexp-download", daemon=True).start()
        return found.result(download_timeout_s)

    # tiktoken sets no timeout of its own: a network that swallows packets would hold it for minutes
    tiktoken.load.read_file = fetched
    try:
        return as_tokenizer(tiktoken.get_encoding(name))
    except TimeoutError:
        why = f"no answer within {download_timeout_s:g} s"
    except Exception as error:
        why = type(error).__name__
    finally:
        tiktoken.load.read_file = _READ_FILE
    text = f"its files are neither cached nor could they be downloaded ({why})"
    way = "set the environment variable TIKTOKEN_CACHE_DIR to a folder that holds them"
    raise refuse("tokenizer.name", name, f"{text}; {way}, or choose tokenizer=bytes")
