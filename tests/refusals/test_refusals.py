"""Refusals are rows of the YAML files here, and of tests/features/*/refusals.yaml: a command that
is refused, the key that it names, and the kind of the refusal.

A group of rows has a `home` (homes.py), the `command` that each row's `do` completes (TINY stands
for tests/tiny.py) and, where a file is damaged first, `damage`: lists of an operation, a file and
what it needs. Each is refused with exit code 2 and one message, which holds `key`, without a
traceback, with nothing written, and what the message suggests can be pasted. Its words stand in
tests/golden/words/refusals, those of a feature beside its rows.
"""

import os
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

import llmexp.__main__
from llmexp.config.kinds import MEANING, kind_of_error
from llmexp.sweep import planning
from tests import suggestions
from tests.conftest import ROOT
from tests.refusals import homes
from tests.runs import Runs
from tests.tiny import TINY
from tests.tools import amend
from tests.words import Words

HERE = Path(__file__).parent


def rows(path: Path) -> list[dict[str, Any]]:
    groups = yaml.safe_load(path.read_text(encoding="utf-8"))
    return [{**group, **row} for group in groups for row in group["rows"]]


def name_of(path: Path) -> str:
    """Return the name of the words of a file of rows."""
    return str(path.relative_to(HERE.parent).with_suffix(""))


FILES = sorted([*HERE.glob("*.yaml"), *HERE.parent.glob("features/*/refusals.yaml")])
ROWS = [
    pytest.param(name_of(path), row, id=f"{name_of(path)}: {row.get('do', '')[:70]}")
    for path in FILES
    for row in rows(path)
]


def heading(row: dict[str, Any]) -> str:
    """Return what tells the row from all others of its file: the damage, and the command."""
    damage = [" ".join(map(str, words)) for words in row.get("damage", [])]
    words = "; ".join([*damage, f"{row['command']} {row.get('do', '')}"])
    return " ".join(words.split())


def damaged(work: Path, operation: str, name: str, *more: Any) -> None:
    path = work / name
    if operation == "write":  # write FILE TEXT
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(str(more[0]), encoding="utf-8")
    elif operation == "set":  # set FILE {KEY: VALUE, ...}, of JSON or YAML
        amend(path, **more[0])
    elif operation == "cut":  # cut FILE BYTES
        os.truncate(path, int(more[0]))
    elif operation == "flip":  # flip FILE AT: one bit of a byte
        data = bytearray(path.read_bytes())
        data[int(more[0])] ^= 1
        path.write_bytes(data)
    elif operation == "remove":
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    elif operation == "move":  # move FILE TO
        path.rename(work / str(more[0]))
    else:
        assert operation == "folder", operation
        path.mkdir(parents=True)


def files(folder: Path) -> dict[str, int]:
    """Return what lies there, with sizes, but for what a plan remembers and prepared texts."""
    ours = ("cache/facts", "cache/corpus", "cache/notes", "cache/hashes")
    found = {str(p.relative_to(folder)): p for p in folder.rglob("*") if not p.is_dir()}
    return {
        name: path.lstat().st_size
        for name, path in found.items()
        if not name.startswith(ours) and not path.name.startswith(".lock")
    }


def kinds_reported(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the kinds of what is reported from now on; of points that are planned, the first."""
    kinds: list[str] = []
    report, reasons = llmexp.__main__.report, planning.reasons

    def reported(error: Exception, code: int, as_json: bool) -> int:
        kinds.append(kind_of_error(error))
        return report(error, code, as_json)

    def listed(refused: Any) -> list[str]:
        kinds.extend(one.kind for one in refused[:1])
        return reasons(refused)

    monkeypatch.setattr(llmexp.__main__, "report", reported)
    monkeypatch.setattr(planning, "reasons", listed)
    return kinds


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_each_row_has_its_words_and_no_other_stands_there(path, words):
    asked = [heading(row) for row in rows(path)]
    assert len({*asked}) == len(asked)
    assert {row["kind"] for row in rows(path)} <= set(MEANING)
    words.only(name_of(path), asked)


@pytest.mark.parametrize(("name", "row"), ROWS)
def test_it_is_refused(
    name: str,
    row: dict[str, Any],
    runs: Runs,
    words: Words,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if "needs" in row:
        pytest.importorskip(row["needs"])
    work = tmp_path / "work"
    work.mkdir()
    getattr(homes, row.get("home", "empty"))(work, runs)
    for operation in row.get("damage", []):
        damaged(work, *operation)
    monkeypatch.chdir(work)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("LLMEXP_CACHE_DIR", str(tmp_path / "cache"))
    for key, value in row.get("env", {}).items():
        monkeypatch.setenv(key, str(value))
    words.hidden |= {  # what torch says itself
        r"(?<=LBFGS: cannot be made: ).*": "WHY",
        r"(?<=fails with gradients alone )\([^)]*\)": "(WHY)",
    }
    given = shlex.split(f"{row['command']} {row.get('do', '')}")
    before = files(tmp_path)
    capsys.readouterr()
    kinds = kinds_reported(monkeypatch)
    try:
        code = llmexp.__main__.run(
            [word for each in given for word in (TINY if each == "TINY" else [each])]
        )
    except SystemExit as ended:  # of argparse
        code = ended.code
    out, err = capsys.readouterr()
    assert code == 2, out + err
    assert files(tmp_path) == before
    assert "Traceback" not in err
    assert not out or "plan" in given
    assert row["key"] in err
    assert kinds == [row["kind"]]
    assert re.search(r"^(llmexp|refused|usage): ", err, re.MULTILINE), err
    suggestions.check(err)
    words.places = {work: "WORK", tmp_path: "HOME", ROOT: "ROOT"}
    words(name, err, heading(row))
