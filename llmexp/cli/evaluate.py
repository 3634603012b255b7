"""`llmexp evaluate RUN[@STEP]`: losses of a checkpoint, or scores of tasks, with their errors."""

from __future__ import annotations

import dataclasses
import os
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from llmexp.cli.running import words_in
from llmexp.compose import app, command_line, security
from llmexp.compose.overrides import as_text, key_of
from llmexp.config.sections import Config
from llmexp.config.values import AUTO, ConfigError, choice, refuse, typed
from llmexp.folders import rundir
from llmexp.folders.naming import Weights, named_checkpoint
from llmexp.run.layout import check_split, solve_layout
from llmexp.system.redact import warn
from llmexp.system.text import tabled, with_interval

if TYPE_CHECKING:
    from llmexp.train.assembly.opening import Opened

SHARING = ("fsdp", "hsdp", "tp", "fsdp_tp")
OF_FOLDER = ("data", "tokenizer", "precision", "batch")  # what a folder is evaluated with
LONGEST = 1024  # tokens of a sequence where the folder's model takes more
EXAMPLE = "for example data=text data.train_files=book.txt data.val_ratio=0"
ConfigDir = Annotated[str | None, "DIR", "folder with options of your own, as for train"]
OtherData = Annotated[
    Sequence[str],
    "KEY=VALUE",
    "other data, for example data=text data.train_files=book.txt data.val_ratio=0; ranks that "
    "share the model: parallelism=fsdp parallelism.nproc_per_node=4",
]
TasksFolder = Annotated[
    str | None,
    "DIR",
    "folder of NAME.jsonl (default: train.tasks_folder, else $LLMEXP_TASKS, else the shipped "
    "tiny_facts); of --lm-eval: of YAML files that describe more tasks",
]


@dataclass(frozen=True)
class Evaluation:
    """Losses of a checkpoint, or its scores in tasks: what `llmexp evaluate --json` prints."""

    data: dict[str, Any]

    @property
    def sets(self) -> dict[str, dict[str, Any]]:
        """Return the figures of each validation set by its name.

        They are loss in nats, ppl, bits_per_byte where it is known, each with `_stderr`, and
        tokens.
        """
        return {one["set"]: one for one in self.data.get("sets", ())}

    @property
    def tasks(self) -> dict[str, dict[str, Any]]:
        """Return the figures of each task by its name.

        They are acc and acc_norm (shares), each with `_stderr`, and items.
        """
        return {one["task"]: one for one in self.data.get("tasks", ())}

    def __str__(self) -> str:
        found = self.data
        if "folder" in found:
            first = (
                f"folder  {found['folder']}, in sequences of {found['sequence_length']:,} tokens"
            )
        else:
            other = "" if found["weights"] == "model" else f", {found['weights']}"
            first = f"run     {found['run']}, step {found['step']:,}{other}"
        mean = [f"mean of {found['mean_of']}"] if "mean_of" in found else []
        data = [f"data    {found['data']}"] if "data" in found else []
        device = f"device  {found['device']}, {found['precision']}"
        tables = _tables("task", self.tasks) if self.tasks else _tables("set", self.sets)
        return "\n".join([first, *mean, *data, device, *tables])


_FIGURES = {"loss": "{loss}", "ppl": "{ppl}", "bits/byte": "{bits_per_byte}"}
_COLUMNS = {
    "set": {"set": "{set}", "tokens": "{tokens:,}", "of": "{tokens_there:,}",
            "units": "{units:,} {unit}", **_FIGURES},
    "documents": {"document": "{document}", "begins": "{begins:.40}", "tokens": "{tokens:,}",
                  **_FIGURES},
    "task": {"task": "{task}", "items": "{items:,}"},
    "scores": {"item": "{id}", "answer": "{answer}", "acc": "{acc:.0f}",
               "acc_norm": "{acc_norm:.0f}", "log-likelihoods": "{lls}"},
}  # fmt: skip


