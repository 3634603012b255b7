"""Ids equal the encoding of each whole document, however the text is cut into pieces; memory does
not grow with the text."""

import functools
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
import tiktoken
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from llmexp.data import encode, shards, sniffing
from llmexp.data.documents import Counts
from llmexp.data.encode import BOUNDARY, split_text
from llmexp.data.tokenizers.base import Tokenizer, as_tokenizer
from llmexp.data.tokenizers.bytes import byte_level
from llmexp.data.work import Source
from tests.conftest import ROOT

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
def test_no_boundary_changes_the_tokens(bpe: Tokenizer, text: str) -> None:
    whole = bpe.encode_ordinary(text)
    for match in BOUNDARY.finditer(text):
        at = match.start()
        cut = text[:at], text[at:]
        assert [i for part in cut for i in bpe.encode_ordinary(part)] == whole, cut


@functools.cache
def ending_in(bpe: Tokenizer, end: str) -> Tokenizer:
    """The same encoding with another end of text."""
    ranks = bpe._mergeable_ranks
    special = {"special_tokens": {end: len(ranks)}}
    given = tiktoken.Encoding("named", pat_str=bpe._pat_str, mergeable_ranks=ranks, **special)
    return as_tokenizer(given)


@settings(max_examples=30)
@given(some=st.lists(texts, max_size=6), end=st.sampled_from(["<|endoftext|>", "aba"]))
@example(some=["ab", "aba", "b"], end="aba")  # a name that may overlap with itself
def test_texts_encoded_at_once_are_each_text_with_its_end(bpe, some, end):
    named = ending_in(bpe, end)
    ids, stops = named.encode_documents(some, len(some) < 6)
    found = [array.tolist() for array in np.split(ids, stops[:-1])] if some else []
    ends = [named.eot_token]
    wanted = [bpe.encode_ordinary(text) + ends * (number < 5) for number, text in enumerate(some)]
    assert found == wanted


@settings(max_examples=150)
@given(blocks=st.lists(texts, max_size=8), size=st.integers(1, 40))
def test_pieces_are_the_text(blocks: list[str], size: int) -> None:
    pieces = list(split_text(iter(blocks), size))
    assert "".join(pieces) == "".join(blocks)
    assert all(pieces)


def test_a_text_without_boundaries_is_one_growing_piece() -> None:
    assert list(split_text(iter(["a" * 10] * 1000), 10)) == ["a" * 10_000]
    assert next(split_text(iter(["a" * 50, " b" * 50]), 10)) == "a" * 50 + " b" * 49


def encoded(folder: Path, contents: list[bytes], tokenizer: Tokenizer, piece: int) -> list[int]:
    """Return the ids of text files, read and encoded in pieces of so many bytes."""
    paths = [folder / f"{i}.txt" for i in range(len(contents))]
    for path, content in zip(paths, contents, strict=True):
        path.write_bytes(content)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sniffing, "BLOCK_BYTES", piece)
        patch.setattr(encode, "PIECE_CHARACTERS", piece)
        patch.setattr(shards, "JOB_BYTES", piece)
        counts = Counts()
        read = Source("text", "data.train_files", files=tuple(map(str, paths))).read(counts)
        jobs = shards.encoded(read, counts, tokenizer)
        return [i for _, (ids, _) in jobs for i in ids.tolist()]


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    contents=st.lists(texts.filter(lambda t: "\0" not in t), min_size=1, max_size=4),
    piece=st.integers(1, 50),
)
def test_streamed_tokens_equal_whole_documents(bpe, tmp_path_factory, contents, piece):
    raw = [b"x" + content.encode() for content in contents]  # text by its first bytes
    for tokenizer in (bpe, byte_level()):
        wanted: list[int] = []
        for content in raw:
            wanted += [*tokenizer.encode_ordinary(content.decode()), tokenizer.eot_token]
        assert encoded(tmp_path_factory.mktemp("t"), raw, tokenizer, piece) == wanted


def test_an_encoding_of_ones_own_is_not_cut(tmp_path: Path) -> None:
    """The boundaries are proven for known patterns only: this one joins words across spaces."""
    ranks = {**{bytes([b]): b for b in range(256)}, b"a ": 256, b"a b": 257}
    special = {"special_tokens": {"<|endoftext|>": 258}}
    own = as_tokenizer(
        tiktoken.Encoding("own", pat_str=r"[a-z ]+", mergeable_ranks=ranks, **special)
    )
    found = encoded(tmp_path, [b"a b" * 50], own, 7)
    assert found == [*own.encode_ordinary("a b" * 50), 258]
    assert 257 in found


@pytest.mark.parametrize("piece", [1, 3, 1 << 19])
@pytest.mark.parametrize(
    ("document", "offset"),
    [(b"abc\xff", 3), (b"ab\xe5\xad", 2), (b"\x80", 0), ("字".encode() * 5 + b"\xe5a", 15)],
)
def test_what_is_not_utf8_is_refused_with_its_place(tmp_path, document, offset, piece):
    with pytest.raises(ValueError, match=rf"0\.txt: not UTF-8 at byte {offset} "):
        encoded(tmp_path, [document], byte_level(), piece)


_PROGRAM = """
    import sys
    from llmexp.data.sources.text import text
    from llmexp.data.tokenizers.bytes import byte_level
    found = text(train_files=sys.argv[1], val_files=None, val_ratio=0.0, max_tokens=None, seed=0,
                 cache_dir=sys.argv[2]).build(byte_level())
    peak = next((l for l in open("/proc/self/status") if l.startswith("VmHWM")), "VmHWM: 0")
    print(len(found.train), peak.split()[1])
"""


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
        program, env = textwrap.dedent(_PROGRAM), {**os.environ, "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-c", program, str(path), str(tmp_path / "cache")]
        out = subprocess.run(command, stdout=-1, text=True, check=True, env=env).stdout
        assert out.split()[0] == str(mib << 20)
        peaks.append(int(out.split()[1]) / 1024)
    assert peaks[0] > 0
    assert peaks[1] - peaks[0] < 24
