"""Prepared tokens equal the encoding of each whole document; the cache is whole, shared, and never
trusted blindly."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import tiktoken
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from llmexp.data import encode, readers
from llmexp.data import prepare as module
from llmexp.data.documents import Document
from llmexp.data.encode import BOUNDARY, cut, encode_documents
from llmexp.data.files import sha256_of, state_of
from llmexp.data.prepare import Split, prepare
from llmexp.data.shards import Job, Part, encode_job
from llmexp.data.stream import TokenStream
from llmexp.data.tokenizers import byte_level, end_of_text_id

ROOT = Path(__file__).resolve().parents[2]

# What the split patterns look at: letters of both cases and none, marks, digits, white space of all
# kinds, contractions, punctuation, special tokens as text.
_pieces = st.sampled_from(
    [
        *"abzSTdm'sLRE019 "
         "\n\r\t/!?.,-_\"()[]{}<>=|\\", "  ", "\n\n", "\r\n", " \n", "'ll", "'RE", "<|endoftext|>",
        "字", "。", "、", "あ", "가", "я", "é", "\u0301", "ǅ", "ʰ", "١", "Ⅷ", "²", "\u00a0", "\u0085",  # noqa: E501
        "\u2028",
        "\u3000", "\x1c", "\ufeff", "\x00", "🙂", "\u200d", "ſ", "word", " word", "WORD",
    ]
)  # fmt: skip
texts = st.one_of(st.lists(_pieces, max_size=60).map("".join), st.text(max_size=60))


@settings(max_examples=400)
@given(text=texts)
@example(text="x;\n//y")  # o200k: one match across the line
@example(text="I don't")  # o200k: one match
@example(text="x\n\ny x \n y")
def test_no_boundary_changes_the_tokens(bpe: tiktoken.Encoding, text: str) -> None:
    whole = bpe.encode_ordinary(text)
    for match in BOUNDARY.finditer(text):
        at = match.start()
        assert bpe.encode_ordinary(text[:at]) + bpe.encode_ordinary(text[at:]) == whole, (
            text[:at],
            text[at:],
        )


@functools.cache
def ending_in(bpe: tiktoken.Encoding, end: str) -> tiktoken.Encoding:
    """The same encoding with another end of text."""
    ranks = bpe._mergeable_ranks
    return tiktoken.Encoding(
        "named", pat_str=bpe._pat_str, mergeable_ranks=ranks, special_tokens={end: len(ranks)}
    )


@settings(max_examples=30)
@given(some=st.lists(texts, max_size=6), end=st.sampled_from(["<|endoftext|>", "aba"]))
@example(some=["ab", "aba", "b"], end="aba")  # a name that may overlap with itself
def test_texts_encoded_at_once_are_each_text_with_its_end(
    bpe: tiktoken.Encoding, some: list[str], end: str
) -> None:
    named = ending_in(bpe, end)
    parts = [Part(text, b"", number < 5, 0) for number, text in enumerate(some)]
    ids, stops = encode_job(Job(0, parts), named)
    found = [array.tolist() for array in np.split(ids, stops[:-1])] if some else []
    ends = [named._special_tokens[end]]
    assert found == [bpe.encode_ordinary(p.text) + ends * p.ends for p in parts]


@settings(max_examples=150)
@given(blocks=st.lists(texts, max_size=8), size=st.integers(1, 40))
def test_pieces_are_the_text(blocks: list[str], size: int) -> None:
    pieces = list(cut(iter(blocks), size))
    assert "".join(pieces) == "".join(blocks)
    assert all(pieces)


def test_a_text_without_boundaries_is_one_growing_piece() -> None:
    asked: list[int] = []

    def blocks() -> Iterator[str]:
        for i in range(1000):
            asked.append(i)
            yield "a" * 10

    assert list(cut(blocks(), 10)) == ["a" * 10_000]
    assert next(cut(iter(["a" * 50, " b" * 50]), 10)) == "a" * 50 + " b" * 49


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("texts")


def _segments(folder: Path, contents: list[bytes]) -> list[Document]:
    paths = [folder / f"{i}.txt" for i in range(len(contents))]
    for path, content in zip(paths, contents, strict=True):
        path.write_bytes(content)
    hashed = zip(paths, contents, sha256_of(paths), strict=True)
    return [Document(path, 0, len(c), digest, state_of(path)) for path, c, digest in hashed]


def _cut_into(patch: pytest.MonkeyPatch, piece: int) -> None:
    patch.setattr(readers, "BLOCK", piece)
    patch.setattr(encode, "PIECE_CHARACTERS", piece)


def _reference(contents: list[bytes], encoding: tiktoken.Encoding) -> list[int]:
    ids: list[int] = []
    for i, content in enumerate(contents):
        ids += [end_of_text_id(encoding)] * (i > 0) + encoding.encode_ordinary(content.decode())
    return ids


some_documents = st.lists(texts.map(str.encode).filter(bool), min_size=1, max_size=4)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(contents=some_documents, piece=st.integers(1, 50), most=st.none() | st.integers(0, 80))
def test_streamed_tokens_equal_whole_documents(
    bpe: tiktoken.Encoding, folder: Path, contents: list[bytes], piece: int, most: int | None
) -> None:
    segments = _segments(folder, contents)
    with pytest.MonkeyPatch.context() as patch:
        _cut_into(patch, piece)
        for encoding in (bpe, byte_level()):
            found = [
                i for array in encode_documents(segments, encoding, most) for i in array.tolist()
            ]
            assert found == _reference(contents, encoding)[:most]


def test_an_encoding_of_ones_own_is_not_cut(folder: Path) -> None:
    """The boundaries are proven for known patterns only: this one joins words across spaces."""
    own = tiktoken.Encoding(
        "own", pat_str=r"[a-z ]+", mergeable_ranks={**{bytes([b]): b for b in range(256)},
        b"a ": 256, b"a b": 257},
        special_tokens={},
    )  # fmt: skip
    segments = _segments(folder, [b"a b" * 50])
    with pytest.MonkeyPatch.context() as patch:
        _cut_into(patch, 7)
        found = [i for array in encode_documents(segments, own, None) for i in array.tolist()]
    assert found == own.encode_ordinary("a b" * 50)
    assert 257 in found


@pytest.mark.parametrize("piece", [1, 3, 7, 1 << 19])
@pytest.mark.parametrize(
    ("document", "offset"),
    [(b"abc\xff", 3), (b"ab\xe5\xad", 2), (b"\x80", 0), ("字".encode() * 5 + b"\xe5a", 15)],
)
def test_what_is_not_utf8_is_refused_with_its_place(
    folder: Path,
    document: bytes,
    offset: int,
    piece: int,
    monkeypatch: pytest.MonkeyPatch,
    gpt2: tiktoken.Encoding,
) -> None:
    _cut_into(monkeypatch, piece)
    segments = _segments(folder, [document])
    for encoding in (byte_level(), gpt2):
        with pytest.raises(ValueError, match=rf"0\.txt: not UTF-8 at byte {offset} "):
            list(encode_documents(segments, encoding, None))


def _prepare(
    segments: list[Document], cache: Path, write: bool = True, most: int | None = None
) -> TokenStream:
    return prepare({"train": Split(segments, most)}, byte_level(), cache, write)["train"]


def _ids(stream: TokenStream) -> list[int]:
    return stream.read(0, len(stream)).tolist()


def test_prepared_tokens_are_kept_and_found_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    segments, cache = _segments(tmp_path, [b"hello", b"world"]), tmp_path / "cache"
    assert _ids(_prepare(segments, cache)) == [*b"hello", 256, *b"world"]
    monkeypatch.setattr(module, "encode_documents", None)  # would fail if it were needed again
    assert len(_ids(_prepare(segments, cache))) == 11
    assert len(_prepare(segments, cache, write=False)) == 11


def test_other_text_settings_or_tokenizer_are_other_tokens(
    tmp_path: Path, gpt2: tiktoken.Encoding
) -> None:
    cache = tmp_path / "cache"
    first = _segments(tmp_path, [b"hello"])
    assert _ids(_prepare(first, cache)) == [*b"hello"]
    assert _ids(_prepare(first, cache, most=2)) == [*b"he"]
    assert _ids(_prepare(_segments(tmp_path, [b"jello"]), cache)) == [*b"jello"]
    first = _segments(tmp_path, [b"hello"])
    stream = prepare({"train": Split(first, None)}, gpt2, cache, True)["train"]
    assert _ids(stream) == gpt2.encode_ordinary("hello")


def test_counting_writes_nothing(tmp_path: Path) -> None:
    segments, cache = _segments(tmp_path, [b"hello", b"world"]), tmp_path / "cache"
    stream = _prepare(segments, cache, write=False)
    assert len(stream) == 11
    assert not cache.exists()
    with pytest.raises(ValueError, match="prepare the data"):
        stream.read(0, 1)


def _entry(cache: Path) -> Path:
    (entry,) = [f for f in (cache / "tokens").iterdir() if f.is_dir()]
    return entry


def _truncate(entry: Path) -> None:
    os.truncate(entry / "train.bin", 4)


def _flip(entry: Path) -> None:
    raw = bytearray((entry / "train.bin").read_bytes())
    raw[3] ^= 1
    (entry / "train.bin").write_bytes(raw)


@pytest.mark.parametrize(
    "damage",
    [
        _truncate,
        _flip,
        lambda entry: (entry / "train.bin").unlink(),
        lambda entry: (entry / "manifest.json").unlink(),
        lambda entry: (entry / "manifest.json").write_text('{"format'),
        lambda entry: (entry / "manifest.json").write_text("[]"),
    ],
)
def test_damage_is_repaired(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    segments, cache = _segments(tmp_path, [b"hello", b"world"]), tmp_path / "cache"
    _prepare(segments, cache)
    damage(_entry(cache))
    assert _ids(_prepare(segments, cache)) == [*b"hello", 256, *b"world"]
    assert (_entry(cache) / "manifest.json").exists()


def test_what_a_killed_process_left_is_cleared(tmp_path: Path) -> None:
    segments, cache = _segments(tmp_path, [b"hello", b"world"]), tmp_path / "cache"
    _prepare(segments, cache)
    _entry(cache).rename(_entry(cache).with_suffix(".tmp"))
    assert _ids(_prepare(segments, cache)) == [*b"hello", 256, *b"world"]
    assert _entry(cache).suffix == ""


def _entry_names(cache: Path) -> set[str]:
    return {f.name for f in (cache / "tokens").iterdir() if f.is_dir()}


def test_a_failure_leaves_nothing_behind(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    with pytest.raises(ValueError, match="not UTF-8"):
        _prepare(_segments(tmp_path, [b"x" * 1000 + b"\xff"]), cache)
    assert _entry_names(cache) == set()


def test_a_file_that_changes_meanwhile_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    segments = _segments(tmp_path, [b"hello"])
    encoded = module.encode_documents

    def and_change(*args: object) -> Iterator[np.ndarray]:
        yield from encoded(*args)  # type: ignore[arg-type]
        segments[0].path.write_bytes(b"jello!")

    monkeypatch.setattr(module, "encode_documents", and_change)
    with pytest.raises(ValueError, match="changed while"):
        _prepare(segments, tmp_path / "cache")
    monkeypatch.undo()
    segments[0].path.write_bytes(b"he")
    with pytest.raises(ValueError, match=r"0\.txt: the file became shorter"):
        _prepare(segments, tmp_path / "cache")
    segments[0].path.unlink()
    with pytest.raises(ValueError, match=r"0\.txt: cannot be read: No such file"):
        _prepare(segments, tmp_path / "cache")


def test_a_cache_that_cannot_be_written_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ValueError, match=r"data\.cache_dir=.*LLMEXP_CACHE_DIR"):
        _prepare(_segments(tmp_path, [b"hello"]), tmp_path / "file" / "cache")


def test_a_full_disk_is_a_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ValueError, match=r"data\.cache_dir=.*No space left"):
        _prepare(_segments(tmp_path, [b"hello"]), tmp_path / "cache")
    assert _entry_names(tmp_path / "cache") == set()


_PROGRAM = """
    import sys
    sys.path.insert(0, sys.argv[1])
    from pathlib import Path
    from llmexp.data.files import sha256_of, state_of
    from llmexp.data.documents import Document
    from llmexp.data.prepare import Split, prepare
    from llmexp.data.tokenizers import byte_level
    paths = [Path(p) for p in sys.argv[3:]]
    hashed = zip(paths, sha256_of(paths), strict=True)
    segments = [Document(p, 0, p.stat().st_size, c, state_of(p)) for p, c in hashed]
    splits = {"train": Split(segments, None)}
    streams = prepare(splits, byte_level(), Path(sys.argv[2]), True)
    peak = next((l for l in open("/proc/self/status") if l.startswith("VmHWM")), "VmHWM: 0")
    print(len(streams["train"]), peak.split()[1])
