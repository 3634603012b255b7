"""The commands from outside: tables at any width, strict files, exit codes, lists, marks, clearing
up."""

from __future__ import annotations

import csv
import errno
import hashlib
import io
import itertools
import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
from rich.cells import cell_len

from llmexp.__main__ import run as llmexp
from llmexp.compare.comparing import compare
from llmexp.compare.figures import difference
from llmexp.compare.page import clip_rows
from llmexp.compare.table import lines, show, shown_columns, to_json, to_markdown
from llmexp.runs.rundir import locked
from llmexp.system import fileio
from llmexp.system.text import gib, readable_size, rounded, shown
from tests.compare.synthetic import make_run, make_sweep, write_steps
from tests.conftest import HANG_S
from tests.tools import printed


@pytest.fixture
def sweep(tmp_path):
    points = {
        f"max_norm_{c},gradient_accumulation_steps_{a}": dict(
            max_norm=c, accumulation=a, micro=8 // a, offset=c / 50
        )
        for c in (0.5, 1.0)
        for a in (1, 2)
    }
    return make_sweep(
        tmp_path / "s", points, ["clip.max_norm", "batch.gradient_accumulation_steps"]
    )


@pytest.mark.parametrize("width", [20, 40, 60, 80, 120, 200, 400])
def test_the_table_fits_and_keeps_settings_marks_and_metric(sweep, width):
    out = io.StringIO()
    comparison = compare([sweep])
    show(comparison, out, width)
    lines = out.getvalue().splitlines()
    assert max(map(cell_len, lines)) <= width
    if width >= 40:
        for entry in comparison.settings:
            accum, limit = (part.partition("=")[2] for part in entry.label.split())
            row = [accum, limit, entry.mark, f"{entry.figures['val/loss']:.5g}"]
            assert sum(line.split()[:4] == row for line in lines) == 1
    if width >= 80:
        assert "difference" in out.getvalue()
        assert len(lines) <= 12


# What rules leave in status.json: of the norm, and of what else they look at.
SEEN = {
    "norm": {"clip__max_norm": 0.5},
    "zscore": {},
    "value": {"clip__max_value": 0.1, "measures": {"grad_entry_max": (0.1, 0.25)}},
    "adaptive": {"clip__ratio": 0.01, "measures": {"units": (0.01, 0.052)}},
    "per_group": {"measures": {"grad_norm/*.mlp.*": (None, 0.0), "grad_norm/*": (2.0, 0.5)}},
    "update": {"clip__threshold": 1.0, "measures": {"tensors": (1.0, 0.4), "heads": (9.0, 0.3)}},
}
TABLE = [{"limit": 0.123456, "share": 0.75}]


def test_every_rule_of_clipping_tells_what_it_clipped(tmp_path):
    points = {}
    for i, (kind, given) in enumerate(SEEN.items()):
        knobs = {k: v for k, v in given.items() if k != "measures"}
        measures = {
            key: {"limit": limit, "share": share, "table": TABLE}
            for key, (limit, share) in given.get("measures", {}).items()
        }
        if "heads" in measures:
            knobs["clip__qk_limit"] = 9.0
        if kind == "zscore":
            measures["clip_limit"] = {"limit": None, "share": 0.0, "quantiles": {"50": 1.5}}
        clip = {"share": 0.25, "quantiles": {"50": 1.25}, "table": TABLE, "measures": measures}
        more = dict(offset=i, clip__kind=kind, status={"clip": clip})
        points[kind] = dict(max_norm=None) | knobs | more
    made = compare([make_sweep(tmp_path / "s", points, ["clip.kind"])])
    for width in (120, 80, 60):
        out = io.StringIO()
        show(made, out, width)
        lines = out.getvalue().splitlines()
        assert lines == [line.rstrip() for line in lines]
        assert max(map(cell_len, lines)) <= width
        told = dict(line.split(maxsplit=1) for line in lines if line.split()[:1][0] in SEEN)
        assert all("25% steps" in told[kind] for kind in ("norm", "zscore", "value", "per_group"))
        assert "5.2% units" in told["adaptive"]
        assert "40% tensors" in told["update"]
        if width >= 80:
            limits = dict(
                zip(SEEN, ("0.5", "moving", "0.1", "0.01", "by group", "1.0"), strict=True)
            )
            assert all(f"  {limit}" in told[kind] for kind, limit in limits.items())
        if width == 120:
            assert "30%" in told["update"].split()
    rows = [[row.name, *(cell.text for cell in row.cells)] for row in clip_rows(made)]
    beside = ["1.25", "", "", "0.123: 75%"]
    assert rows == [
        ["clip=norm", "norm", "0.5", "25%", *beside],
        ["clip=zscore", "norm", "moving", "25%", *beside],
        ["", "moving limit", "", "", "1.50", "", ""],
        ["clip=value", "norm", "", "", *beside],
        ["", "largest entry", "0.1", "25%", *["", *beside[1:]]],
        ["clip=adaptive", "norm", "", "", *beside],
        ["", "units", "0.01", "5.2%", *["", *beside[1:]]],
        ["clip=per_group", "norm", "by group", "25%", *beside],
        ["", "norm of *.mlp.*", "", "0%", *["", *beside[1:]]],
        ["", "norm of *", "2.0", "50%", *["", *beside[1:]]],
        ["clip=update", "norm", "", "", *beside],
        ["", "tensors", "1.0", "40%", *["", *beside[1:]]],
        ["", "heads", "9.0", "30%", *["", *beside[1:]]],
    ]
    assert "clip.ratio" not in shown_columns(made)


