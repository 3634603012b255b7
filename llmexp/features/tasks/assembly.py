from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llmexp.config.sections import Config, knobs_of
from llmexp.data.tokenizers.base import Tokenizer
from llmexp.features.tasks.config import Knobs
from llmexp.system.fileio import text_sha256
from llmexp.tasks.scoring import Task, prepare_tasks


def prepare(config: Config, tokenizer: Tokenizer, cached: Callable[..., Any]) -> dict[str, Any]:
    """Return the tasks of a run, with their requests. Raises ConfigError."""
    chosen, length = knobs_of(config, Knobs), config.batch.sequence_length
    return {"tasks": cached(prepare_tasks, chosen.tasks, chosen.tasks_folder, tokenizer, length)}


def fixed(prepared: dict[str, Any]) -> dict[str, Any]:
    """Return the sha256 of the items of each task, for the manifest of a checkpoint."""

    def mark(task: Task) -> str:
        return text_sha256(str([vars(item) | {"place": ""} for item in task.items]))

    return {"tasks": {task.name: mark(task) for task in prepared["tasks"]}}


def other(there: dict[str, Any], here: dict[str, Any]) -> str | None:
    """Return which task has other items than in a manifest; another one may have been added."""
    before = there.get("tasks", {})
    changed = [name for name, sha in here["tasks"].items() if before.get(name, sha) != sha]
    text = "the request file of the task {} changed since the run started; put it back"
    return text.format(changed[0]) if changed else None
