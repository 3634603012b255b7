"""A token stream is the concatenation of its arrays, wherever they lie and however it is read."""

import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmexp.data.stream import TokenStream, as_corpus, check_ids, sample_digest

lengths = st.lists(st.integers(0, 30), min_size=1, max_size=6).filter(lambda x: sum(x) > 0)


def _stream(folder: str, sizes: list[int], types: list[str]) -> tuple[TokenStream, np.ndarray]:
    """Parts in memory, .npy maps and raw maps with an offset, in turn, of these types; and what
    they are together. Every fourth one lies backwards in memory."""
    whole = np.random.default_rng(len(sizes)).integers(0, 60_000, sum(sizes))
    arrays = []
    for i, ids in enumerate(np.split(whole, np.cumsum(sizes)[:-1])):
        path = Path(folder, f"{i}.npy")
        if i % 3 == 0 or not len(ids):
            stored = ids.astype(types[0])
            arrays.append(stored if i % 4 else stored[::-1].copy()[::-1])
        elif i % 3 == 1:
            np.save(path, ids.astype(types[1]))
            arrays.append(np.load(path, mmap_mode="r"))
        else:
            path.write_bytes(b"head" + ids.astype(types[2]).tobytes())
            arrays.append(np.memmap(path, types[2], "r", 4))
    return TokenStream(arrays), whole


TYPES = st.just(["<u2"] * 3) | st.permutations(["<i4", "<u2", "<u4", "<u4"])


@settings(max_examples=120)
@given(sizes=lengths, types=TYPES, data=st.data())
def test_reads_across_borders_like_one_array(sizes, types, data):
    with tempfile.TemporaryDirectory() as folder:
        stream, whole = _stream(folder, sizes, types)
        assert len(stream) == len(whole)
        low = data.draw(st.integers(0, len(whole)))
        high = data.draw(st.integers(low, len(whole)))
        part, expected = stream.part(low, high), whole[low:high]
        assert len(part) == len(expected)
        count = data.draw(st.integers(0, len(expected)))
        starts = data.draw(st.lists(st.integers(0, len(expected) - count), max_size=5))
        rows = part.gather(np.array(starts, dtype=np.int64), count)
        assert rows.dtype == np.int64
        assert rows.shape == (len(starts), count)
        for row, start in zip(rows, starts, strict=True):
            np.testing.assert_array_equal(row, expected[start : start + count])
        np.testing.assert_array_equal(stream.read(low, high - low), expected)


def test_nothing_outside_the_stream_is_read() -> None:
    """And a sequence needs one token more than its length."""
    for start, count in ((-1, 2), (0, 11), (10, 1)):
        with pytest.raises(IndexError):
            TokenStream([np.arange(10)]).read(start, count)
    for tokens, sequences in ((0, 0), (1, 0), (5, 0), (6, 1), (10, 1), (11, 2)):
        assert TokenStream([np.zeros(tokens, np.uint16)]).n_sequences(5) == sequences


def test_a_users_arrays_become_a_corpus() -> None:
    corpus = as_corpus((np.arange(50, dtype=np.uint16), np.arange(9)))
    assert (len(corpus.train), len(corpus.val)) == (50, 9)
    assert as_corpus((np.arange(50), None)).val is None
    again, other = as_corpus((np.arange(50), None)), as_corpus((np.arange(50)[::-1], None))
    assert as_corpus((np.arange(50, dtype=np.uint8), None)).fingerprint == again.fingerprint
    assert other.fingerprint != again.fingerprint


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (None, "not a NoneType"),
        ((None, None), "train is a NoneType"),
        ((np.arange(3.0), None), "train is an array of 1 dimensions and type float64"),
        ((np.zeros(0, int), None), "train is empty"),
        ((np.array([1, 5, -1]), None), r"id -1 at position 2"),
        ((np.array([1, 5]), np.array([10])), r"val: token id 10 at position 0"),
    ],
)
def test_anything_else_is_refused(found: object, message: str) -> None:
    with pytest.raises(ValueError, match=message) as refusal:
        as_corpus(found, vocab_size=10)
    assert "data._target_" in str(refusal.value)


@pytest.mark.parametrize("dtype", ["u2", "i8"])
def test_a_bad_id_is_found_wherever_it_is(dtype: str) -> None:
    for position in (0, 1 << 20, (1 << 21) + 4):
        ids = np.zeros((1 << 21) + 5, dtype)
        check_ids(ids, 100, "x")
        ids[position] = 100
        with pytest.raises(ValueError, match=rf"x: token id 100 at position {position:,} "):
            check_ids(ids, 100, "x")


def test_a_sample_sees_both_ends_and_the_length() -> None:
    ids = np.arange(1 << 20, dtype=np.uint32)
    seen = {sample_digest(TokenStream([ids]))}
    for change in (0, (1 << 20) - 1):
        other = ids.copy()
        other[change] += 1
        seen.add(sample_digest(TokenStream([other])))
    seen.add(sample_digest(TokenStream([ids[:-1]])))
    assert len(seen) == 4