def test_a_norm_without_a_limit_has_none_beside_it(tmp_path):
    make_run(tmp_path / "norm", max_norm=None)
    make_run(tmp_path / "value", max_norm=None, clip__kind="value", clip__max_value=0.1)
    assert sorted(shown_columns(compare([tmp_path]))["clip limit"].cells) == ["", "0.1"]


def test_titles_of_keys_give_way_before_the_metric_does(tmp_path):
    """Four keys, whose titles are wider than their values, in a terminal of 40."""
    keys = {"optimizer__beta2": 0.9, "schedule__warmup_steps": 1, "optimizer__lr": 0.1}
    for i in (1, 2):
        own = {key: i * value for key, value in keys.items()}
        make_run(tmp_path / str(i), max_norm=float(i), offset=0.1 * i, **own)
    c, out = compare([tmp_path]), io.StringIO()
    show(c, out, 40)
    for entry in c.settings:
        row = [*map(str, entry.values.values()), entry.mark, f"{entry.figures['val/loss']:.5g}"]
        assert row in [line.split() for line in out.getvalue().splitlines()]


def test_the_title_of_a_key_of_one_long_word_is_whole(tmp_path):
    for i in (1, 2):
        make_run(tmp_path / str(i), offset=0.1 * i, optimizer__preconditioned_every=i)
    show(compare([tmp_path]), out := io.StringIO(), 80)
    assert "preconditioned_every" in out.getvalue().split()


def test_markup_and_escapes_in_names_are_shown_as_text(tmp_path, capsys):
    make_run(tmp_path / "[red]x[bold]|`=1\x1b[31m")
    make_run(tmp_path / "b")
    assert llmexp(["compare", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "[red]x[bold]|`=1" in out
    assert "\x1b" not in out
    rows = [line for line in to_markdown(compare([tmp_path])).splitlines() if line.startswith("|")]
    assert len({row.replace("\\|", "").count("|") for row in rows}) == 1


def test_json_csv_and_markdown_say_the_same_and_are_written_by_the_name_of_the_file(
    sweep, tmp_path, capsys
):
    comparison = compare([sweep])
    assert llmexp(["compare", str(sweep), "--json"]) == 0
    text = capsys.readouterr().out
    whole = printed("compare", text)
    assert [r["name"] for r in whole["runs"]] == [e.name for e in comparison.settings]
    assert whole["sentences"] == list(comparison.sentences)
    files = [tmp_path / f"t.{form}" for form in ("json", "csv", "md")]
    assert llmexp(["compare", str(sweep), *(f"--out={path}" for path in files)]) == 0
    assert "val loss" in capsys.readouterr().out
    as_json, as_csv, as_markdown = (path.read_text() for path in files)
    assert as_json == text
    rows = list(csv.DictReader(io.StringIO(as_csv)))
    for given, row, entry in zip(whole["runs"], rows, comparison.settings, strict=True):
        for column in comparison.columns:
            assert given[column.key] == float(row[column.key]) == entry.figures[column.key]
        assert str(given["clip.max_norm"]) == f"{float(row['clip.max_norm'])}"
        assert given["state"] == row["state"] == "finished"
    assert as_markdown.count("\n| ") == 2 + 4
    assert comparison.headline.partition(":")[0] in as_markdown


def test_a_full_disk_under_the_page_is_named(sweep, capsys, monkeypatch):
    def full(path, content):
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(fileio, "write_whole", full)
    assert llmexp(["compare", str(sweep), "--out", str(sweep / "page.html")]) == 1
    said = f"--out {sweep / 'page.html'}: could not be written: No space left on device; name a"
    assert capsys.readouterr().err.startswith(f"llmexp: {said}")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--out", "table.txt"], "--out table.csv"),
        (["--out", "no/such/folder/x.html"], "--out /tmp/x.html"),
        (["--align", "days"], "--align steps"),
        (["--sort", "x"], "--sort val/loss"),
    ],
)
def test_what_cannot_be_done_is_one_line_with_an_example(sweep, capsys, arguments, said):
    assert llmexp(["compare", str(sweep), *arguments]) == 2
    captured = capsys.readouterr()
    assert (captured.out == "") == ("--json" not in arguments)
    assert len(captured.err.splitlines()) == 1
    assert said in captured.err


