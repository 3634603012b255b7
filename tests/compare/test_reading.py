"""Damage and foreign folders: each a line, and the good runs are still shown."""

import fcntl
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import llmexp
from llmexp.compare.page import page
from llmexp.compare.reading import read, read_columns
from llmexp.config.values import ConfigError
from llmexp.folders.door import row_in
from llmexp.folders.find import find
from llmexp.folders.folder import RunFolder
from llmexp.folders.steps import FIELDS
from llmexp.system.redact import clean
from tests.compare.synthetic import make_case, make_run, make_sweep


def slow(text: str) -> dict[str, list]:
    """An independent reader of rows: line by line, everything."""
    rows = [json.loads(line) for line in text.splitlines()]
    keys = dict.fromkeys(k for row in rows for k in row)
    return {k: [float(row.get(k, "nan")) for row in rows] for k in keys}


numbers = st.floats(-1e6, 1e6) | st.sampled_from([0.0, -0.0, 1e-30, 3.0000000000000004, 1e22])


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.lists(
        st.tuples(st.booleans(), st.booleans(), numbers, numbers, numbers), min_size=1, max_size=20
    )
)  # fmt: skip
def test_what_is_read_is_what_is_there(tmp_path, rows):
    path = tmp_path / "metrics.jsonl"
    lines = []
    for i, (with_loss, with_val, loss, val, lr) in enumerate(rows, 1):
        row = {"step": i, "tokens_seen": i * 1024, "epoch": 0.5}
        row |= {"train/loss": loss} if with_loss else {}
        row |= {"lr": lr, "skipped": False}
        row |= {"val/loss": val, "val/ppl": 2.0, "val/bits_per_byte": val / 2} if with_val else {}
        lines.append(json.dumps(row, separators=(",", ":")))
    path.write_text("\n".join(lines) + "\n")
    (columns, problems), wanted = read_columns(path), slow(path.read_text())
    for key in ("train/loss", "val/loss", "val/bits_per_byte"):
        assert (key in columns) == (key in wanted)
    assert problems == ()
    for key in wanted:
        np.testing.assert_array_equal(columns[key], wanted[key])


def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key is there twice")
    return found


KEYS = ['"step"', '"lr"', r'"\u006cr"', r'"\""', '"a:"', "lr"]
VALUES = ["1", "2.5", "-0.0", "1e999", "9" * 400, str(2**64), "true", "NaN", "null", '"lr"', "[1]"]


@settings(max_examples=400)
@given(
    pairs=st.lists(st.tuples(st.sampled_from(KEYS), st.sampled_from(VALUES)), max_size=4),
    step=st.sampled_from(['"step":1', '"step" : 7', '"step":1.0', '"step":-1']),
    colon=st.sampled_from([":", " :", ": "]),
)
def test_a_row_is_one_object_of_finite_numbers_each_key_once(pairs, step, colon):
    line = "{" + ",".join([step, *(key + colon + value for key, value in pairs)]) + "}\n"
    try:
        wanted = json.loads(line, object_pairs_hook=once)
    except ValueError:
        wanted = {}
    good = type(wanted.get("step")) is int and wanted["step"] >= 0
    good = good and all(type(v) in (int, float, bool) and abs(v) < 1e308 for v in wanted.values())
    found = row_in(line.encode())
    assert found == wanted if good else isinstance(found, ValueError)


def good_and(bad: Path) -> dict[str, Any]:
    """The answer for a good run and a bad one, which has both, as strict JSON."""
    make_run(bad.parent / "good", max_norm=2.0, steps=100)
    answer = llmexp.compare(bad.parent)
    assert {run["name"] for run in answer.data["runs"]} == {"good", "bad"}
    for setting in answer.comparison.settings:
        assert all(map(math.isfinite, setting.figures.values()))
        for run in setting.runs:
            assert len({len(column) for column in run.columns.values()}) <= 1
    json.loads(json.dumps(answer.data), parse_constant=pytest.fail)
    return answer.data


