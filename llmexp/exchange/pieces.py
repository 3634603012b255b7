"""A sentencepiece model as the tokenizer.json that transformers reads."""

from __future__ import annotations

import base64
import importlib
from typing import Any

UNIGRAM, BPE = 1, 2  # of sentencepiece's trainer_spec.model_type
NORMAL, UNKNOWN, CONTROL, BYTE = 1, 2, 3, 6  # of its pieces' type
MARK = "\u2581"  # stands for a space


def converted(content: bytes) -> dict[str, Any] | None:
    """Return the tokenizer.json of a sentencepiece model; None for one with parts that have no
    counterpart there, or where the package protobuf is missing, which reads the model."""
    try:
        read: Any = importlib.import_module("sentencepiece.sentencepiece_model_pb2")
    except ImportError:
        return None
    model = read.ModelProto()
    model.ParseFromString(content)
    trained, rules = model.trainer_spec, model.normalizer_spec
    known = {piece.type for piece in model.pieces} <= {NORMAL, UNKNOWN, CONTROL, BYTE}
    plain = rules.escape_whitespaces and not trained.treat_whitespace_as_suffix
    if not (known and plain) or trained.model_type not in (UNIGRAM, BPE):
        return None
    special = [i for i, piece in enumerate(model.pieces) if piece.type in (UNKNOWN, CONTROL)]
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": i, "content": model.pieces[i].piece, "special": True, **flags} for i in special
        ],
        "normalizer": {"type": "Sequence", "normalizers": _normalizers(rules)},
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": {"type": "Sequence", "decoders": _decoders(rules)},
        "model": (_unigram if trained.model_type == UNIGRAM else _bpe)(model),
    }


def _normalizers(rules: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    if rules.precompiled_charsmap:
        text = base64.b64encode(rules.precompiled_charsmap).decode()
        found.append({"type": "Precompiled", "precompiled_charsmap": text})
    if rules.remove_extra_whitespaces:
        found.append(_replace({"Regex": "^ +| +$"}, ""))
        found.append(_replace({"Regex": " {2,}"}, " "))
    if rules.add_dummy_prefix:
        found.append({"type": "Prepend", "prepend": MARK})
    return [*found, _replace({"String": " "}, MARK)]


def _replace(pattern: dict[str, str], content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


def _decoders(rules: Any) -> list[dict[str, Any]]:
    found = [_replace({"String": MARK}, " "), {"type": "ByteFallback"}, {"type": "Fuse"}]
    if rules.add_dummy_prefix:
        found.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return found


def _unigram(model: Any) -> dict[str, Any]:
    return {
        "type": "Unigram",
        "unk_id": next(i for i, piece in enumerate(model.pieces) if piece.type == UNKNOWN),
        "vocab": [[piece.piece, piece.score] for piece in model.pieces],
        "byte_fallback": model.trainer_spec.byte_fallback,
    }


def _bpe(model: Any) -> dict[str, Any]:
    """sentencepiece joins the two neighbours that make the piece of the highest score; the other
    library wants that as a list of pairs: for each piece all its cuts into two."""
    scores = {piece.piece: piece.score for piece in model.pieces if piece.type == NORMAL}
    merges = []
    for text in sorted(scores, key=scores.__getitem__, reverse=True):
        cuts = [(text[:at], text[at:]) for at in range(1, len(text))]
        merges += [[*cut] for cut in cuts if cut[0] in scores and cut[1] in scores]
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": next(piece.piece for piece in model.pieces if piece.type == UNKNOWN),
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": True,
        "byte_fallback": model.trainer_spec.byte_fallback,
        "ignore_merges": False,
        "vocab": {piece.piece: i for i, piece in enumerate(model.pieces)},
        "merges": merges,
    }
