"""Write a tokenizer as the files that transformers' AutoTokenizer reads, with the same ids."""

from __future__ import annotations

import base64
import importlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tiktoken

from llmexp.data.tokenizers.base import Tokenizer
from llmexp.data.tokenizers.files import (
    HuggingFaceTokenizer,
    SentencePieceTokenizer,
    from_file,
)
from llmexp.data.tokenizers.own import PROBE
from llmexp.data.tokenizers.training import byte_names

# AutoTokenizer takes a tokenizer.model for one of the model's family, and gives other ids.
SENTENCEPIECE = "sentencepiece.model"


# How transformers cuts text for a model_type, whatever class and rules the folder names.
QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def tokenizer_files(
    tokenizer: Tokenizer, length: int | None, model_type: str = ""
) -> dict[str, str | bytes]:
    """Return the files of a tokenizer by name; none for a tokenizer of the user's own.

    Nobody else knows how that one cuts text. `length`: the tokens that the model can read.
    """
    if isinstance(tokenizer.given, tiktoken.Encoding):
        content = json.dumps(_of_tiktoken(tokenizer.given), ensure_ascii=False, indent=1)
    elif isinstance(tokenizer.given, HuggingFaceTokenizer):
        content = tokenizer.given.content
    elif isinstance(tokenizer.given, SentencePieceTokenizer):
        if (found := of_sentencepiece(tokenizer.given.content)) is None:
            return {SENTENCEPIECE: tokenizer.given.content}
        content = json.dumps(found, ensure_ascii=False)
    else:
        return {}
    described: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": length or int(1e30),  # the library's own word for no limit
        "clean_up_tokenization_spaces": False,
    }
    if (end := tokenizer.eot_token) is not None:
        # sentencepiece decodes a control piece to nothing
        piece = getattr(tokenizer.given, "piece", None)
        text = piece(end) if piece else tokenizer.decode([end])
        described |= {"bos_token": text, "eos_token": text}
    if model_type == "qwen2" and not is_qwen2(json.loads(content)):
        # Without it transformers takes its own rules for the text of this model_type. It names no
        # code: none is there to be run.
        described["auto_map"] = {"AutoTokenizer": ["", ""]}
    text = json.dumps(described, indent=2) + "\n"
    return {"tokenizer.json": content, "tokenizer_config.json": text}


def is_qwen2(content: Mapping[str, Any]) -> bool:
    """Return whether a tokenizer.json cuts text as transformers does for Qwen 2 by itself."""
    parts = (content["pre_tokenizer"] or {}).get("pretokenizers", [{}])
    known = parts[0].get("pattern") == {"Regex": QWEN2} and content["model"]["type"] == "BPE"
    return known and content["normalizer"] == {"type": "NFC"}


def doubts(tokenizer: Tokenizer, files: Mapping[str, str | bytes]) -> list[str]:
    """Return what a user should know of the files of a tokenizer."""
    if not files:
        return [f"the tokenizer {tokenizer.name} is one of your own and is not written"]
    if SENTENCEPIECE in files:
        return [
            f"the tokenizer is written as {SENTENCEPIECE}, which the package sentencepiece reads; "
            "AutoTokenizer does not; it becomes a tokenizer.json where the package protobuf is "
            "installed, unless it has symbols of its user"
        ]
    if isinstance(tokenizer.given, SentencePieceTokenizer) and '"Precompiled"' in str(
        files["tokenizer.json"]
    ):
        return [
            "the tokenizer normalizes text: of a letter that it replaces and a combining mark "
            "behind it, AutoTokenizer may give other ids"
        ]
    return []


def tokenizer_beside(folder: Path) -> Tokenizer | None:
    """Return the tokenizer beside weights; None where there is none. Raises ValueError."""
    names = ("tokenizer.json", "tokenizer.model")
    if not any((folder / name).is_file() for name in names):
        return None
    return from_file(str(folder), None, None)


def same_ids(one: Tokenizer, other: Tokenizer) -> bool:
    """Return whether two tokenizers give a text, of many kinds of characters, the same ids."""
    return one.encode_ordinary(PROBE) == other.encode_ordinary(PROBE)


def _whole(added: Any, normalizer: Any, cut: Any, decoder: Any, model: Any) -> dict[str, Any]:
    """Return a tokenizer.json."""
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": normalizer,
        "pre_tokenizer": cut,
        "post_processor": None,
        "decoder": decoder,
        "model": model,
    }


