"""tokenizer=file: tokenizers that lie in files, of Hugging Face, tiktoken and sentencepiece.

Each is read by the library that made it and offers what `own.NEEDED` lists.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from llmexp.config.commands import need_package
from llmexp.config.kinds import kind_of_error
from llmexp.config.values import knob, refuse
from llmexp.data.encode import PATTERNS
from llmexp.data.tokenizers.base import END_OF_TEXT, Tokenizer, as_tokenizer
from llmexp.data.tokenizers.own import PROBE
from llmexp.data.tokenizers.tiktoken import read_ranks
from llmexp.system.text import first_of

# The usual names of the token between documents, looked for in this order.
ENDS = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]")
# Keys of a tokenizer.json that are not used, and those of its model that make it random.
WITHOUT = ("post_processor", "truncation", "padding")
RANDOM = ("dropout", "alpha", "nbest_size")


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
        special = {token.content: number for number, token in added.items() if token.special}
        self.special_names = list(special)
        given = end_of_text or _declared_end(file)
        self.eot_token = _special_id(path, given, self.special_names, special.get)
        # The bytes of each token as its decoder writes them: one for each character of a byte-level
        # token; of others, one for <0xNN> and for the mark of a space.
        size = len if "ByteLevel" in str(self._tokenizer.decoder) else _piece_bytes
        self.byte_lengths = np.zeros(self.n_vocab, dtype=np.int64)
        for token in vocabulary.keys() - special:
            self.byte_lengths[vocabulary[token]] = size(token)
        self.exact_bytes = keeps_bytes(self)

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        return [one.ids for one in self._tokenizer.encode_batch(texts, add_special_tokens=False)]

    def decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)


def _is_cuttable(content: dict[str, Any]) -> bool:
    """Return whether one of PATTERNS alone decides how a tokenizer.json splits text."""
    if content["normalizer"] or not all(token["special"] for token in content["added_tokens"]):
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


class SentencePieceTokenizer:
    """A sentencepiece model."""

    def __init__(self, path: str, content: bytes, end_of_text: str | None) -> None:
        library = need_package("sentencepiece", "tokenizer", f"reading {path}")
        model = self._model = library.SentencePieceProcessor()
        self.content = content
        try:
            model.LoadFromSerializedProto(content)
        except Exception:  # of the library's C++ side
            text = "is neither a tokenizer.json, nor a .tiktoken file, nor a sentencepiece model"
            raise refuse("damaged_file", "tokenizer.path", path, text) from None
        self.name, self.n_vocab = Path(path).stem, model.GetPieceSize()
        pieces = [self.piece(i) for i in range(self.n_vocab)]
        self.special_names = [p for i, p in enumerate(pieces) if model.IsControl(i)]
        self.eot_token = _special_id(path, end_of_text, self.special_names, model.PieceToId)
        lengths = [
            0 if model.IsControl(i) or model.IsUnknown(i) else _piece_bytes(p)
            for i, p in enumerate(pieces)
        ]
        self.byte_lengths = np.array(lengths, dtype=np.int64)
        self.exact_bytes = keeps_bytes(self)

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        return self._model.EncodeAsIds(texts)

    def decode(self, ids: list[int]) -> str:
        return self._model.DecodeIds(ids)

    def piece(self, number: int) -> str:
        return self._model.IdToPiece(number)


def _special_id(path: str, given: str | None, known: Sequence[str], ids: Any) -> int | None:
    """Return the id of the token between documents. Raises ValueError for one that is not there."""
    if given is not None and given not in known:
        there = first_of(known, 12) or "none"
        text = f"{path} has no such token; its special tokens are: {there}"
        raise refuse("unknown_option", "tokenizer.end_of_text", given, text)
    name = given or next((end for end in ENDS if end in known), None)
    return None if name is None else int(ids(name))


def _piece_bytes(token: str) -> int:
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
