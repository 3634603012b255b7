"""tokenizer=gpt2, cl100k_base, o200k_base: tiktoken's encodings; and files of ranks."""

from __future__ import annotations

import base64
import binascii
import importlib
import struct
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Annotated

import numpy as np
import tiktoken
import tiktoken.load

from llmexp.config.values import knob, nearest, refuse
from llmexp.data.encode import PATTERNS, PUBLISHED
from llmexp.data.tokenizers.base import END_OF_TEXT, Tokenizer
from llmexp.data.tokenizers.settings import Knobs

_READ_FILE = tiktoken.load.read_file


class TiktokenTokenizer(Tokenizer):
    """An encoding of tiktoken."""

    counts_bytes = True

    def __init__(self, given: tiktoken.Encoding) -> None:
        self.given, self.name, self.n_vocab = given, given.name, given.n_vocab
        self._ranks, self._special = given._mergeable_ranks, given._special_tokens
        # the only special token of a file ends documents, whatever it is called
        alone = next(iter(self._special.values())) if len(self._special) == 1 else None
        self.eot_token = self._special.get(END_OF_TEXT) if alone is None else alone
        self.is_cuttable = given.name in PUBLISHED or given._pat_str in PATTERNS.values()
        self.special_ids = list(self._special.values())
        self.byte_lengths = np.zeros(self.n_vocab, dtype=np.int64)
        self.byte_lengths[[*self._ranks.values()]] = [*map(len, self._ranks)]

    def encode_all(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [self.given.encode_to_numpy(text, disallowed_special=()) for text in texts]

    def encode_documents(
        self, texts: Sequence[str], last_ends: bool
    ) -> tuple[np.ndarray, np.ndarray]:
        """Encode all texts by one call: a thread waits for the interpreter lock after each."""
        end = self.end_of_text()
        name = next(text for text, number in self._special.items() if number == end)
        overlaps = any(name.endswith(name[:size]) for size in range(1, len(name)))
        if not texts or overlaps:
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


def pretrained(
    name: Annotated[str, knob("name of the encoding", "gpt2")],
    download_timeout_s: Knobs.download_timeout_s = 8.0,
) -> Tokenizer:
    """Return the published encoding `name`, from tiktoken's cache or, once, from the network.

    The cache is read first, however long that takes: `download_timeout_s` limits the wait for the
    network alone. Raises ValueError for an unknown name, and when the encoding is in neither.
    """
    known = tiktoken.list_encoding_names()
    if name not in known:
        near = nearest(str(name), known)
        text = f"there is no such encoding.{near} Known: {', '.join(known)}"
        raise refuse("unknown_option", "tokenizer.name", name, text)

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
        return TiktokenTokenizer(tiktoken.get_encoding(name))
    except TimeoutError:
        why = f"no answer within {download_timeout_s:g} s"
    except Exception as error:
        why = type(error).__name__
    finally:
        tiktoken.load.read_file = _READ_FILE
    text = f"its files are neither cached nor could they be downloaded ({why})"
    way = "set the environment variable TIKTOKEN_CACHE_DIR to a folder that holds them"
    raise refuse("network", "tokenizer.name", name, f"{text}; {way}, or choose tokenizer=bytes")


def read_ranks(
    path: str, file: Path, content: bytes, end_of_text: str | None, pattern: str | None
) -> Tokenizer:
    """Return the tokenizer of a .tiktoken file. Raises ConfigError."""
    ranks = {}
    for number, line in enumerate(content.splitlines(), 1):
        if not line.strip():
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error):
            text = f"line {number} is not a token and its number (base64, a space, a number)"
            raise refuse("damaged_file", "tokenizer.path", path, text) from None
    missing = [value for value in range(256) if bytes([value]) not in ranks]
    if missing:
        text = f"{len(missing)} of the 256 bytes have no token, byte {missing[0]} is the first"
        raise refuse("damaged_file", "tokenizer.path", path, text)
    if sorted(ranks.values()) != sorted(set(ranks.values())) or max(ranks.values()) >= 1 << 31:
        raise refuse(
            "damaged_file",
            "tokenizer.path",
            path,
            "two tokens have one number, or one is too large",
        )
    split = PATTERNS.get(pattern or "gpt2", pattern)
    special = {end_of_text or END_OF_TEXT: max(ranks.values()) + 1}
    try:
        found = tiktoken.Encoding(
            name=file.name, pat_str=str(split), mergeable_ranks=ranks, special_tokens=special
        )
    except Exception as error:  # tiktoken's own, of its regular expressions
        text = f"is neither {' nor '.join(PATTERNS)} nor a regular expression ({error})"
        raise refuse("wrong_type", "tokenizer.pattern", pattern, text) from None
    return TiktokenTokenizer(found)
