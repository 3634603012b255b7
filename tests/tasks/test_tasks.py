"""Multiple choice: scores against a computation item by item, in the loop and after it, on one rank
and two; lm-eval itself where it is installed. tests/refusals/tasks.yaml has what is refused."""

import importlib.util
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from llmexp import mesh
from llmexp.__main__ import run as command
from llmexp.config.values import ConfigError
from llmexp.evaluate import harness, sets
from llmexp.tasks import make, scoring
from llmexp.tasks.items import SHIPPED, Item, read_items, read_task
from llmexp.train.assembly.opening import Opened, open_run
from tests.conftest import llmexp, train

WORDS = tuple(
    "the cat dog sat on a mat and saw big red house it ran to tree over hill".split()  # noqa: SIM905
)
LENGTH = 24


def settings(there: str | Path = ".") -> list[str]:
    return [
        "data=text", f"data.train_files={there}/text.txt", f"data.cache_dir={there}/cache",
        "tokenizer=file", f"tokenizer.path={there}/tok", f"batch.sequence_length={LENGTH}",
        "train.max_steps=4", "checkpoint.every=2", "train.eval_every=2", "optimizer.lr=0.03",
        "precision=fp64", "batch.real_batch_size=4",
    ]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer whose tokens reach over spaces and letters, a run in fp64, and a task with all
    that is special: white space, an empty and a long context, contexts for each choice."""
    path = tmp_path_factory.mktemp("tasks")
    rng = np.random.default_rng(5)

    def words(count: int) -> str:
        return " ".join(rng.choice(WORDS, count))

    (path / "text.txt").write_text("".join(f"{words(90)}.\n" for _ in range(40)))
    data = ["data=text", "data.train_files=text.txt"]
    made = llmexp("tokenizer", "--vocab-size", "330", "--out", "tok", *data, cwd=path)
    assert made.code == 0, made.err
    items: list[dict[str, Any]] = [
        {"context": "the cat sat on", "choices": ["the mat", "a tree house"], "answer": 0},
        {"context": "it ran to the ", "choices": ["hill", "big", "h\u00fcll"], "answer": 2},
        {"context": "a big\n", "choices": ["red dog and a cat", "dog"], "answer": 1},
        {"context": "", "choices": ["the", "house mat"], "answer": 0},
        {"context": words(60), "choices": ["sat", "over a hill"], "answer": 1},
        {"context": ["the dog saw", "the house saw"], "choices": ["a cat", "a cat"], "answer": 0},
    ]
    for _ in range(14):
        choices = [words(rng.integers(1, 4)) for _ in range(4)]
        context, answer = words(rng.integers(1, 12)), int(rng.integers(4))
        items.append({"context": context, "choices": choices, "answer": answer})
    (path / "sets").mkdir()
    write(path / "sets/mixed.jsonl", [{"id": f"q{n}", **item} for n, item in enumerate(items)])
    train(path, "run", *settings(), "train.log_every=4")
    return path


def write(path: Path, items: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(item) + "\n" for item in items))


def scored(opened: Opened, path: Path, tokens: int) -> tuple[dict[str, float], list[Any]]:
    """Return the figures of a task in float64, and its items."""
    task = scoring.prepare_task(path.stem, read_items(path), opened.tokenizer, LENGTH)
    alone = mesh.join("cpu", "single", 1, 1, 1)
    return scoring.score_task(task, sets.placed_model(opened).loss, alone, "fp64", tokens)


def by_hand(opened: Opened, path: Path) -> list[list[float]]:
    """Return the log-likelihoods of each item: one request at a time, unpadded, in float64. Context
    and continuation are split as lm-eval's documentation has it: in the encoding of both together,
    the ids that follow as many as the context alone has."""
    model, encode = opened.model.double().eval(), opened.tokenizer.encode_ordinary
    found = []
    for line in path.read_text().splitlines():
        item, lls = json.loads(line), []
        for number, choice in enumerate(item["choices"]):
            context = item["context"]
            context = context[number] if isinstance(context, list) else context
            if context:
                whole = encode(f"{context} {choice}")
                count = len(whole) - len(encode(context.rstrip()))
            else:
                whole = [opened.tokenizer.eot_token, *encode(f" {choice}")]
                count = len(whole) - 1
            ids = torch.tensor(whole[-(LENGTH + 1) :])
            with torch.no_grad():
                logp = torch.log_softmax(model(ids[None, :-1])[0], -1)
            picked = logp[torch.arange(len(ids) - 1), ids[1:]]
            lls.append(float(picked[-count:].sum()))
        found.append(lls)
    return found


def test_scores_are_those_of_one_request_at_a_time(folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    arguments = ["--tasks", "mixed", "--tasks-folder", "sets", "--by", "item", "--json"]
    assert command(["evaluate", "run", *arguments]) == 0
    (found,) = json.loads(capsys.readouterr().out)["tasks"]
    wanted = by_hand(open_run(folder / "run", 4), folder / "sets/mixed.jsonl")
    items = read_items(folder / "sets/mixed.jsonl")
    right, normed, nll, size = [], [], 0.0, 0
    for one, lls, item in zip(found["scores"], wanted, items, strict=True):
        assert one["loglikelihoods"] == pytest.approx(lls, rel=1e-11)
        right.append(np.argmax(lls) == item.answer)
        per_byte = [ll / len(c.encode()) for ll, c in zip(lls, item.choices, strict=True)]
        normed.append(np.argmax(per_byte) == item.answer)
        nll -= lls[item.answer]
        context = item.contexts[item.answer]
        size += len(f"{context} {item.choices[item.answer]}".encode())
        size -= len(context.rstrip().encode())
    n = len(items)
    assert found["items"] == n == 20
    assert found["acc"] == pytest.approx(np.mean(right))
    assert found["acc_stderr"] == pytest.approx(np.std(right, ddof=1) / math.sqrt(n))
    assert found["acc_norm"] == pytest.approx(np.mean(normed))
    assert found["acc_norm_stderr"] == pytest.approx(np.std(normed, ddof=1) / math.sqrt(n))
    assert found["bits_per_byte"] == pytest.approx(nll / size / math.log(2), rel=1e-11)
    assert 0 < found["acc"] < 1
    assert right != normed
    assert (
        command(["evaluate", "run@2", "--tasks", "tiny_facts,mixed", "--tasks-folder", "sets"]) == 0
    )
    shown = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in shown[-2:]] == [["tiny_facts", "16"], ["mixed", "20"]]


def completions(opened: Opened) -> tuple[list[dict[str, Any]], list[float]]:
    """Return items with one choice, and whether the model writes it, token by token in float64."""
    model, tokenizer = opened.model.double().eval(), opened.tokenizer
    items: list[dict[str, Any]] = []
    right = []
    for number, text in enumerate(("the cat", "a dog sat on", "it ran to the big", "red")):
        ids = tokenizer.encode_ordinary(text)
        for _ in range(3):
            with torch.no_grad():
                ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
        written = tokenizer.decode(ids).removeprefix(f"{text} ")
        again = tokenizer.encode_ordinary(f"{text} {written}") == ids
        for choice in (written, "over"):
            items.append({"id": number, "context": text, "choices": [choice], "answer": 0})
            right.append(float(again and choice == written))
    assert 0 < sum(right) < len(right)
    return items, right


def test_a_completion_is_right_where_the_likeliest_tokens_write_it(folder, tmp_path, monkeypatch):
    """Its likelihood is that of the same choice among several."""
    monkeypatch.chdir(folder)
    opened = open_run(folder / "run", 4)
    items, right = completions(opened)
    several = [item | {"choices": [*item["choices"], "x"]} for item in items]
    lls = []
    for name, some in (("end", items), ("two", several)):
        write(tmp_path / f"{name}.jsonl", some)
        found, samples = scored(opened, tmp_path / f"{name}.jsonl", 50)
        lls.append([one["loglikelihoods"][0] for one in samples])
        if name == "end":
            assert [one["acc"] for one in samples] == right
            assert found["acc"] == np.mean(right)
    assert lls[0] == pytest.approx(lls[1], rel=1e-11)


def test_how_requests_are_batched_and_padded_changes_nothing(folder, monkeypatch):
    monkeypatch.chdir(folder)
    opened = open_run(folder / "run", 4)
    first, *others = (
        [one["loglikelihoods"] for one in scored(opened, folder / "sets/mixed.jsonl", tokens)[1]]
        for tokens in (1, 50, 200, 10**6)
    )
    for other in others:
        np.testing.assert_allclose(np.hstack(other), np.hstack(first), rtol=1e-12)
    task = scoring.prepare_task("mixed", read_task("mixed", "sets"), opened.tokenizer, LENGTH)
    for tokens in (1, 50, 200):
        batches = scoring.batches(task.requests, tokens)
        assert sorted(n for one in batches for n in one) == list(range(len(task.requests)))
        for chosen in batches:
            widths = [len(task.requests[number].ids) - 1 for number in chosen]
            assert widths == sorted(widths, reverse=True)
            assert len(chosen) == 1 or len(chosen) * widths[0] <= tokens


def test_lm_eval_finds_the_same_item_by_item(folder, tmp_path, monkeypatch, capsys):
    """On the model that is exported for it, in float64; contexts of their own for each choice need
    another kind of its tasks, and long ones are cut alike."""
    monkeypatch.chdir(folder)
    items = [json.loads(line) for line in Path("sets/mixed.jsonl").read_text().splitlines()]
    opened = open_run(Path("run"), 4)
    kept = {"like": [item for item in items if isinstance(item["context"], str)],
            "end": completions(opened)[0]}  # fmt: skip
    more = {"like": "output_type: multiple_choice\ndoc_to_target: answer\n"
                    'doc_to_choice: "{{choices}}"',
            "end": "output_type: loglikelihood\ndoc_to_target: \"{{' '+choices[0]}}\"\n"
                   "target_delimiter: ''\nmetric_list: [{metric: acc}]"}  # fmt: skip
    for name, lines in kept.items():
        file = tmp_path / f"{name}.jsonl"
        write(file, lines)
        (tmp_path / f"{name}.yaml").write_text(
            f'task: {name}\ndataset_path: json\ntest_split: test\ndoc_to_text: "{{{{context}}}}"\n'
            f"dataset_kwargs: {{data_files: {{test: {file}}}}}\n{more[name]}\n"
        )
    given = ["evaluate", "run", "--lm-eval", "like,end", "--tasks-folder", str(tmp_path), "--json"]
    if not all(map(importlib.util.find_spec, ("lm_eval", "accelerate"))):
        assert command(given) == 2
        assert "pip install 'llmexp[eval]'" in capsys.readouterr().err
        pytest.skip("lm-eval is not installed")
    run = (Path("run"), None, "model")
    found = harness.evaluate_by_harness(run, [*kept], str(tmp_path))
    figures = {one["task"]: one for one in harness.harness_figures(found)}
    for name in kept:
        ours, own = scored(opened, tmp_path / f"{name}.jsonl", 96)
        theirs = sorted(found["samples"][name], key=lambda one: one["doc_id"])
        for one, other in zip(own, theirs, strict=True):
            lls = [ll for ll, _ in other["filtered_resps"]]
            assert one["loglikelihoods"] == pytest.approx(lls, rel=1e-10)
            assert one["acc"] == other["acc"]
        assert figures[name]["acc"] == ours["acc"]
        assert figures[name]["acc_stderr"] == pytest.approx(ours["acc_stderr"], rel=1e-12)
    with pytest.raises(ConfigError, match="there is no task nix"):
        harness.evaluate_by_harness(run, ["nix"], None)


GOOD = {"id": 1, "context": "a", "choices": ["b", "c"], "answer": 1}


def test_a_line_separator_in_a_text_ends_no_line(tmp_path):
    item = {**GOOD, "context": "one\u2028two\x85"}
    (tmp_path / "mine.jsonl").write_text(json.dumps(item, ensure_ascii=False) + "\n")
    (found,) = read_items(tmp_path / "mine.jsonl")
    assert found.contexts == ("one\u2028two\x85",) * 2


def test_a_choice_that_the_tokenizer_joins_to_its_context_is_refused():
    class Joining:
        name, eot_token = "joining", None

        def encode_ordinary(self, text: str) -> list[int]:
            return [1] if text == "the cat" else list(text.encode())

    item = Item("mine.jsonl:1", "1", ("the", "the"), ("dog", "cat"), 1)
    words = "mine.jsonl:1: the choice 'cat' has no token of its own, as joining makes one"
    with pytest.raises(ConfigError, match=words):
        scoring.prepare_task("mine", [item], Joining(), LENGTH)  # type: ignore[arg-type]


def test_what_is_shipped_is_whole():
    for path in SHIPPED.glob("*.jsonl"):
        items = read_items(path)
        assert len({item.id for item in items}) == len(items)
        assert len({item.answer for item in items}) > 1


HUB = yaml.safe_load(Path(__file__).with_name("hub.yaml").read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", HUB)
def test_rows_of_the_hub_become_the_requests_of_lm_eval(name, tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.chdir(tmp_path)  # where the library finds a set of the hub as a folder
    wanted, source = HUB[name], make.SOURCES[name]
    Path(source.path).mkdir(parents=True)
    (tmp_path / source.path / "rows.jsonl").write_text(json.dumps(wanted["row"]))
    files = {"data_files": [{"split": source.split, "path": "rows.jsonl"}]}
    page = json.dumps({"configs": [{"config_name": source.name or "default", **files}]})
    (tmp_path / source.path / "README.md").write_text(f"---\n{page}\n---\n")
    assert make.main([name, "--to", "tasks"]) == 0
    (item,) = read_items(tmp_path / "tasks" / f"{name}.jsonl")
    assert [*item.choices] == wanted["choices"]
    given = wanted["context"]
    assert [*item.contexts] == (given if isinstance(given, list) else [given] * len(item.choices))
    assert item.answer == wanted["answer"]
