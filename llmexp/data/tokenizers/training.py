"""Train a byte-level BPE tokenizer on documents, with the library tokenizers."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from llmexp.config.commands import need_package
from llmexp.config.values import ConfigError
from llmexp.data.encode import PATTERNS, split_text
from llmexp.data.tokenizers.base import END_OF_TEXT

SMALLEST = 257  # the bytes, and the token between documents
BATCH_CHARACTERS = 1 << 21  # of text, handed to the library at a time


@dataclass(frozen=True)
class Trained:
    """A tokenizer in two forms that give the same ids."""

    tokenizer_json: str
    tiktoken: bytes  # the lines of a .tiktoken file
    n_vocab: int
    documents: int  # that it was trained on
    bytes_per_token: float  # of a sample of them


def train_bpe(documents: Iterable[Iterator[str]], vocab_size: int, pattern: str) -> Trained:
    """Return a tokenizer of `vocab_size` ids: bytes, merges, and the token between documents.

    Fewer come out where the text has no more pairs to merge. A document comes in pieces, so that
    memory does not grow with it. `pattern`: a name in PATTERNS. Raises ConfigError.
    """
    library = need_package("tokenizers", "llmexp tokenizer", "training a tokenizer")
    tokenizer = library.Tokenizer(library.models.BPE())
    split = library.Regex(PATTERNS[pattern])
    before = library.pre_tokenizers
    as_bytes = before.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = before.Sequence([before.Split(split, "isolated"), as_bytes])
    tokenizer.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocab_size - 1,  # without the token between documents, which comes last
        initial_alphabet=sorted(before.ByteLevel.alphabet()),
        show_progress=False,
    )
    sample: list[str] = []
    counted = 0

    def batches() -> Iterator[list[str]]:
        nonlocal counted
        batch = []
        size = 0
        for document in documents:
            counted += 1
            # Both patterns allow these cuts: no match of theirs crosses one.
            for number, piece in enumerate(split_text(document)):
                if number == 0 and counted % 100 == 1 and len(sample) < 100:
                    sample.append(piece)
                batch.append(piece)
                size += len(piece)
                if size >= BATCH_CHARACTERS:
                    yield batch
                    batch, size = [], 0
        yield batch

    tokenizer.train_from_iterator(batches(), trainer)
    if not counted:
        raise ConfigError("too_little_data", "data: there are no documents to train a tokenizer on")
    tokenizer.add_special_tokens([library.AddedToken(END_OF_TEXT, special=True)])
    tokens = sum(len(found.ids) for found in tokenizer.encode_batch(sample))
    size = sum(len(text.encode()) for text in sample)
    value_of = {name: value for value, name in byte_names().items()}
    vocabulary = json.loads(tokenizer.to_str())["model"]["vocab"]
    lines = (
        base64.b64encode(bytes(value_of[name] for name in token)) + f" {number}\n".encode()
        for token, number in sorted(vocabulary.items(), key=lambda item: item[1])
    )
    n_vocab, ranks = tokenizer.get_vocab_size(), b"".join(lines)
    return Trained(tokenizer.to_str(pretty=True), ranks, n_vocab, counted, size / tokens)


def byte_names() -> dict[int, str]:
    """Return the character that stands for each byte in a byte-level vocabulary (GPT-2)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [value for value in range(256) if value not in printable]
    names = {value: chr(value) for value in printable}
    return names | {value: chr(256 + number) for number, value in enumerate(others)}
