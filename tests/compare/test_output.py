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
from llmexp.compare.comparing import compare
from llmexp.compare.records import difference
from llmexp.compare.table import to_markdown
from llmexp.folders.rundir import locked
from llmexp.system import fileio
from llmexp.system.text import gib, readable_size, rounded, shown, with_interval
from tests.compare.synthetic import make_case, make_run, read_rows, write_rows, write_steps
from tests.conftest import HANG_S
from tests.tools import printed, run_here

ACCUM, LIMIT = "batch.gradient_accumulation_steps", "clip.max_norm"
PAIR = [{"accumulation": a, "micro": 8 // a, "max_norm": {0.5: 0.01, 1.0: 0.02}} for a in (1, 2)]


@pytest.fixture
def sweep(tmp_path):
    return make_case(tmp_path / "s", PAIR, [LIMIT, ACCUM])


def text_of(path, width: int, monkeypatch) -> str:
    monkeypatch.setenv("COLUMNS", str(width))
    text = str(llmexp.compare(path))
    assert max(map(cell_len, text.splitlines())) <= width
    return text


LONG_NAMES = [{"name": f"{'x' * 45}{end}", "offset": 0.01 * i} for i, end in enumerate("abc")]
TABLES = {
    "widths": (PAIR, (20, 40, 60, 120, 400)),
    # In a very narrow terminal the first name gives way, and what is at the end is cut.
    "narrow": ([{"max_norm": i * 1.0, "optimizer.beta2": i * 0.9, "schedule.warmup_steps": i,
                 "optimizer.lr": i * 0.1, "offset": i * 0.1} for i in (1, 2)], (40,)),
    "a key of one long word": ([{"optimizer.preconditioned_every": {1: 0.1, 2: 0.2}}], (80,)),
    "a norm without a limit": ([{"max_norm": None}, {"max_norm": None, "clip.kind": "value",
                                                     "clip.max_value": 0.1}], (80,)),
    "long names that differ at their end": (LONG_NAMES, (120, 50)),
    "markup": ([{"name": "[red]x[bold]|`=1\x1b[31m"}, {"name": "b"}], (80,)),
}  # fmt: skip


@pytest.mark.parametrize("name", TABLES)
def test_tables_fit_and_keep_settings_marks_and_metric(tmp_path, monkeypatch, words, name):
    rows, widths = TABLES[name]
    folder = make_case(tmp_path / "s", rows)
    for width in widths:
        text = text_of(folder, width, monkeypatch)
        assert "\x1b" not in text
        words("compare/tables", text, f"{name}, {width} columns")
    lines = to_markdown(compare([folder])).splitlines()
    bars = {line.replace("\\|", "").count("|") for line in lines if line.startswith("|")}
    assert len(bars) == 1


def test_json_csv_and_markdown_say_the_same_and_are_written_by_the_name_of_the_file(
    sweep, tmp_path, capfd, monkeypatch
):
    text = run_here(capfd, "compare", str(sweep), "--json").out
    whole = printed("compare", text)
    assert whole == llmexp.compare(sweep).data
    files = [tmp_path / f"t.{form}" for form in ("json", "csv", "md")]
    done = run_here(capfd, "compare", str(sweep), *(f"--out={path}" for path in files))
    assert done.code == 0
    assert "val loss" in done.out
    as_json, as_csv, as_markdown = (path.read_text() for path in files)
    assert as_json == text
    columns = [column.key for column in compare([sweep]).columns]
    for given, row in zip(whole["runs"], csv.DictReader(io.StringIO(as_csv)), strict=True):
        for key in [*columns, LIMIT]:
            assert given[key] == float(row[key]), key
        assert given["state"] == row["state"] == "finished"
    assert as_markdown.count("\n| ") == 2 + 4
    assert whole["headline"].partition(":")[0] in as_markdown

    def full(path, content):
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(fileio, "write_whole", full)
    done = run_here(capfd, "compare", str(sweep), "--out", str(sweep / "page.html"))
    assert done.code == 1
    assert done.err.startswith(f"llmexp: --out {sweep / 'page.html'}: could not be written: No spa")


def test_a_bad_path_beside_a_run_is_a_line_and_alone_an_error_as_json(sweep, tmp_path, capfd):
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


def test_the_list_of_runs_with_states_sizes_and_losses(sweep, tmp_path, capfd, monkeypatch, words):
    """The loss is the last val loss that was measured, however far back; a train loss only where
    there is none, and marked."""
    cut = make_run(tmp_path / "lost", state="running")
    make_run(tmp_path / "bad", state="failed")
    write_steps(make_run(tmp_path / "between", steps=40), [3.0] * 47, [1024] * 47)
    error = {"error": "a long word and others " * 3}
    make_run(tmp_path / "worse", state="failed", status=error)
    known = {}
    for name, kept in (("evaluated", 400), ("never", 0)):
        folder = make_run(tmp_path / name, steps=2000, state="preempted")
        rows = read_rows(folder)
        known[name] = rows[399]["val/loss"] if kept else rows[1999]["train/loss"]
        for row in rows[kept:]:
            row.pop("val/loss", None)
        write_rows(folder, rows)
        with open(folder / "metrics.jsonl", "a") as file:
            file.write('{"step": 9999, "val/loss": 7')  # a torn line
    monkeypatch.chdir(tmp_path)
    size_and_age = {r"[0-9.]+ [KM]iB": "SIZE", r"[\d.]+[smhd]( \d+[smhd])?\b": "AGE", " +": " "}
    words.hidden |= size_and_age
    for width in (100, 40):
        monkeypatch.setenv("COLUMNS", str(width))
        words("compare/runs", run_here(capfd, "runs", ".").out, f"{width} columns")
    assert run_here(capfd, "runs", "lost").out.splitlines()[1] == "."  # the folder that it lies in
    listed = json.loads(run_here(capfd, "runs", "--json", ".").out)["runs"]
    found = {one["name"]: one for one in listed}
    assert found["between"]["step"] == 47  # one stopped between two rows: its last step counts
    for name, key in (("evaluated", "val/loss"), ("never", "train/loss")):
        assert (found[name]["loss_key"], found[name]["loss"]) == (key, known[name])
        assert found[name]["step"] == 2000
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


DAMAGE = {
    "short": ("state.pt", b"x" * 10), "one byte": ("state.pt", b"x" * 8999 + b"y"),
    "bad manifest": ("manifest.json", b'{"files": ["state.pt"]}'),
    "missing": ("state.pt", None), "no manifest": ("manifest.json", None),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGE)
def test_the_newest_whole_checkpoint_is_kept(tmp_path, capfd, damage):
    folder = make_run(tmp_path / "a", steps=2)
    old, whole, torn = (make_checkpoint(folder, step) for step in (5, 50, 100))
    name, content = DAMAGE[damage]
    (torn / name).unlink()
    if content is not None:
        (torn / name).write_bytes(content)
    assert removed(capfd, folder, "--yes").code == 0
    assert [p.is_dir() for p in (old, whole, torn)] == [False, True, False]
    (whole / "state.pt").unlink()
    (make_checkpoint(folder, 20) / "manifest.json").unlink()
    done = removed(capfd, folder, "--yes")
    assert done.code == 0
    assert "no checkpoint is whole" in done.err
    assert len(list((folder / "checkpoints").iterdir())) == 2


def test_checkpoints_that_cannot_be_removed_are_a_failure(tmp_path, capfd):
    folder = make_run(tmp_path / "a", steps=2)
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
    where = tmp_path / os.fsdecode(b"lat\xe9")
    folder = make_case(where, [{"max_norm": {1.0: 1, 2.0: 2}}], [LIMIT])
    out = [tmp_path / f"all.{name}" for name in ("html", "csv", "json")]
    done = run_here(capfd, "compare", str(folder), *(f"--out={path}" for path in out))
    assert (done.code, "Traceback" in done.err) == (0, False)
    assert all("lat" in path.read_text(encoding="utf-8") for path in out)
