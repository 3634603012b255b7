"""The data sources: what they split, what they refuse, and that each YAML fits its function."""

from __future__ import annotations

import importlib
import inspect
import itertools
import math
import os
import re
import resource
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmexp.data import sources, tokenizers
from llmexp.data.cache import cached
from llmexp.data.documents import BOM
from llmexp.data.matching import match_files
from llmexp.data.records import Counts
from llmexp.data.remote import RemoteCache
from llmexp.data.stream import Corpus, TokenStream
from llmexp.data.work import Source, with_kinds
from tests.tools import option

from .common import SHARED

pytestmark = pytest.mark.usefixtures("suggestions_are_read")

CONF = Path(__file__).resolve().parents[2] / "conf"
BYTES = tokenizers.byte_level()


@pytest.fixture(autouse=True)
def _somewhere_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LLMEXP_CACHE_DIR", str(tmp_path / "cache"))


def _text(train_files: Any = "*.txt", val_files: Any = None, **changed: Any) -> Corpus:
    knobs = {"tokenizer": BYTES, "val_ratio": 0.1, "max_tokens": None, "seed": 0, "cache_dir": None}
    return sources.text(train_files=train_files, val_files=val_files, **{**knobs, **changed})


def _tokens(train_files: Any, val_files: Any = None, **changed: Any) -> Corpus:
    knobs = {
        "dtype": None,
        "val_ratio": 0.1,
        "max_tokens": None,
        "cache_dir": None,
        "vocab_size": 257,
    }
    return sources.tokens(
        train_files=train_files, val_files=val_files, **{**knobs, "sequence_length": 4, **changed}
    )


def _all(stream: TokenStream | None) -> list[int]:
    return [] if stream is None else stream.read(0, len(stream)).tolist()


def _texts(stream: TokenStream | None) -> list[str]:
    """The documents of a stream of bytes."""
    return bytes(i if i < 256 else 0 for i in _all(stream)).decode().split("\0")


# text


@pytest.mark.parametrize("ratio", [0.1, 0.25])
def test_a_single_ascii_file_is_split_as_nanogpt_does(ratio: float) -> None:
    text = "".join(chr(32 + i * i % 90) for i in range(12_345))
    Path("a.txt").write_text(text)
    corpus = _text(val_ratio=ratio)
    n = int(len(text) * (1 - ratio))
    assert _all(corpus.train) == [*text[:n].encode()]
    assert _all(corpus.val) == [*text[n:].encode()]
    assert corpus.description == "1 document, 12.3 kB of text"


def test_tinyshakespeare_has_nanogpts_token_counts(gpt2: tokenizers.Tokenizer) -> None:
    """301,966 and 36,059: nanoGPT, data/shakespeare/readme.md."""
    path = SHARED / "data/tinyshakespeare.txt"
    if not path.exists():
        pytest.skip("the text is not there")
    corpus = _text(str(path), tokenizer=gpt2)
    assert corpus.val is not None
    assert (len(corpus.train), len(corpus.val)) == (301_966, 36_059)


@settings(max_examples=60)
@given(
    parts=st.lists(st.text("aé字🙂\r\n", min_size=1, max_size=12), min_size=1, max_size=5),
    shares=st.lists(st.floats(0.01, 0.45), min_size=1, max_size=2),
    bom=st.booleans(),
)
def test_few_texts_give_their_last_part(
    tmp_path_factory: pytest.TempPathFactory,
    parts: list[str],
    shares: list[float],
    bom: bool,
) -> None:
    folder = tmp_path_factory.mktemp("split")
    for i, part in enumerate(parts):
        (folder / f"{i}.txt").write_bytes(BOM * bom + f"{i}{part}".encode())
    files = tuple(str(folder / f"{i}.txt") for i in range(len(parts)))
    names = tuple((f"v{n}", share) for n, share in enumerate(shares))
    source = with_kinds(
        Source("text", "data.train_files", files=files, shares=names), RemoteCache(folder)
    )
    assert source.cuts_texts
    read = [(d.where[-5:], d.split, "".join(d.pieces), d.digest) for d in source.read(Counts())]
    assert len({digest for *_, digest in read}) == len(read)
    for i, part in enumerate(parts):
        mine = {split: piece for where, split, piece, _ in read if where == f"{i}.txt"}
        assert "".join(mine.values()) == f"{i}{part}"
        assert all(mine.values())  # none is empty
        stop = int(len(f"{i}{part}") * (1 - sum(shares)))
        assert mine.get("train", "") == f"{i}{part}"[:stop]
    every_other = [
        "".join(d.pieces) for n, d in enumerate(source.read(Counts())) if n % 2 == 0
    ]  # what is left unread does not move the next
    assert every_other == [piece for _, _, piece, _ in read[::2]]


