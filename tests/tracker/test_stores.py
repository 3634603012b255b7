"""Trackers besides wandb: each ends with the rows of metrics.jsonl, whatever happened between."""

import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from llmexp.__main__ import run as command
from llmexp.config import sections
from llmexp.folders.rows import Rows, read_rows
from llmexp.tracker import stores
from llmexp.tracker.fields import Fields
from llmexp.tracker.mirror import Mirror, finish_all
from tests.conftest import HANG_S, TINY
from tests.tracker.made import make_rows, make_run, run_worker, write_rows

FIELDS = Fields("proj", None, "a run", "a/sweep", [], None, {"clip": {"max_norm": 0.5}}, "run-1")
NAMES = dict.fromkeys(("project", "name", "group", "notes"))
SETTINGS = sections.Tracker(kind="tensorboard", tags=[], finish_timeout_s=60, **NAMES)


class Kept(stores.Store):
    """A store in memory. `there`: its rows; `fails`: the call that raises."""

    there: list[dict[str, Any]]
    ends: list[tuple[dict[str, Any], int]]
    fails = ""

    def start(self, fields: Fields, run_dir: Path) -> str:
        self.call("start")
        return "memory"

    def call(self, name: str) -> None:
        if self.fails == name:
            raise OSError("no route to host")

    def position(self) -> int:
        return self.there[-1]["step"] if self.there else -1

    def rows(self, rows: Sequence[dict[str, Any]]) -> None:
        self.call("rows")
        self.there.extend(rows)

    def finish(self, end: stores.End) -> None:
        self.ends.append((end.summary, end.exit_code))


@pytest.fixture
def kept(monkeypatch) -> type[Kept]:
    made = type("Made", (Kept,), {"there": [], "ends": []})
    monkeypatch.setitem(stores.STORES, "tensorboard", made)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    return made


def follow(folder: Path, rows: list[dict[str, Any]], code: int = 0) -> list[str]:
    said: list[str] = []
    out = Rows(folder / "metrics.jsonl", rows[0]["step"] - 1).open()
    mirror = Mirror("tensorboard", SETTINGS, folder, FIELDS, said.append)
    for row in rows:
        out.add(row)
    out.flush()
    mirror.finish({"steps": rows[-1]["step"]}, code)
    return said


def test_rows_arrive_once_over_a_resume_those_of_a_forks_parents_first(tmp_path, kept):
    """The resume is from an earlier step."""
    write_rows(tmp_path / "lineage.jsonl", make_rows(1, 4))
    assert follow(tmp_path, make_rows(5, 7), 75) == []
    assert kept.there == make_rows(1, 7)
    assert follow(tmp_path, make_rows(6, 9)) == []
    assert kept.there == make_rows(1, 9)
    assert read_rows(tmp_path / "metrics.jsonl") == make_rows(5, 9)
    assert kept.ends == [({"steps": 7}, 75), ({"steps": 9}, 0)]


@pytest.mark.parametrize("fails", ["start", "rows"])
def test_a_dead_server_costs_a_line_and_sync_completes_it(tmp_path, kept, capsys, fails):
    run = make_run(tmp_path / "a", 4)
    kept.fails = fails
    (line,) = follow(run, make_rows(1, 4))
    assert "tensorboard: stopped (OSError: no route to host)" in line
    assert f"llmexp sync {run} --to tensorboard" in line
    assert kept.there == []
    for fails_now, code, says in (
        (fails, 1, "not uploaded: OSError: no route to host"),
        ("", 0, "4 of 4 rows sent, finished: memory"),
        ("", 0, "0 of 4 rows sent"),
    ):
        kept.fails = fails_now
        assert command(["sync", str(run), "--to", "tensorboard"]) == code
        assert says in capsys.readouterr().out
    assert kept.there == read_rows(run / "metrics.jsonl")


def test_a_package_that_is_not_there_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for name, chosen in (("mlflow", "tracker=mlflow"), ("trackio", "tracker.also=[trackio]")):
        assert command(["plan", *TINY, "data=synthetic", chosen]) == 2
        assert f"pip install 'llmexp[{name}]'" in capsys.readouterr().err
    assert os.listdir() == []


def there(kind: str, folder: Path) -> dict[int, dict[str, float]]:
    """What a tracker has of the run: its numbers by step, read by its own means."""
    found: dict[int, dict[str, float]] = {}
    if kind == "tensorboard":
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        events = EventAccumulator(str(folder / "tensorboard"))
        events.Reload()
        for key in events.Tags()["tensors"]:
            for event in events.Tensors(key) if not key.endswith("text_summary") else ():
                found.setdefault(event.step, {})[key] = event.tensor_proto.double_val[0]
    elif kind == "mlflow":
        from mlflow import MlflowClient

        client = MlflowClient()
        (run,) = client.search_runs([client.get_experiment_by_name("a-project").experiment_id])
        for key in run.data.metrics:
            history = client.get_metric_history(run.info.run_id, key)
            assert len({metric.step for metric in history}) == len(history)
            for metric in history:
                found.setdefault(metric.step, {})[key] = metric.value
    else:
        from trackio.sqlite_storage import SQLiteStorage

        for row in SQLiteStorage.get_logs("a-project", "lr=3e-4 run-1"):
            row.pop("timestamp")
            found[row["step"]] = row
    return found


@pytest.mark.parametrize("kind", ["tensorboard", "mlflow", "trackio"])
def test_each_holds_the_rows_after_a_kill_and_a_resume(tmp_path, monkeypatch, kind):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))  # read when it is imported
    pytest.importorskip(kind, reason=f"pip install 'llmexp[{kind}]'")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    run_dir = tmp_path / "run"
    for rows, plan, code in ((make_rows(1, 5), {"die_at": 5}, -9), (make_rows(4, 9), {}, 0)):
        done = run_worker(run_dir, rows, kind=kind, plan=plan)
        assert (done.code, done.said) == (code, []), done.stderr
    rows = read_rows(run_dir / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, 10))
    kept = there(kind, run_dir)
    assert sorted(kept) == [row["step"] for row in rows]
    for row in rows:
        assert {**kept[row["step"]], "step": row["step"]} == stores.numbers(row)
    assert not [t for t in threading.enumerate() if t.name == "tracker"]


def test_several_trackers_end_at_the_same_time():
    """Each of two waits until the other one has come to its end too."""
    both, ended = threading.Barrier(2, timeout=HANG_S), []

    class Waiting:
        def finish(self, summary: dict[str, Any], exit_code: int) -> None:
            ended.append(both.wait())

    finish_all([Waiting(), Waiting()], {}, 0)
    assert sorted(ended) == [0, 1]
