"""Scores of tasks by lm-eval (EleutherAI's harness), of a checkpoint that is exported for it."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from llmexp.config.commands import need_package
from llmexp.config.values import ConfigError
from llmexp.folders import rundir
from llmexp.system.text import one_line
from llmexp.train.assembly.opening import export_run


def evaluate_by_harness(
    checkpoint: tuple[Path, int | None, str],
    names: Sequence[str],
    folder: str | None,
) -> dict[str, Any]:
    """Return the scores that lm-eval finds for a checkpoint, each item under "samples".

    `checkpoint` is (run, step, weights). Tasks are those of these names, and those that the YAML
    files in `folder` describe. Raises ConfigError.
    """
    shown = f"--lm-eval {','.join(names)}"
    harness = need_package("lm_eval", shown, "this")
    manager = need_package("lm_eval.tasks", shown, "this").TaskManager
    need_package("accelerate", shown, "lm-eval")
    config = rundir.built_config(checkpoint[0])
    device = "cuda" if torch.cuda.is_available() and config.train.device != "cpu" else "cpu"
    with tempfile.TemporaryDirectory(prefix="llmexp-") as where:
        model = Path(where, "model")
        try:
            tasks = manager(include_path=folder)
            matched = tasks.match_tasks(list(names))
            if unknown := [name for name in names if not tasks.match_tasks([name])]:
                raise ConfigError(
                    "unknown_option", f"there is no task {unknown[0]}; lm_eval ls tasks lists them"
                )
            exported = export_run(checkpoint, model, None)
            given = {"pretrained": str(model), "dtype": "auto"}
            found = harness.simple_evaluate(
                model="hf",
                model_args=given | {"max_length": config.batch.sequence_length},
                tasks=matched,
                batch_size=config.batch.micro_batch_size or 8,
                device=device,
                task_manager=tasks,
            )
        except ConfigError as error:
            raise ConfigError(error.kind, f"{shown}: {error}") from None
        except Exception as error:  # of the network, of a file, of a tokenizer
            reason = one_line(error, 400)
            raise ConfigError("failed", f"{shown}: lm-eval failed: {reason}") from None
    kind = str(found["config"].get("model_dtype", "")).removeprefix("torch.")
    return {**found, "step": exported.step, "device": device, "precision": kind}


def harness_figures(found: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the figures of each task as `evaluate_tasks` has them: NAME and NAME_stderr.

    A filter other than none stands behind the name.
    """
    rows = []
    for task, scores in found["results"].items():
        row = {"task": task, "items": found["n-samples"].get(task, {}).get("effective", 0)}
        for key, value in scores.items():
            name, _, kind = key.partition(",")
            if kind and isinstance(value, float):
                row[name if kind == "none" else f"{name} {kind}"] = value
        rows.append(row)
    return rows
