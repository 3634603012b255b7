"""A tokenizer that was exported gives the same ids in Hugging Face's library."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tiktoken
from hypothesis import given, settings
from hypothesis import strategies as st

from llmexp.data.tokenizer_files import from_file
from llmexp.data.tokenizers import Tokenizer, as_tokenizer, byte_level
from llmexp.data.train_tokenizer import train
from llmexp.exchange.tokenizer import doubts, tokenizer_files
from tests.data.common import encoding

library = pytest.importorskip("tokenizers")
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)
WORDS = [
    "It's 1234567 dogs'\u2003and\n\n  cats",
    "na\u00efve caf\u00e9 \u4f60\u597d \U0001f600",
    "x <|endoftext|> y",
    "",
]


def there(tokenizer: Tokenizer):
    found = library.Tokenizer.from_str(tokenizer_files(tokenizer, 64)["tokenizer.json"])
    found.encode_special_tokens = True
    return found


def trained(tmp_path: Path, pattern: str = "gpt2") -> Tokenizer:
    texts = ["the cat sat on the mat, the cat's mat 12345", "caf\u00e9 caf\u00e9 aaaa aaaaaaa"] * 30
    (tmp_path / "own.tiktoken").write_bytes(train(texts, 320, pattern).tiktoken)
    return as_tokenizer(from_file(str(tmp_path / "own.tiktoken"), None, pattern))


@pytest.mark.parametrize("kind", ["bytes", "gpt2", "cl100k_base", "gpt2 json"])
def test_ids_are_the_same(kind: str, tmp_path: Path) -> None:
    tokenizer = (
        as_tokenizer(byte_level()) if kind == "bytes" else trained(tmp_path, kind.split()[0])
    )
    if kind == "gpt2 json":
        (tmp_path / "tokenizer.json").write_text(tokenizer_files(tokenizer, 64)["tokenizer.json"])
        tokenizer = as_tokenizer(from_file(str(tmp_path), None, None))
    other = there(tokenizer)

    @settings(max_examples=200)
    @given(TEXTS)
    def same(text: str) -> None:
        ids = tokenizer.encode_ordinary(text)
        assert other.encode(text, add_special_tokens=False).ids == ids
        assert other.decode(ids, skip_special_tokens=False) == text

    for text in WORDS:
        assert other.encode(text, add_special_tokens=False).ids == tokenizer.encode_ordinary(text)
    same()
    config = json.loads(tokenizer_files(tokenizer, 64)["tokenizer_config.json"])
    assert config["eos_token"] == "<|endoftext|>"
    assert config["model_max_length"] == 64


@pytest.mark.parametrize("kind", ["unigram", "bpe"])
@pytest.mark.parametrize("rule", ["identity", "nmt_nfkc"])
def test_ids_of_sentencepiece_are_the_same(kind: str, rule: str, tmp_path: Path) -> None:
    sentencepiece = pytest.importorskip("sentencepiece")
    pytest.importorskip("google.protobuf")
    texts = [
        "the cat sat on the mat, 12345",
        "caf\u00e9 \u4f60\u597d \ufb01ne aaaa",
        *WORDS[:2],
    ] * 9
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts * 9), model_prefix=str(tmp_path / "own"), model_type=kind,
        vocab_size=330 if rule == "identity" else 70, byte_fallback=rule == "identity",
        remove_extra_whitespaces=rule != "identity", normalization_rule_name=rule,
        hard_vocab_limit=False, minloglevel=2,
    )  # fmt: skip
    tokenizer = as_tokenizer(from_file(str(tmp_path / "own.model"), None, None))
    other = there(tokenizer)

    def same(text: str) -> None:
        ids = tokenizer.encode_ordinary(text)
        assert other.encode(text, add_special_tokens=False).ids == ids
        assert other.decode(ids, skip_special_tokens=False) == tokenizer.decode(ids) or 0 in ids

    for text in [*texts[:3], "  a  b ", "\uff21\u00bd\u2026\n\tx"]:
        same(text)
    files = tokenizer_files(tokenizer, 64)
    assert json.loads(files["tokenizer_config.json"])["eos_token"] == "</s>"
    assert len(doubts(tokenizer, files)) == (rule != "identity")
    if rule == "identity":  # the other library reads the table of the other rule a little otherwise
        settings(max_examples=200)(given(TEXTS)(same))()


@pytest.mark.parametrize("name", ["gpt2", pytest.param("cl100k_base", marks=pytest.mark.slow)])
def test_published_encodings_give_the_same_ids(name: str, tmp_path: Path) -> None:
    tokenizer = encoding(name, tmp_path / "cache")
    other = there(tokenizer)
    for text in [*WORDS, Path(__file__).read_text()]:
        ids = tokenizer.encode_ordinary(text)
        assert other.encode(text, add_special_tokens=False).ids == ids
    assert other.token_to_id("<|endoftext|>") == tokenizer._special_tokens["<|endoftext|>"]


def test_no_token_is_put_before_a_text(tmp_path: Path) -> None:
    content = json.loads(tokenizer_files(as_tokenizer(byte_level()), 64)["tokenizer.json"])
    content["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [
            {"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
        ],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {
            "<|endoftext|>": {"id": "<|endoftext|>", "ids": [256], "tokens": ["<|endoftext|>"]}
        },
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    before = library.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert before.encode("a").ids == [256, 97]
    tokenizer = as_tokenizer(from_file(str(tmp_path), None, None))
    assert there(tokenizer).encode("a").ids == tokenizer.encode_ordinary("a") == [97]


def test_ids_that_stand_for_nothing_move_no_other() -> None:
    ranks = {bytes([b]): b for b in range(256)} | {b"he": 258}
    special = {"<|a|>": 260, "<|endoftext|>": 263}
    tokenizer = tiktoken.Encoding(
        "holes", pat_str=r"[\s\S]+", mergeable_ranks=ranks, special_tokens=special
    )
    other = there(tokenizer)
    assert {name: other.token_to_id(name) for name in special} == special
    for text in ("he unused 257 <|a|>", "unused 257", "<|a|>"):
        assert other.encode(text, add_special_tokens=False).ids == tokenizer.encode_ordinary(text)
