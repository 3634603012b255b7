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
from llmexp.data.train_tokenizer import train_bpe
from llmexp.exchange.check import TEXTS as TEXTS_OF_CHECK
from llmexp.exchange.families import FAMILIES
from llmexp.exchange.tokenizer import QWEN2, doubts, is_qwen2, tokenizer_files
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
    (tmp_path / "own.tiktoken").write_bytes(train_bpe(texts, 320, pattern).tiktoken)
    return from_file(str(tmp_path / "own.tiktoken"), None, pattern)


@pytest.mark.parametrize("kind", ["bytes", "gpt2", "cl100k_base", "gpt2 json"])
def test_ids_are_the_same(kind: str, tmp_path: Path) -> None:
    tokenizer = byte_level() if kind == "bytes" else trained(tmp_path, kind.split()[0])
    if kind == "gpt2 json":
        (tmp_path / "tokenizer.json").write_text(tokenizer_files(tokenizer, 64)["tokenizer.json"])
        tokenizer = from_file(str(tmp_path), None, None)
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
    texts = ["the cat sat on the mat, 12345", "caf\u00e9 \u4f60\u597d \ufb01ne aaaa"]
    texts = [*texts, *WORDS[:2]] * 9
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts * 9), model_prefix=str(tmp_path / "own"), model_type=kind,
        vocab_size=330 if rule == "identity" else 70, byte_fallback=rule == "identity",
        remove_extra_whitespaces=rule != "identity", normalization_rule_name=rule,
        hard_vocab_limit=False, minloglevel=2,
    )  # fmt: skip
    tokenizer = from_file(str(tmp_path / "own.model"), None, None)
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


def every_kind(folder: Path) -> dict[str, Tokenizer]:
    """Make a tokenizer of each kind that can be exported."""
    sentencepiece = pytest.importorskip("sentencepiece")
    texts = ["the cat's mat 12345 def f(x):", "caf\u00e9 A\u030a na\u00efve"] * 30
    found = {"bytes": byte_level(), "gpt2": encoding("gpt2", folder / "cache")}
    for pattern in ("gpt2", "cl100k_base"):
        found[f"bpe {pattern}"] = trained(folder, pattern)
        (folder / "tokenizer.json").write_text(train_bpe(texts, 320, pattern).tokenizer_json)
        found[f"json {pattern}"] = from_file(str(folder), None, None)
    models, trainers, before = library.models, library.trainers, library.pre_tokenizers
    pieces, words = models.Unigram(), models.WordPiece(unk_token="[UNK]")
    special = {"special_tokens": ["[UNK]", "[EOS]"]}
    more = {"vocab_size": 80, "unk_token": "[UNK]", **special}
    for name, model, trainer, cut, rule in (
        ("wordpiece", words, trainers.WordPieceTrainer(**special), before.Whitespace(),
         library.normalizers.BertNormalizer()),
        ("unigram", pieces, trainers.UnigramTrainer(**more), before.Metaspace(),
         library.normalizers.NFKC()),
    ):  # fmt: skip
        made = library.Tokenizer(model)
        made.pre_tokenizer, made.normalizer = cut, rule
        made.train_from_iterator(texts, trainer)
        made.save(str(folder / f"{name}.json"))
        found[name] = from_file(str(folder / f"{name}.json"), None, None)
    for kind in ("unigram", "bpe"):
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(texts), model_prefix=str(folder / kind), model_type=kind,
            vocab_size=330, byte_fallback=True, hard_vocab_limit=False, minloglevel=2,
        )  # fmt: skip
        found[f"sentencepiece {kind}"] = from_file(str(folder / f"{kind}.model"), None, None)
    return found


def test_every_tokenizer_gives_its_ids_beside_every_family(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    kinds = dict.fromkeys(family.model_type for family in FAMILIES)
    assert set(kinds) == {"gpt2", "llama", "mistral", "qwen2", "qwen3", "olmo2"}
    for name, tokenizer in every_kind(tmp_path).items():
        plain = tokenizer_files(tokenizer, None, "gpt2")
        for kind in ("gpt2", "qwen2") if name == "gpt2" else kinds:  # a large one takes seconds
            files = tokenizer_files(tokenizer, None, kind) if kind == "qwen2" else plain
            for file, content in files.items():
                (tmp_path / file).write_text(str(content))
            (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
            theirs = transformers.AutoTokenizer.from_pretrained(tmp_path, trust_remote_code=False)
            for text in TEXTS_OF_CHECK:
                ids = theirs(text, add_special_tokens=False)["input_ids"]
                assert ids == tokenizer.encode_ordinary(text), (name, kind, text)
            assert theirs.eos_token_id == tokenizer.eot_token, (name, kind)


def test_qwen2_itself_needs_no_note_for_transformers() -> None:
    content = json.loads(tokenizer_files(byte_level(), 64, "llama")["tokenizer.json"])
    assert not is_qwen2(content)
    split = {"type": "Split", "pattern": {"Regex": QWEN2}, "behavior": "Isolated", "invert": False}
    content["pre_tokenizer"]["pretokenizers"][0] = split
    assert not is_qwen2(content)
    assert is_qwen2(content | {"normalizer": {"type": "NFC"}})
    module = pytest.importorskip("transformers.models.qwen2.tokenization_qwen2")
    assert module.PRETOKENIZE_REGEX == QWEN2


def test_no_token_is_put_before_a_text(tmp_path: Path) -> None:
    content = json.loads(tokenizer_files(byte_level(), 64)["tokenizer.json"])
    before = library.Tokenizer.from_str(json.dumps(content))
    end = [("<|endoftext|>", 256)]
    before.post_processor = library.processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=end
    )
    before.save(str(tmp_path / "tokenizer.json"))
    assert before.encode("a").ids == [256, 97]
    tokenizer = from_file(str(tmp_path), None, None)
    assert there(tokenizer).encode("a").ids == tokenizer.encode_ordinary("a") == [97]


def test_ids_that_stand_for_nothing_move_no_other() -> None:
    ranks = {bytes([b]): b for b in range(256)} | {b"he": 258}
    special = {"<|a|>": 260, "<|endoftext|>": 263}
    more = {"mergeable_ranks": ranks, "special_tokens": special}
    tokenizer = as_tokenizer(tiktoken.Encoding("holes", pat_str=r"[\s\S]+", **more))
    other = there(tokenizer)
    assert {name: other.token_to_id(name) for name in special} == special
    for text in ("he unused 257 <|a|>", "unused 257", "<|a|>"):
        assert other.encode(text, add_special_tokens=False).ids == tokenizer.encode_ordinary(text)
