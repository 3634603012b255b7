"""`--json` of each command: one object, as its schema says; and what the function returns."""

import inspect
from pathlib import Path

import pytest

import llmexp
from llmexp.__main__ import COMMANDS
from llmexp.cli.running import function_of
from tests.refusals import homes
from tests.tools import printed, run_here

WORDS = {
    "average": ["run", "--last", "2", "--out", "mean"],
    "evaluate": ["run"],
    "explain": ["optimizer.lr", "train.max_steps=3"],
    "export": ["run", "out", "--no-check"],
    "plan": ["data=synthetic", "tracker=none"],
    "prepare": ["data=text", "data.train_files=a.txt", "tokenizer=bytes"],
    "replay": ["run@3"],
    "runs": ["run"],
    "sample": ["run", "--tokens", "3"],
    "tokenizer": ["--vocab-size", "260", "data=text", "data.train_files=a.txt"],
}
ELSEWHERE = {"compare", "fit", "next", "train"}  # tests of their rooms
PRINTS = {"resume", "sync", "verify"}  # lines as they come, and no answer


@pytest.fixture
def there(tmp_path, runs, monkeypatch) -> Path:
    homes.run(tmp_path, runs)
    (tmp_path / "a.txt").write_text("One and two and three. " * 200)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("command", WORDS)
@pytest.mark.usefixtures("there", "forking")
def test_an_answer_is_as_its_schema_says(capfd, command):
    if command == "tokenizer":
        pytest.importorskip("tokenizers")
    done = run_here(capfd, command, *WORDS[command], "--json")
    assert done.code == 0, done.err
    printed(command, done.out)


@pytest.mark.usefixtures("there")
def test_what_would_be_removed_and_scores_of_tasks(capfd):
    done = run_here(capfd, "runs", "run", "--remove-checkpoints", "--json")
    found = printed("removed", done.out)
    assert (found["removed"], len(found["checkpoints"])) == (False, 1)
    done = run_here(capfd, "evaluate", "run", "--tasks", "tiny_facts", "--by", "item", "--json")
    assert len(printed("evaluate", done.out)["tasks"][0]["scores"]) == 16


def test_each_command_answers_or_prints():
    assert {*WORDS} | ELSEWHERE | PRINTS == {*COMMANDS}
    for command in COMMANDS:
        answers = inspect.signature(function_of(command)).return_annotation != "int"
        assert answers == (command not in PRINTS | {"train"})


def test_lists_and_names_are_words(monkeypatch, there):
    """A list in the place of words, flags by their names; an empty list of runs is a mistake."""
    assert llmexp.explain("train.seed", ["train.seed=4"]).data["value"] == 4
    with pytest.raises(TypeError, match="nothing"):
        llmexp.explain("train.seed", nothing=True)
    with pytest.raises(llmexp.ConfigError, match="runs: the list is empty") as refused:
        llmexp.average("run", [])
    assert refused.value.kind == "missing_value"
    with pytest.raises(llmexp.ConfigError, match=r"^last=0: must be at least 1 .* last=5"):
        llmexp.average("run", last=0)
    assert llmexp.average("run", ["run@2"], out="mean").steps == [4, 2]