def test_nothing_to_show_is_exit_code_2_and_a_bad_path_beside_a_run_is_a_line(
    sweep, tmp_path, capsys
):
    (tmp_path / "empty").mkdir()
    assert llmexp(["compare", str(tmp_path / "empty")]) == 2
    assert "no run" in capsys.readouterr().err
    assert llmexp(["compare", str(tmp_path / "empty"), str(sweep)]) == 0
    captured = capsys.readouterr()
    assert "is no run" in captured.err
    assert "clip=0.5" in captured.out


def test_no_terminal_and_an_ascii_one(tmp_path):
    sweep = tmp_path / "s"
    for norm, seed in itertools.product((0.5, 1.0), (1, 2, 3)):
        make_run(sweep / f"{norm}-{seed}", max_norm=norm, seed=seed, offset=0.01 * norm)
    env = {
        **os.environ,
        "PYTHONIOENCODING": "ascii",
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "60",
        "TERM": "dumb",
    }
    env.pop("DISPLAY", None)
    command = [sys.executable, "-m", "llmexp", "compare", str(sweep)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=HANG_S)
    assert (done.returncode, "Traceback" in done.stderr) == (0, False)
    assert max(map(len, done.stdout.splitlines())) <= 60
    rows = [line for line in done.stdout.splitlines() if "  " in line]
    assert " +- " in rows[1]
    assert len({row.rstrip().rindex("+-") for row in rows[1:]}) == 1  # columns stay aligned
    assert "?" not in done.stdout


def test_figures_are_readable():
    figures = (0.0, 3.14159, 20480.0, 12345.6, 1e-7, 0.25, 1e20, 999.96, 999.94)
    assert [shown(v, 4) for v in figures] == [
        "0", "3.142", "20,480", "12,346", "1e-07", "0.2500", "1e+20", "1,000", "999.9",
    ]  # fmt: skip
    sizes = (1023, 1024, 9.96 * 1024, 1023.4 * 1024, 1024**2 - 1, 3 * 1024**4)
    assert [readable_size(size) for size in sizes] == [
        "1023 B", "1.0 KiB", "10 KiB", "1023 KiB", "1.0 MiB", "3.0 TiB",
    ]  # fmt: skip
    counts = (0.5, 123.4, 999.96, 81_920, 999_960, 1.64e6, 3.3333e12)
    assert [rounded(c) for c in counts] == ["0.5", "123", "1k", "81.9k", "1M", "1.64M", "3,330G"]
    sizes = (0.0039, 15.96, 999.4, 999.7, 3354.2)
    assert [gib(n * 2**30) for n in sizes] == ["0.0039", "16", "999", "1,000", "3,354"]


def test_a_difference_is_below_the_leading_setting_only_where_it_is():
    texts = [difference(SimpleNamespace(size=size, half=0.1)) for size in (-0.2, 0.0, 0.2)]
    assert texts == ["-0.20 ± 0.10", "+0.00 ± 0.10", "+0.20 ± 0.10"]


