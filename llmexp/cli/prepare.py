"""`llmexp prepare`: tokenise the data into the cache, so that runs start at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from llmexp.cli.preparing import Prepare, build_prepare, part_of
from llmexp.cli.running import CommandLine
from llmexp.config.kinds import kind_of_error
from llmexp.config.sections import Config
from llmexp.config.values import ConfigError
from llmexp.config.variables import fill
from llmexp.system.text import aligned


@dataclass(frozen=True)
class Prepared:
    """Hold what `llmexp prepare` made ready.

    Counts are of tokens. `sources` has a row for each source of data=corpus, with the keys of
    _HEADS; `bytes_per_token` is in bytes.
    """

    description: str
    tokenizer: str
    train_tokens: int
    val_tokens: int
    sources: Sequence[dict[str, Any]]
    warnings: Sequence[str]

    def __str__(self) -> str:
        table = [aligned([_HEADS, *map(_cells, self.sources)], left=2)] if self.sources else []
        counts = f"train {self.train_tokens:,} tokens, validation {self.val_tokens:,} tokens"
        warnings = [f"warning: {text}" for text in self.warnings]
        head = f"{self.description}; tokenizer {self.tokenizer}"
        return "\n".join([head, *table, counts, *warnings])


@dataclass(frozen=True)
class PreparedPart:
    """A part of the shards that was written, as `prepare.part` names it."""

    part: str

    def __str__(self) -> str:
        join = "once all parts are, `llmexp prepare` without prepare.part joins them"
        return f"part {self.part} is prepared; {join}"


_HEADS = ("source", "split", "files", "documents", "tokens", "bytes/token", "empty", "bad")


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    per_token = row["bytes_per_token"]
    files = row["hf"] or f"{row['files']:,}"
    counts = (f"{row[name]:,}" for name in ("documents", "tokens"))
    shown = "-" if per_token is None else f"{per_token:.3f}"
    left = (f"{row[name]:,}" for name in ("empty", "bad"))
    return (row["source"], row["split"], files, *counts, shown, *left)


def prepare(line: CommandLine = ()) -> Prepared | PreparedPart:
    """Tokenise the data into the cache, so that runs start at once."""
    from llmexp.compose import app

    with app.composed(line, "prepare") as (cfg, _):
        settings, config = build_prepare(app.section(cfg, "prepare")), app.typed_config(cfg)
    if settings.on == "ray":
        from llmexp.sweep import ray

        ray.need("prepare.on=ray")
    from llmexp.train.assembly.inputs import build_corpus, build_tokenizer, with_vocabulary

    tokenizer = build_tokenizer(config.tokenizer)
    if settings.part is not None or settings.on == "ray":
        prepare_apart(settings, config, tokenizer)
    if settings.part is not None:
        return PreparedPart(settings.part)
    section = with_vocabulary(config.model, tokenizer)
    ids = fill(section.get("vocab_size"), "model.vocab_size") or tokenizer.n_vocab
    length, mask = config.batch.sequence_length, config.batch.document_mask
    corpus = build_corpus(config.data, tokenizer, ids, length, mask, ask_again=True)
    held_out = 0 if corpus.val is None else len(corpus.val)
    counts = (len(corpus.train), held_out)
    return Prepared(corpus.description, tokenizer.name, *counts, corpus.table, corpus.warnings)


def prepare_apart(settings: Prepare, config: Config, tokenizer: Any) -> None:
    """Write one part of the shards here, or all of them by tasks of Ray. Raises ConfigError."""
    from llmexp.cli.prepare_on_ray import write_all
    from llmexp.data.shards import prepare_part
    from llmexp.data.work import Part, works_to_prepare

    works, cache = works_to_prepare(config.data, tokenizer)
    part = part_of(settings)
    try:
        if part is None:
            write_all(works, cache)
        else:
            prepare_part(works, Part(*part), cache)
    except ConfigError:
        raise
    except ValueError as error:  # of a file that changes meanwhile
        raise ConfigError(kind_of_error(error, "bad_data"), str(error)) from None