def test_many_texts_give_whole_ones_by_their_content() -> None:
    for i in range(150):
        Path(f"{i:03}.txt").write_text(f"text {i} " * (1 + i % 7))
    one, other = _text(val_ratio=0.2), _text(val_ratio=0.2, seed=3)
    texts = [_texts(corpus.val) for corpus in (one, other)]
    assert sorted(texts[0]) == sorted(texts[1])  # the seed orders them, and moves none
    assert 15 < len(texts[0]) < 45
    assert texts[0] != texts[1]
    every = {f"text {i} " * (1 + i % 7) for i in range(150)}
    assert set(_texts(one.train)) == every - set(texts[0])


def test_documents_are_shuffled_by_the_seed_and_separated() -> None:
    for i in range(10):
        Path(f"{i}.txt").write_text(f"{i}" * 4)
    orders = {tuple(_all(_text(val_ratio=0.0, seed=seed).train)) for seed in range(4)}
    assert len(orders) == 4
    assert sorted(_texts(_text(val_ratio=0.0).train)) == [f"{i}" * 4 for i in range(10)]
    assert _text(val_ratio=0.0).val is None


def test_validation_files_keep_every_document_in_order() -> None:
    for name in ("b", "a", "v"):
        Path(f"{name}.txt").write_text(name * 3)
    corpus = _text(["b.txt", "a.txt"], "v.txt")
    assert _all(corpus.train) == [*b"bbb", 256, *b"aaa"]
    assert _all(corpus.val) == [*b"vvv"]
    capped = _text(["b.txt", "a.txt"], "v.txt", max_tokens=2)
    assert (_all(capped.train), _all(capped.val)) == ([*b"bb"], [*b"vvv"])


@pytest.mark.parametrize("max_tokens", [2, 15, 10_000])
def test_max_tokens_is_shared_between_training_and_validation(max_tokens: int) -> None:
    Path("a.txt").write_text("0123456789" * 100)
    corpus = _text(max_tokens=max_tokens)
    train = min(900, round(0.9 * max_tokens))
    val = min(100, max_tokens - round(0.9 * max_tokens))
    assert (len(corpus.train), 0 if corpus.val is None else len(corpus.val)) == (train, val)


def test_bytes_stay_as_they_are_but_for_the_order_mark() -> None:
    raw = b"a\tb\r\nc\rd<|endoftext|>"
    Path("a.txt").write_bytes(BOM + raw + BOM)
    assert bytes(_all(_text(val_ratio=0.0).train)) == raw + BOM


def test_empty_files_among_others_are_left_out_and_reported() -> None:
    Path("a.txt").write_text("a" * 30)
    Path("b.txt").write_text("")
    Path("c.txt").write_bytes(BOM)
    corpus = _text(val_ratio=0.0)
    assert _all(corpus.train) == [97] * 30
    assert "2 empty ones left out" in corpus.description


def test_the_same_file_in_both_is_a_warning() -> None:
    Path("a.txt").write_text("a" * 30)
    Path("copy.txt").write_text("a" * 30)
    (text,) = _text("a.txt", "copy.txt").warnings
    assert text.startswith("the validation set val shares documents with training: 1 of its 1 are")
    Path("b.txt").write_text("b" * 30)
    assert not _text("a.txt", "b.txt").warnings


