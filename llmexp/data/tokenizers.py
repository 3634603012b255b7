"""Tokenizers: every one is a `tiktoken.Encoding`, so the rest of the code knows a single kind."""

from __future__ import annotations

import difflib
import hashlib
import struct
import threading
from typing import Any

import numpy as np
import tiktoken

END_OF_TEXT = "<|endoftext|>"


def byte_level() -> tiktoken.Encoding:
    """A token per byte: byte b has id b, the end-of-text token has id 256. Needs no file and no network."""
    return tiktoken.Encoding(
        name="bytes",
        pat_str=r"[\s\S]+",
        mergeable_ranks={bytes([b]): b for b in range(256)},
        special_tokens={END_OF_TEXT: 256},
        explicit_n_vocab=257,
    )


def pretrained(name: str, download_timeout_s: float = 8.0) -> tiktoken.Encoding:
    """The published encoding `name`, from tiktoken's cache or, once, from the network.

    Raises ValueError for an unknown name, and when the encoding is neither cached nor there within
    `download_timeout_s` seconds.
    """
    known = tiktoken.list_encoding_names()
    if name not in known:
        close = difflib.get_close_matches(str(name), known, n=1)
        hint = f" Did you mean {close[0]}?" if close else ""
        raise ValueError(f"tokenizer.name={name}: there is no such encoding.{hint} Known: {', '.join(known)}")
    if not isinstance(download_timeout_s, (int, float)) or not download_timeout_s > 0:
        raise ValueError(f"tokenizer.download_timeout_s={download_timeout_s}: must be above 0, for example 8.0")
    loaded: list[Any] = []

    def load() -> None:
        try:
            loaded.append(tiktoken.get_encoding(name))
        except Exception as error:
            loaded.append(error)

    # tiktoken sets no timeout of its own, so a network that swallows packets would hold it for minutes.
    thread = threading.Thread(target=load, name="llmexp-tokenizer", daemon=True)
    thread.start()
    thread.join(download_timeout_s)
    if loaded and isinstance(loaded[0], tiktoken.Encoding):
        return loaded[0]
    why = type(loaded[0]).__name__ if loaded else f"no answer within {download_timeout_s:g} s"
    raise ValueError(
        f"tokenizer.name={name}: its files are neither cached nor could they be downloaded ({why}); set the "
        "environment variable TIKTOKEN_CACHE_DIR to a folder that holds them, or choose tokenizer=bytes"
    )


def is_byte_level(encoding: tiktoken.Encoding) -> bool:
    """Whether text becomes its UTF-8 bytes, one id per byte and equal to it."""
    ranks = encoding._mergeable_ranks
    return len(ranks) == 256 and all(ranks.get(bytes([b])) == b for b in range(256))


def end_of_text_id(encoding: tiktoken.Encoding) -> int:
    """The id between documents. Raises ValueError where the encoding has no such token."""
    if END_OF_TEXT not in encoding.special_tokens_set:
        raise ValueError(
            f"tokenizer: {encoding.name} has no {END_OF_TEXT} token to put between documents; "
            "add it to the special tokens or use a single file"
        )
    return encoding.encode_single_token(END_OF_TEXT)


def token_byte_lengths(encoding: tiktoken.Encoding) -> np.ndarray:
    """[n_vocab] int64: bytes of text that an id stands for; 0 for special tokens and ids without a meaning."""
    lengths = np.zeros(encoding.n_vocab, dtype=np.int64)
    ranks = encoding._mergeable_ranks
    lengths[np.fromiter(ranks.values(), np.int64, len(ranks))] = np.fromiter(map(len, ranks), np.int64, len(ranks))
    return lengths


def has_meaning(encoding: tiktoken.Encoding) -> np.ndarray:
    """[n_vocab] bool: whether an id stands for bytes or is a special token. No text can be made of another."""
    found: np.ndarray = token_byte_lengths(encoding) > 0
    found[[*encoding._special_tokens.values()]] = True
    return found


def identity(encoding: tiktoken.Encoding) -> str:
    """A digest of all that decides how text becomes ids: the name alone does not."""
    ranks = encoding._mergeable_ranks
    digest = hashlib.sha256(repr((encoding._pat_str, sorted(encoding._special_tokens.items()))).encode())
    digest.update(b"".join(struct.pack("<q", len(token)) + token for token in ranks))
    digest.update(np.fromiter(ranks.values(), np.int64, len(ranks)).tobytes())
    return digest.hexdigest()
