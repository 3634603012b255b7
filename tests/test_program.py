"""`import llmexp`: what a program gets is what the commands show."""

import base64
import csv
import dataclasses
import json
import os
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import llmexp
from llmexp.__main__ import run as command
from llmexp.folders.rows import read_rows
from tests import forks
from tests.conftest import PATHS, ROOT, TINY, environment
from tests.conftest import llmexp as run_llmexp
from tests.tools import printed

DATA = ["data=synthetic", "data.n_tokens=4000", "train.eval_tokens=100"]
SHORT = [*TINY, *DATA, "train.max_steps=4", "train.log_every=1", "train.eval_every=2"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with a run and a sweep, made by a program."""
    folder = tmp_path_factory.mktemp("program")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for name, value in environment(PYTHONPATH=PATHS).items():
            patch.setenv(name, value)
        with forks.warm():
            single = llmexp.train([*SHORT, "hydra.run.dir=one", "checkpoint.every=2"], quiet=True)
            points = ["-m", "optimizer.lr=0.001,0.003", "hydra.sweep.dir=grid"]
            grid = llmexp.train([*SHORT, *points], quiet=True)
    return folder, single, grid


@pytest.fixture
def there(trained, forking, monkeypatch):
    monkeypatch.chdir(trained[0])
    return trained[1:]


def printed_by(capsys, *words: str) -> str:
    capsys.readouterr()
    assert command(list(words)) == 0
    return capsys.readouterr().out


def test_a_run_is_what_its_folder_holds(there):
    single, _ = there
    assert single == llmexp.load("one")
    assert (single.state, single.steps) == ("finished", [2, 4])
    assert single.config.train.max_steps == single.facts["max_steps"] == 4
    rows = read_rows(Path("one/metrics.jsonl"))
    assert single.rows() == rows
    assert single.rows("train/loss").tolist() == [row["train/loss"] for row in rows]
    steps, losses = single.rows("step", "val/loss")
    assert steps.tolist() == [2, 4]
    assert losses[-1] == single.summary["final val/loss"]
    with pytest.raises(llmexp.ConfigError, match="Did you mean val/loss"):
        single.rows("val/los")
    with pytest.raises(llmexp.ConfigError, match="not a run folder"):
        llmexp.load("grid")
    pandas = pytest.importorskip("pandas")
    frame = single.frame()
    assert isinstance(frame, pandas.DataFrame)
    assert [{k: v for k, v in row.items() if v == v} for row in frame.to_dict("records")] == rows


def test_the_model_of_each_step_and_its_text(there, capsys):
    single, _ = there
    model = single.model()
    assert not model.training
    ids = torch.tensor([single.tokenizer.encode_ordinary("words and words")[:12]])
    newest, older = model(ids), single.model(step=2)(ids)
    assert newest.shape[:2] == ids.shape
    assert not torch.equal(newest, older)
    assert torch.equal(newest, single.model(step=4)(ids))
    words = ["one@2", "--prompt", "wo", "--tokens", "9", "--seed", "3"]
    assert f"{single.sample('wo', 9, step=2, seed=3)}\n" == printed_by(capsys, "sample", *words)
    with pytest.raises(llmexp.ConfigError, match="there are those of 2, 4"):
        single.model(step=3)
    with pytest.raises(llmexp.ConfigError, match="tokens=0: must be at least 1"):
        single.sample(tokens=0)


def test_completion_offers_what_the_docs_list():
    text = (ROOT / "docs/python.md").read_text()
    assert dir(llmexp) == sorted(dir(llmexp)) == list(llmexp.__all__)
    assert all(f"llmexp.{name}" in text or f"`{name}`" in text for name in dir(llmexp))
    assert set(re.findall(r"\bllmexp\.(\w+)\(", text)) <= set(dir(llmexp))
    assert all(getattr(llmexp, name) is not None for name in dir(llmexp))
    with pytest.raises(AttributeError, match="nonsense"):
        _ = llmexp.nonsense


def test_plans_are_those_of_the_command(there, capsys):
    words = [*SHORT, "hydra.run.dir=new"]
    plan = llmexp.plan(words)
    assert f"{plan}\n" == printed_by(capsys, "plan", *words)
    whole = printed("plan", printed_by(capsys, "plan", "--json", *words))
    assert json.loads(json.dumps(plan.data)) == whole
    assert (whole["max_steps"], whole["real_batch_size"]) == (4, 8)
    assert (plan.run.max_steps, plan.memory.fits, plan.cost) == (4, None, None)
    sweep = llmexp.plan([*SHORT, "-m", "train.max_steps=4,5"]).plans
    assert [one.run.max_steps for one in sweep] == [4, 5]
    wrong = [*SHORT, "-m", "train.max_steps=4,5,0"]
    with pytest.raises(llmexp.ConfigError, match=r"train\.max_steps=0"):
        llmexp.plan(wrong)
    assert command(["plan", "--json", *wrong]) == 2
    planned = printed("plan", capsys.readouterr().out)
    assert [point["max_steps"] for point in planned["points"]] == [4, 5]
    (refusal,) = planned["refusals"]
    assert refusal["code"] == "out_of_range"
    assert all("train.max_steps=0" in text for text in (refusal["message"], planned["refused"][0]))


def test_figures_averages_data_and_exports_are_those_of_the_commands(there, tmp_path, capsys):
    single, _ = there
    found = llmexp.evaluate(single, tokens="all")
    words = ["evaluate", "one", "--tokens", "all"]
    assert found.data == json.loads(printed_by(capsys, *words, "--json"))
    assert f"{found}\n" == printed_by(capsys, *words)
    assert {name: one["loss"] for name, one in found.sets.items()} == {
        "val": found.data["sets"][0]["loss"]
    }
    scores = llmexp.evaluate("one@2", tasks=["tiny_facts"])
    assert (scores.data["step"], list(scores.tasks)) == (2, ["tiny_facts"])
    with pytest.raises(llmexp.ConfigError, match="by='year': must be one of"):
        llmexp.evaluate(single, by="year")
    out, parameters = tmp_path / "mean", sum(p.numel() for p in single.model().parameters())
    mean = llmexp.average(single, last=2, out=str(out))
    assert (mean.path, mean.steps, mean.parameters) == (out, [2, 4], parameters)
    with pytest.raises(llmexp.ConfigError, match="mean: is there already"):
        llmexp.average(single, last=2, out=str(out))
    (tmp_path / "a.txt").write_text("One and two and three. " * 200)
    text = ["data=text", f"data.train_files=[{tmp_path}/a.txt]", "tokenizer=bytes"]
    prepared = llmexp.prepare(text)
    assert prepared.train_tokens + prepared.val_tokens == pytest.approx(200 * 23, abs=2)
    assert f"train {prepared.train_tokens:,} tokens" in str(prepared)
    with pytest.raises(llmexp.ConfigError, match="leave out -m"):
        llmexp.prepare([*text, "-m"])
    assert llmexp.export(single, tmp_path / "hf").parameters > 0
    assert (tmp_path / "hf/config.json").is_file()
    pytest.importorskip("tokenizers")
    made = llmexp.tokenizer(text, vocab_size=260, out=tmp_path / "bpe")
    assert (made.path, made.n_vocab) == (tmp_path / "bpe", 260)
    assert (made.path / "tokenizer.json").is_file()


def numbers(values) -> list[float]:
    """What a trace draws, in either of Plotly's forms."""
    if isinstance(values, dict):
        values = np.frombuffer(base64.b64decode(values["bdata"]), np.dtype(values["dtype"]))
    return [] if values is None else [float(value) for value in values if value is not None]


def test_an_answer_is_what_the_command_prints(there, capsys):
    _, grid = there
    assert [run.config.optimizer["lr"] for run in grid] == [0.001, 0.003]
    answer = llmexp.compare(grid)
    shown = [line.rstrip() for line in printed_by(capsys, "compare", "grid").splitlines()]
    assert str(answer).splitlines() == shown
    assert " ".join(shown).startswith(answer.headline)
    assert printed("compare", printed_by(capsys, "compare", "grid", "--json")) == answer.data
    losses = [numbers(trace.y) for trace in answer.figures["losses"].data]
    last = {float(np.float32(run.rows("train/loss")[-1])) for run in grid}
    assert last <= {drawn[-1] for drawn in losses if len(drawn) == 4}
    assert llmexp.compare("grid/*", sort="train/loss").data["metric"] == "train/loss"
    tokens, losses = grid[1].rows("tokens_seen", "val/loss")
    (one,) = llmexp.compare(grid[1:], target=f"val/loss={losses.mean()}").data["runs"]
    assert one["target/tokens"] == pytest.approx(tokens.mean())
    assert [one["target/after"], one["target/by"]] == tokens.tolist()
    printed_by(capsys, "compare", "grid", "--out", "grid.csv")
    table = list(csv.DictReader(Path("grid.csv").read_text().splitlines()))
    pytest.importorskip("pandas")
    frame = answer.frame()
    assert list(frame.columns) == list(table[0])
    assert frame["val/loss"].tolist() == [float(row["val/loss"]) for row in table]
    assert frame["name"].tolist() == [row["name"] for row in table]
    switched = dataclasses.replace(answer.comparison.settings[0], values={"optimizer.lr": False})
    changed = dataclasses.replace(answer.comparison, settings=(switched,))
    assert llmexp.Answer(changed).frame()["optimizer.lr"].tolist() == [False]


def test_what_train_refuses_and_what_fails_is_raised(there):
    for words, why in (
        ([*SHORT, "train.max_step=1"], r"train\.max_step"),
        # by the worker
        ([*SHORT, "batch.sequence_length=64", "hydra.run.dir=long"], r"batch\.sequence_length"),
        (["--help"], "--help.*: trains no run"),
        (["--cfg", "job"], "--cfg.*: trains no run"),
    ):
        with pytest.raises(llmexp.ConfigError, match=why):
            llmexp.train(words, quiet=True)
    assert not os.path.exists("long")
    with pytest.raises(TypeError, match="a list is needed"):
        llmexp.train("train.max_steps=1")
    for path, given, why in (
        ("nope", {}, "nope: there is nothing of that name"),
        ([], {}, "paths: the list is empty"),
        ("one", {"min_effect": -1}, "min_effect=-1: must be at least 0"),
        ("one", {"align": "epochs"}, "align='epochs': must be one of"),
        ("one", {"sort": "nope"}, "sort='nope': there is no such figure"),
        ("one", {"sort": "lr", "target": "val/loss=2"}, "sort='lr': target= orders the table"),
        ("one", {"target": "val/loss"}, "target='val/loss': "),
    ):
        with pytest.raises(llmexp.ConfigError, match=why) as refused:
            llmexp.compare(path, **given)
        assert "--" not in str(refused.value)


def test_a_package_is_allowed_for_one_call(monkeypatch):
    """A command ends its process after --allow; a program goes on."""
    monkeypatch.delenv("LLMEXP_ALLOW", raising=False)
    before = dict(os.environ), list(sys.path)
    llmexp.plan([*SHORT, "--allow", "json"])
    with pytest.raises(llmexp.ConfigError, match=r"train\.max_step"):
        llmexp.prepare([*SHORT, "--allow=json", "train.max_step=1"])
    assert (dict(os.environ), list(sys.path)) == before


def test_json_of_a_run_that_fails(tmp_path):
    failing = [*SHORT, "optimizer.lr=1e30", "hydra.run.dir=one"]
    done = run_llmexp("train", "--json", *failing, cwd=tmp_path)
    found = printed("train", done.out)
    assert done.code == found["exit_code"] == 3
    assert "training failed" in done.err
    (run,) = found["runs"]
    assert (run["state"], run["path"], found["path"]) == ("failed", "one", "one")


@pytest.mark.usefixtures("forking")
def test_the_notebook_runs(tmp_path, monkeypatch, capsys):
    """Its code cells in order, without Jupyter, with a fifth of the steps."""
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    for cell in json.loads((ROOT / "docs/python.ipynb").read_text())["cells"]:
        if cell["cell_type"] == "code":
            assert not cell["outputs"]
            text = "".join(cell["source"]).replace("max_steps=40", "max_steps=8")
            exec(text.replace("every=20", "every=4"), names)
    assert names["run"].steps == [4, 8]
    assert len(names["runs"]) == 2
    assert names["answer"].headline in " ".join(capsys.readouterr().out.split())
