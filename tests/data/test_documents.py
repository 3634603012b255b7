"""Readers of documents: whatever the file is, the same documents; what cannot be read is refused or
counted. tests/refusals/data.yaml has the refusals at the command line."""

import bz2
import gzip
import json
import lzma
import re
import struct
from pathlib import Path

import pytest

from llmexp.__main__ import run
from llmexp.data.documents import Counts, read_documents
from tests.conftest import TINY

zstandard = pytest.importorskip("zstandard")
pyarrow = pytest.importorskip("pyarrow")
from pyarrow import feather, parquet  # noqa: E402

pytestmark = pytest.mark.usefixtures("suggestions_are_read")

TEXTS = ["Hello\nworld", "", "Grüße, 你好 \U0001f600", "a" * 1_200_000, '{"text": "no"}']
PACKED = {"": bytes, ".gz": gzip.compress, ".zst": zstandard.compress, ".xz": lzma.compress}
PACKED[".bz2"] = bz2.compress


def read(path: Path, key: str | None = "text", skip: bool = False) -> tuple[list[str], Counts]:
    counts = Counts()
    found = read_documents("data.sources.x.files", str(path), key, skip, counts)
    return ["".join(document.pieces) for document in found], counts


def lines(texts: list[str]) -> bytes:
    return "".join(json.dumps({"text": text, "id": 3}) + "\n" for text in texts).encode()


@pytest.mark.parametrize("ending", PACKED)
def test_json_lines_and_arrays_and_texts(tmp_path, monkeypatch, ending):
    """An array holds objects, whatever its name, or texts, and is read a little at a time."""
    path, pack = tmp_path / f"a.jsonl{ending}", PACKED[ending]
    path.write_bytes(pack(b"\xef\xbb\xbf\n" + lines(TEXTS) + b"\n"))
    texts, counts = read(path)
    assert texts == [text for text in TEXTS if text]
    assert (counts.documents, counts.empty, counts.bad) == (4, 1, 0)
    path = tmp_path / f"a.txt{ending}"
    for text in (TEXTS[0], TEXTS[2], TEXTS[3], "{not json}", "[1] A {note}"):
        path.write_bytes(pack(b"\xef\xbb\xbf" + text.encode()))
        assert read(path)[0] == [text]
    monkeypatch.setattr("llmexp.data.sniffing.BLOCK_BYTES", 64)
    objects = [{"text": text, "n": 1.5} for text in (*TEXTS[:3], "b" * 3000)]
    for content in (json.dumps(objects), "\ufeff" + json.dumps(objects, indent=3) + "\n"):
        path.write_bytes(pack(content.encode()))
        texts, counts = read(path)
        assert texts == [TEXTS[0], TEXTS[2], "b" * 3000]
        assert counts.empty == 1
    path = tmp_path / f"a.json{ending}"
    path.write_bytes(pack(json.dumps(TEXTS[:3]).encode()))
    assert read(path)[0] == [TEXTS[0], TEXTS[2]]
    path.write_bytes(pack(b"[ ]"))
    assert read(path)[0] == []


def test_what_a_file_is_decides_and_not_its_name(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(gzip.compress(lines(["one", "two"])))
    assert read(path)[0] == ["one", "two"]
    parquet.write_table(pyarrow.table({"text": ["one", "two"]}), path)
    assert read(path)[0] == ["one", "two"]
    for content, reason in (
        (b"BZh91AY&SY....", "is truncated or damaged"),
        ("text".encode("utf-32"), "is text in UTF-32, not UTF-8; .* iconv -f UTF-32 -t UTF-8 .*/a"),
    ):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=reason):
            read(path)


@pytest.mark.parametrize("pack", [PACKED[ending] for ending in PACKED if ending])
def test_frames_and_members_one_after_the_other_are_one_file(tmp_path, pack):
    path = tmp_path / "a"
    both = pack(lines(["one"])) + pack(lines(["two"]))
    skipped = b"\x50\x2a\x4d\x18\x02\x00\x00\x00ab"  # as parallel compressors write before each
    for content in (both, skipped + both + skipped)[: 1 + (pack is zstandard.compress)]:
        path.write_bytes(content)
        assert read(path)[0] == ["one", "two"]
    whole = pack(lines([str(n) * 50 for n in range(40_000)]))
    path.write_bytes(whole[: len(whole) // 2])
    for skip in (True, False):
        with pytest.raises(ValueError, match=r"is truncated or damaged after [\d,]+ records \("):
            read(path, skip=skip)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b'{"text": "a"}\n{"text": \n', "line 2: no valid JSON (Expecting value at column 9)"),
        (b'{"text": "a"}\n[1]\n', "line 2: no JSON object but a list"),
        (b'{"body": "a", "n": 1}\n', "line 1: no key 'text'; the keys are: body, n"),
        (b'{"text": 7}\n', "line 1: 'text' is not text but a number"),
        (b'{"text": null}\n', "line 1: 'text' is not text but null"),
        (b'{"text": "\\ud800"}\n', "half a surrogate pair"),
        (b'{"text": "gr\xfc\xdfe"}\n', "line 1: no valid JSON"),
        (b'[{"text": "a"}, 123, "good"]', "item 2: neither a JSON object nor a text but a number"),
        (b"gut\n" * 300_000 + b"gr\xfc\xdfe", "not UTF-8 at byte 1,200,002 in line 300,001"),
    ],
)
def test_a_bad_record_is_refused_or_counted(tmp_path, content, reason):
    path = tmp_path / ("a.jsonl" if content[:1] in b"{[" else "a.txt")
    path.write_bytes(content + (b'{"text": "good"}\n' if content.endswith(b"\n") else b""))
    with pytest.raises(ValueError, match=f"{re.escape(str(path))}.*{re.escape(reason)}"):
        read(path)
    texts, counts = read(path, skip=True)
    assert texts[-1:] == ["good"] or not content.endswith((b"\n", b"]"))
    assert counts.bad == 1
    assert reason in counts.first_bad


