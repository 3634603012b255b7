"""`Run`: every derived number of a run, computed and checked in one place, saved as run.json.

Nothing is rounded silently: what does not multiply out is refused with the nearest totals that
would. This file imports the standard library and `config` only.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from typing import Any

from llmexp.config import Batch, Config, ConfigError, Parallelism, Train, refuse

DEFAULT_MICRO_BATCH_SIZE = 8  # used when the batch section does not determine it
BUDGETS = ("train.max_steps", "train.max_epochs", "train.max_tokens")
DEFAULT_MAX_STEPS = 300  # used when no budget is given


@dataclass(frozen=True)
class Layout:
    """How ranks are arranged: hosts x ranks on each = replicas x shards x tensor-parallel ranks."""

    nnodes: int
    nproc_per_node: int
    replicate_size: int  # groups of ranks that each hold the whole model
    shard_size: int  # ranks over which parameters, gradients and optimizer state are spread (FSDP)
    tensor_parallel_size: int  # ranks that compute each layer together; they see the same sequences

    @property
    def world_size(self) -> int:
        return self.nnodes * self.nproc_per_node

    @property
    def dp_size(self) -> int:
        return self.replicate_size * self.shard_size


@dataclass(frozen=True)
class Facts:
    """What has to be looked up before a run can be solved: the ranks, the data, the model, the
    device."""

    parallelism: str
    layout: Layout
    threads_per_rank: int
    train_tokens: int
    val_tokens: int
    data: str
    model: str
    parameters: int
    max_position_embeddings: int | None
    flops_per_token: int | None
    flops_formula: str | None
    loss_kernel: str
    tokenizer: str
    tokenizer_vocab_size: int
    vocab_size: int | None
    device: str
    device_name: str
    precision: str
    precision_reason: str
    rates: str | None  # how optimizer.lr_rule made the rates, in words; None without a rule
    # tokens/s of the same run on one rank, where it was measured
    single_rank_rate: float | None = None
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Run:
    """A solved run. Sizes are in sequences, tokens or optimizer steps, as the names say."""

    micro_batch_size: int
    gradient_accumulation_steps: int
    dp_size: int
    world_size: int
    real_batch_size: int
    sequence_length: int
    tokens_per_step: int
    max_steps: int
    max_tokens: int
    max_epochs: float
    total_sequences: int  # sequences that the run trains on, all epochs
    tail_sequences: int  # sequences in the last window when it is short, else 0
    dropped_sequences: int  # sequences of the budget left out by train.tail=drop
    train_sequences: int
    val_sequences: int
    eval_sequences: int
    warmup_updates: int
    total_flops: int | None
    facts: Facts
    versions: dict[str, str]
    commit: str | None

    def as_dict(self) -> dict[str, Any]:
        """Flat and plain, for run.json and the tracker."""
        flat = asdict(self)
        facts = flat.pop("facts")
        return {**facts.pop("layout"), **facts, **flat}


def solve_layout(p: Parallelism, nproc_per_node: int) -> Layout:
    """Return where `nproc_per_node` ranks on each of the hosts stand. Raises ConfigError for what
    does not divide."""
    world, tp, replicas = p.nnodes * nproc_per_node, p.tensor_parallel_size, p.replicate_size
    if p.kind == "single" and world > 1:
        key, value = ("nnodes", p.nnodes) if p.nnodes > 1 else ("nproc_per_node", nproc_per_node)
        raise refuse(
            f"parallelism.{key}",
            value,
            "parallelism=single has one rank; for more use parallelism=ddp",
            1,
        )
    if tp not in (None, 1) and p.kind not in ("tp", "fsdp_tp"):
        text = f"parallelism={p.kind} splits no layer; use tp or fsdp_tp"
        raise refuse("parallelism.tensor_parallel_size", tp, text, "null")
    if replicas is not None and p.kind != "hsdp":
        raise refuse(
            "parallelism.replicate_size",
            replicas,
            f"has a meaning for hsdp, not for {p.kind}",
            "null",
        )
    match p.kind:
        case "ddp":
            replicate, shard, tp = world, 1, 1
        case "fsdp":
            replicate, shard, tp = 1, world, 1
        case "hsdp":
            replicate, tp = replicas or p.nnodes, 1
            shard = _ranks_over(world, replicate, "parallelism.replicate_size")
        case "tp":
            replicate, shard, tp = 1, 1, tp or world
            if tp != world:
                text = (
                    f"parallelism=tp splits each layer over all {world} ranks; for less use "
                    "parallelism=fsdp_tp"
                )
                raise refuse("parallelism.tensor_parallel_size", tp, text, world)
        case "fsdp_tp":
            replicate, tp = 1, tp or nproc_per_node
            shard = _ranks_over(world, tp, "parallelism.tensor_parallel_size")
        case _:
            replicate, shard, tp = 1, 1, 1
    return Layout(p.nnodes, nproc_per_node, replicate, shard, tp)


def _ranks_over(world: int, size: int, key: str) -> int:
    if world % size:
        divisors = [n for n in range(1, world + 1) if world % n == 0]
        raise refuse(
            key, size, f"does not divide the {world} ranks", max(n for n in divisors if n <= size)
        )
    return world // size


def check_split(model: dict[str, Any], tp: int) -> None:
    """Whether a model's sizes can be split over `tp` ranks. Raises ConfigError."""
    for key in ("n_heads", "n_kv_heads", "d_ff", "vocab_size"):
        size = model.get(key)
        if isinstance(size, int) and size % tp:
            text = f"cannot be split over parallelism.tensor_parallel_size={tp} ranks"
            raise refuse(f"model.{key}", size, text, -(-size // tp) * tp)


def solve_batch(batch: Batch, dp_size: int) -> Batch:
    """micro_batch_size x gradient_accumulation_steps x dp_size = real_batch_size, solved for what
    is missing.

    Raises ConfigError for what does not divide, with the nearest totals, or contradicts, with the
    product.
    """
    micro, accum, real = (
        batch.micro_batch_size,
        batch.gradient_accumulation_steps,
        batch.real_batch_size,
    )
    if real is None:
        micro = DEFAULT_MICRO_BATCH_SIZE if micro is None else micro
        accum = 1 if accum is None else accum
        real = micro * accum * dp_size
    elif micro is None:
        accum = 1 if accum is None else accum
        micro = _divide(
            real, accum * dp_size, f"gradient_accumulation_steps {accum} x dp_size {dp_size}"
        )
    elif accum is None:
        accum = _divide(real, micro * dp_size, f"micro_batch_size {micro} x dp_size {dp_size}")
    elif micro * accum * dp_size != real:
        raise refuse(
            "batch.real_batch_size",
            real,
            f"micro_batch_size {micro} x gradient_accumulation_steps {accum} x dp_size {dp_size} = "
            f"{micro * accum * dp_size}; set one of the three to null to have it solved",
            micro * accum * dp_size,
        )
    return replace(
        batch, micro_batch_size=micro, gradient_accumulation_steps=accum, real_batch_size=real
    )


def too_large(given: Batch, solved: Batch, dp_size: int, train_sequences: int) -> ConfigError:
    """Return the refusal of a batch that the data do not fill, by the key that was given."""
    micro, accum, real = (
        solved.micro_batch_size,
        solved.gradient_accumulation_steps,
        solved.real_batch_size,
    )
    assert accum is not None
    why = (
        f"more than the {train_sequences} training sequences of {solved.sequence_length} tokens; "
        "more data, a shorter batch.sequence_length or a smaller batch is needed"
    )
    if given.real_batch_size is not None:
        return refuse("batch.real_batch_size", real, f"is {why}", train_sequences)
    product = (
        f"micro_batch_size {micro} x gradient_accumulation_steps {accum} x dp_size {dp_size} = "
        f"{real} is {why}"
    )
    if given.gradient_accumulation_steps is not None and given.micro_batch_size is None:
        return refuse("batch.gradient_accumulation_steps", accum, product, 1)
    return refuse(
        "batch.micro_batch_size", micro, product, max(1, train_sequences // (accum * dp_size))
    )


def cut_anew(batch: Batch, dp_size: int | None) -> Batch:
    """Return the same real batch on another number of replicas: the largest micro-batch up to the
    old one that fits, or any that fits where the number is not known yet."""
    if dp_size is None:
        return replace(batch, micro_batch_size=None, gradient_accumulation_steps=None)
    micro, real = batch.micro_batch_size or 1, batch.real_batch_size or 1
    fitting = [m for m in range(1, micro + 1) if real % (m * dp_size) == 0]
    return replace(
        batch, micro_batch_size=max(fitting, default=micro), gradient_accumulation_steps=None
    )


RATE_RULES = {"none": lambda ratio: 1.0, "linear": lambda ratio: ratio, "sqrt": math.sqrt}


def solve_rates(
    optimizer: dict[str, Any], real_batch_size: int
) -> tuple[dict[str, Any], str | None]:
    """Return (the optimizer section with its rates scaled to the real batch by `lr_rule`, the
    equation in words).

    The reference becomes this real batch, so that a solved section is solved again into itself.
    Raises ConfigError.
    """
    rule, reference = optimizer.get("lr_rule", "none"), optimizer.get("reference_batch")
    if rule not in RATE_RULES:
        raise refuse("optimizer.lr_rule", rule, f"must be one of {', '.join(RATE_RULES)}", "linear")
    if rule == "none":
        if reference is not None:
            text = (
                "is used by a rule only; choose optimizer.lr_rule=linear or sqrt, or leave it out"
            )
            raise refuse("optimizer.reference_batch", reference, text, "null")
        return optimizer, None
    if isinstance(reference, bool) or not isinstance(reference, int) or reference < 1:
        text = (
            f"optimizer.lr_rule={rule} needs the real_batch_size that optimizer.lr was chosen for"
        )
        raise refuse("optimizer.reference_batch", reference, text, 32)
    factor = RATE_RULES[rule](real_batch_size / reference)
    keys = [k for k in optimizer if k == "lr" or k.endswith("_lr")]
    rates = {
        k: v
        for k in keys
        if isinstance(v := optimizer[k], (int, float)) and not isinstance(v, bool)
    }
    if not rates:
        raise refuse(
            "optimizer.lr_rule",
            rule,
            "there is no rate `lr` in this section that it could scale",
            "none",
        )
    scaled = {k: v * factor for k, v in rates.items()}
    ratio = f"real_batch_size {real_batch_size} / reference_batch {reference}"
    by = f"({ratio})" if rule == "linear" else f"sqrt({ratio})"
    told = ", ".join(f"{k} {rates[k]:g} x {by} = {v:g}" for k, v in scaled.items())
    return optimizer | scaled | {"reference_batch": real_batch_size}, f"{told} (lr_rule {rule})"


def _divide(real: int, by: int, what: str) -> int:
    if real % by == 0:
        return real // by
    below, above = real - real % by, real - real % by + by
    near = f"{below} or {above}" if below else f"{above}"
    raise refuse(
        "batch.real_batch_size",
        real,
        f"is not a multiple of {what} = {by}; the nearest are {near}",
        above,
    )


@dataclass(frozen=True)
class Budget:
    total_sequences: int
    max_steps: int
    tail_sequences: int
    dropped_sequences: int


def budgets_in(overrides: Iterable[str]) -> list[str]:
    """Return the budgets that overrides give a value."""
    pairs = (override.lstrip("+").partition("=")[::2] for override in overrides)
    return [key for key, value in pairs if key in BUDGETS and value != "null"]


def replace_budgets(tree: Any, overrides: Iterable[str]) -> None:
    """Set the budgets of a composed config to null that came from its files, where an override
    gives another one."""
    given = budgets_in(overrides)
    for key in BUDGETS if given and isinstance(tree.get("train"), dict) else ():
        if key not in given:
            tree["train"][key.removeprefix("train.")] = None


def solve_budget(
    train: Train, real_batch_size: int, sequence_length: int, train_sequences: int
) -> Budget:
    """Exactly one of the three budgets, in sequences and optimizer steps. Raises ConfigError."""
    given = {
        key: value
        for key in BUDGETS
        if (value := getattr(train, key.removeprefix("train."))) is not None
    }
    if len(given) > 1:
        named = ", ".join(f"{k}={v}" for k, v in given.items())
        raise ConfigError(
            f"{named}: one budget is needed, not {len(given)}; leave "
            f"{('one', 'two')[len(given) - 2]} out"
        )
    if train.max_epochs is not None:
        total = int(Fraction(str(train.max_epochs)) * train_sequences)
    elif train.max_tokens is not None:
        total = train.max_tokens // sequence_length
    else:
        total = (train.max_steps or DEFAULT_MAX_STEPS) * real_batch_size
    key, value = next(iter(given.items()), ("train.max_steps", DEFAULT_MAX_STEPS))
    if total < 1:
        raise refuse(key, value, f"is less than one sequence of {sequence_length} tokens")
    steps, rest = divmod(total, real_batch_size)
    if rest and train.tail == "drop":
        if not steps:
            raise refuse(
                key,
                value,
                f"with train.tail=drop no window of {real_batch_size} sequences is full ({total} "
                "there)",
            )
        return Budget(total - rest, steps, 0, rest)
    return Budget(total, steps + bool(rest), rest, 0)


def check_model(
    length: int, positions: int | None, vocab_size: int | None, tokenizer: str, tokens: int
) -> None:
    """Whether the model has room for the sequences and for the tokenizer's `tokens`. Raises
    ConfigError."""
    if positions is not None and length > positions:
        raise refuse(
            "batch.sequence_length", length, f"the model has {positions} positions", positions
        )
    if vocab_size is not None and vocab_size < tokens:
        raise refuse(
            "model.vocab_size",
            vocab_size,
            f"is smaller than the tokenizer {tokenizer} with {tokens} tokens",
            -(-tokens // 64) * 64,
        )


def solve(
    config: Config, facts: Facts, warmup_updates: Any, versions: dict[str, str], commit: str | None
) -> Run:
    """Return the whole run from the config and the facts. `warmup_updates`: function of the total
    number of updates.

    Raises ConfigError for everything that does not fit together.
    """
    batch = solve_batch(config.batch, facts.layout.dp_size)
    micro, accum, real = (
        batch.micro_batch_size,
        batch.gradient_accumulation_steps,
        batch.real_batch_size,
    )
    assert micro is not None
    assert accum is not None
    assert real is not None
    length = batch.sequence_length
    train_sequences = max(0, facts.train_tokens - 1) // length
    val_sequences = max(0, facts.val_tokens - 1) // length
    if train_sequences < 1:
        raise refuse(
            "batch.sequence_length",
            length,
            f"needs at least {length + 1} training tokens, the data have {facts.train_tokens} "
            f"({facts.data})",
        )
    if real > train_sequences:
        raise too_large(config.batch, batch, facts.layout.dp_size, train_sequences)
    budget = solve_budget(config.train, real, length, train_sequences)
    for name in ("profile_start", "stop_step"):
        if (step := getattr(config.train, name)) is not None and step > budget.max_steps:
            text = (
                f"is past the end of the run, which is {budget.max_steps} optimizer steps; "
                "leave it out"
            )
            raise refuse(f"train.{name}", step, text, budget.max_steps)
    eval_tokens = config.train.eval_tokens
    tokens = budget.total_sequences * length
    return Run(
        micro_batch_size=micro,
        gradient_accumulation_steps=accum,
        dp_size=facts.layout.dp_size,
        world_size=facts.layout.world_size,
        real_batch_size=real,
        sequence_length=length,
        tokens_per_step=real * length,
        max_steps=budget.max_steps,
        max_tokens=tokens,
        max_epochs=budget.total_sequences / train_sequences,
        total_sequences=budget.total_sequences,
        tail_sequences=budget.tail_sequences,
        dropped_sequences=budget.dropped_sequences,
        train_sequences=train_sequences,
        val_sequences=val_sequences,
        eval_sequences=min(val_sequences, -(-eval_tokens // length))
        if eval_tokens
        else val_sequences,
        warmup_updates=warmup_updates(budget.max_steps),
        total_flops=facts.flops_per_token * tokens if facts.flops_per_token else None,
        facts=facts,
        versions=versions,
        commit=commit,
    )


def batch_equation(run: Run) -> str:
    """Return the batch arithmetic with its numbers, as the banner and plan print it."""
    return (
        f"micro_batch_size {run.micro_batch_size} x gradient_accumulation_steps "
        f"{run.gradient_accumulation_steps} x dp_size {run.dp_size} = real_batch_size "
        f"{run.real_batch_size} sequences x sequence_length {run.sequence_length} = "
        f"{run.tokens_per_step:,} tokens per step"
    )


def ranks_sentence(run: Run) -> str:
    """Return who computes, in words: hosts, ranks, how they share the work, threads."""
    layout, kind = run.facts.layout, run.facts.parallelism
    hosts = f"{layout.nnodes} hosts x " if layout.nnodes > 1 else ""
    parts = [
        f"{size} {what}"
        for size, what in (
            (layout.replicate_size, "replicas"),
            (layout.shard_size, "shards"),
            (layout.tensor_parallel_size, "tensor-parallel"),
        )
        if size > 1
    ]
    threads = (
        f"{run.facts.threads_per_rank} CPU "
        f"thread{'s' if run.facts.threads_per_rank > 1 else ''} each"
    )
    return f"{hosts}{layout.nproc_per_node} ({kind}: {' x '.join(parts)}), {threads}"


def banner_sections(run: Run, folder: str) -> list[tuple[str, str]]:
    """Return (label, text) pairs that say in plain words what is about to happen."""
    f = run.facts
    an_epoch = f"{run.train_sequences / run.real_batch_size:,.2f}".rstrip("0").rstrip(".")
    budget = (
        f"{run.max_steps:,} optimizer steps = {run.max_tokens:,} tokens = {run.max_epochs:.4g} "
        f"epochs ({an_epoch} steps per epoch)"
    )
    if run.tail_sequences:
        budget += f"; the last window has {run.tail_sequences} of {run.real_batch_size} sequences"
    if run.dropped_sequences:
        budget += f"; {run.dropped_sequences} sequences that fill no window are left out"
    train = (
        f"{f.train_tokens:,} tokens, {run.train_sequences:,} sequences of {run.sequence_length:,}"
    )
    if rest := f.train_tokens - 1 - run.train_sequences * run.sequence_length:  # 1: a last target
        train += f"; the last {rest:,} token{' is' if rest == 1 else 's are'} too few for another"
    val = f"{f.val_tokens:,} tokens, {run.val_sequences:,} sequences"
    if run.val_sequences and run.eval_sequences < run.val_sequences:
        val += f", {run.eval_sequences:,} of them, evenly spread, per evaluation"
    rows = [
        ("data", f"{f.data}; tokenizer {f.tokenizer}"),
        ("train", train),
        ("validation", val if run.val_sequences else "none"),
        ("model", f"{f.model}, {f.parameters:,} parameters"),
        ("batch", batch_equation(run)),
        ("budget", budget),
        *([("rate", f.rates)] if f.rates else []),
        (
            "warm-up",
            f"{run.warmup_updates:,} optimizer step{'' if run.warmup_updates == 1 else 's'}",
        ),
    ]
    if run.total_flops is not None and f.flops_per_token is not None:
        rows.append(
            (
                "FLOPs",
                f"{run.total_flops:.3e} = {f.flops_per_token:,} per token x tokens "
                f"({f.flops_formula})",
            )
        )
    rows += [
        ("device", f"{f.device_name} ({f.device})"),
        *([("ranks", ranks_sentence(run))] if run.world_size > 1 else []),
        *(
            [("scaling", f"against {f.single_rank_rate:,.0f} tokens/s of one rank")]
            if f.single_rank_rate
            else []
        ),
        (
            "precision",
            f"{f.precision} ({f.precision_reason})" if f.precision_reason else f.precision,
        ),
        ("folder", folder),
    ]
    return rows + [("warning", text) for text in f.warnings]
