"""From a config to the parts of a run: tokenizer, data, model, optimizer, schedule, and the solved
`Run`.

`plan` stops after this; a worker goes on to train. Nothing is written here but the token cache of
the data.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from llmexp import schedule
from llmexp.assembly.inputs import (
    DATA_COMMON,
    Shared,
    build_corpus,
    build_tokenizer,
    document_end,
    filled,
    place_of,
)
from llmexp.assembly.parent import find_parent
from llmexp.assembly.parts import (
    build_model,
    build_optimizers,
    initial_notes,
    label_of,
    model_maker,
    tasks_of,
)
from llmexp.assembly.placement import (
    Placement,
    check_parallel,
    placed,
    solved_parallelism,
    threads_per_rank,
)
from llmexp.assembly.remembered import known_memory
from llmexp.assembly.targets import bind, hook
from llmexp.assembly.trial import try_model
from llmexp.compare.throughput import single_rank_rate
from llmexp.config import Batch, Config, ConfigError, plain, refuse
from llmexp.data.reader import Hidden
from llmexp.data.stream import Corpus
from llmexp.data.tokenizers import Tokenizer
from llmexp.metrics import hardware
from llmexp.models.loss import WindowLoss
from llmexp.redact import redacted
from llmexp.run import Facts, Parent, Run, SourceShare, check_model, solve
from llmexp.run.batch import solve_batch, solve_rates
from llmexp.tasks.scoring import Task
from llmexp.tracker import stores


@dataclass(frozen=True)
class Parts:
    """The parts of a run. `config` has every derived value written back, and names variables
    without their value."""

    config: Config
    run: Run
    device: torch.device
    precision: str
    tokenizer: Tokenizer
    corpus: Corpus
    build_model: Callable[..., nn.Module]  # fresh=False: a checkpoint follows
    build_optimizers: Callable[[nn.Module], list[Optimizer]]
    rate_factor: Callable[[int], float]  # applied updates -> factor on the base rate
    hooks: list[tuple[str, Callable[..., Any]]]
    tasks: list[Task]
    user: dict[str, Any]  # the section user

    @property
    def document_end(self) -> int | None:
        """Return the id that attention and targets do not reach across; None: there is none."""
        return document_end(self.config, self.tokenizer)

    @property
    def hidden(self) -> Hidden:
        """Return which targets do not count."""
        return Hidden(self.config.data.get("ignore_id"), self.document_end)


def assemble(
    config: Config,
    *,
    write: bool,
    shared: Shared | None = None,
    tried: bool = False,
    parent: Parent | None = None,
) -> Parts:
    """Check everything and look up every fact; cheap checks come before expensive ones.

    With `write` false no token cache is written and the corpus may know its length only. `tried`: a
    model of the user's has had its trial pass before the run's folder was made. `parent`: that of a
    fork, from its run.json. Raises ConfigError."""
    stores.check_chosen(config.tracker.kind, config.tracker.also)
    saved, config, once = config, filled(config), (shared or Shared()).once
    place = placed(config)
    batch = solve_batch(config.batch, place.layout.dp_size)
    length = batch.sequence_length
    optimizer, rates = solve_rates(config.optimizer, batch.real_batch_size)
    hooks = [hook(entry, number) for number, entry in enumerate(config.hooks)]
    tokenizer, model_section = once(
        "tokenizer", [config.tokenizer, config.model], lambda: build_tokenizer(config)
    )
    config = dataclasses.replace(config, model=model_section, batch=batch)
    end = document_end(config, tokenizer)
    of_model = (model_maker(config.model), config.model, place.precision, config.train, end)
    make_model = functools.partial(build_model, *of_model)
    make_optimizers = functools.partial(build_optimizers, optimizer)
    deciding = [config.model, place.precision, end]
    loss = _on_meta(once, deciding, optimizer, make_model, make_optimizers)
    check_parallel(config, place.layout, loss)
    vocab_size = _check_sizes(loss.model, length, tokenizer)  # before data are prepared
    initial = _initial(once, config, loss.model, tokenizer, tried or parent is not None)
    if _own(config.model) and not tried:
        meta = shared is not None or not write  # a process that trains nothing
        sizes = (length, tokenizer.n_vocab, config.model.get("vocab_size") or vocab_size)
        asked = (str(config.model["_target_"]), loss.model, make_model, *sizes, place.device, meta)
        once("trial", [*deciding, _own(optimizer), *sizes], lambda: try_model(*asked))
    tasks = tasks_of(once, config, tokenizer)
    corpus = _corpus(once, config, tokenizer, vocab_size or tokenizer.n_vocab, write)
    parent = parent or find_parent(dataclasses.replace(saved, batch=batch), loss.model, corpus)
    facts = _facts(config, place, loss, tokenizer, corpus, rates, {**initial, "parent": parent})
    warmup = functools.partial(_warmup, config.schedule)
    software = once("software", None, lambda: (hardware.versions(), hardware.commit()))
    run = solve(dataclasses.replace(config, batch=saved.batch), facts, warmup, *software)
    solved = _solved(saved, config, optimizer, batch, place)
    return Parts(
        config=solved,
        run=_completed(solved, run, corpus),
        device=place.device,
        precision=place.precision,
        tokenizer=tokenizer,
        corpus=corpus,
        build_model=make_model,
        build_optimizers=make_optimizers,
        rate_factor=rate_factor(config.schedule, run.max_steps),
        hooks=hooks,
        tasks=tasks,
        user=config.user,
    )


def _corpus(
    once: Callable[..., Any], config: Config, tokenizer: Tokenizer, ids: int, write: bool
) -> Corpus:
    deciding = [config.data, config.tokenizer, ids, config.batch.sequence_length, write]
    found: Corpus = once(
        "corpus", deciding, lambda: build_corpus(config, tokenizer, ids, write=write)
    )
    return found


def _own(section: dict[str, Any]) -> dict[str, Any] | None:
    """Return the section where it names a function of the user's, None where it is one of ours."""
    return None if str(section.get("_target_")).startswith("llmexp.") else section


