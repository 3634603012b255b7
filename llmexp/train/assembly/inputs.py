"""Build the inputs of a run that open sections of a config name: tokenizer and data.

Each is checked when built. Nothing here needs torch.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from llmexp.data.cache import cache_folder
from llmexp.data.remote import RemoteCache
from llmexp.data.stream import Corpus, as_corpus
from llmexp.data.tokenizers import Tokenizer, as_tokenizer
from llmexp.data.work import Source, Work, documents_to_train, works_of
from llmexp.settings.config import Config
from llmexp.settings.convert import checked_knob
from llmexp.settings.targets import bind, described, locate, place, resolve
from llmexp.settings.values import ConfigError, is_ours, refuse
from llmexp.settings.variables import fill

OFFERED = ("tokenizer", "vocab_size", "sequence_length", "ask_again")  # to a source of data


def build_tokenizer(section: dict[str, Any]) -> Tokenizer:
    """Build the tokenizer of a section. Raises ConfigError."""
    found = bind("tokenizer", section, {})()
    try:
        return as_tokenizer(found)
    except Exception as error:  # of the user's code
        text = str(error) if isinstance(error, ValueError) else f"failed: {described(error)}"
        text += place_of(section, "tokenizer")
        raise refuse("tokenizer._target_", section["_target_"], text) from error


def with_vocabulary(model: dict[str, Any], tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the model section with the tokenizer's vocabulary, where it has null for its own."""
    follows = fill(model.get("vocab_size", 0), "model.vocab_size") is None
    return model | {"vocab_size": padded_vocabulary(tokenizer)} if follows else dict(model)


def inputs_of(config: Config) -> tuple[Tokenizer, dict[str, Any]]:
    """Return the tokenizer of a config, and its model section with a vocabulary."""
    tokenizer = build_tokenizer(config.tokenizer)
    return tokenizer, with_vocabulary(config.model, tokenizer)


def padded_vocabulary(tokenizer: Tokenizer) -> int:
    """Return the rows of a vocabulary that is not given: a multiple of 64 suits the kernels."""
    return -(-tokenizer.n_vocab // 64) * 64


def build_corpus(
    data: dict[str, Any],
    tokenizer: Tokenizer,
    vocab_size: int,
    length: int,
    document_mask: bool,
    ask_again: bool = False,
) -> Corpus:
    """Return the data of a section, prepared and checked against the vocabulary.

    With `ask_again` buckets and the hub are asked anew. Raises ConfigError.
    """
    if (ignored := data.get("ignore_id")) is not None:
        _check_ignored(ignored, vocab_size)
    values = tokenizer, vocab_size, length, ask_again
    found = bind("data", data, dict(zip(OFFERED, values, strict=True)))()
    try:
        found = as_corpus(found, vocab_size=vocab_size)
    except ValueError as error:
        raise ConfigError(f"{error}{place_of(data, 'data')}") from None
    if document_mask and not found.has_documents:
        text = f"data={data['_target_'].rpartition('.')[2]} has no documents"
        raise refuse("batch.document_mask", True, text, False)
    if document_mask and found.unmarked:
        text = f"{found.unmarked:,} documents lack the end-of-text id and would run into the next"
        raise refuse("batch.document_mask", True, text, False)
    return found


def uses_tokenizer(data: dict[str, Any]) -> bool:
    """Return whether the data's ids are the tokenizer's: our function needs it to make them."""
    if not is_ours(dotted := data["_target_"]):
        return True  # a function of the user's: nothing is imported to know
    found = inspect.signature(locate("data._target_", dotted)).parameters.get("tokenizer")
    return found is not None and found.default is inspect.Parameter.empty


def sources_of(data: dict[str, Any], keep: bool = True) -> tuple[list[Source], RemoteCache]:
    """Return the sources of documents that a section names, and what is known of remote files.

    Buckets and the hub are asked anew; `keep` their answers. Raises ConfigError.
    """
    target, knobs = resolve("data", data, OFFERED)
    find = getattr(sys.modules[target.__module__], f"{target.__name__}_sources", None)
    if find is None:
        text = "has no documents of text; use data=corpus or data=text"
        raise refuse("data._target_", data["_target_"], text, "llmexp.data.corpus.corpus")
    remote = RemoteCache(cache_folder(knobs.get("cache_dir")), anew=True, keep=keep)
    return find(remote, **knobs), remote


def works_to_prepare(data: dict[str, Any], tokenizer: Tokenizer) -> tuple[list[Work], Path]:
    """Return what there is to prepare for each source of a section, and the cache folder.

    Raises ConfigError.
    """
    sources, remote = sources_of(data)
    return works_of(sources, tokenizer, remote), remote.cache


def training_documents(data: dict[str, Any]) -> Iterator[Iterator[str]]:
    """Return the pieces of each training document of a section, without those of validation.

    Raises ConfigError for data that are not text.
    """
    return documents_to_train(*sources_of(data))


def document_end(tokenizer: Tokenizer, wanted: bool) -> int | None:
    """Return the id that ends a document where document masks are `wanted`, else None.

    Raises ConfigError.
    """
    if not wanted:
        return None
    if (found := tokenizer.eot_token) is None:
        text = f"the tokenizer {tokenizer.name} has no token that ends a document"
        raise refuse("batch.document_mask", True, text, False)
    return found


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
