"""The commands from outside: tables at any width, strict files, exit codes, lists, marks, clearing
up."""

import csv
import errno
import hashlib
import io
import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
from rich.cells import cell_len

import llmexp
from llmexp.__main__ import run
from llmexp.compare.comparing import compare
from llmexp.compare.records import difference
from llmexp.compare.table import to_markdown
from llmexp.folders.rundir import locked
from llmexp.system import fileio
from llmexp.system.text import gib, readable_size, rounded, shown, with_interval
from tests.compare.synthetic import (
    make_case,
    make_run,
    read_rows,
    write_rows,
    write_steps,
)
from tests.conftest import HANG_S
from tests.tools import printed, run_here

ACCUM, LIMIT = "batch.gradient_accumulation_steps", "clip.max_norm"


@pytest.fixture
def sweep(tmp_path):
    rows = [
        {"accumulation": a, "micro": 8 // a, "max_norm": {0.5: 0.01, 1.0: 0.02}} for a in (1, 2)
    ]
    return make_case(tmp_path / "s", rows, [LIMIT, ACCUM])


def text_of(path, width: int, monkeypatch) -> str:
    monkeypatch.setenv("COLUMNS", str(width))
    text = str(llmexp.compare(path))
    assert max(map(cell_len, text.splitlines())) <= width
    return text


@pytest.mark.parametrize("width", [20, 40, 60, 80, 120, 200, 400])
def test_the_table_fits_and_keeps_settings_marks_and_metric(sweep, monkeypatch, words, width):
    text = text_of(sweep, width, monkeypatch)
    words("compare/widths", text, str(width))
    if width >= 40:
        rows = [line.split()[:4] for line in text.splitlines()]
        for found in llmexp.compare(sweep).data["runs"]:
            accum, limit = (part.partition("=")[2] for part in found["label"].split())
            assert rows.count([accum, limit, found["mark"], f"{found['val/loss']:.5g}"]) == 1


@pytest.mark.parametrize(
    ("rows", "width"),
    [
        # In a very narrow terminal the first name gives way, and what is at the end is cut.
        ([{"max_norm": i * 1.0, "optimizer.beta2": i * 0.9, "schedule.warmup_steps": i,
           "optimizer.lr": i * 0.1, "offset": i * 0.1} for i in (1, 2)], 40),
        # The title of a key of one long word is whole.
        ([{"optimizer.preconditioned_every": {1: 0.1, 2: 0.2}}], 80),
        # A norm without a limit has none beside it.
        ([{"max_norm": None}, {"max_norm": None, "clip.kind": "value", "clip.max_value": 0.1}], 80),
        # Long names that differ at their end are told apart.
        ([{"name": f"{'x' * 45}{end}", "offset": 0.01 * i} for i, end in enumerate("abc")], 120),
        ([{"name": f"{'x' * 45}{end}", "offset": 0.01 * i} for i, end in enumerate("abc")], 50),
        ([{"name": "[red]x[bold]|`=1\x1b[31m"}, {"name": "b"}], 80),
    ],
    ids=["narrow", "long key", "no limit", "long names", "cut names", "markup"],
)  # fmt: skip
def test_titles_names_and_markup_in_tables(tmp_path, monkeypatch, words, request, rows, width):
    folder = make_case(tmp_path / "s", rows)
    text = text_of(folder, width, monkeypatch)
    assert "\x1b" not in text
    words("compare/tables", text, request.node.callspec.id)
    lines = to_markdown(compare([folder])).splitlines()
    bars = {line.replace("\\|", "").count("|") for line in lines if line.startswith("|")}
    assert len(bars) == 1


def test_json_csv_and_markdown_say_the_same_and_are_written_by_the_name_of_the_file(
    sweep, tmp_path, capsys
):
    assert run(["compare", str(sweep), "--json"]) == 0
    text = capsys.readouterr().out
    whole = printed("compare", text)
    assert whole == llmexp.compare(sweep).data
    files = [tmp_path / f"t.{form}" for form in ("json", "csv", "md")]
    assert run(["compare", str(sweep), *(f"--out={path}" for path in files)]) == 0
    assert "val loss" in capsys.readouterr().out
    as_json, as_csv, as_markdown = (path.read_text() for path in files)
    assert as_json == text
    columns = [column.key for column in compare([sweep]).columns]
    for given, row in zip(whole["runs"], csv.DictReader(io.StringIO(as_csv)), strict=True):
        for key in [*columns, LIMIT]:
            assert given[key] == float(row[key]), key
        assert given["state"] == row["state"] == "finished"
    assert as_markdown.count("\n| ") == 2 + 4
    assert whole["headline"].partition(":")[0] in as_markdown


def test_a_full_disk_under_the_page_is_named(sweep, capfd, monkeypatch):
    def full(path, content):
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(fileio, "write_whole", full)
    done = run_here(capfd, "compare", str(sweep), "--out", str(sweep / "page.html"))
    assert done.code == 1
    assert done.err.startswith(f"llmexp: --out {sweep / 'page.html'}: could not be written: No spa")


def test_a_bad_path_beside_a_run_is_a_line_and_programs_get_errors_as_json(sweep, tmp_path, capfd):
    (tmp_path / "empty").mkdir()
    done = run_here(capfd, "compare", str(tmp_path / "empty"), str(sweep))
    assert done.code == 0
    assert "is not a run" in done.err
    assert "clip" in done.out
    for command in ("compare", "next", "runs"):
        done = run_here(capfd, command, str(tmp_path / "empty"), "--json")
        assert done.code == 2
        message = json.loads(done.out)["error"]["message"]
        assert f"for example llmexp {command} outputs/default" in message
        # one that does not exist is misspelt, whatever stands beside it
        done = run_here(capfd, command, str(sweep), str(tmp_path / "nope"), "--json")
        assert done.code == 2
        message = json.loads(done.out)["error"]["message"]
        assert "nope: there is nothing of that name; a run looks like" in message


def test_no_terminal_and_an_ascii_one(tmp_path):
    rows = [{"max_norm": {0.5: 0.005, 1.0: 0.01}, "seed": {1: 0.0, 2: 0.0, 3: 0.0}}]
    folder = make_case(tmp_path / "s", rows)
    more = {"PYTHONIOENCODING": "ascii", "OMP_NUM_THREADS": "1", "COLUMNS": "60", "TERM": "dumb"}
    env = {key: value for key, value in os.environ.items() if key != "DISPLAY"} | more
    command = [sys.executable, "-m", "llmexp", "compare", str(folder)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=HANG_S)
    assert (done.returncode, "Traceback" in done.stderr) == (0, False)
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= 60
    rows = [line for line in lines if "  " in line]
    assert " +- " in rows[1]
    assert len({row.rstrip().rindex("+-") for row in rows[1:]}) == 1  # columns stay aligned
    assert "?" not in done.stdout


FIGURES = [
    (lambda v: shown(v, 4), (0.0, 3.14159, 20480.0, 12345.6, 1e-7, 0.25, 1e20, 999.96, 999.94),
     ["0", "3.142", "20,480", "12,346", "1e-07", "0.2500", "1e+20", "1,000", "999.9"]),
    (readable_size, (1023, 1024, 9.96 * 1024, 1023.4 * 1024, 1024**2 - 1, 3 * 1024**4),
     ["1023 B", "1.0 KiB", "10 KiB", "1023 KiB", "1.0 MiB", "3.0 TiB"]),
    (rounded, (0.5, 123.4, 999.96, 81_920, 999_960, 1.64e6, 3.3333e12),
     ["0.5", "123", "1k", "81.9k", "1M", "1.64M", "3,330G"]),
    (lambda v: gib(v * 2**30), (0.0039, 15.96, 999.4, 999.7, 3354.2),
     ["0.0039", "16", "999", "1,000", "3,354"]),
    # below the leading setting only where it is
    (lambda v: difference(SimpleNamespace(size=v, half=0.1)), (-0.2, 0.0, 0.2),
     ["-0.20 ± 0.10", "+0.00 ± 0.10", "+0.20 ± 0.10"]),
    # as many digits as its interval bears
    (lambda v: with_interval(*v),
     ((1500.0, 0.0, 4), (34_534.0, 39_144.0, 4), (2.56441, 0.011234, 5), (2.56441, 1.2e-7, 5),
      (2.56441, 0.00006, 5), (183_201.3, 450.0, 4), (0.0, 0.0023, 2), (2.5, None, 4)),
     ["1,500", "35,000 ± 39,000", "2.564 ± 0.011", "2.5644", "2.56441 ± 0.00006", "183,200 ± 450",
      "0.0000 ± 0.0023", "2.500"]),
]  # fmt: skip


@pytest.mark.parametrize(("written", "values", "texts"), FIGURES)
def test_figures_are_readable(written, values, texts):
    assert [written(value) for value in values] == texts


def test_the_list_of_runs_names_its_loss(tmp_path, capfd):
    """The last val loss that was measured, however far back; a train loss only where there is none,
    and marked."""
    evaluated, never = make_run(tmp_path / "evaluated", steps=2000), make_run(tmp_path / "never")
    for folder, kept in ((evaluated, 400), (never, 0)):
        (folder / "status.json").write_text('{"state": "preempted"}')
        rows = read_rows(folder)
        for row in rows[kept:]:
            row.pop("val/loss", None)
        write_rows(folder, rows)
        with open(folder / "metrics.jsonl", "a") as file:
            file.write('{"step": 9999, "val/loss": 7')  # a torn line
    val, train = rows_at(evaluated, 399, "val/loss"), rows_at(never, 399, "train/loss")
    first, second = json.loads(run_here(capfd, "runs", str(tmp_path), "--json").out)["runs"]
    assert (first["loss_key"], first["loss"], first["step"]) == ("val/loss", val, 2000)
    assert (second["loss_key"], second["loss"]) == ("train/loss", train)
    out = run_here(capfd, "runs", str(tmp_path)).out
    assert f" {val:#.5g} " in out
    assert f" {train:#.5g} train " in out


def rows_at(folder, number: int, key: str) -> float:
    return json.loads((folder / "metrics.jsonl").read_text().splitlines()[number])[key]


def test_the_list_of_runs_with_states_and_sizes(sweep, tmp_path, capfd, monkeypatch, words):
    cut = make_run(tmp_path / "lost", state="running")
    make_run(tmp_path / "bad", state="failed")
    write_steps(make_run(tmp_path / "between", steps=40), [3.0] * 47, [1024] * 47)
    error = {"error": "a long word and others " * 3}
    make_run(tmp_path / "worse", state="failed", status=error)
    monkeypatch.chdir(tmp_path)
    words.hidden |= {
        r"[0-9.]+ [KM]iB": "SIZE",
        r"[\d.]+[smhd]( \d+[smhd])?\b": "AGE",
        " +": " ",
    }
    for width in (100, 40):
        monkeypatch.setenv("COLUMNS", str(width))
        words("compare/runs", run_here(capfd, "runs", ".").out, f"{width} columns")
    assert run_here(capfd, "runs", "lost").out.splitlines()[1] == "."  # the folder that it lies in
    found = json.loads(run_here(capfd, "runs", "--json", ".").out)["runs"]
    # one stopped between two rows: its last step counts
    assert {one["name"]: one["step"] for one in found}["between"] == 47
    (row,) = json.loads(run_here(capfd, "runs", ".", "--state", "crashed", "--json").out)["runs"]
    assert (row["name"], row["state"], row["step"]) == ("lost", "crashed", 400)
    assert row["size"] >= (cut / "metrics.jsonl").stat().st_size


def make_checkpoint(folder, step):
    where = folder / "checkpoints" / f"step_{step:08d}"
    where.mkdir(parents=True)
    (where / "state.pt").write_bytes(b"x" * 9000)
    about = {"size": 9000, "sha256": hashlib.sha256(b"x" * 9000).hexdigest()}
    (where / "manifest.json").write_text(json.dumps({"files": {"state.pt": about}}))
    return where


def removed(capfd, folder, *more):
    return run_here(capfd, "runs", str(folder), "--remove-checkpoints", *more)


def test_only_old_checkpoints_of_finished_runs_go_and_only_when_asked(sweep, tmp_path, capfd):
    failed = make_run(tmp_path / "failed", state="failed")
    one = sorted(sweep.iterdir())[0]
    for where in (one, failed):
        for step in (5, 50, 100):
            make_checkpoint(where, step)
        (where / "checkpoints" / "mine").mkdir()
    assert "2 checkpoints" in removed(capfd, tmp_path).out
    assert (one / "checkpoints" / "step_00000005").is_dir()
    with locked(one):
        assert "nothing to remove" in removed(capfd, tmp_path, "--yes").out
    assert removed(capfd, tmp_path, "--yes").code == 0
    kept = sorted(p.name for p in (one / "checkpoints").iterdir())
    assert kept == ["mine", "step_00000100"]
    assert len(list((failed / "checkpoints").iterdir())) == 4
    make_checkpoint(one, 60)
    done = removed(capfd, tmp_path, "--json")
    assert done.code == 0
    assert len(printed("removed", done.out)["checkpoints"]) == 1
    assert "\n1 checkpoint, " in removed(capfd, tmp_path).out


@pytest.mark.parametrize("damage", ["short", "one byte", "missing", "no manifest", "bad manifest"])
def test_the_newest_whole_checkpoint_is_kept(tmp_path, capfd, damage):
    folder = make_run(tmp_path / "a")
    old, whole, torn = (make_checkpoint(folder, step) for step in (5, 50, 100))
    if damage == "short":
        (torn / "state.pt").write_bytes(b"x" * 10)
    elif damage == "one byte":
        (torn / "state.pt").write_bytes(b"x" * 8999 + b"y")
    elif damage == "bad manifest":
        (torn / "manifest.json").write_text('{"files": ["state.pt"]}')
    else:
        (torn / {"missing": "state.pt", "no manifest": "manifest.json"}[damage]).unlink()
    assert removed(capfd, folder, "--yes").code == 0
    assert [p.is_dir() for p in (old, whole, torn)] == [False, True, False]
    (whole / "state.pt").unlink()
    (make_checkpoint(folder, 20) / "manifest.json").unlink()
    done = removed(capfd, folder, "--yes")
    assert done.code == 0
    assert "no checkpoint is whole" in done.err
    assert len(list((folder / "checkpoints").iterdir())) == 2


def test_checkpoints_that_cannot_be_removed_are_a_failure(tmp_path, capfd):
    folder = make_run(tmp_path / "a")
    for step in (5, 50):
        make_checkpoint(folder, step)
    (folder / ".lock").touch()
    mount = ["mount", "--bind", "-o", "ro", folder, folder]
    bound = subprocess.run(mount, capture_output=True, text=True)
    if bound.returncode:
        pytest.skip(f"no read-only mount here: {bound.stderr.strip()}")
    try:
        done = removed(capfd, folder, "--yes")
    finally:
        subprocess.run(["umount", "-l", folder], check=True)
    assert done.code == 1
    assert "Read-only file system" in done.err
    assert "nothing to remove" not in done.out
    assert (folder / "checkpoints" / "step_00000005").is_dir()


def test_names_that_are_no_text_can_be_compared_and_written(tmp_path, capfd):
    """A folder of the byte 0xe9 alone, which is no UTF-8."""
    folder = make_case(
        tmp_path / os.fsdecode(b"lat\xe9"), [{"max_norm": {1.0: 1, 2.0: 2}}], [LIMIT]
    )
    out = [tmp_path / f"all.{name}" for name in ("html", "csv", "json")]
    done = run_here(capfd, "compare", str(folder), *(f"--out={path}" for path in out))
    assert (done.code, "Traceback" in done.err) == (0, False)
    assert all("lat" in path.read_text(encoding="utf-8") for path in out)
