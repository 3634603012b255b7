"""Damage and foreign folders: each a line, and the good runs are still shown."""

from __future__ import annotations

import fcntl
import json

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llmexp.compare.comparing import compare
from llmexp.compare.reading import read
from llmexp.compare.rows import elapsed, read_columns
from llmexp.compare.table import to_json
from llmexp.runs.find import find
from llmexp.runs.folder import RunFolder
from llmexp.system.redact import clean
from tests.compare.synthetic import make_run, make_sweep


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


DAMAGE = {
    "a torn last line": lambda text: text + '{"step":401,"tokens_seen":41',
    "a torn line inside": lambda text: text[:1000] + text[1100:],
    "a foreign line": lambda text: 'step 1: loss 2\n[1, 2]\n"x"\n' + text,
    "zeros": lambda text: text[:5000] + "\0" * 4096,
    "steps twice": lambda text: text + text[: text.index("\n") + 1] * 3,
    "not numbers": lambda text: text.replace('"lr":0.001', '"lr":{"deep":[1]}').replace(
        '"epoch":0.1', '"epoch":null'
    ),
    "huge": lambda text: text.replace(
        '"train/loss":', '"train/loss":1e999,"big":' + "9" * 5000 + ',"x":', 3
    ),
    "too deep": lambda text: "[" * 100_000 + "\n" + text,
    "nothing": lambda text: "",
    "NaN": lambda text: text.replace('"lr":0.001', '"lr":NaN'),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_rows_are_passed_over(tmp_path, damage):
    good, bad = (
        make_run(tmp_path / "good", max_norm=2.0),
        make_run(tmp_path / "bad", steps=60, val_every=20),
    )
    file = bad / "metrics.jsonl"
    file.write_text(DAMAGE[damage](file.read_text()))
    c = compare([tmp_path])
    assert {e.name for e in c.settings} == {"good", "bad"}
    json.loads(to_json(c), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    record = next(r for e in c.settings for r in e.runs if r.path == bad)
    lengths = {len(column) for column in record.columns.values()}
    assert len(lengths) <= 1
    assert all(np.isfinite(v) for e in c.settings for v in e.figures.values())
    if damage in ("a torn line inside", "a foreign line", "steps twice", "too deep"):
        assert any("bad" in p for p in c.problems)
    assert good.is_dir()


@pytest.mark.parametrize("name", ["config.yaml", "run.json", "status.json"])
@pytest.mark.parametrize(
    "text",
    ["", "[1]", "{", "a: [", "\0\1", '{"state": 5, "summary": [1], "step": "x"}', "x: &a [*a]"],
)
def test_damaged_files_are_reported_and_passed_over(tmp_path, name, text):
    make_run(tmp_path / "good", max_norm=2.0)
    (make_run(tmp_path / "bad") / name).write_text(text)
    c = compare([tmp_path])
    assert {e.name for e in c.settings} == {"good", "bad"}
    json.loads(to_json(c))


def test_a_short_yaml_that_would_grow_endless_is_cut_off(tmp_path):
    text = "a0: &a0 {x: 1, y: 2}\n" + "".join(
        f"a{i}: &a{i} {{{', '.join(f'k{j}: *a{i - 1}' for j in range(9))}}}\n" for i in range(1, 12)
    )
    (make_run(tmp_path / "bad") / "config.yaml").write_text(text)
    assert any("bad/config.yaml: cannot be read: line" in p for p in compare([tmp_path]).problems)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"format": 2, "points": []}', "format=2"),
        ("{", "cannot be read"),
        ('{"format": 1, "points": 5}', "sweep.json: "),
    ],
)
def test_a_ledger_that_is_newer_or_damaged_does_not_hide_the_runs(tmp_path, text, said):
    sweep = make_sweep(tmp_path / "s", {"a": {}, "b": {"max_norm": 2.0}}, ["clip.max_norm"])
    (sweep / "sweep.json").write_text(text)
    c = compare([sweep])
    assert len(c.settings) == 2
    assert sum(said in p for p in c.problems) == 1


def test_a_run_of_an_earlier_version_is_compared_as_before(tmp_path):
    """It knows neither twins nor the choice of GELU."""
    kind = {"model___target_": "llmexp.models.gpt2.GPT2"}
    make_run(tmp_path / "old", seed=1, **kind)
    make_run(tmp_path / "new", seed=2, train__twin=0, model__gelu="tanh", **kind)
    c = compare([tmp_path])
    assert c.differing == ()
    assert len(c.settings) == 1


def test_paths_globs_and_folders_give_each_run_once_and_say_what_holds_none(tmp_path, monkeypatch):
    sweep = make_sweep(
        tmp_path / "out" / "x" / "s", {str(i): {"max_norm": i + 1.0} for i in range(11)}, []
    )
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    found, problems = find(
        [
            "out",
            str(sweep / "1-*"),
            "out/x/s/sweep.json",
            "empty",
            "nowhere",
            "out/x/*/2-2/run.json",
        ]
    )
    assert [path.name for path, _ in found] == [
        f"{i}-{i}" for i in range(11)
    ]  # by number: 10 after 9
    assert [p.split(":")[0] for p in problems] == ["empty", "nowhere"]
    assert not compare(["empty"]).settings


