"""A tokenizer that was exported gives the same ids in Hugging Face's library."""

import json
from pathlib import Path

import pytest
import tiktoken
from hypothesis import given, settings
from hypothesis import strategies as st

from llmexp.data.tokenizers.base import Tokenizer, as_tokenizer
from llmexp.data.tokenizers.bytes import byte_level
from llmexp.data.tokenizers.files import from_file
from llmexp.data.tokenizers.training import train_bpe
from llmexp.hf.check import TEXTS as TEXTS_OF_CHECK
from llmexp.hf.families import FAMILIES
from llmexp.hf.tokenizer import QWEN2, doubts, is_qwen2, tokenizer_files
from tests.data.common import encoding, sentencepieces, wordpieces

library = pytest.importorskip("tokenizers")
pytest.importorskip("google.protobuf")
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)
WORDS = [
    "It's 1234567 dogs'\u2003and\n\n  cats",
    "na\u00efve caf\u00e9 \u4f60\u597d \U0001f600",
    "x <|endoftext|> y",
    "",
    "  a  b ",
    "\uff21\u00bd\u2026\n\tx",
]
TRAINED_ON = ["the cat's mat 12345 def f(x):", "caf\u00e9 A\u030a na\u00efve \u4f60 aaaa aaaaaaa"]


def there(tokenizer: Tokenizer):
    found = library.Tokenizer.from_str(tokenizer_files(tokenizer, 64)["tokenizer.json"])
    found.encode_special_tokens = True
    return found


def unigram(folder: Path) -> None:
    made = library.Tokenizer(library.models.Unigram())
    made.pre_tokenizer = library.pre_tokenizers.Metaspace()
    made.normalizer = library.normalizers.NFKC()
    special = {"unk_token": "[UNK]", "special_tokens": ["[UNK]", "[EOS]"]}
    trainer = library.trainers.UnigramTrainer(vocab_size=80, show_progress=False, **special)
    made.train_from_iterator(TRAINED_ON * 30, trainer)
    made.save(str(folder / "own.json"))


def made(kind: str, folder: Path) -> Tokenizer:
    if kind == "bytes":
        return byte_level()
    form, _, name = kind.partition(" ")
    if form == "published":
        return encoding(name, folder / "cache")
    if form in ("tiktoken", "json"):
        found = train_bpe(TRAINED_ON * 30, 320, name)
        (folder / "own.tiktoken").write_bytes(found.tiktoken)
        (folder / "own.json").write_text(found.tokenizer_json)
        return from_file(str(folder / f"own.{form}"), None, name if form == "tiktoken" else None)
    if form == "sentencepiece":
        model, _, rule = name.partition(" ")
        sizes = {"vocab_size": 330, "byte_fallback": True, "remove_extra_whitespaces": False}
        other = {"vocab_size": 70, "normalization_rule_name": "nmt_nfkc"}
        sizes |= {"normalization_rule_name": "identity"}
        sentencepieces(folder, TRAINED_ON * 30, model_type=model, **(other if rule else sizes))
        return from_file(str(folder / "own.model"), None, None)
    unigram(folder) if kind == "unigram" else wordpieces(folder, TRAINED_ON * 30)
    return from_file(str(folder / "own.json"), None, None)


KINDS = [
    "bytes", "published gpt2", "tiktoken gpt2", "tiktoken cl100k_base", "json gpt2",
    "json cl100k_base", "wordpiece", "unigram", "sentencepiece unigram", "sentencepiece bpe",
    "sentencepiece unigram nfkc", "sentencepiece bpe nfkc",
    pytest.param("published cl100k_base", marks=pytest.mark.slow),
]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_ids_are_the_same_in_the_library_and_beside_every_family(kind, tmp_path):
    """The library reads the table of the rule nmt_nfkc a little otherwise, which is a doubt."""
    tokenizer = made(kind, tmp_path)
    other, files = there(tokenizer), tokenizer_files(tokenizer, 64)

    def same(text: str) -> None:
        ids = tokenizer.encode_ordinary(text)
        assert other.encode(text, add_special_tokens=False).ids == ids
        assert other.decode(ids, skip_special_tokens=False) == tokenizer.decode(ids) or 0 in ids

    for text in [*WORDS, *TRAINED_ON]:
        same(text)
    if "nfkc" not in kind and kind not in ("wordpiece", "unigram"):
        settings(max_examples=100)(given(TEXTS)(same))()
    config = json.loads(files["tokenizer_config.json"])
    assert other.token_to_id(config["eos_token"]) == tokenizer.eot_token
    assert config["model_max_length"] == 64
    assert len(doubts(tokenizer, files)) == ("nfkc" in kind)
    if "nfkc" in kind:
        return
    transformers = pytest.importorskip("transformers")
    kinds = dict.fromkeys(family.model_type for family in FAMILIES)
    for family in ("gpt2", "qwen2") if "published" in kind else kinds:  # a large one takes seconds
        for file, content in tokenizer_files(tokenizer, None, family).items():
            (tmp_path / file).write_text(str(content))
        (tmp_path / "config.json").write_text(json.dumps({"model_type": family}))
        theirs = transformers.AutoTokenizer.from_pretrained(tmp_path, trust_remote_code=False)
        for text in TEXTS_OF_CHECK:
            ids = theirs(text, add_special_tokens=False)["input_ids"]
            assert ids == tokenizer.encode_ordinary(text), (family, text)
        assert theirs.eos_token_id == tokenizer.eot_token, family


def test_qwen2_itself_needs_no_note_for_transformers():
    content = json.loads(tokenizer_files(byte_level(), 64, "llama")["tokenizer.json"])
    assert not is_qwen2(content)
    split = {"type": "Split", "pattern": {"Regex": QWEN2}, "behavior": "Isolated", "invert": False}
    content["pre_tokenizer"]["pretokenizers"][0] = split
    assert not is_qwen2(content)
    assert is_qwen2(content | {"normalizer": {"type": "NFC"}})
    module = pytest.importorskip("transformers.models.qwen2.tokenization_qwen2")
    assert module.PRETOKENIZE_REGEX == QWEN2


def test_no_token_is_put_before_a_text(tmp_path):
    before = there(byte_level())
    before.post_processor = library.processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 256)]
    )
    assert before.encode("a").ids == [256, 97]
    before.save(str(tmp_path / "tokenizer.json"))
    tokenizer = from_file(str(tmp_path), None, None)
    assert there(tokenizer).encode("a").ids == tokenizer.encode_ordinary("a") == [97]


def test_ids_that_stand_for_nothing_move_no_other():
    ranks = {bytes([b]): b for b in range(256)} | {b"he": 258}
    special = {"<|a|>": 260, "<|endoftext|>": 263}
    more = {"mergeable_ranks": ranks, "special_tokens": special}
    tokenizer = as_tokenizer(tiktoken.Encoding("holes", pat_str=r"[\s\S]+", **more))
    other = there(tokenizer)
    assert {name: other.token_to_id(name) for name in special} == special
    for text in ("he unused 257 <|a|>", "unused 257", "<|a|>"):
        assert other.encode(text, add_special_tokens=False).ids == tokenizer.encode_ordinary(text)
