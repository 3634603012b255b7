"""The bytes of text that ids stand for, with every kind of tokenizer: those of the documents, as
Python counts them."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmexp.__main__ import run as command
from llmexp.data.sampler import RankSlice, TargetMask, eval_batches
from llmexp.data.stream import TokenStream
from llmexp.data.text_bytes import TextBytes
from llmexp.data.tokenizers.base import Tokenizer
from llmexp.data.tokenizers.files import from_file
from tests.conftest import train

from .common import json_lines, sentencepieces, text_corpus, wordpieces
from .common import made as made_of

library = pytest.importorskip("tokenizers")

TEXTS = [
    "The cat sat on the mat, 12345 times.",
    "caf\u00e9 \u4f60\u597d \ufb01ne  two  spaces\n\n\tindented",
    "\u1e9e\u0301",  # no piece of some tokenizers stands for it
    "x",
    "Gr\u00fc\u00dfe, \U0001f600 don't we'll " * 3,
]


SENTENCES = ["the cat sat on the mat, 12345 times.", "x two spaces"] * 40


def llama(path: Path, first: bool) -> None:
    """As the files of Llama 2; Mistral's later ones replace spaces before pieces are cut."""
    found = library.Tokenizer(library.models.BPE(byte_fallback=True, unk_token="<unk>"))
    trainer = library.trainers.BpeTrainer(
        vocab_size=420, special_tokens=["<unk>", "<s>", "</s>"], show_progress=False,
        initial_alphabet=["\u2581"],
    )  # fmt: skip
    if first:
        norms = library.normalizers
        found.normalizer = norms.Sequence([norms.Prepend("\u2581"), norms.Replace(" ", "\u2581")])
    else:
        found.pre_tokenizer = library.pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    found.train_from_iterator(["the cat sat on the mat"] * 9, trainer)
    content = json.loads(found.to_str())
    for number in range(256):
        content["model"]["vocab"][f"<0x{number:02X}>"] = len(content["model"]["vocab"])
    content["decoder"] = {"type": "ByteFallback"}
    (path / "own.json").write_text(json.dumps(content))


KINDS: dict[str, Callable[[Path], Any]] = {
    "bpe": lambda path: sentencepieces(
        path, SENTENCES, model_type="bpe", vocab_size=330, byte_fallback=True
    ),
    "unigram": lambda path: sentencepieces(path, SENTENCES, model_type="unigram", vocab_size=60),
    "wordpiece": lambda path: wordpieces(path, [TEXTS[0], TEXTS[3]] * 9),
    "llama": lambda path: llama(path, True),
    "mistral": lambda path: llama(path, False),
}


@pytest.fixture(scope="module", params=KINDS)
def made(request, tmp_path_factory) -> tuple[Path, Tokenizer]:
    folder = tmp_path_factory.mktemp(request.param)
    KINDS[request.param](folder)
    (path,) = [p for p in folder.iterdir() if p.suffix in (".json", ".model")]
    return path, from_file(str(path), None, None)


def held_out(folder: Path, tokenizer: Tokenizer) -> TokenStream:
    """Write documents, and return the stream of those that are held out."""
    json_lines(folder / "web.jsonl", [f"web {text}" for text in TEXTS * 3])
    json_lines(folder / "val.jsonl", [f"val {text}" for text in TEXTS])
    found = made_of(folder, tokenizer=tokenizer, sequence_length=7).val
    assert found is not None
    return found


def by_document(found: TextBytes, stream, end: int | None) -> list[float]:
    """Return the bytes of each document, of all its ids."""
    ids = stream.read(0, len(stream))
    bytes_t = found.at(stream, np.array([-1]), ids[None])[0]
    stops = np.append(np.flatnonzero(ids == end) + 1, len(ids))
    return [float(bytes_t[a:b].sum()) for a, b in zip([0, *stops], stops, strict=False)]


def test_the_bytes_of_each_document(made, tmp_path):
    _, tokenizer = made
    stream = held_out(tmp_path, tokenizer)
    found, end = TextBytes(tokenizer, True, None), tokenizer.eot_token
    wanted = [len(f"val {text}".encode()) for text in TEXTS]
    assert by_document(found, stream, end) == pytest.approx([*wanted, 0], rel=1e-12)
    assert not sum(by_document(TextBytes(tokenizer, False, None), stream, end))
    # A stream in windows: each target counts once, and what is no target does not.
    seen = np.zeros(len(stream))
    for starts_b, _, targets_bt in eval_batches(
        stream, RankSlice(2), sequence_length=7, max_sequences=10**6, mask=TargetMask()
    ):
        bytes_bt = found.at(stream, starts_b, targets_bt.numpy())
        for start, row, there in zip(starts_b, bytes_bt, targets_bt, strict=True):
            if there[0] >= 0:
                seen[start + 1 : start + 8] += row
            else:
                assert not row.any()
    ids = stream.read(0, len(stream))
    last = (len(stream) - 1) // 7 * 7 + 1
    each = found.at(stream, np.array([-1]), ids[None])[0]
    assert seen[1:last] == pytest.approx(each[1:last])
    # Of text files, and of a text that a limit of tokens cut: whole documents are exact.
    for number, text in enumerate(TEXTS):
        (tmp_path / f"{number}.txt").write_text(text * 3)
    sizes = np.array([len(text.encode()) * 3 for text in TEXTS])
    for most in (None, 40):
        knobs = {"val_ratio": 0.0, "max_tokens": most, "cache_dir": f"{tmp_path}/cache"}
        cut = text_corpus(f"{tmp_path}/?.txt", tokenizer=tokenizer, **knobs)
        *whole, _ = by_document(found, cut.train, end)  # the end of the last one is not there
        assert all(abs(sizes - size).min() < 1e-9 for size in whole)
        assert len(whole) == len(TEXTS) - 1 or most


@pytest.mark.parametrize("made", ["unigram"], indirect=True)
def test_rows_and_evaluate_have_bits_per_byte(made, tmp_path, monkeypatch, capsys):
    path, tokenizer = made
    stream = held_out(tmp_path, tokenizer)
    train(
        tmp_path, "run", "data=corpus", "data.sources.web.files=web.jsonl", "tokenizer=file",
        f"tokenizer.path={path}", "data.val.far.files=val.jsonl", "data.cache_dir=cache",
        "train.max_steps=2", "train.ema=0.5", "train.eval_tokens=null", "batch.sequence_length=1",
        "batch.document_mask=false",
    )  # fmt: skip
    row = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    # Sequences of one target: every id but the first is one.
    ids = stream.read(0, len(stream))
    first = TextBytes(tokenizer, True, None).at(stream, np.array([-1]), ids[None])[0, 0]
    whole = sum(len(f"val {text}".encode()) for text in TEXTS) - first
    for key in ("val", "val/far", "val/ema"):
        wanted = row[f"{key}/loss"] * (len(stream) - 1) / math.log(2) / whole
        assert row[f"{key}/bits_per_byte"] == pytest.approx(wanted, rel=1e-6)
    monkeypatch.chdir(tmp_path)
    assert command(["evaluate", "run", "--json", "--by", "document"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["sets"]
    assert found["bits_per_byte"] == pytest.approx(row["val/bits_per_byte"], rel=1e-6)
    sizes = [
        one["loss"] * one["tokens"] / math.log(2) / one["bits_per_byte"]
        for one in found["documents"]
    ]
    assert sizes[1:] == pytest.approx([len(f"val {text}".encode()) for text in TEXTS[1:]])
