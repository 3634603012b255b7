"""Build the inputs of a run that open sections of a config name: tokenizer and data.

Each is checked when built. Nothing here needs torch.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from llmexp.data.cache import cache_folder
from llmexp.data.corpus import Sources, documents_to_train, works_of
from llmexp.data.remote import RemoteCache
from llmexp.data.stream import Corpus, as_corpus
from llmexp.data.tokenizers import Tokenizer, as_tokenizer
from llmexp.data.work import Work
from llmexp.settings.config import OPEN_SECTIONS, Config, plain
from llmexp.settings.convert import checked_knob
from llmexp.settings.targets import bind, described, locate, place, resolve
from llmexp.settings.values import ConfigError, refuse
from llmexp.settings.variables import fill, remember_names

T = TypeVar("T")
OFFERED = ("tokenizer", "vocab_size", "sequence_length", "ask_again")  # to a source of data


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
    """Return the config with the values of the variables that its open sections name.

    The functions below take it; this is the one place where they are filled in. Raises ConfigError.
    """
    remember_names(plain(config))
    sections = {name: fill(getattr(config, name), name) for name in OPEN_SECTIONS}
    return dataclasses.replace(config, **sections)


def build_tokenizer(config: Config) -> tuple[Tokenizer, dict[str, Any]]:
    """Return the tokenizer of a filled config, and the model section with its vocabulary.

    That follows from the tokenizer where it is null.
    """
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
    config: Config, tokenizer: Tokenizer, vocab_size: int, *, ask_again: bool = False
) -> Corpus:
    """Return the data of a filled config, prepared and checked against the vocabulary.

    With `ask_again` buckets and the hub are asked anew. Raises ConfigError.
    """
    data = config.data
    if (ignored := data.get("ignore_id")) is not None:
        _check_ignored(ignored, vocab_size)
    values = (tokenizer, vocab_size, config.batch.sequence_length, ask_again)
    found = bind("data", data, dict(zip(OFFERED, values, strict=True)))()
    try:
        found = as_corpus(found, vocab_size=vocab_size)
    except ValueError as error:
        raise ConfigError(f"{error}{place_of(data, 'data')}") from None
    if config.batch.document_mask and not found.has_documents:
        text = f"data={data['_target_'].rpartition('.')[2]} has no documents"
        raise refuse("batch.document_mask", True, text, False)
    if config.batch.document_mask and found.unmarked:
        text = f"{found.unmarked:,} documents lack the end-of-text id and would run into the next"
        raise refuse("batch.document_mask", True, text, False)
    return found


def uses_tokenizer(data: dict[str, Any]) -> bool:
    """Return whether the data's ids are the tokenizer's: our function needs it to make them."""
    if not (dotted := str(data["_target_"])).startswith("llmexp."):
        return True  # a function of the user's: nothing is imported to know
    found = inspect.signature(locate("data._target_", dotted)).parameters.get("tokenizer")
    return found is not None and found.default is inspect.Parameter.empty


def sources_of(config: Config, remote: RemoteCache) -> Sources:
    """Return the sources of documents that a filled config names. Raises ConfigError."""
    dotted = config.data["_target_"]
    target, knobs = resolve("data", config.data, OFFERED)
    find = getattr(sys.modules[target.__module__], f"{target.__name__}_sources", None)
    if find is None:
        text = "has no documents of text; use data=corpus or data=text"
        raise refuse("data._target_", dotted, text, "llmexp.data.corpus.corpus")
    try:
        found: Sources = find(remote, **knobs)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    return found


def works_to_prepare(config: Config, tokenizer: Tokenizer) -> tuple[list[Work], Path]:
    """Return what there is to prepare for each source of a filled config, and the cache folder.

    Raises ConfigError.
    """
    remote = RemoteCache(cache_folder(config.data.get("cache_dir")), anew=True)
    some = sources_of(config, remote)
    try:
        found = works_of(some, tokenizer, remote)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    return [work for works in found for work in works.values()], remote.cache


def document_end(config: Config, tokenizer: Tokenizer) -> int | None:
    """Return the id that ends a document where the run has document masks, else None.

    Raises ConfigError.
    """
    if not config.batch.document_mask:
        return None
    if (found := tokenizer.eot_token) is None:
        text = f"the tokenizer {tokenizer.name} has no token that ends a document"
        raise refuse("batch.document_mask", True, text, False)
    return found


def training_documents(config: Config) -> Iterator[Iterator[str]]:
    """Return the pieces of each training document of a filled config, without those of validation.

    Raises ConfigError for data that are not text.
    """
    remote = RemoteCache(cache_folder(config.data.get("cache_dir")), anew=True)
    return documents_to_train(sources_of(config, remote), remote)


def place_of(section: dict[str, Any], name: str) -> str:
    """Return " (FILE:LINE)" of the function that a section names."""
    return place(locate(f"{name}._target_", section["_target_"]))


def _check_ignored(given: Any, ids: int) -> None:
    """Raise ConfigError for a masked token id that the vocabulary does not have."""
    text = f"a token id below {ids}, or null, is needed"
    if given == -100:
        text += "; labels with -100 are files of their own, data=tokens data.train_labels=FILES"
        raise refuse("data.ignore_id", given, text)
    if checked_knob("data.ignore_id", given) >= ids:
        raise refuse("data.ignore_id", given, text, 0)
