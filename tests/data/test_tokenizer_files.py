"""Tokenizers in files give the ids of the libraries that made them; what is no tokenizer is
refused."""

from __future__ import annotations

import base64
import io
import json
import shlex
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tiktoken
from hypothesis import given
from hypothesis import strategies as st

from llmexp.__main__ import run
from llmexp.data import sources
from llmexp.data.encode import split_text
from llmexp.data.remote import RemoteCache
from llmexp.data.tokenizer_files import from_file, keeps_bytes
from llmexp.data.tokenizers import PATTERNS, PROBE, as_tokenizer, byte_level
from llmexp.data.train_tokenizer import SMALLEST, train_bpe
from llmexp.data.work import documents_to_train
from llmexp.exchange.tokenizer import tokenizer_files

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


def in_blocks(text: str) -> Iterator[str]:
    return (text[i : i + 300] for i in range(0, len(text), 300))


def test_a_trained_tokenizer_cuts_long_documents_without_a_change_of_ids(trained):
    folder, pattern = trained
    for path, split in ((folder, None), (folder / "mine.tiktoken", pattern)):
        ours = from_file(str(path), None, split)
        assert ours.is_cuttable
        text = "".join(TEXTS) * 20
        pieces = list(split_text(in_blocks(text), 700))
        assert len(pieces) > 5
        ids = [number for piece in pieces for number in ours.encode_ordinary(piece)]
        assert ids == ours.encode_ordinary(text)


@pytest.mark.parametrize("change", ["normalizer", "pattern", "added", "space"])
def test_a_tokenizer_that_does_more_than_split_by_a_known_pattern_is_not_cut(
    trained, tmp_path, change
):
    content = json.loads((trained[0] / "tokenizer.json").read_text())
    split, level = content["pre_tokenizer"]["pretokenizers"]
    if change == "normalizer":
        content["normalizer"] = {"type": "NFC"}
    elif change == "pattern":
        split["pattern"]["Regex"] += "|x"
    elif change == "added":
        content["added_tokens"][0]["special"] = False
    else:
        level["add_prefix_space"] = True
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
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
    content = json.loads(
        (trained[0] / "tokenizer.json").read_text() if "dropout" in how else unigram()
    )
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
    assert [library.encode(TEXTS[0]).ids for _ in range(3)] == [
        wanted.encode_ordinary(TEXTS[0])
    ] * 3


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
    config = json.dumps({"eos_token": END})
    content = (trained[0] / "tokenizer.json").read_text().replace(END, "<other>")
    content = content.replace("<other>", "<mine>")
    (tmp_path / "disk").mkdir()
    (tmp_path / "disk/tokenizer.json").write_text(content)
    (tmp_path / "disk/tokenizer_config.json").write_text(config.replace(END, "<mine>"))
    (tmp_path / "link.json").symlink_to(tmp_path / "disk/tokenizer.json")
    assert from_file(str(tmp_path / "link.json"), None, None).eot_token == 319
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/tokenizer.model").write_bytes(b"another tokenizer")
    (tmp_path / "folder/tokenizer.json").symlink_to(tmp_path / "gone.json")
    with pytest.raises(ValueError, match=r"cannot be read: No such file"):
        from_file(str(tmp_path / "folder"), None, None)


def test_training_in_pieces_gives_the_tokenizer_of_whole_documents():
    text = "".join(TEXTS) * 30
    whole = train_bpe(documents_of([text]), 400, "gpt2")
    pieces = train_bpe(iter([split_text(in_blocks(text), 500)]), 400, "gpt2")
    assert json.loads(pieces.tokenizer_json)["model"] == json.loads(whole.tokenizer_json)["model"]