def test_the_fingerprint_follows_content_and_settings_not_places() -> None:
    Path("one").mkdir()
    Path("two").mkdir()
    for folder in ("one", "two"):
        Path(folder, "a.txt").write_text("some text" * 10)
    base = _text("one/a.txt").fingerprint
    assert _text("two/a.txt").fingerprint == base
    os.utime("one/a.txt", (1, 1))
    assert _text("one/*.txt").fingerprint == base
    assert _text("one/a.txt", val_ratio=0.2).fingerprint != base
    assert _text("one/a.txt", max_tokens=50).fingerprint != base
    Path("one/a.txt").write_text("some texT" * 10)
    assert _text("one/a.txt").fingerprint != base
    for i in range(30):
        Path(f"two/{i}.txt").write_text("x")
    many = _text("two/*.txt").fingerprint["train_files"]
    assert list(many) == ["31 files"]


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ("none/*.txt", r"data\.train_files=none/\*\.txt: no file matches \(looked in "),
        ("folder", r"data\.train_files=folder: there are no files in this folder"),
        (
            "fold*",
            r"data\.train_files=fold\*: folder is a folder; for its files write "
            r"data\.train_files=folder",
        ),
        (["empty.txt", "empty2.txt"], r"data\.train_files: there are no documents; 2 are empty"),
        (
            "dangling.txt",
            r"data\.train_files=dangling\.txt: dangling\.txt cannot be read: No such file",
        ),
        (None, r"data\.train_files=null: a glob or a list of globs is needed"),
        ([], r"data\.train_files=\[\]: a glob"),
    ],
)
def test_files_that_cannot_be_used_are_refused(files: Any, message: str) -> None:
    Path("folder").mkdir()
    for name in ("empty.txt", "empty2.txt"):
        Path(name).touch()
    os.symlink("nowhere", "dangling.txt")
    with pytest.raises(ValueError, match=message):
        _text(files)
    if files is not None:
        Path("good.txt").write_text("good")
        with pytest.raises(ValueError, match=message.replace("train_files", "val_files")):
            _text("good.txt", files)


def test_globs_cross_folders_and_name_each_file_once() -> None:
    Path("a/b").mkdir(parents=True)
    for name in ("a/2.txt", "a/b/1.txt", "a/x[1].txt"):
        Path(name).write_text(name)
    found = [str(p) for p in match_files("k", ["a/b/*.txt", "a/**/*.txt"], [])]
    assert found == ["a/b/1.txt", "a/2.txt", "a/x[1].txt"]
    assert [str(p) for p in match_files("k", "a/x[1].txt", [])] == ["a/x[1].txt"]


