"""`python -m llmexp.tasks.make hellaswag piqa --to DIR`: request files from sets of the hub.

Questions, contexts and choices are formed as in lm-eval (EleutherAI's harness, 0.4), with no
examples before the question. Needs the extra `data`.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from llmexp.config.arguments import Parser, call
from llmexp.config.commands import need_package
from llmexp.config.values import choice
from llmexp.system.text import one_line

HubRow = Mapping[str, Any]


@dataclass(frozen=True)
class HubSet:
    """A set of the hub, and how a row of it becomes (context, choices, answer)."""

    path: str
    name: str | None
    split: str
    item: Callable[[HubRow], tuple[str | list[str], list[str], int]]


def _hellaswag(row: HubRow) -> tuple[str, list[str], int]:
    def plain(text: str) -> str:
        text = re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". "))
        return text.replace("  ", " ")

    context = f"{row['activity_label']}: {row['ctx_a']} {row['ctx_b'].capitalize()}"
    return plain(context), [plain(ending) for ending in row["endings"]], int(row["label"])


def _arc(row: HubRow) -> tuple[str, list[str], int]:
    answer = row["choices"]["label"].index(row["answerKey"])
    return f"Question: {row['question']}\nAnswer:", row["choices"]["text"], answer


def _openbookqa(row: HubRow) -> tuple[str, list[str], int]:
    answer = row["choices"]["label"].index(row["answerKey"].lstrip())
    return row["question_stem"], row["choices"]["text"], answer


def _piqa(row: HubRow) -> tuple[str, list[str], int]:
    return f"Question: {row['goal']}\nAnswer:", [row["sol1"], row["sol2"]], int(row["label"])


def _boolq(row: HubRow) -> tuple[str, list[str], int]:
    context = f"{row['passage']}\nQuestion: {row['question']}?\nAnswer:"
    return context, ["no", "yes"], int(row["label"])


def _sciq(row: HubRow) -> tuple[str, list[str], int]:
    context = f"{row['support'].lstrip()}\nQuestion: {row['question']}\nAnswer:"
    wrong = [row[f"distractor{number}"] for number in (1, 2, 3)]
    return context, [*wrong, row["correct_answer"]], 3


def _winogrande(row: HubRow) -> tuple[list[str], list[str], int]:
    before, _, after = row["sentence"].partition("_")
    contexts = [before + row["option1"], before + row["option2"]]
    return contexts, [after.strip()] * 2, int(row["answer"]) - 1


def _lambada(row: HubRow) -> tuple[str, list[str], int]:
    context, _, word = row["text"].rpartition(" ")
    return context, [word], 0


SOURCES = {
    "arc_challenge": HubSet("allenai/ai2_arc", "ARC-Challenge", "test", _arc),
    "arc_easy": HubSet("allenai/ai2_arc", "ARC-Easy", "test", _arc),
    "boolq": HubSet("aps/super_glue", "boolq", "validation", _boolq),
    "hellaswag": HubSet("Rowan/hellaswag", None, "validation", _hellaswag),
    "lambada_openai": HubSet("EleutherAI/lambada_openai", "default", "test", _lambada),
    "openbookqa": HubSet("allenai/openbookqa", "main", "test", _openbookqa),
    "piqa": HubSet("baber/piqa", None, "validation", _piqa),
    "sciq": HubSet("allenai/sciq", None, "test", _sciq),
    "winogrande": HubSet("allenai/winogrande", "winogrande_xl", "validation", _winogrande),
}


_Name = Annotated[str, choice("name of a set", " | ".join(SOURCES))]


def request_file(source: HubSet, rows: Iterable[HubRow]) -> str:
    """Return a request file."""
    found = []
    for number, row in enumerate(rows):
        context, choices, answer = source.item(row)
        item = {"id": str(number), "context": context, "choices": choices, "answer": answer}
        found.append(json.dumps(item, ensure_ascii=False) + "\n")
    return "".join(found)


def make(
    first: _Name,
    *names: _Name,
    to: Annotated[Path, "FOLDER", "folder of the files"],
) -> int:
    """Make request files for --tasks and train.tasks from sets of the hub."""
    datasets = need_package("datasets", first, "making request files")
    for name in (first, *names):
        source = SOURCES[name]
        try:
            text = request_file(
                source, datasets.load_dataset(source.path, source.name, split=source.split)
            )
        except Exception as error:  # of the network, or of a set that has changed
            reason = one_line(str(error))
            print(f"llmexp: {source.path} cannot be read: {reason}", file=sys.stderr)
            return 2
        to.mkdir(parents=True, exist_ok=True)
        path = to / f"{name}.jsonl"
        path.write_text(text, encoding="utf-8")
        print(f"{path}: {text.count(chr(10)):,} items")
    return 0


def main(arguments: list[str]) -> int:
    """Run it as a command; return the exit code."""
    try:
        return int(call(make, Parser("python -m llmexp.tasks.make", make).parse_args(arguments)))
    except ValueError as error:
        print(f"llmexp: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
