"""From a config to the parts of a run: tokenizer, data, model, optimizer, schedule, and the solved
`Run`.

`plan` stops after this; a worker goes on to train. Nothing is written here but the token cache of
the data.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from llmexp import mesh, precision, schedule
from llmexp.assembly.parts import (
    DATA_COMMON,
    Shared,
    build_corpus,
    build_model,
    build_optimizers,
    build_tokenizer,
    filled,
    label_of,
    place_of,
)
from llmexp.assembly.targets import bind, hook
from llmexp.assembly.trial import try_model
from llmexp.compare.throughput import single_rank_rate
from llmexp.config import Batch, Config, ConfigError, Parallelism, plain, refuse
from llmexp.data.files import cpu_count
from llmexp.data.stream import Corpus
from llmexp.data.tokenizers import Tokenizer
from llmexp.metrics import hardware
from llmexp.models.loss import WindowLoss
from llmexp.models.memory import saved_bytes
from llmexp.models.recompute import blocks_of
from llmexp.redact import redacted
from llmexp.run import (
    Facts,
    Layout,
    Run,
    check_model,
    check_split,
    solve,
    solve_batch,
    solve_layout,
    solve_rates,
)

# Of memory: what backward passes need beside what forward passes keep, and the share that may be
# planned with.
TEMPORARY, ROOM = 1.25, 0.8


@dataclass(frozen=True)
class Parts:
    """What a run is made of. `config` has every derived value written back, and names variables
    without their value."""

    config: Config
    run: Run
    device: torch.device
    precision: str
    tokenizer: Tokenizer
    corpus: Corpus
    build_model: Callable[[], nn.Module]
    build_optimizers: Callable[[nn.Module], list[Optimizer]]
    rate_factor: Callable[[int], float]  # applied updates -> factor on the base rate
    hooks: list[tuple[str, Callable[..., Any]]]
    user: dict[str, Any]  # the section user


def resolve_device(kind: str) -> torch.device:
    if kind == "cuda" and not torch.cuda.is_available():
        raise refuse("train.device", kind, "no CUDA device is visible", "cpu")
    return torch.device(
        "cuda" if kind == "cuda" or (kind == "auto" and torch.cuda.is_available()) else "cpu"
    )


def resolve_layout(config: Config, device: torch.device) -> Layout:
    """Return where the ranks stand. Raises ConfigError for more than the devices there are and for
    what does not divide."""
    wanted, kind = config.parallelism.nproc_per_node, config.parallelism.kind
    there = torch.cuda.device_count() if device.type == "cuda" else None
    ranks = wanted or (1 if kind == "single" else there) or 1
    if there is not None and ranks > there:
        raise refuse(
            "parallelism.nproc_per_node",
            ranks,
            f"there are {there} CUDA devices on this host",
            there,
        )
    if config.parallelism.backend == "nccl" and device.type != "cuda":
        raise refuse(
            "parallelism.backend",
            "nccl",
            f"needs CUDA devices; this run computes on {device.type}",
            "gloo",
        )
    layout = solve_layout(config.parallelism, ranks)
    if layout.nnodes == 1 and layout.world_size > 1 and "WORLD_SIZE" not in os.environ:
        try:
            mesh.check_loopback()
        except ValueError as error:
            raise refuse("parallelism.nproc_per_node", ranks, str(error)) from None
    return layout


def assemble(
    config: Config, *, write: bool, shared: Shared | None = None, tried: bool = False
) -> Parts:
    """Check everything and look up every fact; cheap checks come before expensive ones.

    With `write` false no token cache is written and the corpus may know its length only. `tried`: a
    model of the user's has had its trial pass before the run's folder was made. Raises ConfigError.
    """
    saved, config, once = config, filled(config), (shared or Shared()).once
    device = resolve_device(config.train.device)
    layout = resolve_layout(config, device)
    batch = solve_batch(config.batch, layout.dp_size)
    assert batch.real_batch_size is not None
    optimizer, rates = solve_rates(config.optimizer, batch.real_batch_size)
    hooks = [hook(entry, number) for number, entry in enumerate(config.hooks)]
    chosen = _precision(config, device)
    _check_compiler(config, device)

    tokenizer, model_config = once(
        "tokenizer", [config.tokenizer, config.model], lambda: build_tokenizer(config)
    )
    make_model = functools.partial(
        build_model, bind("model", model_config, {}), model_config, chosen[0], config.train
    )
    make_optimizers = functools.partial(build_optimizers, optimizer)
    loss = _on_meta(once, [model_config, chosen[0]], optimizer, make_model, make_optimizers)
    _check_parallel(config, layout, model_config, loss)
    # Before the data are prepared for nothing.
    positions, vocab_size = (
        getattr(loss.model, key, None) for key in ("max_position_embeddings", "vocab_size")
    )
    check_model(batch.sequence_length, positions, vocab_size, tokenizer.name, tokenizer.n_vocab)
    if _own(model_config) and not tried:
        sizes = (
            batch.sequence_length,
            tokenizer.n_vocab,
            model_config.get("vocab_size") or vocab_size,
        )
        meta = shared is not None or not write  # a process that trains nothing
        trial = functools.partial(
            try_model, str(model_config["_target_"]), loss.model, make_model, *sizes, device, meta
        )
        once("trial", [model_config, chosen[0], _own(optimizer), *sizes], trial)
    ids = vocab_size or tokenizer.n_vocab
    deciding = [config.data, config.tokenizer, ids, batch.sequence_length, write]
    corpus = once("corpus", deciding, lambda: build_corpus(config, tokenizer, ids, write=write))

    software = once("software", None, lambda: (hardware.versions(), hardware.commit()))
    facts = _facts(config, layout, device, chosen, loss, model_config, tokenizer, corpus, rates)
    run = solve(config, facts, functools.partial(_warmup, config.schedule), *software)
    rate_factor = _rate_factor(config.schedule, run.max_steps)
    solved = _solved(saved, config, model_config, optimizer, batch, chosen[0], layout)
    return Parts(
        solved, _completed(solved, run), device, chosen[0], tokenizer, corpus, make_model,
        make_optimizers, rate_factor,
        hooks, config.user,
    )  # fmt: skip


def _own(section: dict[str, Any]) -> dict[str, Any] | None:
    """Return the section where it names a function of the user's, None where it is one of ours."""
    return None if str(section.get("_target_")).startswith("llmexp.") else section


