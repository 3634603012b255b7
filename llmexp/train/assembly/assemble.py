"""Assemble a run from its config in five stages: place, inputs, model, data, run.

Every check is made and every fact is looked up here. `plan` stops after it; a worker goes on to
train. Nothing is written but the token cache of the data.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from llmexp import features
from llmexp.config import variables
from llmexp.config.parts import COMMON
from llmexp.config.rules import LIBRARY_TARGET, asks_rule
from llmexp.config.sections import Config, plain
from llmexp.config.targets import bind, hook, place
from llmexp.config.values import ConfigError, Plain, is_ours
from llmexp.data.sampler import TargetMask
from llmexp.data.stream import Corpus
from llmexp.data.text_bytes import TextBytes
from llmexp.data.tokenizers.base import Tokenizer
from llmexp.models.loss import SummedLoss
from llmexp.optim.held import not_updated
from llmexp.optim.states import Traits, traits_of
from llmexp.run import Parent, Run, check_model
from llmexp.run.batch import solve_batch
from llmexp.system.text import first_of
from llmexp.train.assembly.building import (
    begin_model,
    build_model,
    build_on_meta,
    build_optimizers,
    built_whole,
    draws_by_blocks,
    initial_warnings,
    left_in_evaluation,
    named_optimizer,
    shaped,
)
from llmexp.train.assembly.inputs import (
    build_corpus,
    build_tokenizer,
    document_end,
    uses_tokenizer,
    with_vocabulary,
)
from llmexp.train.assembly.placement import Placement, check_parallel, check_ranks, placed
from llmexp.train.assembly.solving import Bare, price_of, rate_factor, run_facts, solve_run
from llmexp.train.clipping import rule_of
from llmexp.train.feature import Feature, own_name

_T = TypeVar("_T")


@dataclass(frozen=True)
class Parts:
    """Hold all that a run needs, built and checked.

    `config` has every derived value written back, and names variables without their value."""

    config: Config
    run: Run
    device: torch.device
    precision: str
    tokenizer: Tokenizer
    document_end: int | None  # the id that attention and targets do not reach across
    corpus: Corpus
    build_model: Callable[[], nn.Module]  # `begin_model` follows
    begin_model: Callable[..., None]
    build_optimizers: Callable[[nn.Module], list[Optimizer]]
    rate_factor: Callable[[int], float]  # applied updates -> factor on the base rate
    hooks: list[tuple[str, Callable[..., Any]]]
    prepared: Plain  # by features, under their names
    user: Plain  # the section user

    def new_model(self) -> nn.Module:
        """Return the model with its first weights, on the CPU."""
        model = self.build_model()
        self.begin_model(model, torch.device("cpu"))
        return model

    @functools.cached_property
    def text_bytes(self) -> TextBytes:
        """Return how many bytes of text each id of the data stands for."""
        return TextBytes(self.tokenizer, self.corpus.is_text, self.run.vocab_size)

    @property
    def mask(self) -> TargetMask:
        """Return which targets do not count."""
        return TargetMask(self.config.data.get("ignore_id"), self.document_end)


class Cache:
    """Keep what functions returned, for configs with equal arguments, such as points of a sweep."""

    def __init__(self) -> None:
        self._made: dict[str, tuple[Any, Any]] = {}

    def __call__(self, make: Callable[..., _T], *arguments: Any) -> _T:
        """Return `make(*arguments)`, or what it returned for the same arguments before.

        Plain values are the same where they are equal, other arguments only as the same object.
        """
        name = make.__module__, make.__qualname__  # a method is another object at each call
        key = json.dumps([name, *map(_sorted, arguments)], default=id)
        if key not in self._made:
            self._made[key] = make(*arguments), arguments  # kept: no other object gets their ids
        found: _T = self._made[key][0]
        return found


def _at_once(make: Callable[..., _T], *arguments: Any) -> _T:
    """Return `make(*arguments)`, as a `Cache` does."""
    return make(*arguments)


def _sorted(value: Any) -> Any:
    """Return plain values, each mapping as pairs in one order, whatever types its keys have."""
    if isinstance(value, dict):
        return [[repr(key), _sorted(value[key])] for key in sorted(value, key=repr)]
    return [_sorted(one) for one in value] if isinstance(value, list | tuple) else value


def assemble(
    config: Config, cache: Cache | None = None, *, tried: bool = False, parent: Parent | None = None
) -> Parts:
    """Build the parts of a run and solve it; cheap checks come before expensive ones.

    `tried`: a checkpoint of the run is there, so its model and first weights were checked before.
    `parent`: that of a fork, from its run.json. Raises ConfigError."""
    cached = cache or _at_once
    variables.remember_names(plain(config))
    for check in features.offered("assembly", "check", config):
        check(config)
    # place: device, ranks and arithmetic, the batch on these ranks, hooks
    place = placed(config)
    if config.optimizer.get("_target_") == LIBRARY_TARGET:
        config = dataclasses.replace(config, optimizer=named_optimizer(config.optimizer))
    _check_batch(config, dp_size := place.layout.dp_size)
    hooks = own_hooks(config.hooks) if config.hooks else []
    # inputs: tokenizer and vocabulary
    tokenizer = cached(build_tokenizer, config.tokenizer)
    kind, end = place.precision, document_end(tokenizer, config.batch.document_mask)
    # model: without memory, with its optimizers and its loss; a user's own model is tried
    sized, shape = shaped(with_vocabulary(config.model, tokenizer), kind, end, cached)
    model = cached(build_on_meta, *(section := (sized, kind, end)))
    config, rule = _ruled(config, dp_size, model) if asks_rule(config.optimizer) else (config, None)
    solved = _solved(config, place, sized)
    bare = _bare(model, section, solved, place, cached)
    train, length, mask = config.train, config.batch.sequence_length, config.batch.document_mask
    ids = check_model(model, length, tokenizer)
    warnings = list(bare.warnings)
    if not tried and not parent and (solved.fork.run or solved.model.get("init_from") is not None):
        given = solved.model, solved.fork.run, uses_tokenizer(solved.data)
        warnings += cached(initial_warnings, *given, model, tokenizer)
    if not is_ours(solved.model["_target_"]) and not tried:
        warnings += _trial(section, model, tokenizer, ids, solved, place, cached)
    bind("schedule", config.schedule, {})  # refuses wrong knobs
    find_parent = _forked(solved, model) if solved.fork.run and not parent else None
    # data: what features prepare; token ids, prepared and checked against the vocabulary
    prepared = features.merged("assembly", "prepare", solved, tokenizer, cached, config=solved)
    corpus = cached(build_corpus, solved.data, tokenizer, ids or tokenizer.n_vocab, length, mask)
    # run: every derived number
    parent = find_parent(corpus) if find_parent else parent
    facts = run_facts(solved, place, bare, tokenizer, corpus, parent=parent, rule=rule, shape=shape)
    run = solve_run(config, solved, facts, corpus, cached, warnings)
    return Parts(
        config=solved,
        run=run,
        device=place.device,
        precision=place.precision,
        tokenizer=tokenizer,
        document_end=end,
        corpus=corpus,
        build_model=functools.partial(build_model, *section, train.seed),
        begin_model=functools.partial(begin_model, sized, train.seed, train.twin),
        build_optimizers=bare.build_optimizers,
        rate_factor=rate_factor(config.schedule, run.max_steps),
        hooks=hooks,
        prepared=prepared,
        user=variables.fill(config.user, "user"),
    )


def admitted(parts: Parts) -> Parts:
    """Return the parts of a run that is begun, with warnings. Raises ConfigError."""
    for admit in features.offered("assembly", "admit", parts.config):
        parts = admit(parts)
    return parts


def own_hooks(entries: Sequence[Any]) -> list[tuple[str, Callable[..., Any]]]:
    """Return the name and the function of each entry of `hooks`, or its class, which is a Feature.

    Each class has a name of its own in checkpoints. Raises ConfigError.
    """
    hooks, taken = [hook(entry, number) for number, entry in enumerate(entries)], set[str]()
    for name, found in hooks:
        kind = getattr(found, "func", found)
        if not isinstance(kind, type):
            continue
        if not issubclass(kind, Feature):
            raise ConfigError(
                "bad_own_part",
                f"hooks={name}: is a class, and no feature; name a function of (event, context), "
                f"or derive the class from llmexp.train.feature.Feature{place(kind)}",
            )
        stored = own_name(kind)
        if stored in taken or not re.fullmatch("[a-z0-9_]+", stored):
            what = "another hook has too" if stored in taken else "no file can have"
            raise ConfigError(
                "bad_own_part",
                f"hooks={name}: has the name {stored} in checkpoints, which {what}; give the class "
                f'a name of lower-case letters, digits and _, such as name = "mine"{place(kind)}',
            )
        taken.add(stored)
    return hooks


def _check_batch(config: Config, dp_size: int) -> None:
    """Raise ConfigError for a batch that cannot be cut."""
    if not asks_rule(config.optimizer):
        solve_batch(config.batch, dp_size)
        return
    from llmexp.run.rules import check_batch

    check_batch(config, dp_size)


def _ruled(config: Config, dp_size: int, model: nn.Module) -> tuple[Config, str | None]:
    """Return the config with what optimizer.rule sets, and that in words. Raises ConfigError."""
    from llmexp.run.rules import solve_rule

    return solve_rule(config, dp_size, price_of(model, config.batch.sequence_length))


def _trial(
    section: tuple[Any, ...],
    model: nn.Module,
    tokenizer: Tokenizer,
    ids: int | None,
    solved: Config,
    place: Placement,
    cached: Callable[..., Any],
) -> list[str]:
    """Try a user's own model, and return warnings. Raises ConfigError."""
    from llmexp.modes import own_model

    batch = solved.batch.sequence_length, tokenizer.n_vocab, ids
    at = str(place.device), solved.train.deterministic
    return cached(own_model.run, section, model, *batch, *at)


