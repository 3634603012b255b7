"""`llmexp evaluate RUN[@STEP]`: losses of a checkpoint, or scores of tasks, with their errors."""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from llmexp.compose import app, command_line, environment
from llmexp.compose.overrides import key_of
from llmexp.run.layout import check_split, solve_layout
from llmexp.runs import rundir
from llmexp.runs.naming import OF_CHECKPOINT, named_checkpoint
from llmexp.settings.config import Config
from llmexp.settings.values import AUTO, ConfigError, refuse, typed
from llmexp.system.child import release_signals
from llmexp.system.redact import redacted, warn
from llmexp.system.text import aligned, with_interval

_ARGUMENTS = OF_CHECKPOINT | {
    "run": (
        "RUN[@STEP]",
        "run folder; without a step its newest checkpoint; or a Hugging Face folder",
    ),
    "overrides*": (
        "data=...",
        "other data, for example data=text data.train_files=book.txt data.val_ratio=0; "
        "ranks that share the model: parallelism=fsdp parallelism.nproc_per_node=4",
    ),
    "--tokens": (None, "tokens of each set, spread evenly, or all (default: train.eval_tokens)"),
    "--by": {
        "choices": ("set", "document", "item"),
        "default": "set",
        "help": "also a row for each document, or item of a task",
    },
    "--tasks": ("NAME,...", "multiple choice in place of losses"),
    "--tasks-folder": (
        "DIR",
        "folder of NAME.jsonl (default: train.tasks_folder, else $LLMEXP_TASKS, else the shipped "
        "tiny_facts); of --lm-eval: of YAML files that describe more tasks",
    ),
    "--lm-eval": ("NAME,...", "tasks of lm-eval, on the model exported to it"),
    "--json": "print JSON instead of a table",
    "--config-dir": (None, "folder with options of your own, as for train"),
}


def main(arguments: list[str]) -> int:
    """`llmexp evaluate RUN[@STEP]`: losses of a checkpoint, or scores of tasks."""
    words = ["evaluate", *arguments]
    args = parsed_words(arguments)
    _tasks(args)  # refuses words that do not go together, before ranks start
    ranks = ranks_of(args.run, args.overrides, args.config_dir)

    def answer() -> str:
        found = evaluated(args)
        if args.json:
            return json.dumps(found, indent=1, allow_nan=False)
        return redacted(tables_of(found))

    return answer_once(words, ranks, answer)


def answer_once(words: list[str], ranks: int, answer: Callable[[], str]) -> int:
    """Print an answer once; several ranks run the same command for it."""
    if ranks > 1 and "RANK" not in os.environ:
        from llmexp.mesh.ranks import run_alike

        return run_alike(words, ranks)
    if ranks > 1:
        release_signals()
    text = answer()
    if ranks == 1 or os.environ["RANK"] == "0":
        print(text)
    return 0


def evaluated(args: argparse.Namespace) -> dict[str, Any]:
    """Return what `llmexp evaluate --json` prints for a parsed command line.

    Raises ConfigError.
    """
    folder, names = Path(args.run).expanduser(), _tasks(args)
    of_folder = (folder / "config.json").is_file() and not rundir.is_run(folder)
    if of_folder:
        config = folder_config(args, folder, names)
        found = {"folder": str(folder), "sequence_length": config.batch.sequence_length}
    else:
        path, step = named_checkpoint(args.run)
        config = with_data(path, args.overrides, args.config_dir)
        ranks = ranks_of(args.run, args.overrides, args.config_dir)
        if ranks > 1 and "RANK" not in os.environ:
            text = "the command llmexp evaluate starts them, a function does not"
            raise ConfigError("wrong_ranks", f"parallelism: needs {ranks} ranks; {text}")
        found = {"run": str(path), "weights": args.weights}
    tokens = _tokens(args.tokens, config.train.eval_tokens)
    if args.lm_eval:
        from llmexp.evaluate.harness import evaluate_by_harness, harness_figures

        scored = evaluate_by_harness((path, step, args.weights), names, args.tasks_folder)
        found |= {key: scored[key] for key in ("step", "device", "precision")}
        return found | {"tasks": harness_figures(scored)}
    from llmexp import mesh
    from llmexp.evaluate.sets import evaluate_sets, evaluate_tasks, placed_model
    from llmexp.exchange.average import RECORD, facts_of
    from llmexp.train.assembly.opening import join_ranks, open_run, open_weights

    joined = None
    if of_folder:
        opened = open_weights(folder, config)
    else:
        joined = join_ranks(config) if ranks > 1 else None
        opened = open_run(path, step, args.weights, joined)
        found["step"] = opened.step
    model = placed_model(opened)
    if model.note:
        warn(model.note)
    if names:
        tasks_folder = args.tasks_folder or getattr(config.train, "tasks_folder", None)
        found |= evaluate_tasks(model, names, tasks_folder, args.by == "item", joined)
    else:
        found |= evaluate_sets(model, config, tokens, args.by == "document")
    if (opened.path / RECORD).is_file():
        found["mean_of"] = facts_of(opened.path)["mean_of"]
    if joined is not None:
        del opened, model
        gc.collect()  # the model goes before the group, or gloo may abort at exit
        mesh.leave(joined)
    return found