def test_names_are_unique_and_control_characters_are_gone(tmp_path):
    for parent in ("p", "q"):
        make_run(tmp_path / parent / "same\x1b[2J\u202e")
    records = read(find([tmp_path])[0])
    assert len({r.name for r in records}) == 2
    assert all(r.name.isprintable() for r in records)
    assert clean("a\nb\x1b]0;x\x07\udc80") .isprintable()  # fmt: skip


def test_running_without_a_holder_of_its_lock_is_cut(tmp_path):
    run = make_run(tmp_path / "a", state="running")
    assert read(find([run])[0])[0].state == "cut"
    with open(run / ".lock", "w") as f:
        fcntl.flock(f, fcntl.LOCK_EX)
        assert read(find([run])[0])[0].state == "running"


def test_time_is_the_sum_of_the_steps_it_took():
    columns = {"step": np.array([10.0, 20.0, 50.0]), "step_time": np.array([1.0, np.nan, 0.5])}
    assert elapsed(columns).tolist() == [10.0, 10.0, 25.0]
    assert len(elapsed({"step": np.array([1.0])})) == 0


@pytest.mark.parametrize("kept", [0, 4, 399])
def test_a_run_whose_last_rows_are_lost_is_reported_and_not_ranked(tmp_path, kept):
    make_run(tmp_path / "a")
    make_run(tmp_path / "b", max_norm=2.0, offset=0.1)
    torn = make_run(tmp_path / "torn", max_norm=3.0, offset=-1.0)
    rows = (torn / "metrics.jsonl").read_text().splitlines(keepends=True)
    (torn / "metrics.jsonl").write_text("".join(rows[:kept]))
    c = compare([tmp_path])
    said = "says finished at step 400, but " + (
        f"its rows end at {kept}" if kept else "it has no rows"
    )
    assert sum(said in p for p in c.problems) == 1
    assert c.align_at == 400 * 8 * 128
    assert [e.name for e in c.settings] == ["a", "b", "torn"]
    assert said in c.settings[-1].note
    assert not {"val/loss", "final val/loss", "train/loss"} & set(c.settings[-1].figures)
    assert "Left out: 1 run with lost rows (clip=3.0)." in c.notes
    assert "clip=1.0 has the lowest" in c.headline


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


def test_a_sweep_that_paths_name_in_two_ways_is_one_sweep(tmp_path, monkeypatch):
    path = make_sweep(tmp_path / "s", {"a": {}, "b": {}}, ["optimizer.lr"])
    (tmp_path / "link").symlink_to("s")
    for first in (tmp_path / "link" / "0-a", tmp_path / "s" / ".." / "s" / "0-a"):
        found, problems = find([first, path])
        assert [sweep.point_of(run).number for run, sweep in found] == [0, 1]
        assert not problems
    monkeypatch.chdir(path / "0-a")
    for here in (".", "checkpoints/.."):
        (path / "0-a" / "checkpoints").mkdir(exist_ok=True)
        ((run, sweep),) = find([here])[0]
        assert sweep.point_of(run).number == 0


STAGE = {"from_tokens": 0, "first_step": 0, "first_sequence": 0, "real_batch_size": 8,
         "gradient_accumulation_steps": 1}  # fmt: skip


@pytest.mark.parametrize(
    "facts",
    [
        {"stages": [STAGE | {"of_tomorrow": 1}]},
        {"stages": [STAGE | {"real_batch_size": "x"}]},
        {"stages": "x"},
        {"sequence_length": "x"},
        {"parent": 0.5},
        {"parent": {"step": [], "setting": ["x"]}},
    ],
)
def test_a_run_json_whose_numbers_are_none_does_not_hide_the_other_runs(tmp_path, facts):
    for name, more in (("good", {}), ("bad", facts)):
        make_run(tmp_path / name, facts=more, batch__document_mask=True)
    found = compare([tmp_path])
    assert {r.name for r in found.runs} == {"good", "bad"}
    (key,) = facts
    assert any(f"bad/run.json: {key}=" in p for p in found.problems)
    compare([tmp_path], align="steps")


def test_a_run_json_without_the_batch_is_compared_by_its_rows(tmp_path):
    for seed in (1, 2):
        make_run(tmp_path / f"{seed}", seed=seed, batch__document_mask=True)
    path = tmp_path / "1" / "run.json"
    facts = json.loads(path.read_text())
    del facts["real_batch_size"], facts["sequence_length"]
    path.write_text(json.dumps(facts | {"stages": [STAGE]}))
    assert len(compare([tmp_path]).taking_part) == 2
    del facts["tokens_per_step"]
    path.write_text(json.dumps(facts | {"sequence_length": 128}))
    assert len(compare([tmp_path]).taking_part) == 2
