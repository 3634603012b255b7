"""The inputs of a run that the open sections of a config name: tokenizer and data, each checked
when built. Nothing here needs torch."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from llmexp.data import corpus, sources
from llmexp.data.stream import Corpus, as_corpus
from llmexp.data.tokenizers import Tokenizer, as_tokenizer, end_of_text
from llmexp.data.work import Work
from llmexp.settings.config import OPEN_SECTIONS, Config, plain
from llmexp.settings.values import ConfigError, fill, refuse, remember_variables
from llmexp.train.assembly.targets import bind, described, locate, place

T = TypeVar("T")
CORPUS = "llmexp.data.corpus.corpus"
# Data of ids, which need not be the tokenizer's.
WITHOUT_TEXT = ("llmexp.data.sources.synthetic", "llmexp.data.sources.tokens")
DATA_COMMON = ("shuffle", "ignore_id")  # knobs of every source that the loop reads, not the source


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
    remember_variables(plain(config))
    sections = {name: fill(getattr(config, name), name) for name in OPEN_SECTIONS}
    return dataclasses.replace(config, **sections)


def build_tokenizer(config: Config) -> tuple[Tokenizer, dict[str, Any]]:
    """Return the tokenizer of a filled config, and the model section with the vocabulary that
    follows where it is null."""
    found = bind("tokenizer", config.tokenizer, {})()
    try:
        tokenizer = as_tokenizer(found)
    except Exception as error:  # of the user's code
        dotted = config.tokenizer["_target_"]
        text = str(error) if isinstance(error, ValueError) else f"failed: {described(error)}"
        text += place_of(config.tokenizer, "tokenizer")
        raise refuse("tokenizer._target_", dotted, text) from error
    model_config = dict(config.model)
    if model_config.get("vocab_size", 0) is None:
        model_config["vocab_size"] = padded(tokenizer)
    return tokenizer, model_config


def padded(tokenizer: Tokenizer) -> int:
    """Return the rows of a vocabulary that is not given: a multiple of 64 suits the kernels."""
    return -(-tokenizer.n_vocab // 64) * 64


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


def place_of(section: dict[str, Any], name: str) -> str:
    """Return " (FILE:LINE)" of the function that a section names."""
    return place(locate(f"{name}._target_", section["_target_"]))


def _check_common_data(data: dict[str, Any], ids: int) -> None:
    shuffle, ignore = data.get("shuffle", True), data.get("ignore_id")
    if not isinstance(shuffle, bool):
        raise refuse("data.shuffle", shuffle, "true or false is needed", "false")
    whole = isinstance(ignore, int) and not isinstance(ignore, bool)
    if ignore is not None and not (whole and 0 <= ignore < ids):
        text = f"a token id below {ids}, or null, is needed"
        if ignore == -100:
            text += "; labels with -100 are files of their own, data=tokens data.train_labels=FILES"
        raise refuse("data.ignore_id", ignore, text, 0)
