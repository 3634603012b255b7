"""Readers of documents: whatever the file is, the same documents; and what cannot be read."""

from __future__ import annotations

import gzip
import io
import json
import re
import struct
import tarfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmexp.data.files import refuse_packed
from llmexp.data.readers import Counts, documents

zstandard = pytest.importorskip("zstandard")
pyarrow = pytest.importorskip("pyarrow")
from pyarrow import parquet  # noqa: E402

TEXTS = ["Hello\nworld", "", "Grüße, 你好 \U0001f600", "a" * 1_200_000, '{"text": "no"}']
PACKED = {"": bytes, ".gz": gzip.compress, ".zst": zstandard.compress}


def read(path: Path, *, key: str = "text", skip: bool = False) -> tuple[list[str], Counts]:
    counts = Counts()
    found = documents("data.sources.x.files", str(path), key, skip, counts)
    return ["".join(document.pieces) for document in found], counts


def json_lines(texts: list[str], key: str = "text") -> bytes:
    return "".join(json.dumps({key: text, "id": 3}) + "\n" for text in texts).encode()


@pytest.mark.parametrize("ending", PACKED)
def test_json_lines(tmp_path, ending):
    path = tmp_path / f"a.jsonl{ending}"
    path.write_bytes(PACKED[ending](b"\xef\xbb\xbf\n" + json_lines(TEXTS) + b"\n"))
    texts, counts = read(path)
    assert texts == [text for text in TEXTS if text]
    assert (counts.documents, counts.empty, counts.bad) == (4, 1, 0)


@pytest.mark.parametrize("ending", PACKED)
@pytest.mark.parametrize("text", [TEXTS[0], TEXTS[2], TEXTS[3], "{not json}"])
def test_a_text_file_is_a_document(tmp_path, ending, text):
    path = tmp_path / f"a.txt{ending}"
    path.write_bytes(PACKED[ending](b"\xef\xbb\xbf" + text.encode()))
    assert read(path)[0] == [text]


@pytest.mark.parametrize("encoded", [False, True])
def test_parquet(tmp_path, encoded):
    column = pyarrow.array(TEXTS * 300)
    table = {"body": column.dictionary_encode() if encoded else column, "n": [1] * 1500}
    parquet.write_table(pyarrow.table(table), tmp_path / "a.bin")
    texts, counts = read(tmp_path / "a.bin", key="body")
    assert texts == [text for text in TEXTS * 300 if text]
    assert counts.empty == 300


def test_what_a_file_is_decides_and_not_its_name(tmp_path):
    (tmp_path / "a.txt").write_bytes(gzip.compress(json_lines(["one", "two"])))
    assert read(tmp_path / "a.txt")[0] == ["one", "two"]


def test_frames_and_members_one_after_the_other_are_one_file(tmp_path):
    for ending, pack in (("gz", gzip.compress), ("zst", zstandard.compress)):
        path = tmp_path / f"a.jsonl.{ending}"
        path.write_bytes(pack(json_lines(["one"])) + pack(json_lines(["two"])))
        assert read(path)[0] == ["one", "two"]
    skipped = b"\x50\x2a\x4d\x18\x02\x00\x00\x00ab"  # as parallel compressors write before each
    path.write_bytes(skipped + path.read_bytes() + skipped)
    assert read(path)[0] == ["one", "two"]


@given(st.lists(st.text(), max_size=20))
def test_any_text_survives(tmp_path_factory, texts):
    path = tmp_path_factory.mktemp("any") / "a.jsonl.gz"
    path.write_bytes(gzip.compress(json_lines(texts)))
    assert read(path)[0] == [text for text in texts if text]


