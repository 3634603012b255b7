"""`llmexp tokenizer --vocab-size N data=...`: train a tokenizer on the training documents."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from llmexp.cli.running import CommandLine
from llmexp.compose import app
from llmexp.config.commands import command
from llmexp.config.kinds import kind_of_error
from llmexp.config.values import ConfigError, choice, knob
from llmexp.data.encode import PATTERNS
from llmexp.data.tokenizers.training import SMALLEST, train_bpe
from llmexp.folders.rundir import check_new
from llmexp.system.fileio import write_whole


@dataclass(frozen=True)
class TrainedTokenizer:
    """A tokenizer in `path`, the folder for tokenizer.path; counts are of its training text."""

    path: Path
    wanted: int
    n_vocab: int  # fewer where the text has no more pairs to merge
    documents: int
    bytes_per_token: float  # on a sample of the documents

    def __str__(self) -> str:
        documents = f"{self.documents:,} training documents (validation left out)"
        size = f"{self.bytes_per_token:.2f} bytes per token on a sample of them"
        lines = [f"{self.n_vocab:,} ids from {documents}, {size}"]
        if self.n_vocab < self.wanted:
            lines.append(f"fewer than {self.wanted:,}: the text has no more pairs to merge")
        use = command("train", "tokenizer=file", ("tokenizer.path", self.path), "...")
        return "\n".join([*lines, f"use it: {use}"])


def tokenizer(
    line: CommandLine = (),
    *,
    vocab_size: Annotated[
        int, knob("ids, the token between documents among them", 32768, at_least=SMALLEST)
    ],
    pattern: Annotated[
        str, choice("how text is split before bytes are merged", " | ".join(PATTERNS))
    ] = "gpt2",
    out: Annotated[Path | None, "FOLDER", "a new folder (default: tokenizers/bpe-N)"] = None,
) -> TrainedTokenizer:
    """Train a byte-level BPE tokenizer on the training documents of data=corpus, text or stdlib.

    What is held out for validation is left out. FOLDER gets tokenizer.json and a .tiktoken file,
    which give the same ids. Then: llmexp train tokenizer=file tokenizer.path=FOLDER ...
    """
    folder = out or Path(f"tokenizers/bpe-{vocab_size}")
    check_new(folder, "--out")
    with app.composed(line, "tokenizer") as (cfg, _):
        config = app.typed_config(cfg)
    from llmexp.data.work import training_documents

    try:
        # on a thread: this one answers a signal, while the library works for long without Python
        texts = training_documents(config.data)
        found = ThreadPoolExecutor(1).submit(train_bpe, texts, vocab_size, pattern).result()
    except ConfigError:
        raise
    except ValueError as error:  # of a file that changes meanwhile
        raise ConfigError(kind_of_error(error, "bad_data"), str(error)) from None
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / "tokenizer.json", found.tokenizer_json)
    write_whole(folder / f"{folder.name}.tiktoken", found.tiktoken)
    counts = (found.n_vocab, found.documents, found.bytes_per_token)
    return TrainedTokenizer(folder, vocab_size, *counts)
