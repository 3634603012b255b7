"""Scores of tasks in the rows of a run; tests/tasks has how a task is scored."""

import json
import shutil
from types import SimpleNamespace as Namespace
from typing import Any

import pytest

from llmexp.__main__ import run as command
from llmexp.compare.figures import columns_of
from llmexp.config.values import ConfigError
from llmexp.features.tasks.forecast import counts
from llmexp.features.tasks.train import Tasks
from llmexp.tasks.items import read_task
from llmexp.train.assembly.opening import open_run
from tests.conftest import llmexp, train
from tests.tasks.test_tasks import GOOD, folder, scored, settings
from tests.tools import amend, exact

__all__ = ["folder"]  # a fixture

TASKS = ["train.tasks=[mixed,tiny_facts]", "train.tasks_every=2", "train.tasks_folder=sets"]


@pytest.mark.parametrize("every", [None, 1, 3, 4, 9])
@pytest.mark.parametrize(("first", "steps"), [(0, 1), (0, 8), (3, 8), (5, 9)])
def test_a_plan_counts_what_the_loop_scores(first, steps, every):
    nothing: Any = Namespace()
    feature = Tasks(nothing, nothing, every)
    config = Namespace(train=Namespace(tasks=["t"], tasks_every=every))

    def times(n: int | None) -> int:
        return steps // n - first // n if n else 0

    found = counts(config, times, lambda n: bool(n) and steps % n == 0)
    scored = [s for s in range(first + 1, steps + 1) if feature.measure(s, s == steps)]
    assert found == {"tasks": len(scored)}


def test_rows_have_the_figures_of_evaluate_and_compare_asks_the_items(
    folder, tmp_path, monkeypatch, capsys
):
    """The interval of a score is 1.96 standard errors of its row; that of a difference, both."""
    train(folder, "asked", *settings(), *TASKS, "train.log_every=4")
    monkeypatch.chdir(folder)
    arguments = ["--tasks", "mixed", "--tasks-folder", "sets", "--json"]
    assert command(["evaluate", "asked", *arguments]) == 0
    (found,) = json.loads(capsys.readouterr().out)["tasks"]
    row = json.loads((folder / "asked/metrics.jsonl").read_text().splitlines()[-1])
    for key in {*found} - {"task", "items", "scores"}:
        assert row[f"task/mixed/{key}"] == pytest.approx(found[key], rel=1e-12)
    assert sum(key.startswith("task/mixed/") for key in row) == 6
    assert "task/tiny_facts/acc" in row

    (column,) = [c for c in columns_of({"task/mixed/acc"}) if c.key.startswith("task/")]
    assert column.sign == -1  # higher is better
    key = "task/mixed/acc"
    for name, stderr, words in (
        ("far", 0.05, ", significant over the items"),
        ("wide", 0.5, "not significant over the items"),
    ):
        other = tmp_path / name
        shutil.copytree("asked", other)
        lines = (other / "metrics.jsonl").read_text().splitlines()
        lines[-1] = json.dumps(row | {key: 0.9, f"{key}_stderr": stderr})
        (other / "metrics.jsonl").write_text("\n".join(lines) + "\n")
        amend(other / "config.yaml", optimizer={"lr": 0.05})
        assert command(["compare", "asked", str(other), "--sort", key, "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert words in found["headline"], found["headline"]
        assert [run[key] for run in found["runs"]] == [0.9, row[key]]
        for run, error in zip(found["runs"], (stderr, row[f"{key}_stderr"]), strict=True):
            low, high = run["intervals"][key]
            assert (low + high) / 2 == pytest.approx(run[key])
            assert (high - low) / 2 == pytest.approx(1.96 * error)


@pytest.mark.parametrize("kind", [pytest.param("ddp", marks=pytest.mark.slow), "fsdp"])
def test_two_ranks_share_the_items_and_training_does_not_notice(folder, tmp_path, kind):
    """Rows are bit-equal with and without tasks, but for those of the tasks; two ranks score what
    one does."""
    two = [f"parallelism={kind}", "parallelism.nproc_per_node=2"]
    tasks = ["train.tasks=[mixed]", "train.tasks_every=1", f"train.tasks_folder={folder}/sets"]
    common = [*settings(folder), "train.log_every=1", "model.dropout=0.1"]
    result = train(tmp_path, "asked", *common, *two, *tasks)
    asked = result.rows()
    score = asked[-1]["task/mixed/acc"]
    assert result.out.count(" | mixed acc ") == len(asked)
    assert result.json("status.json")["summary"]["final task/mixed/acc"] == score
    quiet = train(tmp_path, "quiet", *common, *two)
    for row, other in zip(exact(result), exact(quiet), strict=True):
        assert {key: value for key, value in row.items() if not key.startswith("task/")} == other
        assert len(row) == len(other) + 6
    figures, _ = scored(open_run(tmp_path / "asked", 4), folder / "sets/mixed.jsonl", 10**6)
    for key, value in figures.items():
        assert asked[-1][f"task/mixed/{key}"] == pytest.approx(value, rel=1e-12)


def test_a_request_file_that_changes_between_two_starts(folder, tmp_path):
    """Rows of one run are about the same items; a broken link is no shipped set."""
    asked = tmp_path / "disk/mine.jsonl"
    asked.parent.mkdir()
    (tmp_path / "sets").mkdir()
    (tmp_path / "sets/mine.jsonl").symlink_to(asked)
    asked.write_text(text := json.dumps(GOOD) + "\n")
    own = [*settings(folder), "train.tasks=[mine]", "train.tasks_folder=sets"]
    stopped = llmexp("train", *own, "train.stop_step=2", "hydra.run.dir=run", cwd=tmp_path)
    assert stopped.code == 75, stopped.err
    asked.write_text(text.replace('"answer": 1', '"answer": 0'))
    refused = llmexp("resume", "run", "train.stop_step=null", cwd=tmp_path)
    assert refused.code == 2
    assert "the request file of the task mine changed" in refused.err
    asked.write_text(text + "\n")  # the same items
    assert llmexp("resume", "run", "train.stop_step=null", cwd=tmp_path).code == 0
    (tmp_path / "sets/tiny_facts.jsonl").symlink_to(tmp_path / "gone")
    with pytest.raises(ConfigError, match=r"tiny_facts\.jsonl: cannot be read"):
        read_task("tiny_facts", str(tmp_path / "sets"))