def test_a_folder_stands_for_the_files_below_it() -> None:
    for name in ("a/2.txt", "a/b/1.txt", "a/.git/x", "a/b/.hidden", "saved/.x", "saved/state.json"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(name)
    assert [str(p) for p in match_files("k", "a", [])] == ["a/2.txt", "a/b/1.txt"]
    assert [str(p) for p in match_files("k", ["a/b/", "a"], [])] == ["a/b/1.txt", "a/2.txt"]
    for key, way in {
        "data.sources.x.files": r"data\.sources\.x\.hf=saved",
        "data.train_files": r"data=corpus data\.sources\.main\.hf=saved",
    }.items():
        with pytest.raises(ValueError, match=f"made by save_to_disk of datasets; use {way}"):
            match_files(key, "saved", [])
    Path("a/.git/x").rename("a/.git/.x")
    with pytest.raises(
        ValueError, match=r"k=a/\.git: there are no files in .*; left out: a/\.git/\.x"
    ):
        match_files("k", "a/.git", [])


def test_what_is_remembered_of_files_ends_with_a_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, calls = tmp_path / "a", []
    path.write_text("a")

    def ask(settings: int = 0) -> int:
        return cached(tmp_path / "c", "x", settings, [path], lambda: calls.append(1) or len(calls))

    os.utime(path, (1000, 1000))
    assert (ask(), ask()) == (1, 2)  # changed just now, whatever its time says: not remembered yet
    _minutes_later(monkeypatch)
    assert (ask(), ask(), ask(1)) == (3, 3, 4)
    os.chmod(path, 0o600)  # as much as a new content shows, where its time is set back
    assert (ask(), ask()) == (5, 5)
    for note in (tmp_path / "c" / "notes").iterdir():
        note.write_text("{")
    assert ask() == 6


def _minutes_later(monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.time_ns() + 10**11
    monkeypatch.setattr("llmexp.data.cache.time.time_ns", lambda: now)


# tokens


def test_token_files_of_all_kinds_are_one_stream() -> None:
    ids = np.arange(200) % 257
    np.save("a.npy", ids.astype(np.int64))
    np.save("b.npy", ids.astype(np.uint16))
    ids.astype("<u2").tofile("c.bin")
    for name, magic, version, kind in (("d", 20240520, 1, "<u2"), ("e", 20240801, 7, "<u4")):
        header = np.zeros(256, "<i4")
        header[:3] = magic, version, len(ids)
        Path(f"{name}.bin").write_bytes(header.tobytes() + ids.astype(kind).tobytes())
    corpus = _tokens(["*.npy", "*.bin"])
    assert _all(corpus.train) + _all(corpus.val) == ids.tolist() * 5
    assert len(corpus.train) == 900
    corpus = _tokens("a.npy", "*.bin", max_tokens=20)
    assert (_all(corpus.train), _all(corpus.val)) == (ids[:20].tolist(), ids.tolist() * 3)
    corpus = _tokens("*.npy", max_tokens=100)
    assert (_all(corpus.train), _all(corpus.val)) == ([*range(90)], (ids.tolist() * 2)[360:370])
    wide = (np.arange(2000) % 257).astype("<u4")
    wide.tofile("f.bin")
    assert len(_tokens("f.bin", dtype="uint32", val_ratio=0.0).train) == 2000
    with pytest.raises(ValueError, match=r"f\.bin: data\.dtype=uint16, .* uint32"):
        _tokens("f.bin")


def _llm_c(magic: int, version: int, told: int, n: int) -> bytes:
    return np.array([magic, version, told, *[0] * 253], "<i4").tobytes() + bytes(2 * n)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.bin", b"", r"the file is empty \(0 bytes\)"),
        ("a.bin", b"\0" * 101, r"101 bytes are no whole number of uint16"),
        ("a.bin", b"\0" * 8, r"4 training tokens in 1 files .* needs 5"),
        (
            "a.bin",
            _llm_c(20240520, 1, 50, 49),
            r"says 50 uint16 tokens = 1,124 bytes, .* has 1,122",
        ),
        ("a.bin", _llm_c(20240520, 2, 50, 50), r"20240520 version 2 is unknown"),
        ("a.npy", b"\x93NUMPY\x01\x00", r"no readable \.npy file of 8 bytes"),
        ("a.npy", np.zeros((3, 3), int), r"a 1-d array of integers is needed, .* holds 2-d int64"),
        ("a.npy", bytes(101), r"a\.npy: 101 bytes are no whole number of uint16"),
        ("a.npy", np.zeros(0, int), r"the array is empty"),
        ("a.txt", b"text", r"a token file ends in \.npy or \.bin"),
    ],
)
def test_token_files_that_are_not_whole_are_refused(name: str, content: Any, message: str) -> None:
    if isinstance(content, bytes):
        Path(name).write_bytes(content)
    else:
        np.save(name, content)
    with pytest.raises(ValueError, match=message) as refusal:
        _tokens(name, val_ratio=0.0)
    assert name in str(refusal.value)
    assert "data.train_files" in str(refusal.value)


def megatron(name: str, documents: list[list[int]], code: int, kind: str) -> bytes:
    """Write a pair as Megatron's tools/preprocess_data.py does, a sequence a document; return the
    index."""
    lengths = np.array([len(ids) for ids in documents], "<i4")
    Path(f"{name}.bin").write_bytes(b"".join(np.array(ids, kind).tobytes() for ids in documents))
    starts = (np.cumsum(lengths) - lengths).astype("<i8") * np.dtype(kind).itemsize
    index = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, len(documents), len(documents) + 1)
    index += lengths.tobytes() + starts.tobytes() + np.arange(len(documents) + 1).tobytes()
    Path(f"{name}.idx").write_bytes(index)
    return index


