"""Request files of multiple choice, or of texts to be completed: NAME.jsonl, one item a line.

    {"id": "7", "context": "The capital of France is", "choices": ["Rome", "Paris"], "answer": 1}

A model is asked for the likelihood of each choice after the context, with one space between; the
answer counts from 0. Where the choices differ in the context instead (winogrande), `context` is a
list with one text for each choice. An item with one choice is right where the model, taking the
likeliest token each time, writes it. docs/evaluation.md shows more.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmexp.config.kinds import kind_of_error
from llmexp.config.values import ConfigError
from llmexp.data.sources.settings import NAME

SHIPPED = Path(__file__).parent / "sets"


@dataclass(frozen=True)
class Item:
    """A question. `place` is its file and line; there is a context for each choice."""

    place: str
    id: str
    contexts: tuple[str, ...]
    choices: tuple[str, ...]
    answer: int

    @property
    def completed(self) -> bool:
        """Return whether the one choice is to be written, not chosen."""
        return len(self.choices) == 1


def read_task(name: str, folder: str | None) -> list[Item]:
    """Return the items of a task: NAME.jsonl in `folder`, else $LLMEXP_TASKS, else as shipped.

    Raises ConfigError naming what is there, or file and line.
    """
    folder = folder or os.environ.get("LLMEXP_TASKS") or None
    if folder is not None and not Path(folder).is_dir():
        raise ConfigError(
            "unknown_file", f"{folder}: there is no such folder of tasks; it holds NAME.jsonl"
        )
    places = [SHIPPED] if folder is None else [Path(folder), SHIPPED]
    for place in places:
        path = place / f"{name}.jsonl"
        if NAME.fullmatch(name) and os.path.lexists(path):  # a broken link is no other set
            return read_items(path)
    known = sorted({path.stem for place in places for path in place.glob("*.jsonl")})
    where = f"in {folder}" if folder else "with llmexp, and no folder is given (train.tasks_folder)"
    raise ConfigError(
        "unknown_option",
        f"the task {name!r} has no file {name}.jsonl {where}; there are: {', '.join(known)}; "
        "python -m llmexp.tasks.make --help says how to make more",
    )


def read_items(path: Path) -> list[Item]:
    """Return the items of a request file. Raises ConfigError with file and line."""
    found = []
    try:
        lines = path.read_text(encoding="utf-8").split("\n")  # JSON may hold U+2028
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            kind_of_error(error, "damaged_file"), f"{path}: cannot be read: {error}"
        ) from None
    for number, line in enumerate(lines, 1):
        if line.strip():
            found.append(_item(f"{path}:{number}", line))
    if not found:
        raise ConfigError("bad_data", f"{path}: has no items")
    if other := [item for item in found if item.completed != found[0].completed]:
        raise ConfigError(
            "bad_data", f"{other[0].place}: one choice and several do not stand in one task"
        )
    return found


def _item(place: str, line: str) -> Item:
    try:
        given: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError("bad_data", f"{place}: is not JSON: {error}") from None
    keys = ("id", "context", "choices", "answer")
    if not isinstance(given, dict) or (missing := [key for key in keys if key not in given]):
        lacks = ", ".join(missing) if isinstance(given, dict) else "all of them"
        raise ConfigError(
            "bad_data", f"{place}: an item has the keys {', '.join(keys)}; this one lacks {lacks}"
        )
    choices, context, answer = given["choices"], given["context"], given["answer"]
    if not _texts(choices) or not choices or not all(choices):
        raise ConfigError("bad_data", f"{place}: choices must be a list of texts, none empty")
    contexts = context if isinstance(context, list) else [context] * len(choices)
    if not _texts(contexts) or len(contexts) != len(choices):
        raise ConfigError(
            "bad_data",
            f"{place}: context must be a text, or a list with one for each of the {len(choices)} "
            "choices",
        )
    if isinstance(answer, bool) or not isinstance(answer, int) or not 0 <= answer < len(choices):
        raise ConfigError(
            "bad_data",
            f"{place}: answer {answer!r}: must be the number of a choice, from 0 to "
            f"{len(choices) - 1}",
        )
    return Item(place, str(given["id"]), tuple(contexts), tuple(choices), answer)


def _texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, str) for one in value)