def _on_meta(
    once: Callable[..., Any],
    deciding: list[Any],
    optimizer: dict[str, Any],
    make_model: Callable[[], nn.Module],
    make_optimizers: Callable[[nn.Module], list[Optimizer]],
) -> WindowLoss:
    """Return the loss with its model, without memory. Raise ConfigError for bad knobs of the model
    and the optimizer.

    An optimizer of the user's may change the model that it is given, so each gets a model of its
    own.
    """
    with torch.device("meta"):
        model = make_model() if _own(optimizer) else once("model", deciding, make_model)
        make_optimizers(model)
        return WindowLoss(model)


def _check_sizes(model: nn.Module, length: int, tokenizer: Tokenizer) -> int | None:
    """Return the vocabulary of a model that has one. Raise ConfigError where sequences or token ids
    are beyond the model."""
    positions = getattr(model, "max_position_embeddings", None)
    vocab_size: int | None = getattr(model, "vocab_size", None)
    check_model(length, positions, vocab_size, tokenizer.name, tokenizer.n_vocab)
    return vocab_size


def _initial(
    once: Callable[..., Any], config: Config, model: nn.Module, tokenizer: Tokenizer, tried: bool
) -> dict[str, Any]:
    """Return the facts about the weights that the model begins with. Raise ConfigError for those
    that do not fit; a run that was `tried` may go on without them."""
    run, given = config.fork.run, config.model.get("init_from")
    if run is None and given is None:
        return {}
    deciding = [config.model, config.tokenizer, config.data["_target_"], run]
    asked = config, model, tokenizer
    found = () if tried else tuple(once("initial", deciding, lambda: initial_notes(*asked)))
    return {"initial": str(given) if run is None else None, "warnings": found}