BIG = '"train/loss":1e999,"big":' + "9" * 5000 + ',"x":'
DAMAGE = {
    "a torn last line": (False, lambda text: text + '{"step":401,"tokens_seen":41'),
    "a torn line inside": (True, lambda text: text[:1000] + text[1100:]),
    "a foreign line": (True, lambda text: 'step 1: loss 2\n[1, 2]\n"x"\n' + text),
    "zeros": (None, lambda text: text[:5000] + "\0" * 4096),
    "steps twice": (True, lambda text: text + text[: text.index("\n") + 1] * 3),
    "a list": (None, lambda text: text.replace('"lr":0.001', '"lr":{"deep":[1]}')),
    "a null": (None, lambda text: text.replace('"epoch":0.1', '"epoch":null')),
    "huge": (None, lambda text: text.replace('"train/loss":', BIG, 3)),
    "too deep": (True, lambda text: "[" * 100_000 + "\n" + text),
    "nothing": (None, lambda text: ""),
    "NaN": (None, lambda text: text.replace('"lr":0.001', '"lr":NaN')),
    "a digest that is a number": (
        False,
        lambda text: text.replace("{", '{"data_digest":5,', 1).replace(
            "\n{", '\n{"data_digest":"0123456789abcdef",'
        ),
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_rows_are_passed_over(tmp_path, damage):
    bad = make_run(tmp_path / "bad", steps=60, val_every=20)
    reported, damaged = DAMAGE[damage]
    (bad / "metrics.jsonl").write_text(damaged((bad / "metrics.jsonl").read_text()))
    problems = good_and(bad)["problems"]
    if reported is not None:
        assert any("bad" in problem for problem in problems) == reported


FULL = "a0: &a0 {x: 1, y: 2}\n" + "".join(
    f"a{i}: &a{i} {{{', '.join(f'k{j}: *a{i - 1}' for j in range(9))}}}\n" for i in range(1, 12)
)  # a short YAML that would grow endless


TEXTS = [
    "",
    "[1]",
    "{",
    "a: [",
    "\0\1",
    '{"state": 5, "summary": [1], "step": "x"}',
    "x: &a [*a]",
    FULL,
]


@pytest.mark.parametrize("name", ["config.yaml", "run.json", "status.json"])
@pytest.mark.parametrize("text", TEXTS)
def test_damaged_files_are_reported_and_passed_over(tmp_path, name, text):
    (make_run(tmp_path / "bad", steps=100) / name).write_text(text)
    answer = good_and(tmp_path / "bad")
    if text == FULL:
        assert any(f"bad/{name}: cannot be read" in problem for problem in answer["problems"])
    if name == "config.yaml" and "state" not in text:  # no one can say what was trained
        assert {run["name"]: run["mark"] for run in answer["runs"]}["bad"] == "no config"
        assert answer["headline"].startswith("Only setting: good")


def test_paths_globs_and_folders_give_each_run_once_and_say_what_holds_none(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    sweep = make_sweep(Path("out/x/s"), {str(i): {"max_norm": i + 1.0} for i in range(11)}, [])
    (tmp_path / "empty").mkdir()
    globs = ["out", str(sweep / "1-*"), "out/x/s/sweep.json", "empty"]
    found, problems = find([*globs, "out/x/*/2-2/run.json"])
    by_number = [f"{i}-{i}" for i in range(11)]  # 10 after 9
    assert [path.name for path, _ in found] == by_number
    assert [p.split(":")[0] for p in problems] == ["empty"]
    with pytest.raises(ConfigError, match="nowhere: there is nothing of that name in"):
        find([*globs, "nowhere"])
    Path("link").symlink_to(sweep)
    for first in ("link/0-0", "out/x/s/../s/0-0"):  # the same sweep by another name
        found, problems = find([first, sweep])
        assert [of.point_of(run).number for run, of in found] == list(range(11))
        assert not problems
    (sweep / "0-0" / "checkpoints").mkdir()
    monkeypatch.chdir(sweep / "0-0")
    for here in (".", "checkpoints/.."):
        ((run, of),) = find([here])[0]
        assert of.point_of(run).number == 0


def test_a_run_in_a_deeper_folder_is_of_the_sweep_whose_ledger_has_it(tmp_path):
    path = make_sweep(tmp_path / "s", {"a": {}}, ["optimizer.lr"])
    (path / "x").mkdir()
    (path / "0-a").rename(path / "x" / "0-a")
    text = (path / "sweep.json").read_text()
    (path / "sweep.json").write_text(text.replace('"folder": "0-a"', '"folder": "x/0-a"'))
    make_run(path / "y" / "alone")  # trained where the sweep is, and none of its points
    found = {run.name: (sweep.path, sweep.point_of(run)) for run, sweep in find([path])[0]}
    where, point = found["0-a"]
    assert (where, point.number) == (path, 0)
    assert found["alone"] == (None, None)


def test_names_are_unique_and_control_characters_are_gone(tmp_path):
    for parent in ("p", "q"):
        make_run(tmp_path / parent / "same\x1b[2J\u202e", steps=20)
    names = {r.name for r in read(find([tmp_path])[0])}
    assert len(names) == 2
    assert all(map(str.isprintable, [*names, clean("a\nb\x1b]0;x\x07\udc80")]))


def test_running_without_a_holder_of_its_lock_is_cut(tmp_path):
    run = make_run(tmp_path / "a", state="running", steps=20)
    assert read(find([run])[0])[0].state == "crashed"
    with open(run / ".lock", "w") as f:
        fcntl.flock(f, fcntl.LOCK_EX)
        assert read(find([run])[0])[0].state == "running"


RECORD = 8 * len(FIELDS)
STEPS = {
    "gone": None,
    "cut": lambda data: data[: -3 * RECORD],
    "a hole": lambda data: data[:RECORD] + bytes(RECORD) + data[2 * RECORD :],
    "negative": lambda data: (-np.frombuffer(data)).tobytes(),
    "huge": lambda data: b"\x7f" * len(data),
}


@pytest.mark.parametrize("kind", STEPS)
def test_a_run_whose_steps_are_lost_is_not_compared(tmp_path, kind):
    rows = [{"max_norm": {1.0: 0.0, 2.0: 0.0}}, {"name": "bad", "max_norm": 3.0, "offset": -1.0}]
    file = make_case(tmp_path / "s", rows) / "bad/steps.bin"
    if STEPS[kind]:
        file.write_bytes(STEPS[kind](file.read_bytes()))
    else:
        file.unlink()
    answer = llmexp.compare(tmp_path)
    page(answer.comparison)  # it still has its rows
    assert sum("steps.bin" in problem for problem in answer.problems) == 1
    assert [run["mark"] for run in answer.data["runs"]][-1] == "rows lost"
    assert answer.data["runs"][-1]["train/loss"] is None


@pytest.mark.parametrize(
    ("state", "ended", "most", "log_every", "last", "lost"),
    [
        ("finished", 600, 600, 10, 600, False),
        ("finished", 600, 600, 10, 599, True),
        ("finished", None, 600, 10, 590, True),
        ("preempted", 605, 900, 10, 600, False),  # stopped between two rows
        ("preempted", 610, 900, 10, 600, True),
        ("preempted", None, 900, 10, 600, False),
        ("failed", 700, 900, 10, 600, False),  # the figures of an earlier part, before it went back
        ("running", 700, 900, 10, 600, False),
        ("finished", "600", [600], 10, 1, False),
    ],
)
def test_where_the_rows_should_end(tmp_path, state, ended, most, log_every, last, lost):
    status = {"state": state, "summary": {"steps": ended}}
    (tmp_path / "status.json").write_text(json.dumps(status))
    (tmp_path / "run.json").write_text(json.dumps({"max_steps": most}))
    (tmp_path / "config.yaml").write_text(f"train: {{log_every: {log_every}}}")
    (tmp_path / "metrics.jsonl").write_text(f'{{"step": {last}}}\n')
    assert bool(RunFolder(tmp_path).lost()) == lost