@pytest.mark.parametrize(
    ("code", "kind"), [(1, "u1"), (3, "<i2"), (4, "<i4"), (5, "<i8"), (8, "<u2")]
)
def test_pairs_of_megatron(code: int, kind: str) -> None:
    documents = [[7, 8, 9, 100], [5], [], [3] * 20]
    index = megatron("a", documents, code, kind)
    corpus = _tokens("a.bin", val_ratio=0.0, tokenizer=BYTES)
    assert _all(corpus.train) == [*itertools.chain(*documents)]
    assert "25 training tokens, 4 documents by their indexes" in corpus.description
    assert "(3 do not end with the end-of-text id)" in corpus.description
    assert corpus.unmarked == 3  # one is empty
    Path("a.idx").write_bytes(index + bytes(4))  # with modes, as of images
    assert len(_tokens("a.bin", val_ratio=0.0).train) == 25
    with pytest.raises(ValueError, match=r"a\.idx: is the index of a\.bin; name the \.bin file"):
        _tokens("a.idx", val_ratio=0.0)


DAMAGED: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "magic": (lambda index: b"TNTIDX" + index[6:], "is no index of Megatron: it begins with b'TNT"),
    "version": (lambda index: index[:9] + bytes([2]) + index[10:], "has version 2; known is"),
    "floats": (lambda index: index[:17] + bytes([6]) + index[18:], "type code 6; codes of whole"),
    "type": (lambda index: index[:17] + bytes([4]) + index[18:], "sequence 1 does not begin where"),
    "short": (lambda index: index[:-1], "4 sequences and 5 document .* 122 bytes, .* has 121"),
    "header": (lambda index: index[:20], "is cut short: 20 bytes"),
    "length": (lambda index: index[:34] + b"\x03" + index[35:], "sequence 1 does not begin where"),
    "ids": (bytes, "says 25 uint16 tokens = 50 bytes, the file has 8"),
    "documents": (lambda index: index[:-1] + b"\x01", "its documents do not begin at 0, rise"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_pairs_that_do_not_fit_together_are_refused(name: str) -> None:
    change, message = DAMAGED[name]
    index = megatron("a", [[7, 8, 9, 100], [5], [], [3] * 20], 8, "<u2")
    Path("a.idx").write_bytes(change(index))
    if name == "ids":
        os.truncate("a.bin", 8)
    with pytest.raises(ValueError, match=rf"data\.train_files=a\.bin: a\.idx.* {message}"):
        _tokens("a.bin", val_ratio=0.0)


KINDS = {"uint16": "<u2", "int32": "<i4", "uint32": "<u4", "int64": "<i8"}


@settings(max_examples=120)
@given(
    seed=st.integers(0, 2**32),
    vocabulary=st.sampled_from([40, 257, 50_304, 200_019]),
    count=st.integers(80, 40_000),
    true=st.sampled_from(sorted(KINDS)),
    given_type=st.sampled_from([*KINDS, None]),
    ending=st.sampled_from(["bin", "npy"]),
)
def test_flat_ids_are_read_as_what_they_are_or_refused(
    tmp_path_factory, seed, vocabulary, count, true, given_type, ending
) -> None:
    """Whatever type is given: never other ids, and no type is suggested that is not theirs."""
    ids = np.random.default_rng(seed).integers(0, vocabulary, count)
    if true == "uint16":
        ids = np.minimum(ids, 2**16 - 1)
    path = tmp_path_factory.mktemp("flat") / f"a.{ending}"
    ids.astype(KINDS[true]).tofile(path)

    def read(kind: str | None) -> list[int]:
        return _all(_tokens(str(path), dtype=kind, vocab_size=vocabulary, val_ratio=0.0).train)

    if np.dtype(KINDS[given_type or "uint16"]).itemsize == np.dtype(KINDS[true]).itemsize:
        assert read(given_type) == ids.tolist()
        return
    with pytest.raises(ValueError, match=r"data\.dtype|whole number|not in the voc") as refused:
        read(given_type)
    for kind in re.findall(r"give data\.dtype=(\w+)", str(refused.value)):
        assert read(kind) == ids.tolist()


@pytest.mark.parametrize("where", ["npy", "llm.c", "megatron"])
def test_a_type_beside_files_that_say_theirs_is_refused(where: str) -> None:
    ids = np.arange(100, dtype="<u2")
    if where == "npy":
        np.save("a.npy", ids)
    elif where == "llm.c":
        Path("a.bin").write_bytes(_llm_c(20240520, 1, 100, 0) + ids.tobytes())
    else:
        megatron("a", [ids.tolist()], 8, "<u2")
    name = "a.npy" if where == "npy" else "a.bin"
    assert len(_tokens(name, val_ratio=0.0).train) == 100
    for kind in KINDS:
        with pytest.raises(ValueError, match=rf"data\.dtype={kind}: does nothing: {name} says it"):
            _tokens(name, dtype=kind)
    ids.astype("<u4").tofile("flat.bin")  # one that needs it beside others
    assert _all(_tokens([name, "flat.bin"], dtype="uint32", val_ratio=0.0).train) == [*ids, *ids]


def test_an_index_is_found_behind_links() -> None:
    """Else ids of four bytes would be read as twice as many."""
    Path("disk").mkdir()
    megatron("disk/a", [[7, 8, 9, 100], [3] * 20], 4, "<i4")
    os.symlink("disk/a.bin", "far.bin")
    assert _all(_tokens("far.bin", val_ratio=0.0).train) == [7, 8, 9, 100, *[3] * 20]
    assert "2 documents by their indexes" in _tokens("far.bin").description
    os.symlink("disk/a.bin", "near.bin")
    os.symlink("disk/gone.idx", "near.idx")
    with pytest.raises(ValueError, match=r"near\.bin: .*No such file"):
        _tokens("near.bin")


def test_flat_files_of_olmo() -> None:
    ids = np.arange(1000) % 257
    ids.astype("<u2").tofile("a.npy")
    assert _all(_tokens("a.npy", val_ratio=0.0).train) == ids.tolist()
    ids.astype("<u4").tofile("b.npy")
    assert _all(_tokens("b.npy", val_ratio=0.0, dtype="uint32").train) == ids.tolist()
    with pytest.raises(ValueError, match=r"b\.npy: data\.dtype=uint16, .* uint32"):
        _tokens("b.npy")


@pytest.mark.parametrize(("position", "bad"), [(0, 257), (50, -1), (99, 60_000)])
def test_an_id_outside_the_vocabulary_is_refused_wherever_it_is(position: int, bad: int) -> None:
    good = np.zeros(100, np.int32)
    np.save("a.npy", good)
    np.save("b.npy", np.where(np.arange(100) == position, bad, good))
    for files in ((["a.npy", "b.npy"], None), ("a.npy", "b.npy")):
        for _ in range(2):  # a refusal is not remembered as a pass
            with pytest.raises(
                ValueError, match=rf"b\.npy: token id {bad} at position {position} \(of 100\)"
            ):
                _tokens(*files)


def test_a_checked_file_is_not_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    np.save("a.npy", np.zeros(100, np.uint16))
    _minutes_later(monkeypatch)
    scanned: list[int] = []
    monkeypatch.setattr(sources, "check_ids", lambda *args: scanned.append(1))
    for _ in range(3):
        _tokens("a.npy")
    assert len(scanned) == 1
    _tokens("a.npy", vocab_size=100)
    assert len(scanned) == 2


# synthetic


def _synthetic(**changed: Any) -> Corpus:
    knobs: dict[str, Any] = {
        "pattern": "markov",
        "n_tokens": 200_000,
        "n_ids": 20,
        "val_ratio": 0.1,
        "seed": 1,
    }
    return sources.synthetic(**{**knobs, "vocab_size": 257, **changed})


def test_the_markov_chain_has_the_entropy_it_tells() -> None:
    """The plug-in estimate from counts: its deviation is sqrt(var(-ln p) / n) and its bias (states
    x 3) / 2n; with var = 0.7 ln^2 0.7 + 0.3 ln^2 0.1 - 0.94^2 = 0.80, five deviations are 0.0105 at
    n = 180,000 and the bias 0.0002."""
    corpus = _synthetic()
    ids = np.array(_all(corpus.train))
    counts = np.zeros((20, 20))
    np.add.at(counts, (ids[:-1], ids[1:]), 1)
    assert (np.count_nonzero(counts, axis=1) == 4).all()
    share = counts / counts.sum(1, keepdims=True)
    found = -np.sum(counts / counts.sum() * np.log(np.where(share > 0, share, 1)))
    told = -(0.7 * math.log(0.7) + 0.3 * math.log(0.1))
    assert abs(found - told) < 0.0107
    assert f"{told:.3f} nats" in corpus.description


def test_the_copy_task_repeats_every_block() -> None:
    corpus = _synthetic(pattern="copy", val_ratio=0.0)
    blocks = np.array(_all(corpus.train))[: 32 * 6000].reshape(-1, 2, 16)
    np.testing.assert_array_equal(blocks[:, 0], blocks[:, 1])
    assert set(blocks.ravel().tolist()) == set(range(20))
    assert f"{math.log(20) / 2:.3f} nats" in corpus.description


@pytest.mark.parametrize("pattern", ["markov", "copy"])
@pytest.mark.parametrize("n_ids", [5, None])
def test_synthetic_tokens_are_a_function_of_the_seed_inside_the_vocabulary(
    pattern: str, n_ids: int | None
) -> None:
    first, again, other = (
        _synthetic(pattern=pattern, n_tokens=999, n_ids=n_ids, seed=s) for s in (1, 1, 2)
    )
    ids = _all(first.train) + _all(first.val)
    assert len(ids) == 999
    assert 0 <= min(ids) <= max(ids) < (n_ids or 257)
    assert _all(again.train) == _all(first.train) != _all(other.train)
    assert first.fingerprint == again.fingerprint != other.fingerprint
    with pytest.raises(ValueError, match=r"data\.n_ids=3"):
        _synthetic(n_ids=3)


# stdlib


def test_the_standard_library_is_real_text() -> None:
    knobs: dict[str, Any] = {"val_ratio": 0.1, "max_tokens": 50_000, "seed": 0, "cache_dir": None}
    corpus = sources.stdlib(tokenizer=BYTES, **knobs)
    assert corpus.val is not None
    assert (len(corpus.train), len(corpus.val)) == (45_000, 5_000)
    assert "import " in BYTES.decode(_all(corpus.train))
    assert "standard library" in corpus.description
    again = sources.stdlib(tokenizer=BYTES, **knobs)
    assert (_all(again.val), again.fingerprint) == (_all(corpus.val), corpus.fingerprint)


def test_a_python_without_sources_is_a_clear_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path / "python311.zip"))
    with pytest.raises(ValueError, match=r"data=stdlib: .*data=text"):
        sources.stdlib(tokenizer=BYTES, val_ratio=0.1, max_tokens=None, seed=0, cache_dir=None)


# conf


@pytest.mark.parametrize("group", ["data", "tokenizer"])
def test_each_option_lists_every_knob_of_its_function(group: str) -> None:
    for path in sorted(CONF.glob(f"{group}/*.yaml")):
        knobs = option(f"{group}/{path.stem}")
        module, _, name = knobs.pop("_target_").rpartition(".")
        offered: set[str] = set()
        if group == "data":
            assert knobs.pop("shuffle") is True
            assert knobs.pop("ignore_id") is None
            offered = {"tokenizer", "vocab_size", "sequence_length", "ask_again"}
        function = getattr(importlib.import_module(module), name)
        assert set(inspect.signature(function).parameters) - offered == set(knobs), path


def test_more_token_files_than_may_be_open_by_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is a map, which keeps its file open."""
    monkeypatch.chdir(tmp_path)
    for i in range(300):
        np.save(f"{i:03}.npy", np.arange(20, dtype=np.uint16))
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (200, before[1]))
    try:
        assert len(_tokens("*.npy", val_ratio=0.1).train) == 5400
        monkeypatch.setattr(resource, "getrlimit", lambda _: (200, 350))
        with pytest.raises(ValueError, match="300 token files are more than this process may open"):
            _tokens("*.npy", val_ratio=0.1)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