def _check_compiler(config: Config, device: torch.device) -> None:
    if (
        config.train.compile
        and device.type == "cpu"
        and not (shutil.which("g++") or shutil.which("clang++"))
    ):
        raise refuse(
            "train.compile", True, "compiling for the CPU needs a C++ compiler (g++)", "false"
        )


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


def _facts(
    config: Config,
    layout: Layout,
    device: torch.device,
    chosen: tuple[str, str],
    loss: WindowLoss,
    model_config: dict[str, Any],
    tokenizer: Tokenizer,
    corpus: Corpus,
    rates: str | None,
) -> Facts:
    """Return what the run is solved from. `chosen`: the precision, and why."""
    model, kernel, tp = loss.model, loss.loss_kernel(device), layout.tensor_parallel_size
    if tp > 1:
        kernel = (
            f"chunked(vocab={model.head_weight.shape[0] // tp} of {model.head_weight.shape[0]})"
        )
    flops = getattr(model, "flops_per_token", None)
    return Facts(
        parallelism=config.parallelism.kind,
        layout=layout,
        threads_per_rank=threads_per_rank(layout.nproc_per_node),
        train_tokens=len(corpus.train),
        val_tokens=len(corpus.val) if corpus.val is not None else 0,
        data=redacted(corpus.description),
        model=redacted(label_of(model_config)),
        parameters=sum(p.numel() for p in model.parameters()),
        max_position_embeddings=getattr(model, "max_position_embeddings", None),
        flops_per_token=flops(config.batch.sequence_length) if flops else None,
        flops_formula=getattr(model, "flops_formula", None),
        loss_kernel=kernel,
        tokenizer=redacted(tokenizer.name),
        tokenizer_vocab_size=tokenizer.n_vocab,
        vocab_size=getattr(model, "vocab_size", None),
        device=device.type,
        device_name=hardware.device_name(device),
        precision=chosen[0],
        precision_reason=chosen[1],
        rates=rates,
    )


def _warmup(section: dict[str, Any], total: int) -> int:
    """Return the updates of warm-up of a schedule over `total` updates. Raise ConfigError."""
    try:
        return schedule.warmup_updates(
            total, section.get("warmup_steps"), section.get("warmup_ratio")
        )
    except ValueError as error:
        raise ConfigError(str(error)) from None


def _rate_factor(section: dict[str, Any], max_steps: int) -> Callable[[int], float]:
    """Return the schedule's factor on the base rate by applied updates. Raise ConfigError for bad
    knobs."""
    factor = bind("schedule", section, {})

    def rate_factor(update: int) -> float:
        found: float = factor(update, max_steps)
        return found

    for update in (0, max_steps - 1):
        if not isinstance(found := rate_factor(update), (int, float)):
            text = (
                f"returned {found!r} for update {update}; the factor on the base rate, a "
                "number, is needed"
            )
            raise refuse(
                "schedule._target_", section["_target_"], f"{text}{place_of(section, 'schedule')}"
            )
    return rate_factor


def _solved(
    saved: Config, config: Config, model: dict[str, Any], optimizer: dict[str, Any], batch: Batch,
    kind: str,
    layout: Layout,
) -> Config:  # fmt: skip
    """Return the config `saved` with every derived value written back. `config` is the same one,
    filled."""
    vocabulary = {k: v for k, v in model.items() if k == "vocab_size" and saved.model[k] is None}
    return dataclasses.replace(
        saved,
        model=saved.model | vocabulary,
        data=saved.data | {key: config.data[key] for key in DATA_COMMON if key in config.data},
        optimizer=saved.optimizer
        | {k: v for k, v in optimizer.items() if v != config.optimizer[k]},
        batch=batch,
        precision=dataclasses.replace(config.precision, kind=kind),
        parallelism=solved_parallelism(config.parallelism, layout),
    )


