"""Solve a run from its config, its data and the facts of its model and its device."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

from llmexp.data.stream import Corpus
from llmexp.data.tokenizers import Tokenizer
from llmexp.run import Facts, Run, SourceShare, solve
from llmexp.run.layout import Layout
from llmexp.runs import provenance
from llmexp.settings.config import Config
from llmexp.settings.convert import checked_knob
from llmexp.settings.execution import Parallelism
from llmexp.settings.parts import COMMON
from llmexp.settings.targets import bind
from llmexp.settings.values import refuse
from llmexp.system.redact import redacted
from llmexp.train.assembly.inputs import build_corpus, place_of
from llmexp.train.assembly.remembered import known_memory
from llmexp.update import schedule

Once = Callable[..., Any]


def facts_of_data(config: Config, tokenizer: Tokenizer, corpus: Corpus) -> dict[str, Any]:
    """Return the facts about the data of a run."""
    return {
        "train_tokens": len(corpus.train),
        "train_sequences": corpus.train_sequences(config.batch.sequence_length),
        "val_tokens": len(corpus.val) if corpus.val is not None else 0,
        "data": redacted(corpus.description),
        "tokenizer": redacted(tokenizer.name),
        "tokenizer_vocab_size": tokenizer.n_vocab,
    }


def solve_run(
    saved: Config,
    config: Config,
    optimizer: dict[str, Any],
    facts: Facts,
    corpus: Corpus,
    once: Once,
    compiled: bool,
) -> tuple[Config, Run]:
    """Return the config `saved` with every derived value written back, and the run. `config` is the
    same one, filled, with its batch solved; `optimizer`: its section with solved rates. Raises
    ConfigError."""
    software = once("software", None, lambda: (provenance.versions(), provenance.source_commit()))
    warmup = functools.partial(_warmup, config.schedule)
    run = solve(dataclasses.replace(config, batch=saved.batch), facts, warmup, *software)
    solved = _solved(saved, config, optimizer, facts, compiled)
    return solved, _completed(solved, run, corpus)


def corpus_of(once: Once, config: Config, tokenizer: Tokenizer, ids: int) -> Corpus:
    length, masks = config.batch.sequence_length, config.batch.document_mask
    deciding = [config.data, config.tokenizer, ids, length, masks]
    found: Corpus = once("corpus", deciding, lambda: build_corpus(config, tokenizer, ids))
    return found


def _warmup(section: dict[str, Any], total: int) -> int:
    """Return the updates of warm-up of a schedule over `total` updates. Raises ConfigError."""
    names = ("warmup_steps", "warmup_ratio")
    knobs = {name: checked_knob(f"schedule.{name}", section.get(name)) for name in names}
    return schedule.warmup_updates(total, **knobs)


def rate_factor(section: dict[str, Any], max_steps: int) -> Callable[[int], float]:
    """Return the schedule's factor on the base rate by applied updates. Raise ConfigError for bad
    knobs."""
    factor = bind("schedule", section, {})
    for update in (0, max_steps - 1):
        if not isinstance(found := factor(update, max_steps), (int, float)):
            text = (
                f"returned {found!r} for update {update}; the factor on the base rate, a "
                f"number, is needed{place_of(section, 'schedule')}"
            )
            raise refuse("schedule._target_", section["_target_"], text)
    return lambda update: float(factor(update, max_steps))


def solved_parallelism(p: Parallelism, layout: Layout) -> Parallelism:
    """Return the section with what was null and has a meaning written back."""
    return dataclasses.replace(
        p,
        nproc_per_node=layout.nproc_per_node,
        replicate_size=layout.replicate_size if p.kind == "hsdp" else None,
        tensor_parallel_size=layout.tensor_parallel_size if p.kind in ("tp", "fsdp_tp") else None,
    )


def _solved(
    saved: Config,
    config: Config,
    optimizer: dict[str, Any],
    facts: Facts,
    compiled: bool,
) -> Config:
    """Return the config `saved` with every derived value written back. `config` is the same one,
    filled."""
    model, data = dict(saved.model), dict(saved.data)
    if model.get("vocab_size", 0) is None:
        model["vocab_size"] = config.model["vocab_size"]
    data |= {key: config.data[key] for key in COMMON["data"] if key in config.data}
    wanted = config.checkpoint.async_
    beside = facts.device == "cuda" if wanted == "auto" else wanted is True
    rates = {key: rate for key, rate in optimizer.items() if rate != config.optimizer[key]}
    return dataclasses.replace(
        saved,
        model=model,
        data=data,
        optimizer=saved.optimizer | rates,
        batch=config.batch,
        precision=dataclasses.replace(config.precision, kind=facts.precision),
        parallelism=solved_parallelism(config.parallelism, facts.layout),
        train=dataclasses.replace(config.train, compile=compiled),
        checkpoint=dataclasses.replace(config.checkpoint, async_=beside),
    )


def _completed(config: Config, run: Run, corpus: Corpus) -> Run:
    """Return the run with its sources, its warnings and what is known of its memory.

    Raises ConfigError for a source that is read too often."""
    warnings = (*run.warnings, *corpus.warnings, *_too_late(config, run))
    sources = []
    if (mixed := corpus.mixed) is not None:
        shares = mixed.shares(run.total_sequences, run.sequence_length)
        for name, (sequences, epochs) in shares.items():
            if mixed.max_epochs is not None and epochs > mixed.max_epochs:
                text = f"the run would walk the source {name} {epochs:.4g} times"
                raise refuse("data.max_epochs", mixed.max_epochs, text, math.ceil(epochs))
            sources.append(SourceShare(name, mixed.tokens[name], sequences, epochs))
    memory = known_memory(config, run.device_name)
    return dataclasses.replace(run, warnings=warnings, memory=memory, sources=tuple(sources))


def _too_late(config: Config, run: Run) -> Iterator[str]:
    """Yield what is set and does not come before the end of the run."""
    if run.warmup_updates > run.max_steps:
        yield (
            f"the warm-up of {run.warmup_updates} updates is longer than the run of "
            f"{run.max_steps}: the base rate is never reached"
        )
    start = config.schedule.get("decay_start")
    if isinstance(start, int) and start >= run.max_steps:
        yield (
            f"schedule.decay_start={start}: the run ends after {run.max_steps} updates, so the "
            "rate never decays"
        )
    stages = config.data.get("stages")
    for stage in stages if isinstance(stages, list) else ():
        first = stage.get("from_tokens") if isinstance(stage, dict) else None
        if isinstance(first, int) and first >= run.max_tokens:
            yield (
                f"data.stages: that from {first:,} tokens on never begins, as the run ends at "
                f"{run.max_tokens:,}"
            )
