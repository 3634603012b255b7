"""tokenizer=bytes: a token per byte."""

from __future__ import annotations

import functools
import struct
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from llmexp.data.tokenizers.base import END_OF_TEXT, Tokenizer

PATTERN = r"[\s\S]+"


class ByteTokenizer(Tokenizer):
    """Byte b has id b, the end-of-text token has id 256.

    It needs no file and no network.
    """

    name, n_vocab, eot_token, special_ids = "bytes", 257, 256, (256,)
    is_byte_level = counts_bytes = True

    def __init__(self) -> None:
        self.byte_lengths = np.append(np.ones(256, np.int64), 0)

    @functools.cached_property
    def given(self) -> Any:
        """Make the same of tiktoken, which writes texts of ids."""
        import tiktoken

        ranks = {bytes([b]): b for b in range(256)}
        return tiktoken.Encoding(
            "bytes", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens={END_OF_TEXT: 256}
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return ByteTokenizer, ()

    def encode_all(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [np.frombuffer(text.encode(), np.uint8) for text in texts]

    def _deciding(self) -> Iterator[bytes]:  # as `TiktokenTokenizer` of `given`
        yield repr((PATTERN, [(END_OF_TEXT, 256)])).encode()
        yield b"".join(struct.pack("<qB", 1, b) for b in range(256))
        yield np.arange(256, dtype=np.int64).tobytes()


def byte_level() -> Tokenizer:
    """Return a token per byte: byte b has id b, the end-of-text token has id 256."""
    return ByteTokenizer()
