"""Write a tokenizer as the files that transformers' AutoTokenizer reads, with the same ids."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tiktoken

from llmexp.data.tokenizer_files import HuggingFace, SentencePiece, from_file
from llmexp.data.tokenizers import PROBE, Tokenizer, as_tokenizer, end_of_text
from llmexp.data.train_tokenizer import byte_names
from llmexp.exchange.pieces import converted

# AutoTokenizer takes a tokenizer.model for one of the model's family, and gives other ids.
SENTENCEPIECE = "sentencepiece.model"


def tokenizer_files(tokenizer: Tokenizer, length: int | None) -> dict[str, str | bytes]:
    """Return the files by name; none for a tokenizer of the user's own, of which nobody else knows
    how it cuts text. `length`: the tokens that the model can read."""
    if isinstance(tokenizer, tiktoken.Encoding):
        content = json.dumps(_bpe(tokenizer), ensure_ascii=False, indent=1)
        return {"tokenizer.json": content, "tokenizer_config.json": _config(tokenizer, length)}
    if isinstance(tokenizer.given, HuggingFace):
        # without what the run does without: a token before each text, cut or filled texts
        without = dict.fromkeys(("post_processor", "truncation", "padding"))
        held = json.dumps({**json.loads(tokenizer.given.content), **without}, ensure_ascii=False)
        return {"tokenizer.json": held, "tokenizer_config.json": _config(tokenizer, length)}
    if isinstance(tokenizer.given, SentencePiece):
        if (found := converted(tokenizer.given.content)) is None:
            return {SENTENCEPIECE: tokenizer.given.content}
        held = json.dumps(found, ensure_ascii=False)
        return {"tokenizer.json": held, "tokenizer_config.json": _config(tokenizer, length)}
    return {}


def doubts(tokenizer: Tokenizer, files: Mapping[str, str | bytes]) -> list[str]:
    """Return what is to be said of the files of a tokenizer."""
    if not files:
        return [f"the tokenizer {tokenizer.name} is one of your own and is not written"]
    if SENTENCEPIECE in files:
        return [
            f"the tokenizer is written as {SENTENCEPIECE}, which the package sentencepiece reads; "
            "AutoTokenizer does not; it becomes a tokenizer.json where the package protobuf is "
            "installed, unless it has symbols of its user"
        ]
    given = None if isinstance(tokenizer, tiktoken.Encoding) else tokenizer.given
    if isinstance(given, SentencePiece) and '"Precompiled"' in str(files["tokenizer.json"]):
        return [
            "the tokenizer normalizes text: of a letter that it replaces and a combining mark "
            "behind it, AutoTokenizer may give other ids"
        ]
    return []


def tokenizer_of(folder: Path) -> Tokenizer | None:
    """Return the tokenizer beside weights; None where there is none. Raises ValueError."""
    names = ("tokenizer.json", "tokenizer.model")
    if not any((folder / name).is_file() for name in names):
        return None
    return as_tokenizer(from_file(str(folder), None, None))


def same_ids(one: Tokenizer, other: Tokenizer) -> bool:
    """Return whether two tokenizers give a text, of many kinds of characters, the same ids."""
    return one.encode_ordinary(PROBE) == other.encode_ordinary(PROBE)


def _config(tokenizer: Tokenizer, length: int | None) -> str:
    found: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": length or int(1e30),  # the library's own word for no limit
        "clean_up_tokenization_spaces": False,
    }
    if (end := end_of_text(tokenizer)) is not None:
        given = None if isinstance(tokenizer, tiktoken.Encoding) else tokenizer.given
        if isinstance(given, SentencePiece):  # it decodes a control piece to nothing
            text = given.piece(end)
        else:
            text = tokenizer.decode([end])
        found |= {"bos_token": text, "eos_token": text}
    return json.dumps(found, indent=2) + "\n"


def _bpe(encoding: tiktoken.Encoding) -> dict[str, Any]:
    """Return the tokenizer.json of a tiktoken encoding.

    tiktoken joins the two neighbours that make the token of the lowest id; the other library wants
    that as a list of pairs: for each token, in the order of ids, all its cuts into two tokens.
    """
    ranks, character = encoding._mergeable_ranks, byte_names()

    def text(token: bytes) -> str:
        return "".join(character[byte] for byte in token)

    merges = []
    for token in sorted(ranks, key=ranks.__getitem__):
        cuts = [(token[:at], token[at:]) for at in range(1, len(token))]
        known = [cut for cut in cuts if cut[0] in ranks and cut[1] in ranks]
        known.sort(key=lambda cut: (ranks[cut[0]], ranks[cut[1]]))
        merges += [[text(left), text(right)] for left, right in known]
    # {1,3}+ takes all it can without giving back; Oniguruma reads a repetition in it.
    pattern = re.sub(r"(\{[\d,]+\})\+", r"\1", encoding._pat_str)
    vocab = {text(token): number for token, number in ranks.items()}
    # The library numbers added tokens one after another, behind the vocabulary, whatever is
    # written: ids that stand for nothing need a name. No text has a space when it is looked up.
    holes = set(range(max(ranks.values()))) - set(ranks.values())
    unused = {f"unused {number}": number for number in sorted(holes)}
    split = {
        "type": "Split",
        "pattern": {"Regex": pattern},
        "behavior": "Isolated",
        "invert": False,
    }
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added(encoding),
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [split, {**level, "use_regex": False}],
        },
        "post_processor": None,
        "decoder": {**level, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": True,  # a piece that is a token is one, as in tiktoken
            "vocab": {**vocab, **unused},
            "merges": merges,
        },
    }


def _added(encoding: tiktoken.Encoding) -> list[dict[str, Any]]:
    """Return the tokens behind the vocabulary: special ones, and names for the ids between."""
    special = {number: name for name, number in encoding._special_tokens.items()}
    ids = range(1 + max(encoding._mergeable_ranks.values()), 1 + max(special, default=0))
    common = {"special": True, **dict.fromkeys(("single_word", "lstrip", "rstrip"), False)}
    return [
        {
            "id": number,
            "content": special.get(number, f"<|unused_{number}|>"),
            "normalized": False,
            **common,
        }
        for number in ids
    ]
