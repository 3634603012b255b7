"""The parts that the open sections of a config name: tokenizer, data, model and optimizers, each
checked when built."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from llmexp import optim, precision, rundir
from llmexp.assembly.targets import bind, described, locate, place
from llmexp.config import OPEN_SECTIONS, Config, ConfigError, Train, fill, refuse
from llmexp.data import corpus, sources
from llmexp.data.stream import Corpus, as_corpus
from llmexp.data.tokenizers import Tokenizer, as_tokenizer, end_of_text
from llmexp.data.work import Work
from llmexp.exchange.reading import Source, begin_with, check, check_values, open_source
from llmexp.exchange.tokenizer import same_ids, tokenizer_of
from llmexp.tasks.items import read_task
from llmexp.tasks.scoring import Task, prepare

T = TypeVar("T")
CORPUS = "llmexp.data.corpus.corpus"
DATA_COMMON = (
    "shuffle",
    "ignore_id",
)  # knobs of every data source that the loop reads, not the source
MODEL_COMMON = (
    "init_from",
    "init_grow",
)  # knobs of every model about its first weights, not of the model
RATE_RULE = (
    "lr_rule",
    "reference_batch",
)  # knobs of every optimizer that `solve_rates` reads, not the optimizer


class Shared:
    """Parts that several configs have in common, such as the points of a sweep."""

    def __init__(self) -> None:
        self._made: dict[str, Any] = {}

    def once(self, what: str, deciding: Any, make: Callable[[], T]) -> T:
        """Return `make()`, or what it made before from the same `deciding` values of a config."""
        key = json.dumps([what, deciding], sort_keys=True, default=repr)
        if key not in self._made:
            self._made[key] = make()
        found: T = self._made[key]
        return found


def filled(config: Config) -> Config:
    """Return the config with the values of the variables that its open sections name, which is what
    the functions below take. The one place where they are filled in. Raises ConfigError."""
    return dataclasses.replace(
        config, **{name: fill(getattr(config, name), name) for name in OPEN_SECTIONS}
    )


def build_tokenizer(config: Config) -> tuple[Tokenizer, dict[str, Any]]:
    """Return the tokenizer of a filled config, and the model section with the vocabulary that
    follows where it is null."""
    found = bind("tokenizer", config.tokenizer, {})()
    try:
        tokenizer = as_tokenizer(found)
    except Exception as error:  # of the user's code
        dotted = config.tokenizer["_target_"]
        text = str(error) if isinstance(error, ValueError) else f"failed: {described(error)}"
        raise refuse(
            "tokenizer._target_", dotted, f"{text}{place_of(config.tokenizer, 'tokenizer')}"
        ) from error
    model_config = dict(config.model)
    if model_config.get("vocab_size", 0) is None:
        # a multiple of 64 suits the kernels
        model_config["vocab_size"] = -(-tokenizer.n_vocab // 64) * 64
    return tokenizer, model_config


def build_corpus(
    config: Config, tokenizer: Tokenizer, vocab_size: int, *, write: bool, ask_again: bool = False
) -> Corpus:
    """Return the data of a filled config, checked against the vocabulary; prepared with `write`,
    asking again of buckets and the hub with `ask_again`. Raises ConfigError."""
    data = config.data
    _check_common_data(data, vocab_size)
    offered = {
        "tokenizer": tokenizer,
        "vocab_size": vocab_size,
        "sequence_length": config.batch.sequence_length,
        "write": write,
        "ask_again": ask_again,
    }
    knobs = {k: v for k, v in data.items() if k not in DATA_COMMON}
    found = bind("data", knobs, offered)()
    try:
        found = as_corpus(found, vocab_size=vocab_size)
    except ValueError as error:
        raise ConfigError(f"{error}{place_of(data, 'data')}") from None
    if config.batch.document_mask and found.unmarked:
        text = f"{found.unmarked:,} documents lack the end-of-text id and would run into the next"
        raise refuse("batch.document_mask", True, text, False)
    return found


def corpus_work(config: Config, tokenizer: Tokenizer) -> tuple[list[Work], Path]:
    """Return what there is to prepare for each source of a filled config, and the cache folder.
    Raises ConfigError."""
    if (target := config.data["_target_"]) != CORPUS:
        text = "is prepared as a whole, here; parts and clusters are for data=corpus"
        raise refuse("data._target_", target, text)
    try:
        return corpus.work(config.data, tokenizer)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def prepare_tasks(
    names: Sequence[str], folder: str | None, tokenizer: Tokenizer, length: int
) -> list[Task]:
    """Return the tasks of these names, with their requests. Raises ConfigError."""
    try:
        return [prepare(name, read_task(name, folder), tokenizer, length) for name in names]
    except ValueError as error:
        raise ConfigError(str(error)) from None


def tasks_of(once: Callable[..., Any], config: Config, tokenizer: Tokenizer) -> list[Task]:
    """Return the tasks of a run, read once for configs that share them. Raises ConfigError."""
    given = (config.train.tasks, config.train.tasks_folder)
    length = config.batch.sequence_length
    found: list[Task] = once(
        "tasks",
        [*given, config.tokenizer, length],
        lambda: prepare_tasks(*given, tokenizer, length),
    )
    return found


def document_end(config: Config, tokenizer: Tokenizer) -> int | None:
    """Return the id that ends a document where the run has document masks, else None. Raises
    ConfigError."""
    if not config.batch.document_mask:
        return None
    if config.data["_target_"] == "llmexp.data.sources.synthetic":
        raise refuse("batch.document_mask", True, "data=synthetic has no documents", False)
    if (found := end_of_text(tokenizer)) is None:
        text = f"the tokenizer {tokenizer.name} has no token that ends a document"
        raise refuse("batch.document_mask", True, text, False)
    return found


def training_documents(config: Config) -> Iterator[Iterator[str]]:
    """Yield the pieces of each training document of a filled config: what is held out for
    validation is none of them. Raises ConfigError for data that are not text."""
    knobs = {k: v for k, v in config.data.items() if k not in DATA_COMMON}
    target = knobs.pop("_target_")
    if target == CORPUS:
        names = ("sources", "val", "on_bad_record", "cache_dir")
        return corpus.training_documents(**{name: knobs[name] for name in names})
    if target in ("llmexp.data.sources.text", "llmexp.data.sources.stdlib"):
        return sources.training_documents(**knobs)
    text = "has no documents of text; use data=corpus or data=text"
    raise refuse("data._target_", target, text, CORPUS)


def model_maker(section: dict[str, Any]) -> Callable[[], Any]:
    """Return the function that makes the model of a filled section. Raises ConfigError for knobs
    that it does not have."""
    return bind("model", {k: v for k, v in section.items() if k not in MODEL_COMMON}, {})


def initial_weights(
    section: dict[str, Any], model: nn.Module, whole: bool
) -> tuple[Source, list[str]] | None:
    """Return the weights that the model section names, and what grows beyond them; None without
    any. `whole`: all values are read and checked, too. Raises ConfigError where they do not fit the
    model."""
    if (given := section.get("init_from")) is None:
        return None
    try:
        source = open_source(given, hashed=whole)
        grown = check(source, section, model)
        if whole:
            check_values(source)
        return source, grown
    except ValueError as error:
        raise ConfigError(f"model.init_from={given}: {error}") from None


def check_ids(source: Source, data: dict[str, Any], tokenizer: Tokenizer) -> list[str]:
    """Return a warning where the tokenizer that the weights were trained with cannot be read.
    Raises ConfigError where it gives other ids than the run's."""
    if data["_target_"] in ("llmexp.data.sources.synthetic", "llmexp.data.sources.tokens"):
        return []
    folder = source.folder
    try:
        other = (
            build_tokenizer(filled(rundir.built_config(folder)))[0]
            if rundir.is_run(folder)
            else tokenizer_of(folder)
        )
    except ValueError as error:
        return [f"the tokenizer of {folder} cannot be compared with the run's: {error}"]
    if other is not None and not same_ids(other, tokenizer):
        own = "take the section tokenizer of its config.yaml"
        text = own if rundir.is_run(folder) else f"use tokenizer=file tokenizer.path={folder}"
        raise ConfigError(
            f"model.init_from={folder}: its tokenizer ({other.name}) gives other ids than that of "
            f"this run ({tokenizer.name}), for which the weights are not made; {text}"
        )
    return []