def _facts(
    config: Config,
    place: Placement,
    loss: WindowLoss,
    tokenizer: Tokenizer,
    corpus: Corpus,
    rates: str | None,
    initial: dict[str, Any],
) -> Facts:
    """Return what the run is solved from."""
    model, batch, whole = loss.model, config.batch, place.layout.world_size == 1
    together = place.compiled and (whole or config.parallelism.kind == "ddp")
    rows = int(batch.micro_batch_size or 1) * batch.sequence_length if together else None
    kernel = loss.loss_kernel(place.device, rows)
    tp = place.layout.tensor_parallel_size
    if tp > 1:
        rows = model.head_weight.shape[0]
        kernel = f"chunked(vocab={rows // tp} of {rows})"
    flops = getattr(model, "flops_per_token", None)
    return Facts(
        parallelism=config.parallelism.kind,
        layout=place.layout,
        threads_per_rank=threads_per_rank(place.layout.nproc_per_node),
        train_tokens=len(corpus.train),
        train_sequences=corpus.train_sequences(config.batch.sequence_length),
        val_tokens=len(corpus.val) if corpus.val is not None else 0,
        data=redacted(corpus.description),
        model=redacted(label_of(config.model)),
        parameters=sum(p.numel() for p in model.parameters()),
        max_position_embeddings=getattr(model, "max_position_embeddings", None),
        flops_per_token=flops(config.batch.sequence_length) if flops else None,
        flops_formula=getattr(model, "flops_formula", None),
        loss_kernel=kernel,
        tokenizer=redacted(tokenizer.name),
        tokenizer_vocab_size=tokenizer.n_vocab,
        vocab_size=getattr(model, "vocab_size", None),
        device=place.device.type,
        device_name=hardware.device_name(place.device),
        precision=place.precision,
        precision_reason=place.reason,
        rates=rates,
        **initial,
        compiled=place.compiled_because,
    )


def _warmup(section: dict[str, Any], total: int) -> int:
    """Return the updates of warm-up of a schedule over `total` updates. Raise ConfigError."""
    try:
        return schedule.warmup_updates(
            total, section.get("warmup_steps"), section.get("warmup_ratio")
        )
    except ValueError as error:
        raise ConfigError(str(error)) from None


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


def _solved(
    saved: Config, config: Config, optimizer: dict[str, Any], batch: Batch, place: Placement
) -> Config:
    """Return the config `saved` with every derived value written back. `config` is the same one,
    filled."""
    model, data = dict(saved.model), dict(saved.data)
    if model.get("vocab_size", 0) is None:
        model["vocab_size"] = config.model["vocab_size"]
    data |= {key: config.data[key] for key in DATA_COMMON if key in config.data}
    rates = {key: rate for key, rate in optimizer.items() if rate != config.optimizer[key]}
    return dataclasses.replace(
        saved,
        model=model,
        data=data,
        optimizer=saved.optimizer | rates,
        batch=batch,
        precision=dataclasses.replace(config.precision, kind=place.precision),
        parallelism=solved_parallelism(config.parallelism, place.layout),
        train=dataclasses.replace(config.train, compile=place.compiled),
        checkpoint=dataclasses.replace(config.checkpoint, async_=place.saves_beside(config)),
    )


def _completed(config: Config, run: Run, corpus: Corpus) -> Run:
    """Return the run with its sources, its warnings, what is known of its memory, and the rate of a
    single rank. Raises ConfigError for a source that is walked too often."""
    facts = run.facts
    sources = []
    if (mixed := corpus.mixed) is not None:
        shares = mixed.shares(run.total_sequences, run.sequence_length)
        for name, (sequences, epochs) in shares.items():
            if mixed.max_epochs is not None and epochs > mixed.max_epochs:
                text = f"the run would walk the source {name} {epochs:.4g} times"
                raise refuse("data.max_epochs", mixed.max_epochs, text, math.ceil(epochs))
            sources.append(SourceShare(name, mixed.tokens[name], sequences, epochs))
    if run.warmup_updates > run.max_steps:
        text = (
            f"the warm-up of {run.warmup_updates} updates is longer than the run of "
            f"{run.max_steps}: the base rate is never reached"
        )
        facts = dataclasses.replace(facts, warnings=(*facts.warnings, text))
    facts = dataclasses.replace(facts, memory=known_memory(config, facts.device_name))
    if config.metrics.single_rank_rates is not None:
        facts = with_single_rank_rate(config, facts)
    return dataclasses.replace(run, facts=facts, sources=tuple(sources))


def with_single_rank_rate(config: Config, facts: Facts) -> Facts:
    """Return the facts with the rate that one rank had at the same work, or with a warning."""
    where = config.metrics.single_rank_rates
    assert where is not None
    if config.parallelism.kind == "single":
        text = (
            "a run with parallelism=single is not held against itself; for several ranks use "
            "parallelism=ddp"
        )
        raise refuse("metrics.single_rank_rates", where, text, "null")
    rate, why = single_rank_rate(where, plain(config), dataclasses.asdict(facts))
    text = f"metrics.single_rank_rates={where}: {why}; the rows have no scaling_efficiency"
    return dataclasses.replace(
        facts, single_rank_rate=rate, warnings=(*facts.warnings, text) if why else facts.warnings
    )