def ranks_of(run: str, overrides: Sequence[str], config_dir: str | None = None) -> int:
    """Return how many ranks share the model: those of overrides of parallelism, else 1.

    With parallelism=single it is one, whatever the run was trained with. Raises ConfigError for
    what does not share it."""
    if not any(key_of(o).partition(".")[0] == "parallelism" for o in overrides):
        return 1
    folder = Path(run).expanduser()
    if (folder / "config.json").is_file() and not rundir.is_run(folder):
        return 1  # refused there
    config = with_data(named_checkpoint(run)[0], overrides, config_dir)
    chosen = config.parallelism
    if chosen.kind == "single":
        return 1
    if chosen.kind not in SHARING:
        text = "ranks that share a model hold parts of it"
        raise refuse("unsupported", "parallelism.kind", chosen.kind, text, "fsdp")
    if chosen.nproc_per_node is None:
        raise refuse(
            "missing_value", "parallelism.nproc_per_node", None, "a number of ranks is needed", 4
        )
    layout = solve_layout(chosen, chosen.nproc_per_node)
    try:
        check_split(config.model, layout.tensor_parallel_size)
    except ConfigError as error:  # its example is of a model that is not trained yet
        why = str(error).partition("; for example")[0]
        raise ConfigError(error.kind, f"{why}; for example parallelism=fsdp", error.key) from None
    return chosen.nnodes * chosen.nproc_per_node


SHARING = ("fsdp", "hsdp", "tp", "fsdp_tp")
OF_FOLDER = ("data", "tokenizer", "precision", "batch")  # what a folder is evaluated with
LONGEST = 1024  # tokens of a sequence where the folder's model takes more
EXAMPLE = "for example data=text data.train_files=book.txt data.val_ratio=0"


def folder_config(args: argparse.Namespace, folder: Path, names: Sequence[str]) -> Config:
    """Return a config for the model of a Hugging Face folder, on the data of the overrides.

    The tokenizer is that of the folder, where none is named. Sequences are as long as the model
    takes, LONGEST at most. Raises ConfigError.
    """
    if args.lm_eval:
        command = f"lm_eval --model hf --model_args pretrained={folder} --tasks {args.lm_eval}"
        raise ConfigError(
            "unsupported", f"--lm-eval: lm-eval takes such a folder itself: {command}"
        )
    if args.weights != "model":
        raise ConfigError(
            "unsupported", f"--weights {args.weights}: {folder} is no run and holds one model"
        )
    if not names and not any(o.startswith("data=") for o in args.overrides):
        raise ConfigError(
            "missing_value", f"{folder}: is no run, so its data must be named; {EXAMPLE}"
        )
    text = f"of a folder evaluate takes {', '.join(OF_FOLDER)}"
    refuse_sections(args.overrides, OF_FOLDER, f"{text}; for example batch.sequence_length=512")
    from llmexp.train.assembly.opening import folder_model

    keys = list(map(key_of, args.overrides))
    own = ["tokenizer=file", typed("tokenizer.path", folder)] if "tokenizer" not in keys else []
    section = folder_model(folder)
    if "batch.sequence_length" not in keys:
        length = min(LONGEST, section.get("max_position_embeddings") or LONGEST)
        own.append(f"batch.sequence_length={length}")
    words = command_line.for_hydra([*own, *args.overrides])
    whole = argparse.Namespace(
        config_dir=args.config_dir, overrides=words, multirun=False, command=""
    )
    with app.composed(whole, "evaluate") as (cfg, _):
        config = dataclasses.replace(app.typed_config(cfg), model=section)
    if config.batch.micro_batch_size == AUTO:
        raise refuse(
            "unsupported", "batch.micro_batch_size", AUTO, "is found where a run trains", 8
        )
    return config


def with_data(run: Path, overrides: Sequence[str], config_dir: str | None) -> Config:
    """Return a run's config with the data that overrides describe. Raises ConfigError."""
    config = rundir.built_config(run)
    text = f"evaluate changes only the data and the ranks that share the model; {EXAMPLE}"
    refuse_sections(overrides, ("data", "parallelism"), text)
    if not overrides:
        return config
    other = app.composed_over(run, overrides, config_dir)
    return dataclasses.replace(config, data=other.data, parallelism=other.parallelism)


def refuse_sections(overrides: Sequence[str], sections: Sequence[str], why: str) -> None:
    """Raise ConfigError for an override of another section, and for a secret in one."""
    command_line.check_overrides(overrides)
    for override in overrides:
        if key_of(override).partition(".")[0] not in sections:
            raise ConfigError("unsupported", f"{override}: {why}")
    environment.refuse_secrets(list(overrides), "the command line")