def build_model(
    make: Callable[[], Any],
    section: dict[str, Any],
    kind: str,
    train: Train,
    end: int | None = None,
    fresh: bool = True,
) -> nn.Module:
    """Return what `make` makes of the model section, in the type of its parameters for the
    precision `kind`, with the weights of this run's seed and twin. `fresh` false: a checkpoint's
    weights follow. Raise ConfigError for what cannot be trained."""
    torch.manual_seed(train.seed)
    model = make()
    dotted = section["_target_"]
    if not isinstance(model, nn.Module):
        text = f"returned {type(model).__name__}, not a torch.nn.Module"
        raise refuse("model._target_", dotted, f"{text}{place_of(section, 'model')}")
    if not any(p.requires_grad for p in model.parameters()):
        raise refuse(
            "model._target_", dotted, f"has no parameters to train{place_of(section, 'model')}"
        )
    keep_inside_documents(model, dotted, end)
    model = model.to(precision.parameter_dtype(kind))
    on_meta = any(p.is_meta for p in model.parameters())
    if fresh and not on_meta and (initial := initial_weights(section, model, False)) is not None:
        begin_with(model, initial[0])
    precision.nudge(model, train.seed, train.twin)
    return model


def keep_inside_documents(model: nn.Module, dotted: str, end: int | None) -> None:
    """Give the model the id that ends a document, where there is one. Raise ConfigError for a model
    that has no use for it."""
    if end is None:
        return
    if not hasattr(model, "document_end"):
        text = (
            f"{dotted} knows nothing of documents; give it an attribute `document_end`, the "
            "last id of each, which it has to keep attention inside of"
        )
        raise refuse("batch.document_mask", True, text, False)
    setattr(model, "document_end", end)  # noqa: B010


