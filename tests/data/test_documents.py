"""Readers of documents: whatever the file is, the same documents; and what cannot be read."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import re
import struct
import tarfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmexp.data.documents import read_documents
from llmexp.data.records import Counts
from tests.conftest import TINY, llmexp

zstandard = pytest.importorskip("zstandard")
pyarrow = pytest.importorskip("pyarrow")
from pyarrow import feather, parquet  # noqa: E402

pytestmark = pytest.mark.usefixtures("suggestions_are_read")

TEXTS = ["Hello\nworld", "", "Grüße, 你好 \U0001f600", "a" * 1_200_000, '{"text": "no"}']
PACKED = {"": bytes, ".gz": gzip.compress, ".zst": zstandard.compress, ".xz": lzma.compress}
PACKED[".bz2"] = bz2.compress


def read(path: Path, *, key: str = "text", skip: bool = False) -> tuple[list[str], Counts]:
    counts = Counts()
    found = read_documents("data.sources.x.files", str(path), key, skip, counts)
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
@pytest.mark.parametrize("text", [TEXTS[0], TEXTS[2], TEXTS[3], "{not json}", "[1] A {note}"])
def test_a_text_file_is_a_document(tmp_path, ending, text):
    path = tmp_path / f"a.txt{ending}"
    path.write_bytes(PACKED[ending](b"\xef\xbb\xbf" + text.encode()))
    assert read(path)[0] == [text]


def test_what_a_file_is_decides_and_not_its_name(tmp_path):
    (tmp_path / "a.txt").write_bytes(gzip.compress(json_lines(["one", "two"])))
    assert read(tmp_path / "a.txt")[0] == ["one", "two"]
    parquet.write_table(pyarrow.table({"text": ["one", "two"]}), tmp_path / "a.txt")
    assert read(tmp_path / "a.txt")[0] == ["one", "two"]


def test_frames_and_members_one_after_the_other_are_one_file(tmp_path):
    for ending, pack in ((ending[1:], PACKED[ending]) for ending in (".gz", ".xz", ".bz2", ".zst")):
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


@pytest.mark.parametrize("ending", [".gz", ".zst", ".xz", ".bz2"])
def test_a_file_cut_short_is_refused(tmp_path, ending):
    whole = PACKED[ending](json_lines([str(n) * 50 for n in range(4000)]))
    (tmp_path / "a").write_bytes(whole[: len(whole) // 2])
    for skip in (True, False):
        with pytest.raises(ValueError, match="is cut short or damaged"):
            read(tmp_path / "a", skip=skip)


def packed_tar(form: str) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode=f"w:{form}") as archive:
        member = tarfile.TarInfo("a.txt")
        member.size = 5
        archive.addfile(member, io.BytesIO(b"hello"))
    return file.getvalue()


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"BZh91AY&SY....", "is cut short or damaged"),
        (
            "text".encode("utf-16"),
            r"is text in UTF-16, not UTF-8; .* iconv -f UTF-16 -t UTF-8 .*/a",
        ),
        (
            "text".encode("utf-32"),
            r"is text in UTF-32, not UTF-8; .* iconv -f UTF-32 -t UTF-8 .*/a",
        ),
        ("text".encode("utf-16-le"), r"zero bytes in it; if it is UTF-16, .* iconv -f UTF-16LE"),
        (b"PK\x03\x04....", "is a zip archive, not text; unpack it"),
        (b"\x93NUMPY.....", "for token ids use data=tokens"),
        (b"PAR1 and no more", "is cut short or damaged"),
        (packed_tar("gz"), r"is a tar archive, .* tar -xf .*/a"),
        (packed_tar(""), r"is a tar archive, .* tar -xf .*/a"),
    ],
)
def test_what_holds_no_documents_is_refused(tmp_path, content, reason):
    (tmp_path / "a").write_bytes(content)
    with pytest.raises(ValueError, match=reason):
        read(tmp_path / "a")


@pytest.mark.parametrize("ending", PACKED)
def test_a_json_array(tmp_path, monkeypatch, ending):
    """Of objects, whatever its name, or of texts; read a little at a time."""
    monkeypatch.setattr("llmexp.data.documents.BLOCK_BYTES", 64)
    path = tmp_path / f"a.txt{ending}"
    objects = [{"text": text, "n": 1.5} for text in (*TEXTS[:3], "b" * 3000)]
    for content in (json.dumps(objects), "\ufeff" + json.dumps(objects, indent=3) + "\n"):
        path.write_bytes(PACKED[ending](content.encode()))
        texts, counts = read(path)
        assert texts == [TEXTS[0], TEXTS[2], "b" * 3000]
        assert counts.empty == 1
    path = tmp_path / f"a.json{ending}"
    path.write_bytes(PACKED[ending](json.dumps(TEXTS[:3]).encode()))
    assert read(path)[0] == [TEXTS[0], TEXTS[2]]
    path.write_bytes(PACKED[ending](b"[ ]"))
    assert read(path)[0] == []


def test_a_json_array_with_a_bad_item(tmp_path):
    path = tmp_path / "a.json"
    path.write_bytes(b'[{"text": "a"}, 123, {"body": "b"}, "good"]')
    with pytest.raises(ValueError, match="item 2: neither a JSON object nor a text but int"):
        read(path)
    texts, counts = read(path, skip=True)
    assert (texts, counts.bad) == (["a", "good"], 2)
    for cut in (b'[{"text": "a"}, {"te', b'[{"text": "a"} {"text": "b"}]', b'[{"text": "a"}, ',
        b'[{"text": "a"},]', b'[{"text": "a"},, "b"]'):  # fmt: skip
        path.write_bytes(cut)
        with pytest.raises(ValueError, match=r"a\.json: item [12] is no valid JSON"):
            read(path, skip=True)


def test_nothing_behind_a_json_array_is_passed_over(tmp_path, monkeypatch):
    """Such as a second one, of files that were joined."""
    monkeypatch.setattr("llmexp.data.documents.BLOCK_BYTES", 64)
    path = tmp_path / "a.json"
    for first, count in (([{"text": "a" * 100}] * 2, 2), ([], 0)):
        path.write_text(f"{json.dumps(first)}{' ' * 200}\n{json.dumps([{'text': 'b'}])}\n")
        with pytest.raises(ValueError, match=f"more behind its array of {count} items; put all"):
            read(path, skip=True)


NESTED = [
    {"content": {"body": "one", "n": 1}},
    {"content": {"body": ""}},
    {"content": {"body": "two"}},
]


def test_a_key_with_dots_leads_into_objects(tmp_path):
    path = tmp_path / "a.jsonl"
    lines = [json.dumps(record) for record in NESTED]
    path.write_text("\n".join([*lines, '{"content.body": "literal", "content": {"body": "no"}}']))
    assert read(path, key="content.body")[0] == ["one", "two", "literal"]
    path.write_text('{"content": {"title": "a"}}\n{"content": 7}\n{"content": {"body": 3}}\n')
    with pytest.raises(ValueError, match=r"line 1: no key 'content.body'; the keys are: content"):
        read(path, key="content.body")
    assert read(path, key="content.body", skip=True)[1].bad == 3


def tables(path: Path, table) -> list[Path]:
    """Write a table in every form that is read."""
    parquet.write_table(table, path / "a.parquet")
    feather.write_feather(table, str(path / "a.feather"), compression="lz4")
    with pyarrow.ipc.new_stream(path / "a.arrow", table.schema) as stream:
        stream.write_table(table, max_chunksize=700)
    return [path / "a.parquet", path / "a.feather", path / "a.arrow"]


def test_tables(tmp_path):
    texts = TEXTS[:3] * 700
    column, raw = pyarrow.array(texts), pyarrow.array([text.encode() for text in texts])
    inner = pyarrow.StructArray.from_arrays([column, raw], ["body", "raw"])
    table = pyarrow.table({
        "text": column, "raw": raw, "words": column.dictionary_encode(), "content": inner,
        "outer": pyarrow.StructArray.from_arrays([inner], ["in"]),
        "content.raw": pyarrow.array(["literal"] * len(texts)),
    })  # fmt: skip
    for path in tables(tmp_path, table):
        for key in ("text", "raw", "words", "content.body", "outer.in.body", "outer.in.raw"):
            found, counts = read(path, key=key)
            assert found == [text for text in texts if text], (path, key)
            assert counts.empty == 700
        assert set(read(path, key="content.raw")[0]) == {"literal"}


def test_rows_and_columns_of_tables_that_are_no_text(tmp_path):
    rows = [{"body": b"good"}, None, {"body": None}, {"body": b"gr\xfc"}, {"body": b"fine"}]
    table = pyarrow.table({"content": rows, "n": [1] * 5})
    for path in tables(tmp_path, table):
        texts, counts = read(path, key="content.body", skip=True)
        assert (texts, counts.bad) == (["good", "fine"], 3)
        with pytest.raises(ValueError, match=r"row 2: 'content.body' is null"):
            read(path, key="content.body")
        for key, reason in {
            "text": "no column 'text'; the columns are: content, n",
            "content.text": "no column 'content.text'; the fields of content are: body",
            "content": "the column 'content' is no text but struct<body: binary>",
            "n.body": "the column 'n' is no text but int64",
        }.items():
            with pytest.raises(ValueError, match=re.escape(reason)):
                read(path, key=key)
        path.write_bytes(path.read_bytes()[:-60])
        with pytest.raises(ValueError, match="is cut short or damaged"):
            read(path, key="content.body", skip=True)


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


@pytest.mark.parametrize(
    "content",
    ['{\n  "name": "x"\n}\n', '{"a": 1} # a note\n', '[ {"a" 1} ]', '[{"a": 1}] and more', "text"],
)
@pytest.mark.parametrize("name", ["package.json", "a.jsonl", "a.txt"])
def test_a_file_that_looks_like_json_can_be_read_as_plain_text(tmp_path, content, name):
    """The refusal says how, with a word for its source."""
    for ending in ("", ".gz"):
        path = tmp_path / f"{name}{ending}"
        path.write_bytes(PACKED[ending](content.encode()))
        for section, key in (("data", "train_files"), ("data.sources.x", "files")):
            place = f"{section}.{key}", str(path)
            plain = list(read_documents(*place, None, False, Counts()))
            assert ["".join(one.pieces) for one in plain] == [content]
            if name == "a.txt" and content[0] != "[":
                assert len(list(read_documents(*place, "text", False, Counts()))) == 1
                continue
            with pytest.raises(ValueError, match=f"as plain text add {section}.plain=true$"):
                list(read_documents(*place, "text", False, Counts()))


def test_a_source_of_plain_text_at_the_command_line(tmp_path):
    cache = {"LLMEXP_CACHE_DIR": str(tmp_path / "cache")}
    for name in ("package.json", "b.json"):
        (tmp_path / name).write_text(json.dumps({"name": "a" * 40}, indent=2))
    for data, way in (
        (["data=text", "data.train_files=*.json"], "data.plain=true"),
        (["data=corpus", "data.sources.x.files=*.json"], "data.sources.x.plain=true"),
    ):
        ended = llmexp("prepare", *TINY, *data, cwd=tmp_path, **cache)
        assert ended.code == 2
        assert way in ended.err
        assert llmexp("prepare", *TINY, *data, way, cwd=tmp_path, **cache).code == 0
    data += [way, "data.sources.x.text_key=name"]
    ended = llmexp("prepare", *TINY, *data, cwd=tmp_path, **cache)
    assert "data.sources.x.plain=true: does nothing beside text_key" in ended.err