BAD = {
    "json": (b'{"text": "a"}\n{"text": \n', "line 2: no valid JSON"),
    "list": (b'{"text": "a"}\n[1]\n', "line 2: no JSON object but list"),
    "key": (b'{"body": "a", "n": 1}\n', "line 1: no key 'text'; the keys are: body, n"),
    "number": (b'{"text": 7}\n', "line 1: 'text' is no text but int"),
    "surrogate": (b'{"text": "\\ud800"}\n', "half a surrogate pair"),
    "latin1": (b'{"text": "gr\xfc\xdfe"}\n', "line 1: no valid JSON"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_record_is_refused_or_counted(tmp_path, name):
    content, reason = BAD[name]
    (tmp_path / "a.jsonl").write_bytes(content + b'{"text": "good"}\n')
    with pytest.raises(ValueError, match=f"{re.escape(str(tmp_path))}.*{re.escape(reason)}"):
        read(tmp_path / "a.jsonl")
    texts, counts = read(tmp_path / "a.jsonl", skip=True)
    assert texts[-1] == "good"
    assert counts.bad == 1
    assert reason in counts.first_bad


def test_text_that_is_not_utf8(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"gut" * 300_000 + b"gr\xfc\xdfe")
    with pytest.raises(ValueError, match=r"not UTF-8 at byte 900,002 .* iconv"):
        read(tmp_path / "a.txt")
    assert read(tmp_path / "a.txt", skip=True)[1].bad == 1


@pytest.mark.parametrize("ending", [".gz", ".zst"])
def test_a_file_cut_short_is_refused(tmp_path, ending):
    whole = PACKED[ending](json_lines([str(n) * 50 for n in range(4000)]))
    (tmp_path / "a").write_bytes(whole[: len(whole) // 2])
    for skip in (True, False):
        with pytest.raises(ValueError, match="is cut short or damaged"):
            read(tmp_path / "a", skip=skip)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"BZh91AY&SY....", "is compressed by bzip2, not text; unpack it first: bunzip2"),
        (b"PK\x03\x04....", "is a zip archive, not text; unpack it"),
        (b"\x93NUMPY.....", "for token ids use data=tokens"),
        (b"PAR1 and no more", "is cut short or damaged"),
    ],
)
def test_what_holds_no_documents_is_refused(tmp_path, content, reason):
    (tmp_path / "a").write_bytes(content)
    with pytest.raises(ValueError, match=reason):
        read(tmp_path / "a")


def packed_tar(form: str) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode=f"w:{form}") as archive:
        member = tarfile.TarInfo("a.txt")
        member.size = 5
        archive.addfile(member, io.BytesIO(b"hello"))
    return file.getvalue()


@pytest.mark.parametrize("content", [packed_tar("gz"), packed_tar("")])
def test_an_archive_is_no_text(tmp_path, content):
    (tmp_path / "a.txt").write_bytes(content)
    with pytest.raises(ValueError, match=r"is a tar archive, .* tar -xf .*a.txt"):
        read(tmp_path / "a.txt")
    with pytest.raises(ValueError, match=r"gzip|tar archive"):
        refuse_packed("data.train_files", tmp_path / "a.txt")


@pytest.mark.parametrize("ending", PACKED)
@pytest.mark.parametrize("content", [b'[{"text": "a"},\n{}]', b'\n[\n  {\n  "text": 1}]'])
def test_a_json_array_is_refused_with_what_to_do(tmp_path, ending, content):
    path = tmp_path / f"a.json{ending}"
    path.write_bytes(PACKED[ending](content))
    with pytest.raises(ValueError, match=r"one JSON array, .* a record a line: jq -c '\.\[\]'"):
        read(path)


def test_a_text_that_begins_with_a_bracket_is_text(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"[1] A footnote {that} is no JSON")
    assert read(tmp_path / "a.txt")[1].documents == 1
    refuse_packed("data.train_files", tmp_path / "a.txt")


@pytest.mark.parametrize("kind", [pyarrow.string(), pyarrow.large_string()])
def test_parquet_text_that_is_not_utf8(tmp_path, kind):
    wide = "l" if kind == pyarrow.large_string() else "i"
    raw = [b"good", b"gr\xfc\xdfe", b"fine"]
    ends = struct.pack(f"<4{'q' if wide == 'l' else 'i'}", 0, 4, 9, 13)
    buffers = [None, pyarrow.py_buffer(ends), pyarrow.py_buffer(b"".join(raw))]
    column = pyarrow.Array.from_buffers(kind, 3, buffers)
    parquet.write_table(pyarrow.table({"text": column}), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=r"a\.parquet, row 2: 'text' is not UTF-8"):
        read(tmp_path / "a.parquet")
    texts, counts = read(tmp_path / "a.parquet", skip=True)
    assert texts == ["good", "fine"]
    assert counts.bad == 1


def test_a_parquet_column_that_is_not_there(tmp_path):
    parquet.write_table(pyarrow.table({"body": ["a"], "n": [1]}), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match="no column 'text'; the columns are: body, n"):
        read(tmp_path / "a.parquet")
    with pytest.raises(ValueError, match="the column 'n' is no text but int64"):
        read(tmp_path / "a.parquet", key="n")