def build_optimizers(section: dict[str, Any], model: nn.Module) -> list[Optimizer]:
    """Return the optimizers of the section, whose rates are solved. Raise ConfigError."""
    built = bind("optimizer", {k: v for k, v in section.items() if k not in RATE_RULE}, {})(model)
    try:
        return optim.as_list(built)
    except ValueError as error:
        raise ConfigError(f"{error}{place_of(section, 'optimizer')}") from None


def place_of(section: dict[str, Any], name: str) -> str:
    """Return " (FILE:LINE)" of the function that a section names."""
    return place(locate(f"{name}._target_", section["_target_"]))


def _check_common_data(data: dict[str, Any], ids: int) -> None:
    shuffle, ignore = data.get("shuffle", True), data.get("ignore_id")
    if not isinstance(shuffle, bool):
        raise refuse("data.shuffle", shuffle, "true or false is needed", "false")
    if ignore is not None and (
        isinstance(ignore, bool) or not isinstance(ignore, int) or not 0 <= ignore < ids
    ):
        raise refuse("data.ignore_id", ignore, f"a token id below {ids}, or null, is needed", 0)


def label_of(model: dict[str, Any]) -> str:
    """Return the model section in a few words."""
    name = str(model["_target_"]).rpartition(".")[2]
    layers = "layer" if model.get("n_layers") == 1 else "layers"
    sizes = [
        f"{v} {k}"
        for k, v in ((layers, model.get("n_layers")), ("wide", model.get("d_model")))
        if v
    ]
    width, inner = model.get("d_model"), model.get("d_ff")
    # a new width alone leaves the MLP as it was
    if isinstance(width, int) and isinstance(inner, int) and width:
        sizes.append(f"d_ff {inner:,} = {inner / width:.3g} x d_model")
    return ", ".join([name, *sizes])