def _forked(solved: Config, model: nn.Module) -> Callable[[Corpus], Parent]:
    """Return what finds the parent of a fork. Raises ConfigError."""
    from llmexp.modes import fork

    return fork.run(solved, model)


def _bare(
    model: nn.Module,
    section: tuple[Any, ...],
    solved: Config,
    place: Placement,
    cached: Callable[..., Any],
) -> Bare:
    """Return what the run trains, without memory; optimizers of the user's are tried.

    Raises ConfigError, also for a rule of clipping or ranks that do not go with them.
    """
    optimizer = solved.optimizer
    own = not is_ours(optimizer.get("_target_"))
    traits, warnings = list[Traits](), list[str]()
    if own:
        from llmexp.modes import own_optimizer

        traits, warnings = cached(own_optimizer.run, optimizer, section)
    building = functools.partial(build_optimizers, optimizer, traits=traits)
    with torch.device("meta"):
        # an optimizer of the user's may change the model that it is given
        given = build_on_meta(*section) if own else model
        optimizers = building(given)
        rule_of(solved)(solved.clip, None, given, optimizers)
        for check in features.offered("assembly", "check_model", solved):
            check(solved, given)
        if known := [one for one in map(traits_of, optimizers) if one is not None]:
            check_ranks(known, place.layout)
        loss = SummedLoss(model)
    if own and (names := not_updated(given, optimizers)):
        text = f"leaves out {len(names)} of the parameters that the model trains, which stay"
        text = f"optimizer: {optimizer['_target_']} {text} as they are: {first_of(names)}"
        warnings = [*warnings, text]
    recomputed = solved.parallelism.activation_checkpointing != "none"
    if recomputed or place.layout.tensor_parallel_size > 1:
        warnings = [*warnings, *check_parallel(solved, place, loss)]
    if not draws_by_blocks(solved.model):
        whole = built_whole(solved.model, model, place.layout)
        warnings = [*warnings, *whole, *left_in_evaluation(model)]
    return Bare(loss, given, optimizers, building, warnings)


def _solved(config: Config, place: Placement, model: Plain) -> Config:
    """Return the config with every derived value written back."""
    layout, kind, wanted = place.layout, config.parallelism.kind, config.checkpoint.async_
    ours = {key: config.data[key] for key in COMMON["data"] if key in config.data}
    return dataclasses.replace(
        config,
        model=model,
        data=config.data | variables.fill(ours, "data"),
        batch=solve_batch(config.batch, layout.dp_size),
        precision=dataclasses.replace(config.precision, kind=place.precision),
        parallelism=dataclasses.replace(
            config.parallelism,
            nproc_per_node=layout.nproc_per_node,
            replicate_size=layout.replicate_size if kind == "hsdp" else None,
            tensor_parallel_size=(
                layout.tensor_parallel_size if kind in ("tp", "fsdp_tp") else None
            ),
        ),
        train=dataclasses.replace(config.train, compile=place.compiled),
        checkpoint=dataclasses.replace(
            config.checkpoint,
            async_=place.device.type == "cuda" if wanted == "auto" else wanted is True,
        ),
    )
