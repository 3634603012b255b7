"""Write a tokenizer as the files that transformers' AutoTokenizer reads, with the same ids."""

from __future__ import annotations

import json
import re
from typing import Any

import tiktoken

from llmexp.data.tokenizer_files import HuggingFace, SentencePiece
from llmexp.data.tokenizers import Tokenizer, end_of_text
from llmexp.data.train_tokenizer import byte_names


def tokenizer_files(tokenizer: Tokenizer, length: int) -> dict[str, str | bytes]:
    """Return the files by name; none for a tokenizer of the user's own, of which nobody else knows
    how it cuts text. `length`: the tokens that the model can read."""
    if isinstance(tokenizer, tiktoken.Encoding):
        content = json.dumps(_bpe(tokenizer), ensure_ascii=False, indent=1)
        return {"tokenizer.json": content, "tokenizer_config.json": _config(tokenizer, length)}
    if isinstance(tokenizer.given, HuggingFace):
        held = tokenizer.given.content
        return {"tokenizer.json": held, "tokenizer_config.json": _config(tokenizer, length)}
    if isinstance(tokenizer.given, SentencePiece):
        return {"tokenizer.model": tokenizer.given.content}
    return {}


def _config(tokenizer: Tokenizer, length: int) -> str:
    found: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": length,
        "clean_up_tokenization_spaces": False,
    }
    if (end := end_of_text(tokenizer)) is not None:
        text = _text_of(tokenizer, end)
        found |= {"bos_token": text, "eos_token": text}
    return json.dumps(found, indent=2) + "\n"


def _text_of(tokenizer: Tokenizer, number: int) -> str:
    return tokenizer.decode([number])


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
    split = {
        "type": "Split",
        "pattern": {"Regex": pattern},
        "behavior": "Isolated",
        "invert": False,
    }
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    special = sorted(encoding._special_tokens.items(), key=lambda item: item[1])
    vocabulary = {text(token): number for token, number in ranks.items()}
    if [number for _, number in special] != [len(ranks) + i for i in range(len(special))]:
        # The library numbers added tokens one after another, unless it knows their ids.
        vocabulary |= dict(special)
    added = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": number, "content": name, "special": True, **added} for name, number in special
        ],
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
            "vocab": vocabulary,
            "merges": merges,
        },
    }
