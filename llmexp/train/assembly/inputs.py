"""Build the inputs of a run that open sections of a config name: tokenizer and data.

Each is checked when built. Nothing here needs torch.
"""

from __future__ import annotations

import inspect
from typing import Any

from llmexp.config.convert import checked_knob
from llmexp.config.kinds import kind_of_error
from llmexp.config.sections import Config
from llmexp.config.targets import bind, described, locate, place
from llmexp.config.values import ConfigError, Plain, is_ours, refuse
from llmexp.config.variables import fill
from llmexp.data.stream import Corpus, as_corpus
from llmexp.data.tokenizers.base import Tokenizer, as_tokenizer


def build_tokenizer(section: Plain) -> Tokenizer:
    """Build the tokenizer of a section. Raises ConfigError."""
    found = bind("tokenizer", section, {})()
    if isinstance(found, Tokenizer):
        return found
    try:
        return as_tokenizer(found)
    except Exception as error:  # of the user's code
        text = str(error) if isinstance(error, ValueError) else f"failed: {described(error)}"
        text += place_of(section, "tokenizer")
        raise refuse(
            kind_of_error(error, "bad_own_part"), "tokenizer._target_", section["_target_"], text
        ) from error


def with_vocabulary(model: Plain, tokenizer: Tokenizer) -> Plain:
    """Return the model section with the tokenizer's vocabulary, where it has null for its own."""
    follows = fill(model.get("vocab_size", 0), "model.vocab_size") is None
    return model | {"vocab_size": padded_vocabulary(tokenizer)} if follows else dict(model)


def inputs_of(config: Config) -> tuple[Tokenizer, Plain]:
    """Return the tokenizer of a config, and its model section with a vocabulary."""
    tokenizer = build_tokenizer(config.tokenizer)
    return tokenizer, with_vocabulary(config.model, tokenizer)


def padded_vocabulary(tokenizer: Tokenizer) -> int:
    """Return the rows of a vocabulary that is not given: a multiple of 64 suits the kernels."""
    return -(-tokenizer.n_vocab // 64) * 64


def build_corpus(
    data: Plain,
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
    offered = {"tokenizer": tokenizer, "vocab_size": vocab_size, "sequence_length": length}

    def built(found: Any) -> Any:
        of_documents = hasattr(found, "documents")
        return found.build(tokenizer, length, ask_again) if of_documents else found

    try:
        found = bind("data", data, offered, built)()
    except MemoryError:
        key = "n_tokens" if "n_tokens" in data else "_target_"
        raise refuse("too_large", f"data.{key}", data[key], "does not fit into memory") from None
    if not isinstance(found, Corpus):
        try:
            found = as_corpus(found, vocab_size=vocab_size)
        except ValueError as error:
            raise ConfigError(
                kind_of_error(error, "bad_own_part"), f"{error}{place_of(data, 'data')}"
            ) from None
    if document_mask and not found.has_documents:
        text = f"data={data['_target_'].rpartition('.')[2]} has no documents"
        raise refuse("unsupported", "batch.document_mask", True, text, False)
    if document_mask and found.unmarked:
        text = f"{found.unmarked:,} documents lack the end-of-text id and would run into the next"
        raise refuse("bad_data", "batch.document_mask", True, text, False)
    return found


def uses_tokenizer(data: Plain) -> bool:
    """Return whether the data's ids are the tokenizer's: our source needs it to make them."""
    if not is_ours(dotted := data["_target_"]):
        return True  # a function of the user's: nothing is imported to know
    target = locate("data._target_", dotted)
    found = inspect.signature(target).parameters.get("tokenizer")
    return hasattr(target, "documents") or (
        found is not None and found.default is inspect.Parameter.empty
    )


def document_end(tokenizer: Tokenizer, wanted: bool) -> int | None:
    """Return the id that ends a document where document masks are `wanted`, else None.

    Raises ConfigError.
    """
    if not wanted:
        return None
    if (found := tokenizer.eot_token) is None:
        text = f"the tokenizer {tokenizer.name} has no token that ends a document"
        raise refuse("wrong_tokenizer", "batch.document_mask", True, text, False)
    return found


def place_of(section: Plain, name: str) -> str:
    """Return " (FILE:LINE)" of the function that a section names."""
    return place(locate(f"{name}._target_", section["_target_"]))


def _check_ignored(given: Any, ids: int) -> None:
    """Raise ConfigError for a masked token id that the vocabulary does not have."""
    text = f"a token id below {ids}, or null, is needed"
    if given == -100:
        text += "; labels with -100 are files of their own, data=tokens data.train_labels=FILES"
        raise refuse("out_of_range", "data.ignore_id", given, text)
    if checked_knob("data.ignore_id", given) >= ids:
        raise refuse("out_of_range", "data.ignore_id", given, text, 0)
