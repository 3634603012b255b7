"""Solve a run from its config, its data and the facts of its model and its device."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from llmexp import features
from llmexp.config.convert import checked_knob
from llmexp.config.forms import ramp_sizes
from llmexp.config.sections import Config
from llmexp.config.targets import bind
from llmexp.config.values import Plain, refuse
from llmexp.config.variables import fill
from llmexp.data.mixture import Mixture
from llmexp.data.stream import Corpus
from llmexp.data.tokenizers.base import Tokenizer
from llmexp.folders.versions import source_commit, versions
from llmexp.models.common import idle_parameters, parameter_counts
from llmexp.models.loss import SummedLoss
from llmexp.optim import schedule
from llmexp.run import Facts, Run, solve
from llmexp.run.budget import TokenCost
from llmexp.run.layout import Layout
from llmexp.run.shares import SourceShare
from llmexp.system import hardware
from llmexp.system.devices import threads_per_rank
from llmexp.system.redact import redacted
from llmexp.train.assembly.building import (
    dropout_words,
    group_shares,
    label_of,
    sizes_in,
    width_words,
)
from llmexp.train.assembly.inputs import place_of
from llmexp.train.assembly.placement import Placement
from llmexp.train.clipping import rule_of

TRIED_UPDATES = 256  # updates of a schedule, evenly spread, before a run begins


@dataclass(frozen=True)
class Bare:
    """Hold what a run trains, without memory: the model in its loss, and optimizers.

    They hold the parameters of `given`, a model of its own where they are the user's."""

    loss: SummedLoss
    given: nn.Module
    optimizers: list[Optimizer]
    build_optimizers: Callable[[nn.Module], list[Optimizer]]
    warnings: list[str]


def run_facts(
    config: Config,
    place: Placement,
    bare: Bare,
    tokenizer: Tokenizer,
    corpus: Corpus,
    **more: Any,
) -> Facts:
    """Return what a run is solved from: `more`, and what follows. `config` is solved."""
    model, section = bare.loss.model, fill(config.model, "model")
    given = section.get("init_from")
    begins_with = config.fork.run is None and given is not None
    by_width = getattr(bare.given, "base_width", None) is not None
    with_head, in_blocks = parameter_counts(model)
    flops = getattr(model, "flops_per_token", None)
    parameters, idle = sum(p.numel() for p in model.parameters()), idle_parameters(model)
    return Facts(
        parallelism=config.parallelism.kind,
        layout=place.layout,
        threads_per_rank=threads_per_rank(place.layout.nproc_per_node),
        train_tokens=len(corpus.train),
        train_sequences=corpus.train_sequences(config.batch.sequence_length),
        val_tokens=len(corpus.val) if corpus.val is not None else 0,
        data=redacted(corpus.description),
        model=redacted(label_of(section)) + dropout_words(model),
        parameters=parameters,
        parameters_active=parameters - idle if idle else None,
        parameters_with_head=with_head,
        parameters_in_blocks=in_blocks,
        max_position_embeddings=getattr(model, "max_position_embeddings", None),
        flops_per_token=flops(config.batch.sequence_length) if flops else None,
        flops_formula=getattr(model, "flops_formula", None),
        loss_kernel=kernel_of(config, bare.loss, place.layout, place.device, place.compiled),
        tokenizer=redacted(tokenizer.name),
        tokenizer_vocab_size=tokenizer.n_vocab,
        vocab_size=getattr(model, "vocab_size", None),
        device=place.device.type,
        device_name=hardware.device_name(place.device),
        precision=place.precision,
        precision_reason=place.reason,
        compiled=place.compiled_because,
        initial=f"{given} ({sizes_in(section)})" if begins_with else None,
        groups=(
            group_shares(config.optimizer, bare.given, bare.optimizers)
            if config.optimizer.get("groups")
            else ()
        ),
        parametrization=width_words(bare.given, bare.optimizers) if by_width else None,
        **more,
    )


def price_of(model: nn.Module, length: int) -> TokenCost:
    """Return what budgets and rules need to know of a model with sequences of a length."""
    flops = getattr(model, "flops_per_token", None)
    parameters = parameter_counts(model)[0] or sum(p.numel() for p in model.parameters())
    return TokenCost(flops(length) if flops else None, parameters)


def kernel_of(
    config: Config, loss: SummedLoss, layout: Layout, device: torch.device, compiled: bool
) -> str:
    """Return which kernel computes the loss of a run on the device."""
    if (tp := layout.tensor_parallel_size) > 1:
        rows = loss.model.head_weight.shape[0]
        return f"chunked(vocab={rows // tp} of {rows})"
    batch, whole = config.batch, layout.world_size == 1
    together = compiled and (whole or config.parallelism.kind == "ddp")
    tokens = int(batch.micro_batch_size or 1) * batch.sequence_length
    return loss.loss_kernel(device, tokens if together else None)


