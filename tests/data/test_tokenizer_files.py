"""Tokenizers in files give the ids of the libraries that made them; tests/refusals/data.yaml has
what is no tokenizer."""

import base64
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tiktoken
from hypothesis import given
from hypothesis import strategies as st

from llmexp.data.encode import PATTERNS, split_text
from llmexp.data.sources.text import text as text_source
from llmexp.data.tokenizers.base import as_tokenizer
from llmexp.data.tokenizers.bytes import byte_level
from llmexp.data.tokenizers.files import from_file, keeps_bytes
from llmexp.data.tokenizers.own import PROBE
from llmexp.data.tokenizers.training import SMALLEST, train_bpe
from llmexp.data.work import training_documents
from llmexp.hf.tokenizer import tokenizer_files

from .common import all_ids, built, sentencepieces

pytestmark = pytest.mark.usefixtures("suggestions_are_read")

tokenizers = pytest.importorskip("tokenizers")
sentencepiece = pytest.importorskip("sentencepiece")

TEXTS = [
    "The quick brown fox jumps over the lazy dog, 1234 times. " * 3,
    "Grüße aus München, 你好! \U0001f600 don't we'll\n\n\tindented  text\r\n",
    "def f(x):\n    return x ** 2  # squares\n" * 4,
]
END = "<|endoftext|>"


def documents_of(texts: list[str]) -> Iterator[Iterator[str]]:
    return (iter((text,)) for text in texts)


@pytest.fixture(scope="module", params=PATTERNS)
def trained(request, tmp_path_factory) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp("bpe")
    found = train_bpe(documents_of(TEXTS), 320, request.param)
    (folder / "tokenizer.json").write_text(found.tokenizer_json)
    (folder / "mine.tiktoken").write_bytes(found.tiktoken)
    assert (found.n_vocab, found.documents) == (320, 3)
    return folder, request.param


@given(text=st.one_of(st.text(), st.sampled_from([*TEXTS, END, f"a{END}b"])))
def test_both_forms_of_a_trained_tokenizer_give_the_ids_of_the_library(trained, text):
    folder, pattern = trained
    library = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    library.encode_special_tokens = True
    wanted = library.encode(text, add_special_tokens=False).ids
    for path, split in ((folder, None), (folder / "mine.tiktoken", pattern)):
        ours = from_file(str(path), None, split)
        assert ours.encode_ordinary(text) == wanted
        assert ours.decode(wanted) == text
        assert ours.byte_lengths[wanted].sum() == len(text.encode())
        assert (ours.n_vocab, ours.eot_token) == (320, 319)


def test_long_documents_are_cut_without_a_change_of_ids_or_of_the_training(trained):
    folder, pattern = trained
    text = "".join(TEXTS) * 20

    def cut(size: int) -> Iterator[str]:
        return split_text((text[i : i + 300] for i in range(0, len(text), 300)), size)

    pieces = list(cut(700))
    assert len(pieces) > 5
    for path, split in ((folder, None), (folder / "mine.tiktoken", pattern)):
        ours = from_file(str(path), None, split)
        assert ours.is_cuttable
        ids = [number for piece in pieces for number in ours.encode_ordinary(piece)]
        assert ids == ours.encode_ordinary(text)
    made = [train_bpe(iter([some]), 400, pattern) for some in (iter((text,)), cut(500))]
    whole, in_pieces = (json.loads(one.tokenizer_json)["model"] for one in made)
    assert in_pieces == whole


@pytest.mark.parametrize(
    ("there", "instead"),
    [
        ('"normalizer": null', '"normalizer": {"type": "NFC"}'),
        ('{"Regex": "', '{"Regex": "x|'),
        ('"special": true', '"special": false'),
        ('"add_prefix_space": false', '"add_prefix_space": true'),
    ],
)
def test_a_tokenizer_that_does_more_than_split_by_a_known_pattern_is_not_cut(
    trained, tmp_path, there, instead
):
    content = json.dumps(json.loads((trained[0] / "tokenizer.json").read_text()))
    assert there in content
    (tmp_path / "tokenizer.json").write_text(content.replace(there, instead))
    assert not from_file(str(tmp_path), None, None).is_cuttable


def unigram() -> str:
    pieces = [("<unk>", 0.0), *((c, -9.0) for c in sorted(set("".join(TEXTS))))]
    pieces += [(TEXTS[0][i : i + n], -n * 8.5) for n in (2, 3) for i in range(40)]
    vocabulary = list(dict(pieces).items())
    return tokenizers.Tokenizer(tokenizers.models.Unigram(vocabulary, unk_id=0)).to_str()


RANDOM = [{"dropout": 0.1}, {"dropout": 1.0}, {"alpha": 0.5}, {"alpha": 0.1, "nbest_size": 20}]


@pytest.mark.parametrize("how", RANDOM, ids=str)
def test_what_is_random_in_a_tokenizer_is_off(trained, tmp_path, how):
    """At each command the same ids, those of the file without it, in an export too."""
    given = (trained[0] / "tokenizer.json").read_text() if "dropout" in how else unigram()
    content = json.loads(given)
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    wanted = from_file(str(tmp_path), None, None)
    content["model"] |= how
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    found = [from_file(str(tmp_path), None, None) for _ in range(3)]
    for text in TEXTS:
        ids = wanted.encode_ordinary(text * 20)
        assert all(one.encode_ordinary(text * 20) == ids for one in found)
    assert len({one.identity for one in found}) == 1
    library = tokenizers.Tokenizer.from_str(tokenizer_files(found[0], None)["tokenizer.json"])
    ids = wanted.encode_ordinary(TEXTS[0])
    assert all(library.encode(TEXTS[0]).ids == ids for _ in range(3))