def tables_of(found: Mapping[str, Any]) -> str:
    """Return the figures of `evaluated` as tables."""
    if "folder" in found:
        first = f"folder  {found['folder']}, in sequences of {found['sequence_length']:,} tokens"
    else:
        ema = ", ema" * (found["weights"] == "ema")
        first = f"run     {found['run']}, step {found['step']:,}{ema}"
    lines = [
        first,
        *([f"mean of {found['mean_of']}"] if "mean_of" in found else []),
        *([f"data    {found['data']}"] if "data" in found else []),
        f"device  {found['device']}, {found['precision']}",
        "",
        *(_of_tasks(found["tasks"]) if "tasks" in found else _of_sets(found["sets"])),
    ]
    return "\n".join(lines)


def parsed_words(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the command line of `llmexp evaluate`; --allow takes effect."""
    text = (
        "Evaluate a checkpoint on the validation sets of its run, or on other data: loss, "
        "perplexity and bits per byte, each with its standard error. Or on tasks of multiple "
        "choice: accuracy."
    )
    return command_line.read("evaluate", text, _ARGUMENTS, arguments)


def _tasks(args: argparse.Namespace) -> list[str]:
    """Return the names of the tasks; none where sets are evaluated. Raises ConfigError."""
    flag, given = ("--tasks", args.tasks) if args.lm_eval is None else ("--lm-eval", args.lm_eval)
    names = [name.strip() for name in (given or "").split(",") if name.strip()]
    taken = "parallelism" if args.lm_eval is None else None
    beside = {o: True for o in args.overrides if key_of(o).partition(".")[0] != taken}
    beside["--tokens"] = args.tokens
    if args.lm_eval is not None:
        beside |= {"--tasks": args.tasks, "--by item": args.by == "item"}
    for other, there in beside.items():
        if given is not None and there:
            raise ConfigError(
                "conflict", f"{flag} {given}: takes no {other}; tasks have items of their own"
            )
    if given is not None and not names:
        raise ConfigError(
            "missing_value", f"{flag}: a name is needed; for example {flag} tiny_facts"
        )
    wrong = "item" if not names else "document"
    if args.by == wrong or (args.tasks_folder and not names):
        other = f"--by {args.by}" if args.by == wrong else "--tasks-folder"
        instead = "--by item" if names else "--tasks tiny_facts"
        raise ConfigError("conflict", f"{other}: does not go with this; for example {instead}")
    return names


def _tokens(given: str | None, configured: int | None) -> int | None:
    if given is None or given == "all":
        return configured if given is None else None
    if not given.isdecimal() or int(given) < 1:
        text = "a whole number above 0, or all, is needed; for example --tokens 100000"
        raise ConfigError("wrong_type", f"--tokens {given}: {text}")
    return int(given)


def _of_tasks(tasks: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the table of tasks, and those of their items."""
    other = ("task", "items", "scores")
    every = dict.fromkeys(key for one in tasks for key in one)
    keys = [key for key in every if key not in other and "_stderr" not in key]
    rows = [["task", "items", *({"bits_per_byte": "bits/byte"}.get(key, key) for key in keys)]]
    rows += [[one["task"], f"{one['items']:,}", *_figures(one, keys)] for one in tasks]
    lines = [aligned(rows, left=1)]
    for one in tasks:
        if "scores" in one:
            rows = [["item", "answer", "acc", "acc_norm", "log-likelihoods"]]
            for item in one["scores"]:
                lls = " ".join(f"{ll:.4f}" for ll in item["loglikelihoods"])
                right = (f"{item['acc']:.0f}", f"{item['acc_norm']:.0f}")
                rows.append([item["id"], str(item["answer"]), *right, lls])
            lines += ["", f"{one['task']}, by item", aligned(rows, left=1)]
    return lines


def _of_sets(sets: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the table of sets, and those of their documents."""
    heads = ["set", "tokens", "of", "units", "loss", "ppl", "bits/byte"]
    rows = [heads]
    for one in sets:
        counts = (f"{one['tokens']:,}", f"{one['tokens_there']:,}")
        units = f"{one['units']:,} {one['unit']}"
        rows.append([one["set"], *counts, units, *_figures(one)])
    lines = [aligned(_without_empty(rows), left=1)]
    for one in sets:
        rows = [["document", "begins", "tokens", "loss", "ppl", "bits/byte"]]
        for d in one.get("documents", ()):
            rows.append([str(d["document"]), d["begins"][:40], f"{d['tokens']:,}", *_figures(d)])
        if "documents" in one:
            table = aligned(_without_empty(rows), left=2)
            lines += ["", f"{one['set']}, by document", table]
    return lines


def _figures(
    one: Mapping[str, Any], keys: Sequence[str] = ("loss", "ppl", "bits_per_byte")
) -> list[str]:
    return [with_interval(one.get(key), one.get(f"{key}_stderr"), 5) for key in keys]


def _without_empty(rows: list[list[str]]) -> list[list[str]]:
    """Leave out columns that no row has a value in."""
    kept = [i for i in range(len(rows[0])) if any(row[i] for row in rows[1:])]
    return [[row[i] for i in kept] for row in rows]
