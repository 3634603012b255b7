"""`--json` of each command: one object, as its schema says, also where it is refused; and what
the function returns."""

import inspect
from pathlib import Path

import pytest

import llmexp
from llmexp.__main__ import COMMANDS
from llmexp.cli.running import function_of
from tests.conftest import TINY
from tests.conftest import llmexp as command
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
    "tokenizer": ["--vocab-size", "260", "data=corpus", "data.sources.a.files=a.txt"],
}
ELSEWHERE = {"compare", "fit", "next", "train"}  # tests of their rooms
PRINTS = {"resume", "sync", "verify"}  # lines as they come, and no answer


@pytest.fixture
def there(tmp_path, runs, monkeypatch) -> Path:
    homes.run(tmp_path, runs)
    (tmp_path / "a.txt").write_text("One and two and three. " * 200)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", WORDS)
@pytest.mark.usefixtures("there", "forking")
def test_an_answer_is_as_its_schema_says(capfd, name):
    if name == "tokenizer":
        pytest.importorskip("tokenizers")
    done = run_here(capfd, name, *WORDS[name], "--json")
    assert done.code == 0, done.err
    printed(name, done.out)
    if name == "tokenizer":
        assert Path("tokenizers/bpe-260/bpe-260.tiktoken").is_file()
        use = ["tokenizer=file", "tokenizer.path=tokenizers/bpe-260"]
        done = run_here(capfd, "prepare", "data=corpus", "data.sources.a.files=a.txt", *use)
        assert done.code == 0, done.err


@pytest.mark.usefixtures("there")
def test_what_would_be_removed_and_scores_of_tasks(capfd):
    done = run_here(capfd, "runs", "run", "--remove-checkpoints", "--json")
    found = printed("removed", done.out)
    assert (found["removed"], len(found["checkpoints"])) == (False, 1)
    done = run_here(capfd, "evaluate", "run", "--tasks", "tiny_facts", "--by", "item", "--json")
    assert len(printed("evaluate", done.out)["tasks"][0]["scores"]) == 16


@pytest.mark.parametrize(
    ("words", "kind", "key"),
    [
        (["plan", "optimizer.lr=-1"], "out_of_range", "optimizer.lr"),
        (["plan", "-m", "train.max_steps=1,2", "a.b"], "wrong_type", None),
        (["plan", "train.sed=1"], "unknown_key", "train.sed"),
        (["compare", "nothing-here"], "not_a_run", None),
        (["bogus"], "unknown_key", None),
    ],
)
@pytest.mark.usefixtures("forking", "suggestions_are_read")
def test_a_refusal_is_an_object_with_its_kind_message_and_key(words, kind, key, capfd):
    done = run_here(capfd, *words, "--json")
    error = printed("error", done.out)["error"]
    assert (done.code, error["code"], error["key"]) == (2, kind, key)
    assert f"llmexp: {error['message']}\n" in done.err


@pytest.mark.usefixtures("forking", "suggestions_are_read")
def test_so_is_one_of_the_process_that_trains(tmp_path):
    no_file = [*TINY, "data=text", "data.train_files=nope"]
    done = command("train", "--json", *no_file, cwd=tmp_path)
    assert (done.code, done.err.count("no file matches")) == (2, 1)
    assert printed("error", done.out)["error"]["code"] == "unknown_file"
    with pytest.raises(llmexp.ConfigError, match="no file matches") as refused:
        llmexp.train(no_file, quiet=True)
    assert (refused.value.kind, refused.value.key) == ("unknown_file", "data.train_files")


def test_each_command_answers_or_prints():
    assert {*WORDS} | ELSEWHERE | PRINTS == {*COMMANDS}
    for name in COMMANDS:
        answers = inspect.signature(function_of(name)).return_annotation != "int"
        assert answers == (name not in PRINTS | {"train"})


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
