"""`llmexp prepare`: tokenise the data into the cache, so that runs start at once."""

from __future__ import annotations

from typing import Any

from llmexp.cli import hydra_flags
from llmexp.compose import app, command_line
from llmexp.config import ConfigError
from llmexp.sweep import show

HEADS = ("source", "split", "files", "documents", "tokens", "bytes/token", "empty", "bad")


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    per_token = row["bytes_per_token"]
    counts = (f"{row[name]:,}" for name in ("files", "documents", "tokens"))
    shown = "-" if per_token is None else f"{per_token:.3f}"
    return (row["source"], row["split"], *counts, shown, f"{row['empty']:,}", f"{row['bad']:,}")


def prepare(arguments: list[str]) -> int:
    """`llmexp prepare`: tokenises the data into the cache, so that runs start at once."""
    args = command_line.parse("prepare", arguments)
    if hydra_flags.asked(args):
        return hydra_flags.answer(args)
    if args.multirun:
        raise ConfigError("-m: llmexp prepare takes one config, not a sweep; leave out -m")
    from llmexp.assembly.parts import build_corpus, build_tokenizer, filled

    with app.hydra_app(args.config_dir) as hydra:
        config = filled(app.typed(app.compose(hydra, args.overrides)[0]))
    tokenizer, model_config = build_tokenizer(config)
    ids = model_config.get("vocab_size") or tokenizer.n_vocab
    corpus = build_corpus(config, tokenizer, ids, write=True, ask_again=True)
    print(f"{corpus.description}; tokenizer {tokenizer.name}")
    if corpus.table:
        print(show.table([HEADS, *map(_cells, corpus.table)], left=2))
    print(
        f"train {len(corpus.train):,} tokens, validation "
        f"{len(corpus.val) if corpus.val is not None else 0:,} tokens"
    )
    return 0
