"""From a config to the parts of a run: tokenizer, data, model, optimizer, schedule, and the solved
`Run`.

`plan` stops after this; a worker goes on to train. Nothing is written here but the token cache of
the data.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from llmexp.data.reader import TargetMask
from llmexp.data.stream import Corpus
from llmexp.data.tokenizers import Tokenizer
from llmexp.exchange.families import TRANSFORMERS
from llmexp.models.loss import WindowLoss
from llmexp.run import Facts, Parent, Run, check_model
from llmexp.run.batch import solve_batch, solve_rates
from llmexp.run.layout import Layout
from llmexp.settings.config import Config
from llmexp.settings.targets import hook
from llmexp.system import hardware
from llmexp.system.redact import redacted
from llmexp.tasks.scoring import Task
from llmexp.tracker import stores
from llmexp.train.assembly.inputs import (
    Shared,
    build_tokenizer,
    document_end,
    filled,
)
from llmexp.train.assembly.parent import find_parent
from llmexp.train.assembly.parts import (
    build_model,
    build_optimizers,
    initial_notes,
    label_of,
    model_maker,
    sizes_in,
    tasks_of,
)
from llmexp.train.assembly.placement import (
    Placement,
    check_parallel,
    placed,
    threads_per_rank,
)
from llmexp.train.assembly.solving import corpus_of, facts_of_data, rate_factor, solve_run
from llmexp.train.assembly.trial import try_model


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

    @functools.cached_property
    def foreign_code(self) -> bool:
        """Return whether code that is not ours runs in a step: hooks, own parts, transformers."""
        config = self.config
        parts = (config.model, config.data, config.tokenizer, config.optimizer, config.schedule)
        foreign = config.model.get("_target_") == TRANSFORMERS or any(map(_own, parts))
        return bool(self.hooks) or foreign

    @property
    def hidden(self) -> TargetMask:
        """Return which targets do not count."""
        return TargetMask(self.config.data.get("ignore_id"), self.document_end)


def assemble(
    config: Config,
    *,
    write: bool,
    shared: Shared | None = None,
    tried: bool = False,
    parent: Parent | None = None,
) -> Parts:
    """Check everything and look up every fact; cheap checks come before expensive ones.

    `write` is false in a process that trains nothing. `tried`: a model of the user's has had its
    trial pass before the run's folder was made. `parent`: that of a fork, from its run.json. Raises
    ConfigError."""
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
        sizes = (length, tokenizer.n_vocab, config.model.get("vocab_size") or vocab_size)
        asked = (str(config.model["_target_"]), loss.model, make_model, *sizes, place)
        tried_as = [*deciding, _own(optimizer), *sizes, place.deterministic]
        once("trial", tried_as, lambda: try_model(*asked))
    tasks = tasks_of(once, config, tokenizer)
    corpus = corpus_of(once, config, tokenizer, vocab_size or tokenizer.n_vocab)
    more = facts_of_data(config, tokenizer, corpus) | initial | {"rates": rates}
    parent = parent or find_parent(dataclasses.replace(saved, batch=batch), loss.model, corpus)
    facts = _facts(config, place, loss, more | {"parent": parent})
    solved, run = solve_run(saved, config, optimizer, facts, corpus, once, place.compiled)
    return Parts(
        config=solved,
        run=run,
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
    if run is None and given is None and config.model["_target_"] != TRANSFORMERS:
        return {}
    deciding = [config.model, config.tokenizer, config.data["_target_"], run]
    asked = config, model, tokenizer
    found = () if tried else tuple(once("initial", deciding, lambda: initial_notes(*asked)))
    initial = f"{given} ({sizes_in(config.model)})" if run is None and given else None
    return {"initial": initial, "warnings": found}


def kernel_of(
    config: Config, loss: WindowLoss, layout: Layout, device: torch.device, compiled: bool
) -> str:
    """Return which kernel computes the loss of a run on the device."""
    if (tp := layout.tensor_parallel_size) > 1:
        rows = loss.model.head_weight.shape[0]
        return f"chunked(vocab={rows // tp} of {rows})"
    batch, whole = config.batch, layout.world_size == 1
    together = compiled and (whole or config.parallelism.kind == "ddp")
    tokens = int(batch.micro_batch_size or 1) * batch.sequence_length
    return loss.loss_kernel(device, tokens if together else None)


def _facts(config: Config, place: Placement, loss: WindowLoss, more: dict[str, Any]) -> Facts:
    """Return what the run is solved from. `more`: the facts that are of neither model nor
    device."""
    model = loss.model
    flops = getattr(model, "flops_per_token", None)
    return Facts(
        parallelism=config.parallelism.kind,
        layout=place.layout,
        threads_per_rank=threads_per_rank(place.layout.nproc_per_node),
        model=redacted(label_of(config.model)),
        parameters=sum(p.numel() for p in model.parameters()),
        max_position_embeddings=getattr(model, "max_position_embeddings", None),
        flops_per_token=flops(config.batch.sequence_length) if flops else None,
        flops_formula=getattr(model, "flops_formula", None),
        loss_kernel=kernel_of(config, loss, place.layout, place.device, place.compiled),
        vocab_size=getattr(model, "vocab_size", None),
        device=place.device.type,
        device_name=hardware.device_name(place.device),
        precision=place.precision,
        precision_reason=place.reason,
        compiled=place.compiled_because,
        **more,
    )