def solve_run(
    config: Config,
    solved: Config,
    facts: Facts,
    corpus: Corpus,
    cached: Callable[..., Any],
    warnings: list[str],
) -> Run:
    """Return the run, with its sources, all `warnings` and what features know of it.

    `solved` is `config` with every derived value; `cached`: an `assemble.Cache`. Raises
    ConfigError."""
    warmup = {
        name: checked_knob(f"schedule.{name}", config.schedule.get(name))
        for name in ("warmup_steps", "warmup_ratio")
    }
    made_of = cached(versions), cached(source_commit)
    run = solve(config, facts, functools.partial(schedule.warmup_updates, **warmup), *made_of)
    return dataclasses.replace(
        run,
        warnings=(*warnings, *corpus.warnings, *_too_late(config, run)),
        sources=() if corpus.mixed is None else tuple(_sources(corpus.mixed, run)),
        **features.merged("assembly", "known", solved, run, config=solved),
    )


def _sources(mixed: Mixture, run: Run) -> Iterator[SourceShare]:
    """Yield what the run takes of each source. Raises ConfigError for too many epochs of one."""
    for name, (sequences, epochs) in mixed.shares(run.total_sequences, run.sequence_length).items():
        if mixed.max_epochs is not None and epochs > mixed.max_epochs:
            text = f"the run would walk the source {name} {epochs:.4g} times"
            least = math.ceil(epochs)
            raise refuse("out_of_range", "data.max_epochs", mixed.max_epochs, text, least)
        yield SourceShare(name, mixed.tokens[name], sequences, epochs)


def rate_factor(section: Plain, max_steps: int) -> Callable[[int], float]:
    """Return the schedule's factor on the base rate by applied updates, checked at each use.

    Raises ConfigError for bad knobs, and for a factor that is no finite number of at least 0: at
    once where one of `TRIED_UPDATES` updates of the run has it, and where a step uses it.
    """
    schedule_of = bind("schedule", section, {})

    def factor(update: int) -> float:
        found = schedule_of(update, max_steps)
        if isinstance(found, (int, float)) and 0 <= found < math.inf:
            return float(found)
        text = (
            f"returned {found!r} for update {update}; the factor on the base rate, a finite number "
            f"of at least 0, is needed{place_of(section, 'schedule')}"
        )
        raise refuse("bad_own_part", "schedule._target_", section["_target_"], text)

    for update in (*range(0, max_steps - 1, -(-max_steps // TRIED_UPDATES)), max_steps - 1):
        factor(update)
    return factor


def _too_late(config: Config, run: Run) -> Iterator[str]:
    """Yield what is set and does not come before the end of the run, or works against it."""
    if run.warmup_updates > run.max_steps:
        yield (
            f"the warm-up of {run.warmup_updates} updates is longer than the run of "
            f"{run.max_steps}: the base rate is never reached"
        )
    kind = str(config.optimizer.get("name") or config.optimizer["_target_"]).replace("_", "")
    if "schedulefree" in kind.lower():
        yield from _falls(config, run)
    start = fill(config.schedule.get("decay_start"), "schedule.decay_start")
    if isinstance(start, int) and start >= run.max_steps:
        yield (
            f"schedule.decay_start={start}: the run ends after {run.max_steps} updates, so the "
            "rate never decays"
        )
    begin = start if isinstance(start, int) else 0
    steps = fill(config.schedule.get("decay_steps"), "schedule.decay_steps")
    if isinstance(steps, int) and 0 < run.max_steps - begin < steps:
        left = run.max_steps - begin
        yield f"schedule.decay_steps={steps}: the decay takes the {left} updates that are left"
    if text := rule_of(config).too_late(config.clip, run.max_steps):
        yield text
    if config.batch.ramp or config.data.get("stages"):
        yield from _stages_too_late(config, run)


def _falls(config: Config, run: Run) -> Iterator[str]:
    """Yield that the rate falls, where the average of the weights takes the decay's place."""
    factor, last = rate_factor(config.schedule, run.max_steps), run.max_steps - 1
    if factor(last) < factor(min(run.warmup_updates, last)):
        yield (
            "the rate of a schedule-free optimizer falls: its average takes the decay's place "
            "(docs/optimizers.md); schedule=constant with a warm-up is advised"
        )


def _stages_too_late(config: Config, run: Run) -> Iterator[str]:
    """Yield the stages of the batch and of the data that never begin."""
    begun = {stage.from_tokens for stage in run.stages}
    for tokens in ramp_sizes(config.batch.ramp) if config.batch.ramp else ():
        if tokens not in begun and tokens > min(begun):
            why = f"as the run ends at {run.max_tokens:,}"
            if tokens < run.max_tokens:
                why = "as the next one begins with the same step"
            yield f"batch.ramp: the stage from {tokens:,} tokens on never begins, {why}"
    stages = fill(config.data.get("stages"), "data.stages")
    for stage in stages if isinstance(stages, list) else ():
        first = stage.get("from_tokens") if isinstance(stage, dict) else None
        if isinstance(first, int) and first >= run.max_tokens:
            yield (
                f"data.stages: that from {first:,} tokens on never begins, as the run ends at "
                f"{run.max_tokens:,}"
            )