def test_other_merges_of_the_same_pieces_are_another_tokenizer(trained, tmp_path):
    """Although no probe shows it: prepared tokens of the one are none of the other."""
    content = json.loads((trained[0] / "tokenizer.json").read_text())
    one = from_file(str(trained[0]), None, None)
    content["model"]["merges"].pop()
    for spaces in (None, 2):  # how a file is written down does not count
        (tmp_path / f"{spaces}.json").write_text(json.dumps(content, indent=spaces))
    other, same = (from_file(str(tmp_path / f"{n}.json"), None, None) for n in (None, 2))
    assert other.encode_ordinary(PROBE) == one.encode_ordinary(PROBE)
    assert other.identity == same.identity != one.identity


def test_a_tokenizer_of_files_elsewhere(trained, tmp_path):
    """Links are followed, also to what stands beside; a broken one is no other file."""
    for folder in ("disk", "folder"):
        (tmp_path / folder).mkdir()
    content = (trained[0] / "tokenizer.json").read_text().replace(END, "<mine>")
    (tmp_path / "disk/tokenizer.json").write_text(content)
    (tmp_path / "disk/tokenizer_config.json").write_text(json.dumps({"eos_token": "<mine>"}))
    (tmp_path / "link.json").symlink_to(tmp_path / "disk/tokenizer.json")
    assert from_file(str(tmp_path / "link.json"), None, None).eot_token == 319
    (tmp_path / "folder/tokenizer.model").write_bytes(b"another tokenizer")
    (tmp_path / "folder/tokenizer.json").symlink_to(tmp_path / "gone.json")
    with pytest.raises(ValueError, match=r"cannot be read: No such file"):
        from_file(str(tmp_path / "folder"), None, None)


@pytest.mark.parametrize("names", ["a", "abc"])
def test_text_that_is_held_out_trains_no_tokenizer(tmp_path, names):
    """And with files for validation all of the others does."""
    paths = [tmp_path / f"{name}.txt" for name in names]
    for path in paths:
        path.write_text("".join(f"{path.name} {i} words\n" for i in range(1000)))
    knobs = {"max_tokens": None, "seed": 3, "cache_dir": str(tmp_path / "cache")}
    knobs |= {"train_files": list(map(str, paths)), "val_ratio": 0.1, "val_files": None}

    def documents() -> list[str]:
        target = {"_target_": "llmexp.data.sources.text.text", **knobs}
        return ["".join(pieces) for pieces in training_documents(target)]

    found = documents()
    ids = all_ids(built(text_source, **knobs, tokenizer=byte_level()).train)
    assert "".join(found).encode() == bytes(i for i in ids if i < 256)
    assert sum(map(len, found)) < 0.91 * sum(path.stat().st_size for path in paths)
    (tmp_path / "val.txt").write_text("other words")
    knobs["val_files"] = str(tmp_path / "val.txt")
    assert documents() == [path.read_text() for path in paths]


def test_fewer_ids_than_asked_for_where_nothing_is_left_to_merge():
    found = train_bpe(documents_of(["ab"]), 1000, "gpt2")
    assert found.n_vocab == SMALLEST + 1
    with pytest.raises(ValueError, match="no documents"):
        train_bpe([], 1000, "gpt2")


def test_a_sentencepiece_model(tmp_path):
    knobs = {"vocab_size": 330, "byte_fallback": True, "model_type": "bpe"}
    path = sentencepieces(tmp_path, TEXTS * 20, **knobs)
    ours = from_file(str(path), None, None)
    library = sentencepiece.SentencePieceProcessor(model_file=str(path))
    for text in TEXTS:
        assert ours.encode_ordinary(text) == library.encode(text)
    assert (ours.n_vocab, ours.eot_token) == (330, library.eos_id())
    assert not keeps_bytes(ours.given)  # it puts a space in front
    assert ours.byte_lengths[library.piece_to_id("<0x41>")] == 1


def test_a_published_vocabulary_of_tiktoken(tmp_path):
    """In a file, with its pattern by name, it is the same tokenizer."""
    ranks = {bytes([b]): b for b in range(256)} | {b"th": 256, b"the": 257}
    lines = b"".join(base64.b64encode(t) + b" %d\n" % r for t, r in ranks.items())
    (tmp_path / "x.tiktoken").write_bytes(lines)
    ours = from_file(str(tmp_path / "x.tiktoken"), None, "gpt2")
    theirs = tiktoken.Encoding("t", pat_str=PATTERNS["gpt2"], mergeable_ranks=ranks,
                               special_tokens={END: 258})  # fmt: skip
    for text in (*TEXTS, "the then breathe"):
        assert ours.encode_ordinary(text) == theirs.encode_ordinary(text)
    assert np.array_equal(ours.byte_lengths, as_tokenizer(theirs).byte_lengths)
