"""What the data tests share."""

import gzip
import hashlib
import json
import os
import shutil
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmexp.data.sources.corpus import corpus
from llmexp.data.sources.text import text
from llmexp.data.sources.tokens import tokens
from llmexp.data.stream import Corpus, TokenStream
from llmexp.data.tokenizers.base import Tokenizer
from llmexp.data.tokenizers.bytes import byte_level
from llmexp.data.tokenizers.tiktoken import pretrained

SHARED = Path(__file__).resolve().parents[2] / "../shared"


def encoding(name: str, folder: Path) -> Tokenizer:
    """A published encoding from a copy of the shared files in `folder` (tiktoken deletes what it
    finds damaged)."""
    if not (SHARED / "tiktoken").is_dir():
        pytest.skip("the tokenizer files are not there")
    if not folder.exists():
        shutil.copytree(SHARED / "tiktoken", folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(os.environ, "TIKTOKEN_CACHE_DIR", str(folder))
        return pretrained(name)


def json_lines(path: Path, texts: list[str], key: str = "text") -> Path:
    content = "".join(json.dumps({key: text}, ensure_ascii=False) + "\n" for text in texts).encode()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


def texts_of(name: str, count: int) -> list[str]:
    return [f"{name} {i}: " + "so many wörds " * (1 + i * i % 11) for i in range(count)]


def built(
    source: Any,
    *,
    tokenizer: Tokenizer,
    sequence_length: int = 8,
    ask_again: bool = False,
    **knobs: Any,
) -> Corpus:
    """Return what a source of documents makes."""
    found: Corpus = source(**knobs).build(tokenizer, sequence_length, ask_again)
    return found


def made(folder: Path, **changes: Any) -> Corpus:
    """Return data=corpus of the folder's web.jsonl, with val.jsonl beside it."""
    knobs: dict[str, Any] = {
        "sources": {"web": {"files": f"{folder}/web.jsonl"}},
        "val": {"far": {"files": f"{folder}/val.jsonl"}},
        "val_main": None,
        "stages": [],
        "max_epochs": None,
        "on_bad_record": "refuse",
        "cache_dir": f"{folder}/cache",
        "tokenizer": byte_level(),
        "sequence_length": 8,
    }
    return built(corpus, **knobs | changes)


def text_corpus(train: Any = "*.txt", val: Any = None, **changes: Any) -> Corpus:
    """Return data=text of these files, as bytes."""
    knobs = {"tokenizer": byte_level(), "val_ratio": 0.1, "max_tokens": None, "cache_dir": None}
    return built(text, train_files=train, val_files=val, **knobs | {"seed": 0} | changes)


def token_corpus(train: Any, val: Any = None, **changes: Any) -> Corpus:
    """Return data=tokens of these files."""
    knobs = {"dtype": None, "val_ratio": 0.1, "max_tokens": None, "cache_dir": None}
    knobs |= {"vocab_size": 257, "sequence_length": 4}
    return tokens(train_files=train, val_files=val, **knobs | changes)


def tree(folder: Path) -> dict[str, str]:
    """Digest of each file, but for locks."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.suffix != ".lock"
    }


def llm_c(said: int, there: int, magic: int = 20240520, version: int = 1) -> bytes:
    """Return a file of llm.c that says a number of ids and holds another."""
    header = np.array([magic, version, said, *[0] * 253], "<i4")
    return header.tobytes() + np.arange(there, dtype="<u2").tobytes()


def megatron(path: Path, documents: list[list[int]], code: int = 8, kind: str = "<u2") -> bytes:
    """Write a pair as Megatron's tools/preprocess_data.py does, a sequence a document; return the
    index."""
    lengths = np.array([len(ids) for ids in documents], "<i4")
    path.write_bytes(b"".join(np.array(ids, kind).tobytes() for ids in documents))
    starts = (np.cumsum(lengths) - lengths).astype("<i8") * np.dtype(kind).itemsize
    index = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, len(documents), len(documents) + 1)
    index += lengths.tobytes() + starts.tobytes() + np.arange(len(documents) + 1).tobytes()
    path.with_suffix(".idx").write_bytes(index)
    return index


def sentencepieces(folder: Path, texts: list[str], **knobs: Any) -> Path:
    """Train a sentencepiece model, own.model."""
    trainer = pytest.importorskip("sentencepiece").SentencePieceTrainer
    usual = {"model_prefix": str(folder / "own"), "hard_vocab_limit": False, "minloglevel": 2}
    trainer.train(sentence_iterator=iter(texts), **usual, **knobs)
    return folder / "own.model"


def wordpieces(folder: Path, texts: list[str], end: str = "[EOS]") -> Path:
    """Train a tokenizer of word pieces as BERT's, own.json."""
    library = pytest.importorskip("tokenizers")
    found = library.Tokenizer(library.models.WordPiece(unk_token="[UNK]"))
    found.normalizer = library.normalizers.BertNormalizer()
    found.pre_tokenizer = library.pre_tokenizers.BertPreTokenizer()
    special = {"vocab_size": 80, "special_tokens": ["[UNK]", end]}
    trainer = library.trainers.WordPieceTrainer(show_progress=False, **special)
    found.train_from_iterator(texts, trainer)
    found.decoder = library.decoders.WordPiece()
    found.save(str(folder / "own.json"))
    return folder / "own.json"


def all_ids(stream: TokenStream | None) -> list[int]:
    return [] if stream is None else stream.read(0, len(stream)).tolist()
