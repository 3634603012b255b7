from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter

from llmexp.config.values import count, knob, optional, where

SECTION = "train"
OFF: dict[str, list[str]] = {"tasks": []}
NO_WORK, SOMETIMES = ("tasks_folder",), ("tasks_every",)


@dataclass(frozen=True, kw_only=True)
class Knobs:
    tasks: list[str] = knob(
        "tasks of multiple choice to score", ["tiny_facts"], affects="nothing", default=[]
    )
    tasks_every: int | None = count(
        "optimizer steps between scores of the tasks; null: only at the end",
        1000,
        affects="nothing",
        acts=where("train.tasks"),
        default=None,
    )
    tasks_folder: str | None = optional(
        "folder with NAME.jsonl of each task; null: $LLMEXP_TASKS, else what is shipped",
        "tasks",
        affects="nothing",
        acts=where("train.tasks"),
    )


asked = attrgetter("train.tasks")