"""


def _start(cache: Path, *paths: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(_PROGRAM), str(ROOT), str(cache), *map(str, paths)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def test_several_processes_at_once_share_one_preparation(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_bytes(b"some text, " * 200_000)
    started = [_start(tmp_path / "cache", path) for _ in range(4)]
    for process in started:
        out, err = process.communicate(timeout=60)
        assert process.returncode == 0, err
        assert out.split()[0] == "2200000"
    assert len(_entry_names(tmp_path / "cache")) == 1
    manifest = json.loads((_entry(tmp_path / "cache") / "manifest.json").read_text())
    assert manifest["splits"]["train"]["tokens"] == 2_200_000


@pytest.mark.skipif(
    not Path("/proc/self/status").exists(), reason="needs the peak memory from /proc"
)
def test_memory_does_not_grow_with_the_text(tmp_path: Path) -> None:
    """A single line of 64 MiB against one of 1 MiB: within 24 MiB, a few blocks and the sampled
    pages of the shard."""
    peaks = []
    for mib in (1, 64):
        path = tmp_path / f"{mib}.txt"
        path.write_bytes(b"0123456789abcde " * 2**16 * mib)
        out, err = _start(tmp_path / "cache", path).communicate(timeout=60)
        assert out, err
        peaks.append(int(out.split()[1]) / 1024)
    assert peaks[0] > 0
    assert peaks[1] - peaks[0] < 24
