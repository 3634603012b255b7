"""From a config to the parts of a run: tokenizer, data, model, optimizer, schedule, and the solved `Run`.

`plan` stops after this; a worker goes on to train. Nothing is written here but the token cache of the data.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from llmexp import mesh, optim, precision, schedule
from llmexp.config import OPEN_SECTIONS, Config, ConfigError, Parallelism, fill, plain, refuse
from llmexp.data.files import cpu_count
from llmexp.data.stream import Corpus, as_corpus
from llmexp.data.tokenizers import Tokenizer, as_tokenizer
from llmexp.environment import redacted
from llmexp.metrics import hardware
from llmexp.models.loss import WindowLoss
from llmexp.models.memory import saved_bytes
from llmexp.models.recompute import blocks_of
from llmexp.run import Facts, Layout, Run, check_model, check_split, solve, solve_batch, solve_layout, solve_rates
from llmexp.targets import bind, described, hook, locate, place
from llmexp.trial import try_model

T = TypeVar("T")
DATA_COMMON = ("shuffle", "ignore_id")  # knobs of every data source that the loop reads, not the source
RATE_RULE = ("lr_rule", "reference_batch")  # knobs of every optimizer that `solve_rates` reads, not the optimizer
# Of memory: what backward passes need beside what forward passes keep, and the share that may be planned with.
TEMPORARY, ROOM = 1.25, 0.8


@dataclass(frozen=True)
class Parts:
    """What a run is made of. `config` has every derived value written back, and names variables without their value."""

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
    return torch.device("cuda" if kind == "cuda" or (kind == "auto" and torch.cuda.is_available()) else "cpu")


def resolve_layout(config: Config, device: torch.device) -> Layout:
    """Where the ranks stand. Raises ConfigError for more than the devices there are and for what does not divide."""
    wanted, kind = config.parallelism.nproc_per_node, config.parallelism.kind
    there = torch.cuda.device_count() if device.type == "cuda" else None
    ranks = wanted or (1 if kind == "single" else there) or 1
    if there is not None and ranks > there:
        raise refuse("parallelism.nproc_per_node", ranks, f"there are {there} CUDA devices on this host", there)
    if config.parallelism.backend == "nccl" and device.type != "cuda":
        raise refuse("parallelism.backend", "nccl", f"needs CUDA devices; this run computes on {device.type}", "gloo")
    layout = solve_layout(config.parallelism, ranks)
    if layout.nnodes == 1 and layout.world_size > 1 and "WORLD_SIZE" not in os.environ:
        try:
            mesh.check_loopback()
        except ValueError as error:
            raise refuse("parallelism.nproc_per_node", ranks, str(error)) from None
    return layout


def filled(config: Config) -> Config:
    """The config with the values of the variables that its open sections name, which is what the functions below take.
    The one place where they are filled in. Raises ConfigError."""
    return dataclasses.replace(config, **{name: fill(getattr(config, name), name) for name in OPEN_SECTIONS})


class Shared:
    """What configs that are assembled one after the other have in common, such as the points of a sweep."""

    def __init__(self) -> None:
        self._made: dict[str, Any] = {}

    def once(self, what: str, deciding: Any, make: Callable[[], T]) -> T:
        """Return `make()`, or what it made before from the same `deciding` values of a config."""
        key = json.dumps([what, deciding], sort_keys=True, default=repr)
        if key not in self._made:
            self._made[key] = make()
        found: T = self._made[key]
        return found


def assemble(config: Config, *, write: bool, shared: Shared | None = None, tried: bool = False) -> Parts:
    """Checks everything and looks up every fact; cheap checks come before expensive ones.

    With `write` false no token cache is written and the corpus may know its length only. `tried`: a model of the user's
    has had its trial pass before the run's folder was made. Raises ConfigError.
    """
    saved, config, once = config, filled(config), (shared or Shared()).once
    device = resolve_device(config.train.device)
    layout = resolve_layout(config, device)
    batch = solve_batch(config.batch, layout.dp_size)
    assert batch.real_batch_size is not None
    optimizer, rates = solve_rates(config.optimizer, batch.real_batch_size)
    hooks = [hook(entry, number) for number, entry in enumerate(config.hooks)]
    kind, reason = _precision(config, device)
    if config.train.compile and device.type == "cpu" and not (shutil.which("g++") or shutil.which("clang++")):
        raise refuse("train.compile", True, "compiling for the CPU needs a C++ compiler (g++)", "false")

    tokenizer, model_config = once("tokenizer", [config.tokenizer, config.model], lambda: build_tokenizer(config))
    build_bare = bind("model", model_config, {})

    def build_model() -> nn.Module:
        torch.manual_seed(config.train.seed)
        model = build_bare()
        dotted = model_config["_target_"]
        if not isinstance(model, nn.Module):
            text = f"returned {type(model).__name__}, not a torch.nn.Module"
            raise refuse("model._target_", dotted, f"{text}{_place_of(model_config, 'model')}")
        if not any(p.requires_grad for p in model.parameters()):
            raise refuse("model._target_", dotted, f"has no parameters to train{_place_of(model_config, 'model')}")
        model = model.to(precision.parameter_dtype(kind))
        precision.nudge(model, config.train.seed, config.train.twin)
        return model

    def build_optimizers(model: nn.Module) -> list[Optimizer]:
        built = bind("optimizer", {k: v for k, v in optimizer.items() if k not in RATE_RULE}, {})(model)
        try:
            return optim.as_list(built)
        except ValueError as error:
            raise ConfigError(f"{error}{_place_of(config.optimizer, 'optimizer')}") from None

    with torch.device("meta"):
        # An optimizer of the user's own may change the model that it is given.
        own = None if str(optimizer.get("_target_")).startswith("llmexp.") else optimizer
        model = once("model", [model_config, kind, own], build_model)
        build_optimizers(model)  # refuses bad knobs now
        loss = WindowLoss(model)
    _check_parallel(config, layout, model_config, loss)
    kernel, tp = loss.loss_kernel(device), layout.tensor_parallel_size
    if tp > 1:
        kernel = f"chunked(vocab={loss.model.head_weight.shape[0] // tp} of {loss.model.head_weight.shape[0]})"
    flops = getattr(model, "flops_per_token", None)
    vocab_size = getattr(model, "vocab_size", None)
    positions = getattr(model, "max_position_embeddings", None)
    dotted = str(model_config["_target_"])
    # Before the data are prepared for nothing.
    check_model(batch.sequence_length, positions, vocab_size, tokenizer.name, tokenizer.n_vocab)
    ids = vocab_size or tokenizer.n_vocab
    deciding = [config.data, config.tokenizer, ids, batch.sequence_length, write]
    if not (dotted.startswith("llmexp.") or tried):
        sizes = (batch.sequence_length, tokenizer.n_vocab, model_config.get("vocab_size") or vocab_size)
        meta = shared is not None or not write  # a process that trains nothing
        once("trial", [model_config, kind, *sizes], lambda: try_model(dotted, model, build_model, *sizes, device, meta))
    corpus = once("corpus", deciding, lambda: build_corpus(config, tokenizer, ids, write=write))
    facts = Facts(
        parallelism=config.parallelism.kind,
        layout=layout,
        threads_per_rank=threads_per_rank(layout.nproc_per_node),
        train_tokens=len(corpus.train),
        val_tokens=len(corpus.val) if corpus.val is not None else 0,
        data=redacted(corpus.description),
        model=redacted(_label(model_config)),
        parameters=sum(p.numel() for p in model.parameters()),
        max_position_embeddings=positions,
        flops_per_token=flops(batch.sequence_length) if flops else None,
        flops_formula=getattr(model, "flops_formula", None),
        loss_kernel=kernel,
        tokenizer=redacted(tokenizer.name),
        tokenizer_vocab_size=tokenizer.n_vocab,
        vocab_size=vocab_size,
        device=device.type,
        device_name=hardware.device_name(device),
        precision=kind,
        precision_reason=reason,
        rates=rates,
    )
    scheduled = {k: v for k, v in config.schedule.items() if k in ("warmup_steps", "warmup_ratio")}

    def warmup(total: int) -> int:
        try:
            return schedule.warmup_updates(total, **scheduled)
        except ValueError as error:
            raise ConfigError(str(error)) from None

    software = once("software", None, lambda: (hardware.versions(), hardware.commit()))
    run = solve(config, facts, warmup, *software)
    if run.warmup_updates > run.max_steps:
        text = (
            f"the warm-up of {run.warmup_updates} updates is longer than the run of {run.max_steps}: "
            "the base rate is never reached"
        )
        run = dataclasses.replace(run, facts=dataclasses.replace(facts, warnings=(*facts.warnings, text)))
    factor = bind("schedule", config.schedule, {})

    def rate_factor(update: int) -> float:
        return factor(update, run.max_steps)

    for update in (0, run.max_steps - 1):  # refuses bad knobs now
        if not isinstance(found := rate_factor(update), (int, float)):
            at = _place_of(config.schedule, "schedule")
            text = f"returned {found!r} for update {update}; the factor on the base rate, a number, is needed{at}"
            raise refuse("schedule._target_", config.schedule["_target_"], text)
    vocabulary = {k: v for k, v in model_config.items() if k == "vocab_size" and saved.model[k] is None}
    solved = dataclasses.replace(
        saved,
        model=saved.model | vocabulary,
        data=saved.data | {key: config.data[key] for key in DATA_COMMON if key in config.data},
        optimizer=saved.optimizer | {k: v for k, v in optimizer.items() if v != config.optimizer[k]},
        batch=batch,
        precision=dataclasses.replace(config.precision, kind=kind),
        parallelism=solved_parallelism(config.parallelism, layout),
    )
    if solved.metrics.single_rank_rates is not None:
        run = dataclasses.replace(run, facts=with_single_rank_rate(solved, run.facts))
    return Parts(
        solved, run, device, kind, tokenizer, corpus, build_model, build_optimizers, rate_factor, hooks, config.user
    )


def larger_micro_batch(parts: Parts) -> str | None:
    """In words, with its figures: the largest micro-batch that would do with less accumulation and surely fits into
    memory, by an upper estimate. None without accumulation, where none fits, and where memory is not known."""
    run, there = parts.run, hardware.memory_bytes(parts.device)
    if run.gradient_accumulation_steps == 1 or there is None:
        return None
    with torch.device("meta"):
        model = parts.build_model()
    saved = saved_bytes(model, run.sequence_length, whole_logits=not run.facts.loss_kernel.startswith("chunked"))
    if not saved:
        return None
    held = 4 * precision.parameter_dtype(parts.precision).itemsize  # weight, gradient and two moments
    ranks = 1 if parts.device.type == "cuda" else run.facts.layout.nproc_per_node
    cuts = [n for n in range(1, run.gradient_accumulation_steps) if run.gradient_accumulation_steps % n == 0]
    for accumulation in cuts:
        micro = run.micro_batch_size * run.gradient_accumulation_steps // accumulation
        needed = ranks * (held * run.facts.parameters + TEMPORARY * micro * saved)
        if needed > ROOM * there:
            continue
        share = f"{held} bytes x {run.facts.parameters:,} parameters + {TEMPORARY} x {micro} x {saved / 2**20:,.1f} MiB"
        times = f" x {ranks} ranks" if ranks > 1 else ""
        cut = f"gradient_accumulation_steps {accumulation}" if accumulation > 1 else "no accumulation"
        return (
            f"batch.micro_batch_size={micro} with {cut} computes the same, but for rounding and the random numbers of "
            f"dropout, and fits: at most about {needed / 2**30:,.3g} of {there / 2**30:,.3g} GiB ({share} that the "
            f"forward pass of a sequence keeps{times})"
        )
    return None


def with_single_rank_rate(config: Config, facts: Facts) -> Facts:
    """The facts with the rate that one rank had at the same work; with a warning where it was not measured."""
    where = config.metrics.single_rank_rates
    assert where is not None
    if config.parallelism.kind == "single":
        text = "a run with parallelism=single is not held against itself; for several ranks use parallelism=ddp"
        raise refuse("metrics.single_rank_rates", where, text, "null")
    from llmexp.compare.throughput import single_rank_rate

    rate, why = single_rank_rate(where, plain(config), dataclasses.asdict(facts))
    text = f"metrics.single_rank_rates={where}: {why}; the rows have no scaling_efficiency"
    return dataclasses.replace(
        facts, single_rank_rate=rate, warnings=(*facts.warnings, text) if why else facts.warnings
    )


def build_tokenizer(config: Config) -> tuple[Tokenizer, dict[str, Any]]:
    """The tokenizer of a filled config, and the model section with the vocabulary that follows where it is null."""
    found = bind("tokenizer", config.tokenizer, {})()
    try:
        tokenizer = as_tokenizer(found)
    except Exception as error:  # of the user's code
        dotted = config.tokenizer["_target_"]
        text = str(error) if isinstance(error, ValueError) else f"failed: {described(error)}"
        raise refuse("tokenizer._target_", dotted, f"{text}{_place_of(config.tokenizer, 'tokenizer')}") from error
    model_config = dict(config.model)
    if model_config.get("vocab_size", 0) is None:
        model_config["vocab_size"] = -(-tokenizer.n_vocab // 64) * 64  # a multiple of 64 suits the kernels
    return tokenizer, model_config


def build_corpus(config: Config, tokenizer: Tokenizer, vocab_size: int, *, write: bool) -> Corpus:
    """The data of a filled config, checked against the vocabulary; prepared with `write`. Raises ConfigError."""
    data = config.data
    _check_common_data(data, vocab_size)
    offered = {
        "tokenizer": tokenizer,
        "vocab_size": vocab_size,
        "sequence_length": config.batch.sequence_length,
        "write": write,
    }
    knobs = {k: v for k, v in data.items() if k not in DATA_COMMON}
    found = bind("data", knobs, offered)()
    try:
        return as_corpus(found, vocab_size=vocab_size)
    except ValueError as error:
        raise ConfigError(f"{error}{_place_of(data, 'data')}") from None


def _place_of(section: dict[str, Any], name: str) -> str:
    return place(locate(f"{name}._target_", section["_target_"]))


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


def _check_parallel(config: Config, layout: Layout, model_config: dict[str, Any], loss: WindowLoss) -> None:
    """What of the model and the optimizer the ranks cannot share. Raises ConfigError."""
    p, tp = config.parallelism, layout.tensor_parallel_size
    if p.activation_checkpointing != "none" and not blocks_of(loss.model):
        text = "computes blocks again, and the model has no list of them named `blocks`"
        raise refuse("parallelism.activation_checkpointing", p.activation_checkpointing, text, "none")
    if tp == 1:
        return
    check_split(model_config, tp)
    if not mesh.tensor_parallel_plan(loss.model) or not hasattr(loss.model, "head_weight"):
        text = f"there is no plan for splitting the layers of {model_config['_target_']} over ranks"
        raise refuse("parallelism", p.kind, text, "fsdp")
    target = str(config.optimizer.get("_target_"))
    if not target.startswith("llmexp."):
        text = f"{target} is not known to take the mix of split and whole parameters of parallelism={p.kind}"
        raise refuse("optimizer._target_", target, text, "llmexp.optim.adamw")


def _precision(config: Config, device: torch.device) -> tuple[str, str]:
    try:
        return precision.choose(config.precision.kind, device)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def _check_common_data(data: dict[str, Any], ids: int) -> None:
    shuffle, ignore = data.get("shuffle", True), data.get("ignore_id")
    if not isinstance(shuffle, bool):
        raise refuse("data.shuffle", shuffle, "true or false is needed", "false")
    if ignore is not None and (isinstance(ignore, bool) or not isinstance(ignore, int) or not 0 <= ignore < ids):
        raise refuse("data.ignore_id", ignore, f"a token id below {ids}, or null, is needed", 0)


def _label(model: dict[str, Any]) -> str:
    name = str(model["_target_"]).rpartition(".")[2]
    layers = "layer" if model.get("n_layers") == 1 else "layers"
    sizes = [f"{v} {k}" for k, v in ((layers, model.get("n_layers")), ("wide", model.get("d_model"))) if v]
    width, inner = model.get("d_model"), model.get("d_ff")
    if isinstance(width, int) and isinstance(inner, int) and width:  # a new width alone leaves the MLP as it was
        sizes.append(f"d_ff {inner:,} = {inner / width:.3g} x d_model")
    return ", ".join([name, *sizes])
