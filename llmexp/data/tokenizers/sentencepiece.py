"""Sentencepiece models."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from llmexp.config.commands import need_package
from llmexp.config.values import refuse
from llmexp.data.tokenizers.pieces import keeps_bytes, piece_bytes, special_id


class SentencePieceTokenizer:
    """A sentencepiece model."""

    def __init__(self, path: str, content: bytes, end_of_text: str | None) -> None:
        library = need_package("sentencepiece", "tokenizer", f"reading {path}")
        self._model, self.content = library.SentencePieceProcessor(), content
        try:
            self._model.LoadFromSerializedProto(content)
        except Exception:  # of the library's C++ side
            text = "is neither a tokenizer.json, nor a .tiktoken file, nor a sentencepiece model"
            raise refuse("damaged_file", "tokenizer.path", path, text) from None
        self.name = Path(path).stem
        self.n_vocab = self._model.GetPieceSize()
        pieces = [self._model.IdToPiece(i) for i in range(self.n_vocab)]
        self.special_names = [p for i, p in enumerate(pieces) if self._model.IsControl(i)]
        self.eot_token = special_id(path, end_of_text, self.special_names, self._model.PieceToId)
        no_text = (self._model.IsControl, self._model.IsUnknown)
        lengths = [
            0 if any(has(i) for has in no_text) else piece_bytes(p) for i, p in enumerate(pieces)
        ]
        self.byte_lengths = np.array(lengths, dtype=np.int64)
        self.exact_bytes = keeps_bytes(self)

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        return self._model.EncodeAsIds(texts)

    def decode(self, ids: list[int]) -> str:
        return self._model.DecodeIds(ids)

    def piece(self, number: int) -> str:
        return str(self._model.IdToPiece(number))
