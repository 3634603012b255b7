"""The data sources: what they split, the ids that they give, and that each YAML fits its function;
tests/refusals/data.yaml has what they refuse."""

import itertools
import math
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmexp.data.cache import cached
from llmexp.data.documents import Counts
from llmexp.data.remote import RemoteCache
from llmexp.data.sniffing import BOM
from llmexp.data.sources.stdlib import stdlib
from llmexp.data.sources.synthetic import synthetic as synthetic_source
from llmexp.data.stream import Corpus, TokenStream
from llmexp.data.tokenizers.bytes import byte_level
from llmexp.data.work import Source, with_kinds

from .common import SHARED, all_ids, built, llm_c, megatron
from .common import text_corpus as text
from .common import token_corpus as tokens

pytestmark = pytest.mark.usefixtures("suggestions_are_read")

BYTES = byte_level()


@pytest.fixture(autouse=True)
def _somewhere_else(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LLMEXP_CACHE_DIR", str(tmp_path / "cache"))


def texts_in(stream: TokenStream | None) -> list[str]:
    """Return the documents of a stream of bytes."""
    return bytes(i if i < 256 else 0 for i in all_ids(stream)).decode().split("\0")


def write(**contents: str | bytes) -> None:
    for name, content in contents.items():
        raw = content if isinstance(content, bytes) else content.encode()
        Path(f"{name}.txt").write_bytes(raw)


@pytest.mark.parametrize("ratio", [0.1, 0.25])
def test_a_single_ascii_file_is_split_as_nanogpt_does(ratio):
    content = "".join(chr(32 + i * i % 90) for i in range(12_345))
    write(a=content)
    corpus = text(val_ratio=ratio)
    n = int(len(content) * (1 - ratio))
    found = [bytes(all_ids(stream)).decode() for stream in (corpus.train, corpus.val)]
    assert found == [content[:n], content[n:]]
    assert corpus.description == "1 document, 12.3 kB of text"


def test_tinyshakespeare_has_nanogpts_token_counts(gpt2):
    """301,966 and 36,059: nanoGPT, data/shakespeare/readme.md."""
    path = SHARED / "data/tinyshakespeare.txt"
    if not path.exists():
        pytest.skip("the text is not there")
    corpus = text(str(path), tokenizer=gpt2)
    assert (len(corpus.train), len(corpus.val)) == (301_966, 36_059)


@settings(max_examples=60)
@given(
    parts=st.lists(st.text("aé字🙂\r\n", min_size=1, max_size=12), min_size=1, max_size=5),
    shares=st.lists(st.floats(0.01, 0.45), min_size=1, max_size=2),
    bom=st.booleans(),
)
def test_few_texts_give_their_last_part(tmp_path_factory, parts, shares, bom):
    folder = tmp_path_factory.mktemp("split")
    for i, part in enumerate(parts):
        (folder / f"{i}.txt").write_bytes(BOM * bom + f"{i}{part}".encode())
    files = tuple(str(folder / f"{i}.txt") for i in range(len(parts)))
    names = tuple((f"v{n}", share) for n, share in enumerate(shares))
    given = Source("text", "data.train_files", files=files, shares=names)
    source = with_kinds(given, RemoteCache(folder))
    assert source.cuts_texts
    read = [(d.where[-5:], d.split, "".join(d.pieces), d.digest) for d in source.read(Counts())]
    assert len({digest for *_, digest in read}) == len(read)
    for i, part in enumerate(parts):
        mine = {split: piece for where, split, piece, _ in read if where == f"{i}.txt"}
        assert "".join(mine.values()) == f"{i}{part}"
        assert all(mine.values())  # none is empty
        stop = int(len(f"{i}{part}") * (1 - sum(shares)))
        assert mine.get("train", "") == f"{i}{part}"[:stop]
    # what is left unread does not move the next
    every_other = ["".join(d.pieces) for n, d in enumerate(source.read(Counts())) if n % 2 == 0]
    assert every_other == [piece for _, _, piece, _ in read[::2]]


def test_many_texts_give_whole_ones_by_their_content_shuffled_by_the_seed():
    every = [f"text {i} " * (1 + i % 7) for i in range(150)]
    write(**{f"{i:03}": content for i, content in enumerate(every)})
    corpora = [text(val_ratio=0.2, seed=seed) for seed in range(3)]
    held = [texts_in(corpus.val) for corpus in corpora]
    assert sorted(held[0]) == sorted(held[1])  # the seed orders them, and moves none
    assert len({tuple(one) for one in held}) == 3
    assert 15 < len(held[0]) < 45
    trained = [texts_in(corpus.train) for corpus in corpora]
    assert {*trained[0]} == {*every} - {*held[0]}
    assert len({tuple(one) for one in trained}) == 3
    whole = text(val_ratio=0.0)
    assert (sorted(texts_in(whole.train)), whole.val) == (sorted(every), None)


def test_what_is_read_of_the_files(tmp_path):
    """Files for validation keep every document in order; max_tokens is shared by both sets. Bytes
    stay but for the order mark. The same file in both is a warning."""
    raw = b"a\tb\r\nc\rd<|endoftext|>"
    write(a="aaa", b="bbb", copy="aaa", v="vvv", empty="", mark=BOM, raw=BOM + raw + BOM)
    write(long="0123456789" * 100)
    two = ["b.txt", "a.txt"]
    for most, train in ((None, [*b"bbb", 256, *b"aaa"]), (2, [*b"bb"])):
        corpus = text(two, "v.txt", max_tokens=most)
        assert (all_ids(corpus.train), all_ids(corpus.val)) == (train, [*b"vvv"])
        assert not corpus.warnings
    for most, *sizes in ((2, 2, 0), (15, 14, 1), (500, 450, 50), (10_000, 900, 100)):
        corpus = text("long.txt", max_tokens=most)
        assert [len(all_ids(corpus.train)), len(all_ids(corpus.val))] == sizes
    corpus = text(["raw.txt", "empty.txt", "mark.txt"], val_ratio=0.0)
    assert bytes(all_ids(corpus.train)) == raw + BOM
    assert "2 empty ones left out" in corpus.description
    (warning,) = text("a.txt", "copy.txt").warnings
    assert "1 of its 1 are" in warning


def test_the_fingerprint_follows_content_and_settings_not_places():
    for folder in ("one", "two"):
        Path(folder).mkdir()
        Path(folder, "a.txt").write_text("some text" * 10)
    base = text("one/a.txt").fingerprint
    os.utime("one/a.txt", (1, 1))
    assert text("two/a.txt").fingerprint == text("one/*.txt").fingerprint == base
    others = [text("one/a.txt", **other) for other in ({"val_ratio": 0.2}, {"max_tokens": 50})]
    Path("one/a.txt").write_text("some texT" * 10)
    assert base not in [one.fingerprint for one in (*others, text("one/a.txt"))]
    for i in range(30):
        Path(f"two/{i}.txt").write_text("x")
    assert list(text("two/*.txt").fingerprint["train_files"]) == ["31 files"]


def test_what_is_remembered_of_files_ends_with_a_change(tmp_path, monkeypatch):
    path, calls = tmp_path / "a", []
    path.write_text("a")

    def ask(knobs: int = 0) -> int:
        return cached(tmp_path / "c", "x", knobs, [path], lambda: calls.append(1) or len(calls))

    os.utime(path, (1000, 1000))
    assert (ask(), ask()) == (1, 2)  # changed just now, whatever its time says: not remembered yet
    monkeypatch.setattr("llmexp.data.cache.time.time_ns", lambda: 2**62)  # years later
    assert (ask(), ask(), ask(1)) == (3, 3, 4)
    os.chmod(path, 0o600)  # as much as a new content shows, where its time is set back
    assert (ask(), ask()) == (5, 5)
    for note in (tmp_path / "c" / "notes").iterdir():
        note.write_text("{")
    assert ask() == 6


def test_token_files_of_all_kinds_are_one_stream():
    ids = np.arange(200) % 257
    np.save("a.npy", ids.astype(np.int64))
    np.save("b.npy", ids.astype(np.uint16))
    ids.astype("<u2").tofile("c.bin")
    for name, magic, version, kind in (("d", 20240520, 1, "<u2"), ("e", 20240801, 7, "<u4")):
        header = llm_c(len(ids), 0, magic, version)
        Path(f"{name}.bin").write_bytes(header + ids.astype(kind).tobytes())
    ids.astype("<u2").tofile("f.npy")  # flat, as OLMo's
    corpus = tokens(["*.npy", "*.bin"])
    assert all_ids(corpus.train) + all_ids(corpus.val) == ids.tolist() * 6
    assert len(corpus.train) == 1080
    corpus = tokens("a.npy", "*.bin", max_tokens=20)
    assert (all_ids(corpus.train), all_ids(corpus.val)) == (ids[:20].tolist(), ids.tolist() * 3)
    corpus = tokens(["a.npy", "b.npy"], max_tokens=100)
    assert all_ids(corpus.train) == [*range(90)]
    assert all_ids(corpus.val) == (ids.tolist() * 2)[360:370]
    ids.astype("<u4").tofile("wide.npy")  # its type is given, beside one that says its own
    corpus = tokens(["a.npy", "wide.npy"], dtype="uint32", val_ratio=0.0)
    assert all_ids(corpus.train) == ids.tolist() * 2


def test_pairs_of_megatron():
    """An index is found behind links: else ids of four bytes would be read as twice as many."""
    documents = [[7, 8, 9, 100], [5], [], [3] * 20]
    for code, kind in ((1, "u1"), (3, "<i2"), (4, "<i4"), (5, "<i8"), (8, "<u2")):
        index = megatron(Path("a.bin"), documents, code, kind)
        corpus = tokens("a.bin", val_ratio=0.0, tokenizer=BYTES)
        assert all_ids(corpus.train) == [*itertools.chain(*documents)]
        assert "25 training tokens, 4 documents by their indexes" in corpus.description
        assert corpus.unmarked == 3  # do not end with the end-of-text id, and one is empty
        Path("a.idx").write_bytes(index + bytes(4))  # with modes, as of images
        assert len(tokens("a.bin", val_ratio=0.0).train) == 25
    Path("disk").mkdir()
    megatron(Path("disk/a.bin"), documents, 4, "<i4")
    os.symlink("disk/a.bin", "far.bin")
    assert all_ids(tokens("far.bin", val_ratio=0.0).train) == [*itertools.chain(*documents)]
    os.symlink("disk/a.bin", "near.bin")
    os.symlink("disk/gone.idx", "near.idx")
    with pytest.raises(ValueError, match=r"near\.bin: .*No such file"):
        tokens("near.bin")


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
):
    """Whatever type is given: never other ids, and no type is suggested that is not theirs."""
    ids = np.random.default_rng(seed).integers(0, vocabulary, count)
    if true == "uint16":
        ids = np.minimum(ids, 2**16 - 1)
    path = tmp_path_factory.mktemp("flat") / f"a.{ending}"
    ids.astype(KINDS[true]).tofile(path)

    def read(kind: str | None) -> list[int]:
        return all_ids(tokens(str(path), dtype=kind, vocab_size=vocabulary, val_ratio=0.0).train)

    if np.dtype(KINDS[given_type or "uint16"]).itemsize == np.dtype(KINDS[true]).itemsize:
        assert read(given_type) == ids.tolist()
        return
    with pytest.raises(ValueError, match=r"data\.dtype|whole number|not in the voc") as refused:
        read(given_type)
    for kind in re.findall(r"give data\.dtype=(\w+)", str(refused.value)):
        assert read(kind) == ids.tolist()


