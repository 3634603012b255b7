"""Give tokenizers of pieces the token between documents, and the bytes of a text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llmexp.config.values import refuse
from llmexp.data.tokenizers.base import END_OF_TEXT
from llmexp.data.tokenizers.own import PROBE
from llmexp.system.text import first_of

# The usual names of the token between documents, looked for in this order.
ENDS = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]")


def special_id(path: str, given: str | None, known: Sequence[str], ids: Any) -> int | None:
    """Return the id of the token between documents. Raises ValueError for one that is not there."""
    if given is not None and given not in known:
        there = first_of(known, 12) or "none"
        text = f"{path} has no such token; its special tokens are: {there}"
        raise refuse("unknown_option", "tokenizer.end_of_text", given, text)
    name = given or next((end for end in ENDS if end in known), None)
    return None if name is None else int(ids(name))


def piece_bytes(token: str) -> int:
    """Return the bytes of text of a piece: one for <0xNN> and for the mark of a space."""
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        return 1
    return len(token.replace("\u2581", " ").encode())


def keeps_bytes(tokenizer: Any) -> bool:
    """Return whether the byte lengths of a text's ids add up to the text's bytes.

    Then losses per byte mean what they say. A tokenizer that changes the text before (lower case, a
    space in front) does not keep them.
    """
    (ids,) = tokenizer.encode_batch([PROBE])
    return int(tokenizer.byte_lengths[ids].sum()) == len(PROBE.encode())
