"""tokenizer=file: tokenizers that lie in files, of Hugging Face, tiktoken and sentencepiece.

Each is read by the library that made it and offers what `own.NEEDED` lists.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

from llmexp.config.kinds import kind_of_error
from llmexp.config.values import knob, refuse
from llmexp.data.tokenizers.base import Tokenizer, as_tokenizer
from llmexp.data.tokenizers.huggingface import HuggingFaceTokenizer
from llmexp.data.tokenizers.sentencepiece import SentencePieceTokenizer
from llmexp.data.tokenizers.tiktoken import read_ranks


def from_file(
    path: Annotated[
        str | None, knob("needed: the file, or the folder that holds tokenizer.json", "mine.json")
    ],
    end_of_text: Annotated[
        str | None,
        knob("text of the token that ends a document; null: the usual names", "<|endoftext|>"),
    ],
    pattern: Annotated[
        str | None,
        knob(
            "of a .tiktoken file, how text is split: gpt2 | cl100k_base | a regular expression; "
            "null: gpt2",
            "gpt2",
        ),
    ],
) -> Tokenizer:
    """Return the tokenizer of a file.

    That is a Hugging Face tokenizer.json or the folder that holds it, a .tiktoken file, or a
    sentencepiece .model. `end_of_text`: the text of the token between documents; None finds the
    usual ones. `pattern`: of a .tiktoken file, a name in PATTERNS or a regular expression. Raises
    ValueError.
    """
    if not isinstance(path, str) or not path:
        raise refuse(
            "missing_value", "tokenizer.path", path, "a file or folder is needed", "tokenizer.json"
        )
    file = Path(path).expanduser()
    if file.is_dir():
        inside = [file / name for name in ("tokenizer.json", "tokenizer.model")]
        found = next((one for one in inside if os.path.lexists(one)), None)
        if found is None:
            text = "the folder holds neither tokenizer.json nor tokenizer.model"
            raise refuse("unknown_file", "tokenizer.path", path, text)
        file = found
    try:
        content = file.read_bytes()
    except OSError as error:
        raise refuse(
            kind_of_error(error), "tokenizer.path", path, f"cannot be read: {error.strerror}"
        ) from None
    if file.suffix == ".tiktoken":
        return read_ranks(path, file, content, end_of_text, pattern)
    if pattern is not None:
        text = f"belongs to a .tiktoken file; {file.name} says itself how text is split"
        raise refuse("idle_knob", "tokenizer.pattern", pattern, text)
    if content.lstrip()[:1] == b"{":
        return as_tokenizer(HuggingFaceTokenizer(path, file, content, end_of_text))
    return as_tokenizer(SentencePieceTokenizer(path, content, end_of_text))