@pytest.mark.parametrize(
    "content",
    [
        '[{"text": "a"}, {"te', '[{"text": "a"} {"text": "b"}]', '[{"text": "a"}, ',
        '[{"text": "a"},]', '[{"text": "a"},, "b"]',
        f'{json.dumps([{"text": "a" * 100}] * 2)}{" " * 200}\n[{{"text": "b"}}]', "[]  ['b']",
    ],
)  # fmt: skip
def test_an_array_that_is_not_whole_is_refused(tmp_path, monkeypatch, content):
    """Nor is anything behind it passed over, such as a second one, of files that were joined."""
    monkeypatch.setattr("llmexp.data.sniffing.BLOCK_BYTES", 64)
    (tmp_path / "a.json").write_text(content)
    with pytest.raises(ValueError, match=r"item [12] is not valid JSON|behind its array of [02]"):
        read(tmp_path / "a.json", skip=True)


def test_a_key_with_dots_leads_into_objects(tmp_path):
    path = tmp_path / "a.jsonl"
    bodies = [{"body": "one", "n": 1}, {"body": ""}, {"body": "two"}]
    records = [{"content": one} for one in bodies]
    records += [{"content.body": "literal", "content": {"body": "no"}}]
    path.write_text("\n".join(map(json.dumps, records)))
    assert read(path, key="content.body")[0] == ["one", "two", "literal"]
    path.write_text('{"content": {"title": "a"}}\n{"content": 7}\n{"content": {"body": 3}}\n')
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
        for key, reason in {
            "content.body": "row 2: 'content.body' is null",
            "text": "no column 'text'; the columns are: content, n",
            "content.text": "no column 'content.text'; the fields of content are: body",
            "content": "the column 'content' is not text but struct<body: binary>",
            "n.body": "the column 'n' is not text but int64",
        }.items():
            with pytest.raises(ValueError, match=re.escape(reason)):
                read(path, key=key)
        path.write_bytes(path.read_bytes()[:-60])
        with pytest.raises(ValueError, match="is truncated or damaged"):
            read(path, key="content.body", skip=True)


def test_damage_in_the_middle_of_a_table(tmp_path):
    path = tmp_path / "a.parquet"
    column = [f"text {n} " * 9 for n in range(6000)]
    parquet.write_table(pyarrow.table({"text": column}), path, row_group_size=2048)
    content = bytearray(path.read_bytes())
    begin = parquet.ParquetFile(path).metadata.row_group(2).column(0).dictionary_page_offset
    content[begin : begin + 300] = bytes(300)
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"damaged after [\d,]+ records \(.*\); get the file"):
        read(path)


def test_parquet_text_that_is_not_utf8(tmp_path):
    path = tmp_path / "a.parquet"
    for kind, wide in ((pyarrow.string(), "i"), (pyarrow.large_string(), "q")):
        ends = struct.pack(f"<4{wide}", 0, 4, 9, 13)
        buffers = [None, pyarrow.py_buffer(ends), pyarrow.py_buffer(b"goodgr\xfc\xdfefine")]
        column = pyarrow.Array.from_buffers(kind, 3, buffers)
        parquet.write_table(pyarrow.table({"text": column}), path)
        with pytest.raises(ValueError, match=r"a\.parquet, row 2: 'text' is not UTF-8"):
            read(path)
        texts, counts = read(path, skip=True)
        assert (texts, counts.bad) == (["good", "fine"], 1)


@pytest.mark.parametrize("name", ["package.json", "a.jsonl", "a.txt"])
def test_a_file_that_looks_like_json_can_be_read_as_plain_text(tmp_path, name):
    """The refusal says how, with a word for its source."""
    objects = ['{\n  "name": "x"\n}\n', '{"a": 1} # a note\n']
    for content in (*objects, '[ {"a" 1} ]', '[{"a": 1}] and more', "text"):
        for ending in ("", ".gz"):
            path = tmp_path / f"{name}{ending}"
            path.write_bytes(PACKED[ending](content.encode()))
            assert read(path, None)[0] == [content]
            if name == "a.txt" and content[0] != "[":
                assert len(read(path)[0]) == 1
                continue
            with pytest.raises(ValueError, match=r"plain text add data\.sources\.x\.plain=true$"):
                read(path)


def test_a_source_of_plain_text_at_the_command_line(tmp_path, monkeypatch):
    monkeypatch.setenv("LLMEXP_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    Path("package.json").write_text(json.dumps({"name": "a" * 40}, indent=2))
    for data, way in (
        (["data=text", "data.train_files=*.json"], "data.plain=true"),
        (["data=corpus", "data.sources.x.files=*.json"], "data.sources.x.plain=true"),
    ):
        assert run(["prepare", *TINY, *data, way]) == 0
