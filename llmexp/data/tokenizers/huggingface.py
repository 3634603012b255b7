"""A tokenizer.json, read by the library tokenizers."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np

from llmexp.config.commands import need_package
from llmexp.config.values import refuse
from llmexp.data.encode import PATTERNS
from llmexp.data.tokenizers.pieces import keeps_bytes, piece_bytes, special_id

# Keys of a tokenizer.json that are not used, and those of its model that make it random.
WITHOUT = ("post_processor", "truncation", "padding")
RANDOM = ("dropout", "alpha", "nbest_size")


class HuggingFaceTokenizer:
    """A tokenizer.json, read by the library tokenizers, without what is random in it.

    That is training's: BPE dropout, and the sampling of unigram models.
    """

    def __init__(self, path: str, file: Path, content: bytes, end_of_text: str | None) -> None:
        library = need_package("tokenizers", "tokenizer", f"reading {path}")
        try:
            found = json.loads(content) | dict.fromkeys(WITHOUT)
            found["model"] |= {key: None for key in RANDOM if key in found["model"]}
            self.content = json.dumps(found, ensure_ascii=False)  # all that decides ids
            self._tokenizer = library.Tokenizer.from_str(self.content)
        except Exception as error:  # of the library's Rust side
            raise refuse(
                "damaged_file", "tokenizer.path", path, f"is not a tokenizer.json ({error})"
            ) from None
        self.is_cuttable = _is_cuttable(json.loads(self._tokenizer.to_str()))
        self._tokenizer.encode_special_tokens = True  # "<|endoftext|>" in a text ends no document
        self.name = file.parent.name if file.name == "tokenizer.json" else file.stem
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        self.n_vocab = 1 + max(vocabulary.values())
        added = self._tokenizer.get_added_tokens_decoder()
        self._special = {token.content: number for number, token in added.items() if token.special}
        given = end_of_text or _declared_end(file)
        self.special_names = list(self._special)
        self.eot_token = special_id(path, given, self.special_names, self._special.get)
        # The bytes of each token as its decoder writes them: one for each character of a byte-level
        # token; of others, one for <0xNN> and for the mark of a space.
        is_byte_level = "ByteLevel" in str(self._tokenizer.decoder)
        self.byte_lengths = np.zeros(self.n_vocab, dtype=np.int64)
        for token, number in vocabulary.items():
            if token not in self._special:
                self.byte_lengths[number] = len(token) if is_byte_level else piece_bytes(token)
        self.exact_bytes = keeps_bytes(self)

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        found = self._tokenizer.encode_batch(texts, add_special_tokens=False)
        return [one.ids for one in found]

    def decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)


def _is_cuttable(content: dict[str, Any]) -> bool:
    """Return whether one of PATTERNS alone decides how a tokenizer.json splits text."""
    if content["normalizer"]:
        return False
    if not all(token["special"] for token in content["added_tokens"]):
        return False
    before = content["pre_tokenizer"] or {}
    parts = before.get("pretokenizers", [before])
    if parts[-1].get("type") != "ByteLevel" or parts[-1].get("add_prefix_space"):
        return False
    if len(parts) == 1:  # it has GPT-2's
        return bool(parts[0]["use_regex"])
    split = parts[0].get("pattern", {}).get("Regex")
    alone = len(parts) == 2 and not parts[1]["use_regex"]
    isolated = parts[0].get("behavior") == "Isolated" and not parts[0].get("invert")
    return alone and isolated and split in PATTERNS.values()


def _declared_end(file: Path) -> str | None:
    """Return the end-of-text token that the tokenizer_config.json beside a tokenizer.json names."""
    beside = [one.parent / "tokenizer_config.json" for one in (file, file.resolve())]
    try:
        found = json.loads(next(filter(os.path.lexists, beside)).read_text()).get("eos_token")
    except (StopIteration, OSError, ValueError, AttributeError):
        return None
    text = found.get("content") if isinstance(found, dict) else found
    return text if isinstance(text, str) else None