def test_the_list_of_runs_names_its_loss(tmp_path, capsys):
    """The last val loss that was measured, however far back; a train loss only where there is none,
    and marked."""
    evaluated, never = make_run(tmp_path / "evaluated", steps=2000), make_run(tmp_path / "never")
    for run, kept in ((evaluated, 400), (never, 0)):
        (run / "status.json").write_text('{"state": "preempted"}')
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        for row in rows[kept:]:
            row.pop("val/loss", None)
        text = "".join(f"{json.dumps(row)}\n" for row in rows)
        (run / "metrics.jsonl").write_text(f'{text}{{"step": 9999, "val/loss": 7')  # a torn line
    rows = [
        json.loads(line) for line in (evaluated / "metrics.jsonl").read_text().splitlines()[:-1]
    ]
    val, train = rows[399]["val/loss"], rows[399]["train/loss"]
    assert llmexp(["runs", str(tmp_path), "--json"]) == 0
    first, second = json.loads(capsys.readouterr().out)["runs"]
    assert (first["loss_key"], first["loss"], first["step"]) == ("val/loss", val, 2000)
    assert (second["loss_key"], second["loss"]) == ("train/loss", train)
    assert llmexp(["runs", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert f" {val:#.5g} " in out
    assert f" {train:#.5g} train " in out


def test_the_list_of_runs_with_states_and_sizes(sweep, tmp_path, capsys, monkeypatch):
    cut = make_run(tmp_path / "lost", state="running")
    make_run(tmp_path / "bad", state="failed")
    assert llmexp(["runs", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "4 finished" in out
    assert "400/400" in out
    monkeypatch.chdir(tmp_path)
    assert llmexp(["runs", "lost"]) == 0
    assert capsys.readouterr().out.splitlines()[1] == "."  # the folder that it lies in
    assert llmexp(["runs", str(tmp_path), "--state", "cut", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["runs"]
    assert (row["name"], row["state"], row["step"]) == ("lost", "cut", 400)
    assert row["size"] >= (cut / "metrics.jsonl").stat().st_size
    assert llmexp(["runs", str(tmp_path), "--state", "done"]) == 2
    capsys.readouterr()
    make_run(tmp_path / "worse", state="failed", status={"error": "a long word and others " * 3})
    monkeypatch.setenv("COLUMNS", "40")
    assert llmexp(["runs", str(tmp_path)]) == 0
    assert "  worse\n  a long word and others a long word and\n" in capsys.readouterr().out


def make_checkpoint(run, step):
    where = run / "checkpoints" / f"step_{step:08d}"
    where.mkdir(parents=True)
    (where / "state.pt").write_bytes(b"x" * 9000)
    about = {"size": 9000, "sha256": hashlib.sha256(b"x" * 9000).hexdigest()}
    (where / "manifest.json").write_text(json.dumps({"files": {"state.pt": about}}))
    return where


def test_only_old_checkpoints_of_finished_runs_go_and_only_when_asked(sweep, tmp_path, capsys):
    failed = make_run(tmp_path / "failed", state="failed")
    run = sorted(sweep.iterdir())[0]
    for where in (run, failed):
        for step in (5, 50, 100):
            make_checkpoint(where, step)
        (where / "checkpoints" / "mine").mkdir()
    assert llmexp(["runs", str(tmp_path), "--remove-checkpoints"]) == 0
    assert "2 checkpoints" in capsys.readouterr().out
    assert (run / "checkpoints" / "step_00000005").is_dir()
    with locked(run):
        assert llmexp(["runs", str(tmp_path), "--remove-checkpoints", "--yes"]) == 0
    assert "nothing to remove" in capsys.readouterr().out
    assert llmexp(["runs", str(tmp_path), "--remove-checkpoints", "--yes"]) == 0
    kept = sorted(p.name for p in (run / "checkpoints").iterdir())
    assert kept == ["mine", "step_00000100"]
    assert len(list((failed / "checkpoints").iterdir())) == 4
    make_checkpoint(run, 60)
    capsys.readouterr()
    assert llmexp(["runs", str(tmp_path), "--remove-checkpoints", "--json"]) == 2
    assert "leave it out" in json.loads(capsys.readouterr().out)["error"]["message"]
    assert llmexp(["runs", str(tmp_path), "--remove-checkpoints"]) == 0
    assert "\n1 checkpoint, " in capsys.readouterr().out


@pytest.mark.parametrize("damage", ["short", "one byte", "missing", "no manifest", "bad manifest"])
def test_the_newest_whole_checkpoint_is_kept(tmp_path, capsys, damage):
    run = make_run(tmp_path / "a")
    old, whole, torn = (make_checkpoint(run, step) for step in (5, 50, 100))
    if damage == "short":
        (torn / "state.pt").write_bytes(b"x" * 10)
    elif damage == "one byte":
        (torn / "state.pt").write_bytes(b"x" * 8999 + b"y")
    elif damage == "bad manifest":
        (torn / "manifest.json").write_text('{"files": ["state.pt"]}')
    else:
        (torn / {"missing": "state.pt", "no manifest": "manifest.json"}[damage]).unlink()
    assert llmexp(["runs", str(run), "--remove-checkpoints", "--yes"]) == 0
    assert [p.is_dir() for p in (old, whole, torn)] == [False, True, False]
    (whole / "state.pt").unlink()
    make_checkpoint(run, 20)
    (run / "checkpoints" / "step_00000020" / "manifest.json").unlink()
    capsys.readouterr()
    assert llmexp(["runs", str(run), "--remove-checkpoints", "--yes"]) == 0
    assert "no checkpoint is whole" in capsys.readouterr().err
    assert len(list((run / "checkpoints").iterdir())) == 2


def test_all_runs_have_the_same_keys_in_json(tmp_path):
    make_run(tmp_path / "a", seed=1)
    make_run(tmp_path / "b", seed=2)
    failed = make_run(tmp_path / "c", max_norm=2.0, state="failed", steps=10)
    status = json.loads((failed / "status.json").read_text())
    (failed / "status.json").write_text(json.dumps(status | {"summary": {}}))
    runs = json.loads(to_json(compare([tmp_path])))["runs"]
    assert len(runs) == 2
    assert list(runs[0]) == list(runs[1])
    assert (runs[1]["name"], runs[1]["val/loss"], runs[1]["clipped_share"]) == ("c", None, None)
    assert runs[0]["clipped_share"] == 0.25


def test_names_that_are_no_text_can_be_compared_and_written(tmp_path, capsys):
    """A folder of the byte 0xe9 alone, which is no UTF-8."""
    sweep = tmp_path / os.fsdecode(b"lat\xe9")
    make_sweep(sweep, {f"c_{c}": dict(max_norm=c, offset=c) for c in (1.0, 2.0)}, ["clip.max_norm"])
    out = [str(tmp_path / f"all.{name}") for name in ("html", "csv", "json")]
    assert llmexp(["compare", str(sweep), *(f"--out={path}" for path in out)]) == 0
    for path in out:
        with open(path, encoding="utf-8") as f:
            assert "lat" in f.read()
    assert "Traceback" not in capsys.readouterr().err


def test_checkpoints_that_cannot_be_removed_are_a_failure(tmp_path, capsys):
    run = make_run(tmp_path / "a")
    for step in (5, 50):
        make_checkpoint(run, step)
    (run / ".lock").touch()
    bound = subprocess.run(
        ["mount", "--bind", "-o", "ro", run, run], capture_output=True, text=True
    )
    if bound.returncode:
        pytest.skip(f"no read-only mount here: {bound.stderr.strip()}")
    try:
        assert llmexp(["runs", str(run), "--remove-checkpoints", "--yes"]) == 1
    finally:
        subprocess.run(["umount", "-l", run], check=True)
    done = capsys.readouterr()
    assert "Read-only file system" in done.err
    assert "nothing to remove" not in done.out
    assert (run / "checkpoints" / "step_00000005").is_dir()


@pytest.mark.parametrize("command", ["compare", "next", "runs"])
def test_a_program_is_told_which_path_is_not_there(command, tmp_path, capsys):
    assert llmexp([command, str(tmp_path / "nope"), "--json"]) == 2
    message = json.loads(capsys.readouterr().out)["error"]["message"]
    assert "nope: there is nothing of that name" in message
    assert f"for example llmexp {command} outputs/default" in message


def test_a_run_that_stopped_between_two_rows_is_listed_at_its_last_step(tmp_path, capsys):
    run = make_run(tmp_path / "a", steps=40)
    write_steps(run, [3.0] * 47, [1024] * 47)
    assert llmexp(["runs", "--json", str(tmp_path)]) == 0
    assert [one["step"] for one in json.loads(capsys.readouterr().out)["runs"]] == [47]


def test_long_names_that_differ_at_their_end_are_told_apart(tmp_path):
    for i, end in enumerate("abc"):
        make_run(tmp_path / f"{'x' * 45}{end}", own=i, offset=0.01 * i)
    rows = lines(compare([tmp_path]), 120)[-3:]
    assert [row.split()[0][-2:] for row in rows] == ["xa", "xb", "xc"]