def _tables(name: str, parts: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return the table of sets or tasks, and one of the documents or items of each."""
    columns, below = dict(_COLUMNS[name]), "documents" if name == "set" else "scores"
    for key in (key for one in parts.values() for key in one if f"{key}_stderr" in one):
        columns.setdefault({"bits_per_byte": "bits/byte"}.get(key, key), f"{{{key}}}")
    lines = ["", tabled([_with_figures(one) for one in parts.values()], columns)]
    for title, one in parts.items():
        if below in one:
            rows = [_with_figures(row) for row in one[below]]
            table = tabled(rows, _COLUMNS[below], left=2 if name == "set" else 1)
            lines += ["", f"{title}, by {'document' if name == 'set' else 'item'}", table]
    return lines


def _with_figures(one: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row with its figures and their errors as texts."""
    keys = [key for key in one if f"{key}_stderr" in one]
    found = {key: with_interval(one[key], one[f"{key}_stderr"], 5) for key in keys}
    return {**one, **found, "lls": " ".join(f"{ll:.4f}" for ll in one.get("loglikelihoods", ()))}


def evaluate(
    run: Annotated[str, "RUN[@STEP]", "a run, its newest checkpoint; or a Hugging Face folder"],
    overrides: OtherData = (),
    *,
    tokens: Annotated[
        str | None, "N", "of each set, spread evenly, or all (default: train.eval_tokens)"
    ] = None,
    by: Annotated[
        str, choice("also a row for each document, or item of a task", "set | document | item")
    ] = "set",
    tasks: Annotated[Sequence[str], "NAME,...", "multiple choice in place of losses"] = (),
    tasks_folder: TasksFolder = None,
    lm_eval: Annotated[
        Sequence[str], "NAME,...", "tasks of lm-eval, on the model exported to it"
    ] = (),
    weights: Weights = "model",
    config_dir: ConfigDir = None,
) -> Evaluation:  # fmt: skip
    """Evaluate a checkpoint: losses with standard errors, or accuracy in multiple choice.

    Loss, perplexity and bits per byte are those of the run's validation sets, or of other data.
    """
    names = names_of(tasks, lm_eval, overrides, tokens, by, tasks_folder)
    folder = Path(run).expanduser()
    if is_folder(folder):
        refuse_of_folder(folder, lm_eval, weights)
        config = folder_config(folder, overrides, bool(names), config_dir)
        found: dict[str, Any] = {"folder": str(folder)}
        found["sequence_length"] = config.batch.sequence_length
        checkpoint, ranks = None, 1
    else:
        checkpoint = (*named_checkpoint(run), weights)
        config = with_data(checkpoint[0], overrides, config_dir)
        ranks = ranks_of(run, overrides, config_dir)
        if ranks > 1 and "RANK" not in os.environ:
            text = "the command llmexp evaluate starts them, a function does not"
            raise ConfigError("wrong_ranks", f"parallelism: needs {ranks} ranks; {text}")
        found = {"run": str(checkpoint[0]), "weights": weights}
    count = _tokens(tokens, config.train.eval_tokens)
    if lm_eval and checkpoint:
        from llmexp.evaluate.harness import evaluate_by_harness, harness_figures

        scored = evaluate_by_harness(checkpoint, names, tasks_folder)
        found |= {key: scored[key] for key in ("step", "device", "precision")}
        return Evaluation(found | {"tasks": harness_figures(scored)})
    from llmexp.train.assembly.opening import joined_to, open_run, open_weights

    with joined_to(config, ranks > 1) as joined:
        if checkpoint is None:
            opened = open_weights(folder, config)
        else:
            opened = open_run(*checkpoint, joined)
            found["step"] = opened.step
        tasks_in = tasks_folder or getattr(config.train, "tasks_folder", None)
        found |= figures_of(opened, config, (names, tasks_in, count, by), joined)
        del opened
    return Evaluation(found)


def figures_of(opened: Opened, config: Config, what: Any, joined: Any) -> dict[str, Any]:
    """Return the figures of an opened model in sets, or in tasks."""
    from llmexp.evaluate.sets import evaluate_sets, evaluate_tasks, placed_model
    from llmexp.hf.average import RECORD, facts_of

    names, tasks_folder, count, by = what
    model = placed_model(opened)
    if model.note:
        warn(model.note)
    if names:
        found = evaluate_tasks(model, names, tasks_folder, by == "item", joined)
    else:
        found = evaluate_sets(model, config, count, by == "document")
    if (opened.path / RECORD).is_file():
        found["mean_of"] = facts_of(opened.path)["mean_of"]
    return found


def refuse_of_folder(folder: Path, lm_eval: Sequence[str], weights: str) -> None:
    """Raise ConfigError for what is not evaluated on a folder of Hugging Face."""
    if lm_eval:
        command = f"lm_eval --model hf --model_args pretrained={folder}"
        text = f"lm-eval takes such a folder itself: {command} --tasks {','.join(lm_eval)}"
        raise ConfigError("unsupported", f"--lm-eval: {text}")
    if weights != "model":
        text = f"--weights {weights}: {folder} is not a run and holds one model"
        raise ConfigError("unsupported", text)


def ranks(args: Namespace) -> int:
    """Return how many ranks the command takes; words that do not go together are refused."""
    flags = args.tasks, args.lm_eval, args.overrides, args.tokens, args.by, args.tasks_folder
    names_of(*flags)
    return ranks_of(args.run, args.overrides, args.config_dir)


def is_folder(path: Path) -> bool:
    """Tell whether a path is a model in the form of Hugging Face, and no run."""
    return (path / "config.json").is_file() and not rundir.is_run(path)


def ranks_of(run: str, overrides: Sequence[str], config_dir: str | None = None) -> int:
    """Return how many ranks share the model: those of overrides of parallelism, else 1.

    With parallelism=single it is one, whatever the run was trained with. Raises ConfigError for
    what does not share it."""
    if not any(key_of(o).partition(".")[0] == "parallelism" for o in overrides):
        return 1
    if is_folder(Path(run).expanduser()):
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


def folder_config(
    folder: Path, overrides: Sequence[str], tasks: bool, config_dir: str | None
) -> Config:
    """Return a config for the model of a Hugging Face folder, on the data of the overrides.

    The tokenizer is that of the folder, where none is named. Sequences are as long as the model
    takes, LONGEST at most. Raises ConfigError.
    """
    if not tasks and not any(o.startswith("data=") for o in overrides):
        raise ConfigError(
            "missing_value", f"{folder}: is not a run, so its data must be named; {EXAMPLE}"
        )
    text = f"of a folder evaluate takes {', '.join(OF_FOLDER)}"
    refuse_sections(overrides, OF_FOLDER, f"{text}; for example batch.sequence_length=512")
    from llmexp.train.assembly.opening import folder_model

    keys = list(map(key_of, overrides))
    own = ["tokenizer=file", typed("tokenizer.path", folder)] if "tokenizer" not in keys else []
    section = folder_model(folder)
    if "batch.sequence_length" not in keys:
        length = min(LONGEST, section.get("max_position_embeddings") or LONGEST)
        own.append(f"batch.sequence_length={length}")
    words = list(map(as_text, [*own, *overrides]))
    whole = Namespace(config_dir=config_dir, overrides=words, multirun=False, command="")
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
    security.refuse_secrets(list(overrides), "the command line")


def names_of(
    tasks: Sequence[str],
    lm_eval: Sequence[str],
    overrides: Sequence[str],
    tokens: str | None,
    by: str,
    tasks_folder: str | None,
) -> list[str]:
    """Return the names of the tasks; none where sets are evaluated. Raises ConfigError."""
    flag, given = ("--lm-eval", lm_eval) if lm_eval else ("--tasks", tasks)
    names = words_in(given)
    if given:
        taken = None if lm_eval else "parallelism"
        beside = [o for o in overrides if key_of(o).partition(".")[0] != taken]
        beside += ["--tokens"] * (tokens is not None)
        if lm_eval:
            beside += ["--tasks"] * bool(tasks) + ["--by item"] * (by == "item")
        if beside:
            text = f"takes no {beside[0]}; tasks have items of their own"
            raise ConfigError("conflict", f"{flag} {','.join(given)}: {text}")
        if not names:
            raise ConfigError(
                "missing_value", f"{flag}: a name is needed; for example {flag} tiny_facts"
            )
    wrong = "document" if names else "item"
    if by == wrong or (tasks_folder and not names):
        other = f"--by {by}" if by == wrong else "--tasks-folder"
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