@pytest.mark.parametrize("files", [["a.txt"], ["a.txt", "b.txt", "c.txt"]])
def test_text_that_is_held_out_trains_no_tokenizer(tmp_path, files):
    """And with files for validation all of the others does."""
    paths = [tmp_path / name for name in files]
    for path in paths:
        path.write_text("".join(f"{path.name} {i} words\n" for i in range(1000)))
    knobs = {"max_tokens": None, "seed": 3, "cache_dir": str(tmp_path / "cache")}
    knobs |= {"train_files": list(map(str, paths)), "val_ratio": 0.1, "val_files": None}
    remote = RemoteCache(tmp_path / "cache")

    def documents() -> list[str]:
        some = sources.text_sources(remote, **knobs)
        return ["".join(pieces) for pieces in documents_to_train(some, remote)]

    found = documents()
    corpus = sources.text(**knobs, tokenizer=byte_level())
    ids = corpus.train.read(0, len(corpus.train))
    assert "".join(found).encode() == bytes(ids[ids < 256].tolist())
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
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS * 20), model_writer=model, vocab_size=330, byte_fallback=True,
        model_type="bpe", minloglevel=2,
    )  # fmt: skip
    path = tmp_path / "sp.model"
    path.write_bytes(model.getvalue())
    ours = from_file(str(path), None, None)
    library = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    for text in TEXTS:
        assert ours.encode_ordinary(text) == library.encode(text)
    assert ours.n_vocab == 330
    assert ours.eot_token == library.eos_id()
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


REFUSED = {
    "nothing": (None, None, None, "tokenizer.path=null: a file or folder is needed"),
    "missing": ("nope.json", None, None, "nope.json: cannot be read: No such file"),
    "empty folder": ("empty", None, None, "holds neither tokenizer.json nor tokenizer.model"),
    "text": ("text.txt", None, None, "is neither a tokenizer.json, nor a .tiktoken file, nor a"),
    "json": ("other.json", None, None, "is no tokenizer.json"),
    "end": ("good", "<end>", None, "tokenizer.end_of_text=<end>: .* special tokens are: <|endof"),
    "pattern": ("good", None, "gpt2", "tokenizer.pattern=gpt2: belongs to a .tiktoken file"),
    "line": ("bad.tiktoken", None, None, "line 2 is no token and its number"),
    "bytes": ("few.tiktoken", None, None, "255 of the 256 bytes have no token, byte 0 is the firs"),
    "regex": ("good/mine.tiktoken", None, "(", r"tokenizer.pattern=\(: is neither gpt2 nor cl100k"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    found = train_bpe(TEXTS, 300, "gpt2")
    for folder in ("empty", "good"):
        Path(folder).mkdir()
    Path("good/tokenizer.json").write_text(found.tokenizer_json)
    Path("good/mine.tiktoken").write_bytes(found.tiktoken)
    Path("text.txt").write_text("no tokenizer\n")
    Path("other.json").write_text('{"a": 1}')
    Path("bad.tiktoken").write_text("YQ== 1\nYQ==\n")
    Path("few.tiktoken").write_text("YQ== 1\n")
    path, end, pattern, reason = REFUSED[name]
    with pytest.raises(ValueError, match=reason.replace("<|", r"<\|")):
        from_file(path, end, pattern)


def test_a_tokenizer_without_an_end_of_text_is_refused_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("the cat sat on the mat. " * 99)
    library = tokenizers.Tokenizer(tokenizers.models.WordPiece(unk_token="[UNK]"))
    library.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    trainer = tokenizers.trainers.WordPieceTrainer(special_tokens=["[UNK]", "[SEP]"])
    library.train_from_iterator(["the cat sat on the mat"], trainer)
    library.save(str(tmp_path / "wordpiece.json"))
    command = [
        *("prepare", "data=corpus", "data.sources.a.files=[a.txt]", "batch.sequence_length=8"),
        *("tokenizer=file", "tokenizer.path=wordpiece.json", "data.cache_dir=cache"),
    ]
    assert run(command) == 2
    said = capsys.readouterr().err
    assert "wordpiece has no end-of-text token" in said
    assert not (tmp_path / "cache").exists()
    (override,) = shlex.split(said.rpartition(": ")[2])
    assert override == 'tokenizer.end_of_text="[SEP]"'
    assert run([*command, override]) == 0