@pytest.mark.parametrize(("position", "bad"), [(0, 257), (50, -1), (99, 60_000)])
def test_an_id_outside_the_vocabulary_is_refused_wherever_it_is(position, bad, monkeypatch):
    """A refusal is not remembered as a pass, nor a pass for another vocabulary."""
    monkeypatch.setattr("llmexp.data.cache.time.time_ns", lambda: 2**62)  # the files are old
    good = np.zeros(100, np.int32)
    np.save("a.npy", good)
    np.save("b.npy", np.where(np.arange(100) == position, bad, good))
    for files in 2 * ((["a.npy", "b.npy"], None), ("a.npy", "b.npy")):
        with pytest.raises(ValueError, match=rf"b\.npy: token id {bad} at .* {position} "):
            tokens(*files)
    tokens("a.npy")
    with pytest.raises(ValueError, match=r"a\.npy: token id 0 "):
        tokens("a.npy", vocab_size=0)


def synthetic(**changed: Any) -> Corpus:
    knobs = {"pattern": "markov", "n_tokens": 200_000, "n_ids": 20, "val_ratio": 0.1, "seed": 1}
    return synthetic_source(**{**knobs, "vocab_size": 257, **changed})


def test_the_markov_chain_has_the_entropy_it_tells():
    """The plug-in estimate from counts: its deviation is sqrt(var(-ln p) / n) and its bias (states
    x 3) / 2n; with var = 0.7 ln^2 0.7 + 0.3 ln^2 0.1 - 0.94^2 = 0.80, five deviations are 0.0105 at
    n = 180,000 and the bias 0.0002."""
    corpus = synthetic()
    ids = np.array(all_ids(corpus.train))
    counts = np.zeros((20, 20))
    np.add.at(counts, (ids[:-1], ids[1:]), 1)
    assert (np.count_nonzero(counts, axis=1) == 4).all()
    share = counts / counts.sum(1, keepdims=True)
    found = -np.sum(counts / counts.sum() * np.log(np.where(share > 0, share, 1)))
    told = -(0.7 * math.log(0.7) + 0.3 * math.log(0.1))
    assert abs(found - told) < 0.0107
    assert f"{told:.3f} nats" in corpus.description


