"""`llmexp tokenizer --vocab-size N data=...`: train a tokenizer on the training documents."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmexp.cli import hydra_flags
from llmexp.compose import app, command_line
from llmexp.runs.rundir import check_new
from llmexp.settings.commands import command
from llmexp.settings.kinds import kind_of_error
from llmexp.settings.values import ConfigError
from llmexp.system.fileio import write_whole

_USAGE = """\
llmexp tokenizer --vocab-size N [--pattern gpt2|cl100k_base] [--out FOLDER] data=corpus ...

Train a byte-level BPE tokenizer on the training documents of data=corpus, text or stdlib; what is
held out for validation is left out. Writes tokenizer.json and a .tiktoken file, which give the same
ids.

  --vocab-size N   ids of the tokenizer, the token between documents among them
  --pattern NAME   how text is split before bytes are merged (default gpt2)
  --out FOLDER     a new folder (default tokenizers/bpe-N)

Then: llmexp train tokenizer=file tokenizer.path=tokenizers/bpe-N ...
"""


@dataclass(frozen=True)
class TrainedTokenizer:
    """A tokenizer in `path`, the folder for tokenizer.path; counts are of its training text."""

    path: Path
    n_vocab: int
    documents: int
    bytes_per_token: float  # on a sample of the documents


def main(arguments: list[str]) -> int:
    """Train a byte-level BPE tokenizer and write it as tokenizer.json and as a .tiktoken file."""
    if {"-h", "--help"} & set(arguments):
        print(_USAGE, end="")
        return 0
    args = command_line.parse("tokenizer", arguments)
    if hydra_flags.asked(args):
        return hydra_flags.answer_flags(args)
    found = trained(args)
    print(
        f"{found.n_vocab:,} ids from {found.documents:,} training documents (validation left out), "
        f"{found.bytes_per_token:.2f} bytes per token on a sample of them"
    )
    if found.n_vocab < args.vocab_size:
        print(f"fewer than {args.vocab_size:,}: the text has no more pairs to merge")
    print(f"use it: {command('train', 'tokenizer=file', ('tokenizer.path', found.path), '...')}")
    return 0


def trained(args: Any) -> TrainedTokenizer:
    """Train the tokenizer of a command line that was parsed and write it. Raises ConfigError."""
    from llmexp.data.encode import PATTERNS
    from llmexp.data.tokenizers.training import SMALLEST, train_bpe

    if args.vocab_size is None or args.vocab_size < SMALLEST:
        given = "is needed" if args.vocab_size is None else f"{args.vocab_size} is too small"
        raise ConfigError(
            "missing_value" if args.vocab_size is None else "out_of_range",
            f"--vocab-size: {given}; at least {SMALLEST} ids (the bytes and the token between "
            "documents), for example --vocab-size 32768",
        )
    if args.pattern not in PATTERNS:
        raise ConfigError(
            "unknown_option", f"--pattern {args.pattern}: must be {' or '.join(PATTERNS)}"
        )
    folder = Path(args.out or f"tokenizers/bpe-{args.vocab_size}")
    check_new(folder, "--out")
    with app.composed(args, "tokenizer") as (cfg, _):
        config = app.typed_config(cfg)
    from llmexp.data.work import training_documents

    try:
        found = train_bpe(training_documents(config.data), args.vocab_size, args.pattern)
    except ConfigError:
        raise
    except ValueError as error:  # of a file that changes meanwhile
        raise ConfigError(kind_of_error(error, "bad_data"), str(error)) from None
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / "tokenizer.json", found.tokenizer_json)
    write_whole(folder / f"{folder.name}.tiktoken", found.tiktoken)
    return TrainedTokenizer(folder, found.n_vocab, found.documents, found.bytes_per_token)
