"""Files behind addresses: a server that serves, one that falls silent, and none at all."""

import contextlib
import json
import os
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llmexp.__main__ import run as command
from llmexp.data import hub, remote
from llmexp.data.documents import Counts, read_documents
from llmexp.data.stream import DataChanged
from tests.conftest import TINY

from .common import all_ids, json_lines, made, texts_of

pytestmark = pytest.mark.skipif(find_spec("datasets") is None, reason="datasets is not installed")
fsspec = pytest.importorskip("fsspec")
pytest.importorskip("aiohttp")
pyarrow = pytest.importorskip("pyarrow")
from pyarrow import parquet  # noqa: E402


class Server(ThreadingHTTPServer):
    """A web server of one file in memory."""

    daemon_threads, ranges, requests = True, True, 0
    content, mark = b"", "one"
    silent_after: int | None = None  # bytes of an answer

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.go_on = threading.Event()


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_HEAD(self, with_body: bool = False) -> None:
        self.server.requests += 1
        body, code, place = self.server.content, 200, None
        found = re.match(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
        if found and self.server.ranges:
            first, last = int(found[1]), min(int(found[2] or len(body)), len(body) - 1)
            code, place = 206, f"bytes {first}-{last}/{len(body)}"
            body = body[first : last + 1]
        self.send_response(code)
        headers = {"Content-Length": len(body), "ETag": self.server.mark, "Content-Range": place}
        headers["Accept-Ranges"] = "bytes" if self.server.ranges else None
        for name, value in headers.items():
            if value is not None:
                self.send_header(name, str(value))
        self.end_headers()
        self.wfile.write(body[: self.server.silent_after] if with_body else b"")
        if with_body and self.server.silent_after is not None:
            self.wfile.flush()
            self.server.go_on.wait(20)

    def do_GET(self) -> None:
        self.do_HEAD(True)

    def log_message(self, *arguments: Any) -> None:
        pass


@contextlib.contextmanager
def serving(content: bytes) -> Iterator[tuple[Server, str]]:
    with Server() as server:
        server.content = content
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield server, f"http://127.0.0.1:{server.server_port}/web.jsonl"
        finally:
            server.go_on.set()
            server.shutdown()


def plain(tmp_path: Path, count: int = 80) -> bytes:
    return json_lines(tmp_path / "web.jsonl", texts_of("web", count)).read_bytes()


def corpus_of(folder: Path, address: str, **changes: Any) -> Any:
    json_lines(folder / "val.jsonl", texts_of("val", 10))
    return made(folder, sources={"web": {"files": address}}, **changes)


@pytest.mark.parametrize("ranges", [True, False])
def test_a_web_server_is_read_like_a_file_and_asked_once(tmp_path, monkeypatch, ranges):
    """A changed file is seen when it is asked for. Without a network what is prepared trains, and
    another source needs no answer of the first."""
    with serving(plain(tmp_path)) as (server, address):
        server.ranges = ranges
        first = corpus_of(tmp_path, address)
        here = made(tmp_path, sources={"web": {"files": f"{tmp_path}/web.jsonl"}})
        assert all_ids(first.train) == all_ids(here.train)
        assert "as they were" not in first.description
        server.content, server.mark = plain(tmp_path, 81), "two"
        asked = server.requests
        again = corpus_of(tmp_path, address)
        assert server.requests == asked  # nothing is asked where shards are there
        assert (all_ids(again.train), again.fingerprint) == (all_ids(here.train), first.fingerprint)
        assert re.search(r"buckets and hub as they were on \d{4}-", again.description)
        new = corpus_of(tmp_path, address, ask_again=True)
        assert len(new.train) > len(first.train)
        assert all_ids(corpus_of(tmp_path, address).train) == all_ids(new.train)
    monkeypatch.setattr(remote, "ANSWER_S", 2.0)
    assert all_ids(corpus_of(tmp_path, address).train) == all_ids(new.train)
    checked = corpus_of(tmp_path, address, ask_again=True)
    assert all_ids(checked.train) == all_ids(new.train)
    assert re.search(r"not asked now: .*cannot be read", checked.description)
    with pytest.raises(ValueError, match=r"data\.sources\.web\.files=http.*cannot be read"):
        corpus_of(tmp_path, address, cache_dir=f"{tmp_path}/other")
    both = {"web": {"files": address}, "val": {"files": f"{tmp_path}/other.jsonl"}}
    json_lines(tmp_path / "other.jsonl", texts_of("other", 20))
    assert set(made(tmp_path, sources=both).mixed.tokens) == {"web", "val"}


def test_a_change_is_found_where_a_server_has_no_marks_of_it(tmp_path):
    """Then its content counts, as that of a file whose size and time stay as they were."""
    here = json_lines(tmp_path / "here.jsonl", texts_of("web", 80))
    with serving(plain(tmp_path)) as (server, address):
        server.mark = None
        places = address, f"file://{here}"
        first = [corpus_of(tmp_path, place, ask_again=True) for place in places]
        server.content = server.content.replace(b"web", b"bew")
        before = here.stat()
        here.write_bytes(server.content)
        os.utime(here, ns=(before.st_atime_ns, before.st_mtime_ns))
        for old, place in zip(first, places, strict=True):
            new = corpus_of(tmp_path, place, ask_again=True)
            assert new.fingerprint != old.fingerprint
            assert b"bew" in bytes(i % 256 for i in all_ids(new.train))


def test_a_large_file_of_a_web_server(tmp_path):
    """Larger than any buffer: text is one stream, Parquet needs a server that sends parts."""
    texts = [f"{n} " + "many words " * 60 for n in range(8000)]
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
    assert len(lines) > 2 * remote.AHEAD_BYTES
    table = pyarrow.table({"text": [text + str(hash(text)) for text in texts]})
    parquet.write_table(table, tmp_path / "a.parquet", compression="none")
    of_table = (tmp_path / "a.parquet").read_bytes()
    with serving(lines) as (server, address):

        def read() -> list[str]:
            found = read_documents("data.sources.web.files", address, "text", False, Counts())
            return ["".join(document.pieces) for document in found]

        assert read() == texts
        server.content = of_table
        assert read() == table["text"].to_pylist()
        server.ranges = False
        with pytest.raises(ValueError, match="range requests"):
            read()
        server.content = lines
        assert read() == texts


def test_a_file_that_changes_while_it_is_read_leaves_nothing(tmp_path, monkeypatch):
    with serving(plain(tmp_path)) as (server, address):
        real = remote.open_file

        def changing(key: str, place: str, **more: Any) -> Any:
            server.mark = "two"
            return real(key, place, **more)

        monkeypatch.setattr("llmexp.data.documents.open_file", changing)
        with pytest.raises(DataChanged, match="changed while it was prepared"):
            corpus_of(tmp_path, address)
    assert not list((tmp_path / "cache").rglob("*.bin"))


def test_a_server_that_falls_silent_is_given_up(tmp_path, monkeypatch):
    assert remote.ANSWER_S <= 10
    monkeypatch.setattr(remote, "ANSWER_S", 1.0)
    for silent_after in (0, 100):
        with serving(plain(tmp_path)) as (server, address):
            server.silent_after = silent_after
            with pytest.raises(ValueError, match=r"web\.jsonl: cannot be read \(no answer in time"):
                list(read_documents("data.sources.web.files", address, "text", False, Counts()))


def test_buckets_in_memory_and_globs(tmp_path):
    system = fsspec.filesystem("memory")
    content = plain(tmp_path)
    for name in "ab":
        system.pipe(f"/bucket/{name}.jsonl", content)
    both = corpus_of(tmp_path, "memory://bucket/*.jsonl")
    here = made(tmp_path, sources={"web": {"files": f"{tmp_path}/web.jsonl"}})
    assert all_ids(both.train) == 2 * all_ids(here.train)
    system.rm("/bucket", recursive=True)
    assert all_ids(corpus_of(tmp_path, "memory://bucket/*.jsonl").train) == all_ids(both.train)
    with pytest.raises(ValueError, match="no file matches there"):
        corpus_of(tmp_path, "memory://bucket/*.json")


def test_a_dataset_on_the_hub_is_read_at_the_commit_that_was_found(tmp_path, monkeypatch):
    read = []
    commits = ["c0ffee" * 6, "decaf0" * 6]

    class Api:
        def dataset_info(self, name: str) -> Any:
            return SimpleNamespace(sha=commits[0])

    def load_dataset(name: str, revision: str, split: str, streaming: bool) -> Any:
        read.append((name, revision, split, streaming))
        return [{"text": text} for text in texts_of(revision, 30)]

    library = SimpleNamespace(HfApi=Api, load_dataset=load_dataset)
    monkeypatch.setattr(hub, "need_package", lambda *arguments: library)
    sources = {"web": {"hf": "someone/corpus"}}
    first = made(tmp_path, sources=sources, val={})
    assert read == [("someone/corpus", commits[0], "train", True)]
    assert f"someone/corpus at {commits[0][:12]}" in first.description
    commits.pop(0)
    assert all_ids(made(tmp_path, sources=sources, val={}).train) == all_ids(first.train)
    assert len(read) == 1
    asked = made(tmp_path, sources=sources, val={}, ask_again=True)
    assert all_ids(asked.train) != all_ids(first.train)
    assert read[1][1] == commits[0]


def test_a_package_that_a_bucket_needs_is_named(tmp_path, monkeypatch):
    def url_to_fs(address: str) -> None:
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr(fsspec.core, "url_to_fs", url_to_fs)
    with pytest.raises(ValueError, match=r"files=s3://b/a: needs a package .*: Install s3fs"):
        corpus_of(tmp_path, "s3://b/a")


def test_the_proof_of_data_asks_a_server_and_remembers_nothing(tmp_path, monkeypatch):
    """Runs go on with the shards that they have, until somebody prepares anew."""
    monkeypatch.setenv("LLMEXP_CACHE_DIR", f"{tmp_path}/cache")
    with serving(plain(tmp_path)) as (server, address):
        data = ["data=corpus", f"data.sources.web.files={address}"]
        proof = ["verify", "data", *TINY, *data]
        assert command([*proof, f"hydra.run.dir={tmp_path}/one"]) == 0
        server.content, server.mark = server.content.replace(b"web", b"bew"), "two"
        kept = {path: path.read_bytes() for path in (tmp_path / "cache/notes").iterdir()}
        assert command([*proof, f"hydra.run.dir={tmp_path}/two"]) == 1
        record = json.loads((tmp_path / "two/verify.json").read_text())
        (failed,) = [check["what"] for check in record["checks"] if check["passed"] is False]
        assert failed == "data.sources.web.files was prepared from the files of today"
        assert kept == {path: path.read_bytes() for path in (tmp_path / "cache/notes").iterdir()}