def _completed(config: Config, run: Run) -> Run:
    """Return the run with a warning of a warm-up without an end, and with the rate of a single
    rank."""
    facts = run.facts
    if run.warmup_updates > run.max_steps:
        text = (
            f"the warm-up of {run.warmup_updates} updates is longer than the run of "
            f"{run.max_steps}: the base rate is never reached"
        )
        facts = dataclasses.replace(facts, warnings=(*facts.warnings, text))
    if config.metrics.single_rank_rates is not None:
        facts = with_single_rank_rate(config, facts)
    return dataclasses.replace(run, facts=facts)


def larger_micro_batch(parts: Parts) -> str | None:
    """In words, with its figures: the largest micro-batch that would do with less accumulation and
    surely fits into memory, by an upper estimate. None without accumulation, where none fits, and
    where memory is not known."""
    run, there = parts.run, hardware.memory_bytes(parts.device)
    if run.gradient_accumulation_steps == 1 or there is None:
        return None
    with torch.device("meta"):
        model = parts.build_model()
    saved = saved_bytes(
        model, run.sequence_length, whole_logits=not run.facts.loss_kernel.startswith("chunked")
    )
    if not saved:
        return None
    # weight, gradient and two moments
    held = 4 * precision.parameter_dtype(parts.precision).itemsize
    ranks = 1 if parts.device.type == "cuda" else run.facts.layout.nproc_per_node
    cuts = [
        n
        for n in range(1, run.gradient_accumulation_steps)
        if run.gradient_accumulation_steps % n == 0
    ]
    for accumulation in cuts:
        micro = run.micro_batch_size * run.gradient_accumulation_steps // accumulation
        needed = ranks * (held * run.facts.parameters + TEMPORARY * micro * saved)
        if needed > ROOM * there:
            continue
        share = (
            f"{held} bytes x {run.facts.parameters:,} parameters + {TEMPORARY} x {micro} x "
            f"{saved / 2**20:,.1f} MiB"
        )
        times = f" x {ranks} ranks" if ranks > 1 else ""
        cut = (
            f"gradient_accumulation_steps {accumulation}" if accumulation > 1 else "no accumulation"
        )
        return (
            f"batch.micro_batch_size={micro} with {cut} computes the same, but for rounding and "
            f"the random numbers of dropout, and fits: at most about {needed / 2**30:,.3g} of "
            f"{there / 2**30:,.3g} GiB ({share} that the forward pass of a sequence keeps{times})"
        )
    return None


def with_single_rank_rate(config: Config, facts: Facts) -> Facts:
    """Return the facts with the rate that one rank had at the same work; with a warning where it
    was not measured."""
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


def threads_per_rank(ranks: int) -> int:
    """CPU threads of each of a host's ranks: $OMP_NUM_THREADS, else their share of the cores."""
    given = os.environ.get("OMP_NUM_THREADS", "")
    return int(given) if given.isdecimal() and int(given) else max(1, cpu_count() // ranks)


def solved_parallelism(p: Parallelism, layout: Layout) -> Parallelism:
    """With what was null and has a meaning written back."""
    return dataclasses.replace(
        p,
        nproc_per_node=layout.nproc_per_node,
        replicate_size=layout.replicate_size if p.kind == "hsdp" else None,
        tensor_parallel_size=layout.tensor_parallel_size if p.kind in ("tp", "fsdp_tp") else None,
    )


def _check_parallel(
    config: Config, layout: Layout, model_config: dict[str, Any], loss: WindowLoss
) -> None:
    """Refuse a model or an optimizer that the ranks cannot share. Raises ConfigError."""
    p, tp = config.parallelism, layout.tensor_parallel_size
    if p.activation_checkpointing != "none" and not blocks_of(loss.model):
        text = "computes blocks again, and the model has no list of them named `blocks`"
        raise refuse(
            "parallelism.activation_checkpointing", p.activation_checkpointing, text, "none"
        )
    if tp == 1:
        return
    check_split(model_config, tp)
    if not mesh.tensor_parallel_plan(loss.model) or not hasattr(loss.model, "head_weight"):
        text = f"there is no plan for splitting the layers of {model_config['_target_']} over ranks"
        raise refuse("parallelism", p.kind, text, "fsdp")
    target = str(config.optimizer.get("_target_"))
    if not target.startswith("llmexp."):
        text = (
            f"{target} is not known to take the mix of split and whole parameters of "
            f"parallelism={p.kind}"
        )
        raise refuse("optimizer._target_", target, text, "llmexp.optim.adamw")


def _precision(config: Config, device: torch.device) -> tuple[str, str]:
    try:
        return precision.choose(config.precision.kind, device)
    except ValueError as error:
        raise ConfigError(str(error)) from None