def _bpe(vocab: dict[str, int], merges: list[list[str]], **more: Any) -> dict[str, Any]:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        **more,
        "vocab": vocab,
        "merges": merges,
    }


def _of_tiktoken(encoding: tiktoken.Encoding) -> dict[str, Any]:
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
    cut = {"type": "Sequence", "pretokenizers": [split, {**level, "use_regex": False}]}
    # a piece that is a token is one, as in tiktoken
    model = _bpe({**vocab, **unused}, merges, ignore_merges=True)
    # behind the vocabulary: special ones, and names for the ids between
    special = {number: name for name, number in encoding._special_tokens.items()}
    ids = range(1 + max(ranks.values()), 1 + max(special, default=0))
    added = [_added(number, special.get(number, f"<|unused_{number}|>")) for number in ids]
    return _whole(added, None, cut, {**level, "use_regex": True}, model)


def _added(number: int, content: str) -> dict[str, Any]:
    """Return a special token."""
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": number, "content": content, "special": True, **flags}


UNIGRAM, BPE = 1, 2  # of sentencepiece's trainer_spec.model_type
NORMAL, UNKNOWN, CONTROL, BYTE = 1, 2, 3, 6  # of its pieces' type
MARK = "\u2581"  # stands for a space


def of_sentencepiece(content: bytes) -> dict[str, Any] | None:
    """Return the tokenizer.json of a sentencepiece model.

    None for one with parts that have no counterpart there, or where the package protobuf is
    missing, which reads the model.
    """
    try:
        read = importlib.import_module("sentencepiece.sentencepiece_model_pb2")
    except ImportError:
        return None
    model = read.ModelProto()
    model.ParseFromString(content)
    trained, rules = model.trainer_spec, model.normalizer_spec
    known = {piece.type for piece in model.pieces} <= {NORMAL, UNKNOWN, CONTROL, BYTE}
    plain = rules.escape_whitespaces and not trained.treat_whitespace_as_suffix
    if not (known and plain) or trained.model_type not in (UNIGRAM, BPE):
        return None
    special = ((i, p) for i, p in enumerate(model.pieces) if p.type in (UNKNOWN, CONTROL))
    added = [_added(i, piece.piece) for i, piece in special]
    before: list[dict[str, Any]] = []
    after = [_replace({"String": MARK}, " "), {"type": "ByteFallback"}, {"type": "Fuse"}]
    if rules.precompiled_charsmap:
        text = base64.b64encode(rules.precompiled_charsmap).decode()
        before.append({"type": "Precompiled", "precompiled_charsmap": text})
    if rules.remove_extra_whitespaces:
        before += [_replace({"Regex": "^ +| +$"}, ""), _replace({"Regex": " {2,}"}, " ")]
    if rules.add_dummy_prefix:
        before.append({"type": "Prepend", "prepend": MARK})
        after.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    normalizer = {"type": "Sequence", "normalizers": [*before, _replace({"String": " "}, MARK)]}
    kind = _unigram if trained.model_type == UNIGRAM else _of_pieces
    return _whole(added, normalizer, None, {"type": "Sequence", "decoders": after}, kind(model))


def _replace(pattern: dict[str, str], content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


def _unigram(model: Any) -> dict[str, Any]:
    return {
        "type": "Unigram",
        "unk_id": next(i for i, piece in enumerate(model.pieces) if piece.type == UNKNOWN),
        "vocab": [[piece.piece, piece.score] for piece in model.pieces],
        "byte_fallback": model.trainer_spec.byte_fallback,
    }


def _of_pieces(model: Any) -> dict[str, Any]:
    """Return a sentencepiece model of pairs (BPE) with its merges: each piece cut into any two.

    sentencepiece joins the two neighbours that make the piece of the highest score; the other
    library wants that as a list of pairs.
    """
    scores = {piece.piece: piece.score for piece in model.pieces if piece.type == NORMAL}
    merges = []
    for text in sorted(scores, key=scores.__getitem__, reverse=True):
        cuts = [(text[:at], text[at:]) for at in range(1, len(text))]
        merges += [[*cut] for cut in cuts if cut[0] in scores and cut[1] in scores]
    unknown = next(piece.piece for piece in model.pieces if piece.type == UNKNOWN)
    fallback = model.trainer_spec.byte_fallback
    vocab = {piece.piece: i for i, piece in enumerate(model.pieces)}
    return _bpe(vocab, merges, unk_token=unknown, fuse_unk=True, byte_fallback=fallback)
