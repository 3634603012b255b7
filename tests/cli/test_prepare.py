"""`llmexp prepare` in parts and on Ray: the same shards, and what is refused."""

import bz2
import importlib.util
import json
import lzma

import pytest

from llmexp.cli.preparing import build_prepare, part_of
from llmexp.cli.running import run_command
from llmexp.config.values import ConfigError
from tests.conftest import llmexp
from tests.data.test_corpus import tree

CORPUS = ["data=corpus", "data.sources.a.files=a.jsonl", "data.sources.b.files=b.jsonl"]


def test_a_part_is_read_or_refused():
    assert part_of(build_prepare({"part": "3/16", "on": "local"})) == (3, 16)
    assert part_of(build_prepare({"part": None, "on": "ray"})) is None
    for part in ("0/16", "17/16", "a", "", "3", "-1/2", "1/0", "1/2/3", "1.5/2"):
        with pytest.raises(ConfigError, match=r"prepare\.part=.*; for example prepare\.part=3/16"):
            build_prepare({"part": part, "on": "local"})


def test_a_folder_of_many_kinds_with_the_text_inside_of_objects(tmp_path, monkeypatch, capsys):
    pyarrow, feather = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.feather")
    monkeypatch.chdir(tmp_path)
    records = [{"content": {"body": f"{n} words " * 3}} for n in range(9)]
    (tmp_path / "web/b").mkdir(parents=True)
    lines = "".join(json.dumps(record) + "\n" for record in records)
    (tmp_path / "web/a.jsonl.xz").write_bytes(lzma.compress(lines.encode()))
    (tmp_path / "web/b/b.json.bz2").write_bytes(bz2.compress(json.dumps(records).encode()))
    feather.write_feather(pyarrow.Table.from_pylist(records), str(tmp_path / "web/c.feather"))
    (tmp_path / "web/.hidden").write_bytes(b"\0")
    given = ["data=corpus", "data.sources.web.files=web", "data.sources.web.text_key=content.body"]
    assert run_command("prepare", [*given, "data.cache_dir=cache", "batch.sequence_length=12"]) == 0
    row = capsys.readouterr().out.splitlines()[2].split()
    size = sum(len(record["content"]["body"]) + 1 for record in records)
    assert row[:5] == ["web", "train", "3", "27", str(3 * size)]


def test_a_missing_ray_is_named(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"prepare.on=ray: .* pip install 'llmexp\[ray\]'"):
        run_command("prepare", [*CORPUS, "prepare.on=ray"])


@pytest.mark.fresh
def test_parts_as_tasks_of_ray(tmp_path, monkeypatch):
    """A real Ray on this machine."""
    pytest.importorskip("ray")
    pytest.importorskip("datasets")
    for name in "ab":
        lines = (json.dumps({"text": f"{name} {n} " * 9}) + "\n" for n in range(500))
        (tmp_path / f"{name}.jsonl").write_text("".join(lines))
    done = llmexp("prepare", *CORPUS, "data.cache_dir=ray", "prepare.on=ray", cwd=tmp_path)
    assert done.code == 0, done.err
    assert done.out.splitlines()[-1] == "train 53,020 tokens, validation 0 tokens"
    monkeypatch.chdir(tmp_path)
    assert run_command("prepare", [*CORPUS, "data.cache_dir=here"]) == 0
    assert tree(tmp_path / "ray" / "corpus") == tree(tmp_path / "here" / "corpus")