def test_the_copy_task_repeats_every_block():
    corpus = synthetic(pattern="copy", val_ratio=0.0)
    blocks = np.array(all_ids(corpus.train))[: 32 * 6000].reshape(-1, 2, 16)
    np.testing.assert_array_equal(blocks[:, 0], blocks[:, 1])
    assert set(blocks.ravel().tolist()) == set(range(20))
    assert f"{math.log(20) / 2:.3f} nats" in corpus.description


@pytest.mark.parametrize("n_ids", [5, None])
def test_synthetic_tokens_are_a_function_of_the_seed_inside_the_vocabulary(n_ids):
    for pattern in ("markov", "copy"):
        knobs = {"pattern": pattern, "n_tokens": 999, "n_ids": n_ids}
        first, again, other = (synthetic(**knobs, seed=seed) for seed in (1, 1, 2))
        ids = all_ids(first.train) + all_ids(first.val)
        assert len(ids) == 999
        assert 0 <= min(ids) <= max(ids) < (n_ids or 257)
        assert all_ids(again.train) == all_ids(first.train) != all_ids(other.train)
        assert first.fingerprint == again.fingerprint != other.fingerprint


def test_the_standard_library_is_real_text(tmp_path, monkeypatch):
    knobs = {"tokenizer": BYTES, "val_ratio": 0.1, "max_tokens": 50_000, "seed": 0}
    knobs["cache_dir"] = None
    corpus, again = built(stdlib, **knobs), built(stdlib, **knobs)
    assert (len(corpus.train), len(all_ids(corpus.val))) == (45_000, 5_000)
    assert "import " in BYTES.decode(all_ids(corpus.train))
    assert (all_ids(again.val), again.fingerprint) == (all_ids(corpus.val), corpus.fingerprint)
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path / "python311.zip"))
    with pytest.raises(ValueError, match=r"data=stdlib: .*data=text"):
        built(stdlib, **knobs)
