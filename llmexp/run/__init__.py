"""`Run`: every derived number of a run, computed and checked in one place, saved as run.json.

Nothing is rounded silently: what does not multiply out is refused with the nearest totals that
would. Of llmexp it imports `config` alone. In reading order:
batch, stages, budget    the batch equation; batches that change; steps, tokens, a short last batch
layout, shape, rules     ranks; sizes of a model from one number; rate, batch and more from its size
derived, shares, banner  how a number is declared; what each source and group gets; in words
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from llmexp.config.forms import ramp_sizes
from llmexp.config.rules import asks_rule
from llmexp.config.sections import Config, Train
from llmexp.config.values import Plain, refuse
from llmexp.run.batch import SolvedBatch, solve_batch, too_large
from llmexp.run.budget import BUDGETS, TokenCost, solve_budget, spent_of
from llmexp.run.derived import derived, resolved_knob
from llmexp.run.layout import Layout
from llmexp.run.shares import GroupShare, SourceShare
from llmexp.run.stages import BatchStage, Begin, stage_at, stages_of


@dataclass(frozen=True)
class Parent:
    """The checkpoint that a fork goes on from, with what the runs before it had trained on."""

    folder: str
    run_id: str  # in trackers
    step: int
    sequences: int  # the place in the order of sequences where the fork begins
    tokens: int  # of the budget, all runs before the fork together
    tokens_seen: int  # target tokens that count, likewise
    order: str  # in words, how the data go on
    digest: str  # of the checkpoint: the sha256 of its manifest
    setting: str = ""  # equal for parents that differ in the seed alone


_BATCH = (
    "batch.micro_batch_size batch.gradient_accumulation_steps batch.real_batch_size "
    "batch.tokens_per_step dp_size",
    "micro_batch_size {micro_batch_size} x gradient_accumulation_steps "
    "{gradient_accumulation_steps} x dp_size {dp_size} = real_batch_size {real_batch_size}",
)
_BUDGET = f"{' '.join(BUDGETS)} real_batch_size batch.sequence_length"
_BUDGET += " flops_per_token parameters_with_head"
_TAIL = f"{_BUDGET} train.tail"
_DATA = "data tokenizer"
_TOKENS = "real_batch_size {real_batch_size} x sequence_length {sequence_length}"
_TEXT = "{max_steps} optimizer steps = {max_tokens} tokens = {max_epochs} epochs; "
_TEXT += f"{_TOKENS} = {{tokens_per_step}} tokens per step"
_DIVIDED = "/ sequence_length {sequence_length}, rounded down"
_FLOPS = "flops_per_token {flops_per_token} x max_tokens {max_tokens}, of a fork less its parent's"


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Hold what is looked up before a run can be solved: ranks, data, model, device."""

    parallelism: str = resolved_knob("parallelism.kind")
    layout: Layout
    threads_per_rank: int = derived("CPU threads of each rank", "nproc_per_node")
    train_tokens: int = derived("tokens of the training data", _DATA)
    train_sequences: int = derived(
        "sequences in the training data",
        "train_tokens batch.sequence_length",
        f"(train_tokens {{train_tokens}} - 1) {_DIVIDED}; of a corpus, of each source by itself",
    )
    val_tokens: int = derived("tokens of the validation data", _DATA)
    data: str = derived("the data in words", _DATA)
    model: str = derived("the model in words", "model")
    parameters: int = derived("parameters of the model, each once", "model vocab_size")
    parameters_active: int | None = derived(
        "of these, without experts that a token is not sent to", "model vocab_size", default=None
    )
    max_position_embeddings: int | None = derived(
        "tokens; the longest sequence allowed", "model.max_position_embeddings"
    )
    flops_per_token: int | None = derived(
        "floating-point operations per token computed, forward and backward",
        "model batch.sequence_length",
        "{flops_formula}",
    )
    flops_formula: str | None = derived("how flops_per_token is counted", "model")
    loss_kernel: str = derived("how the loss is computed", "model train.device")
    tokenizer: str = derived("the tokenizer's name", "tokenizer")
    tokenizer_vocab_size: int = derived("token ids of the tokenizer", "tokenizer")
    vocab_size: int | None = derived(
        "rows of the model's embedding",
        "model.vocab_size tokenizer_vocab_size",
        "the tokenizer has {tokenizer_vocab_size} ids",
    )
    device: str = derived("where the run computes", "train.device")
    device_name: str = derived("the device's own name", "train.device")
    precision: str = resolved_knob("precision.kind", "precision.kind device")
    precision_reason: str = derived("why this arithmetic", "precision.kind device")
    rule: str | None = derived(  # None without one
        "what optimizer.rule has set, and from what",
        "optimizer.rule optimizer.reference optimizer.exponents model "
        f"{' '.join(BUDGETS)} batch.real_batch_size batch.tokens_per_step",
        default=None,
    )
    parametrization: str | None = derived(
        "what model.parametrization changes, and by how much", "model", default=None
    )
    groups: tuple[GroupShare, ...] = derived(
        "what each group of parameters takes", "optimizer.groups model", default=()
    )
    compiled: str = derived(  # empty where nobody asked
        "whether the model is compiled, and why", "train.compile device", default=""
    )
    memory: str | None = derived(
        "what a rank held at its peak in such a run before", "batch.micro_batch_size", default=None
    )
    initial: str | None = derived(
        "the weights that the model begins with", "model.init_from", default=None
    )
    parent: Parent | None = derived(
        "the checkpoint that a fork starts from", "fork.run fork.step", default=None
    )
    parameters_with_head: int | None = derived(
        "active parameters without embedding tables, but with the head",
        "model vocab_size",
        default=None,
    )
    parameters_in_blocks: int | None = derived(
        "active parameters of the matrices inside the blocks", "model", default=None
    )
    shape: str | None = derived(
        "how the model's sizes follow from one number",
        "model.size model.depth model.shape_rule",
        default=None,
    )
    warnings: tuple[str, ...] = derived("what the start warns of", default=())

    @property
    def dp_size(self) -> int:
        """Return the number of data-parallel replicas."""
        return self.layout.dp_size

    @property
    def begin(self) -> Begin:
        """Return what was done before the run: by its parents, of a fork."""
        if (parent := self.parent) is None:
            return Begin()
        return Begin(parent.step, parent.sequences, parent.tokens, parent.tokens_seen)

    @property
    def token_cost(self) -> TokenCost:
        """Return what budgets need to know of the model."""
        return TokenCost(self.flops_per_token, self.parameters_with_head or self.parameters)


@dataclass(frozen=True, kw_only=True)
class Run(Facts):
    """A solved run. Sizes are in sequences, tokens or optimizer steps, as the names say."""

    micro_batch_size: int = resolved_knob("batch.micro_batch_size", *_BATCH)
    gradient_accumulation_steps: int = resolved_knob("batch.gradient_accumulation_steps", *_BATCH)
    real_batch_size: int = resolved_knob("batch.real_batch_size", *_BATCH)
    sequence_length: int = resolved_knob("batch.sequence_length")
    tokens_per_step: int = derived(
        "tokens of a full optimizer step, masked targets with them",
        "real_batch_size batch.sequence_length",
        _TOKENS,
    )
    ramp: str | None = resolved_knob("batch.ramp")
    stages: tuple[BatchStage, ...] = derived(
        "steps, sequences and micro-batches of each stage of a batch ramp",
        "batch.ramp batch.micro_batch_size dp_size batch.sequence_length",
    )
    max_steps: int = derived("optimizer steps of the whole run", _TAIL, _TEXT)
    max_tokens: int = derived("tokens of the whole run, masked targets with them", _TAIL, _TEXT)
    max_epochs: float = derived(
        "passes over the training sequences", f"{_BUDGET} train_sequences", _TEXT
    )
    total_sequences: int = derived("sequences of the whole run, all epochs", _TAIL, _TEXT)
    tail_sequences: int = derived("sequences in the last step if it is short, else 0", _TAIL)
    dropped_sequences: int = derived("sequences of the budget that fill no step", _TAIL)
    budget_given: str | None = derived(
        "a budget in FLOPs or in tokens per parameter, and what is left of it", _TAIL, default=None
    )
    val_sequences: int = derived(
        "sequences in the validation data",
        "val_tokens batch.sequence_length",
        f"(val_tokens {{val_tokens}} - 1) {_DIVIDED}",
    )
    eval_sequences: int = derived(
        "sequences of one evaluation", "val_sequences train.eval_tokens batch.sequence_length"
    )
    warmup_updates: int = derived(
        "updates of warm-up",
        "schedule.warmup_steps schedule.warmup_ratio max_steps",
        "of {max_steps} updates",
    )
    total_flops: int | None = derived(
        "floating-point operations of the run; of a fork, without its parent's",
        "flops_per_token max_tokens",
        _FLOPS,
    )
    versions: dict[str, str] = derived("versions of Python and packages")
    commit: str | None = derived("commit of llmexp")
    sources: tuple[SourceShare, ...] = derived(
        "sequences and epochs of each source of a corpus", f"{_BUDGET} {_DATA}", default=()
    )

    @property
    def world_size(self) -> int:
        """Return the number of ranks."""
        return self.layout.world_size

    @property
    def first_step(self) -> int:
        """Return how many steps were done before this run: by the parents of a fork, else 0."""
        return self.begin.step

    @property
    def own_tokens(self) -> int:
        """Return the tokens of the budget less those of a parent."""
        return self.max_tokens - self.begin.tokens

    def stage_at(self, step: int) -> BatchStage:
        """Return the stage of the window that follows `step` steps."""
        return stage_at(self.stages, step)

    def sequences_at(self, step: int) -> int:
        """Return the place in the order of sequences after a step."""
        return min(self.stage_at(step).sequences_at(step), self.total_sequences)

    def tokens_at(self, step: int) -> int:
        """Return the tokens of the budget that are spent after a step, a parent's with them."""
        own_sequences = self.sequences_at(step) - self.begin.sequences
        return self.begin.tokens + own_sequences * self.sequence_length

    def evaluations(self, chosen: Train, after: int, until: int) -> int:
        """Return how many steps after one and up to another end with an evaluation by interval.

        Such a step comes to a multiple of the interval, or past it. `after` does not count, `until`
        does: a caller that wants no evaluation at the end of a run asks up to the step before it.
        """
        if chosen.eval_every_tokens is None:
            every = chosen.eval_every
            return until // every - after // every if every else 0
        ends = [stage.first_step for stage in self.stages if after < stage.first_step < until]
        edges = [after, *ends, until]  # within a stage all steps are of one size
        tokens = [self.tokens_at(step) // chosen.eval_every_tokens for step in edges]
        return sum(
            min(tokens[i + 1] - tokens[i], edges[i + 1] - edges[i]) for i in range(len(ends) + 1)
        )

    def as_dict(self) -> Plain:
        """Return all numbers as one flat mapping of plain values, for run.json."""
        found = asdict(self)
        ranks = found.pop("layout") | {"dp_size": self.dp_size, "world_size": self.world_size}
        absent = "initial memory parent compiled sources shape rule budget_given groups "
        absent += "parametrization parameters_active"
        for key in absent.split():
            if not found[key]:
                del found[key]
        if self.ramp is None:
            del found["ramp"], found["stages"]
        return ranks | found


def check_model(model: Any, length: int, tokenizer: Any) -> int | None:
    """Return the vocabulary of a model that has one.

    Raises ConfigError where it has no room for the sequences or the tokenizer's tokens."""
    positions = getattr(model, "max_position_embeddings", None)
    vocab_size: int | None = getattr(model, "vocab_size", None)
    if positions is not None and length > positions:
        text = f"the model has {positions} positions"
        raise refuse("out_of_range", "batch.sequence_length", length, text, positions)
    tokens = tokenizer.n_vocab
    if vocab_size is not None and vocab_size < tokens:
        text = f"is smaller than the tokenizer {tokenizer.name} with {tokens} tokens"
        raise refuse("out_of_range", "model.vocab_size", vocab_size, text, -(-tokens // 64) * 64)
    return vocab_size


def check_steps(train: Train, max_steps: int, first: int) -> None:
    """Raise ConfigError for a step after the end of the run, or in a fork not after `first`."""
    for name in sorted(field.name for field in fields(train) if field.metadata["knob"].a_step):
        step = getattr(train, name)
        if step is not None and step > max_steps:
            text = f"is past the end of the run, which is {max_steps} optimizer steps; leave it out"
            raise refuse("out_of_range", f"train.{name}", step, text, max_steps)
        if step is not None and step <= first:
            text = f"counts the parent's part too, and the fork begins after step {first}"
            raise refuse("out_of_range", f"train.{name}", step, text, first + 1)


def endless_stages(optimizer: Plain, batch: SolvedBatch, facts: Facts) -> tuple[BatchStage, ...]:
    """Return the stages of a run without an end, which its end is solved from; no ramp: one."""
    real, per_micro_step = batch.real_batch_size, batch.micro_batch_size * facts.dp_size
    step, sequence, *_ = facts.begin
    stages: Sequence[BatchStage] = [BatchStage(0, step, sequence, real, real // per_micro_step)]
    if batch.ramp is not None:
        sizes = ramp_sizes(batch.ramp)
        stages = stages_of(sizes, batch.sequence_length, per_micro_step, facts.begin)
    if not asks_rule(optimizer):
        return tuple(stages)
    from llmexp.run.rules import rate_by_batch

    return tuple(
        replace(stage, rate=rate_by_batch(optimizer, stage.real_batch_size / real))
        for stage in stages
    )


def solve(
    config: Config, facts: Facts, warmup_updates: Any, versions: dict[str, str], commit: str | None
) -> Run:
    """Return the whole run from the config and the facts.

    `warmup_updates` is a function of the total number of updates. Raises ConfigError for everything
    that does not fit together.
    """
    batch = solve_batch(config.batch, facts.dp_size)
    length, real = batch.sequence_length, batch.real_batch_size
    val_sequences = max(0, facts.val_tokens - 1) // length
    if facts.train_sequences < 1:
        raise refuse(
            "too_little_data",
            "batch.sequence_length",
            length,
            f"needs at least {length + 1} training tokens, the data have {facts.train_tokens} "
            f"({facts.data})",
        )
    stages = endless_stages(config.optimizer, batch, facts)
    budget = solve_budget(
        config.train, stages, length, facts.train_sequences, facts.begin, facts.token_cost
    )
    stages = tuple(stage for stage in stages if stage.first_step < budget.max_steps)
    if max(stage.real_batch_size for stage in stages) > facts.train_sequences:
        raise too_large(config.batch, batch, facts.dp_size, facts.train_sequences)
    check_steps(config.train, budget.max_steps, facts.begin.step)
    eval_tokens = config.train.eval_tokens or facts.val_tokens
    tokens = (budget.total_sequences - facts.begin.sequences) * length
    max_tokens = tokens + facts.begin.tokens
    by_model = config.train.max_flops or config.train.tokens_per_parameter
    return Run(
        **vars(facts),
        micro_batch_size=batch.micro_batch_size,
        gradient_accumulation_steps=batch.gradient_accumulation_steps,
        real_batch_size=real,
        sequence_length=length,
        tokens_per_step=real * length,
        ramp=batch.ramp,
        stages=stages,
        **vars(budget),
        max_tokens=max_tokens,
        budget_given=spent_of(config.train, facts.token_cost, max_tokens) if by_model else None,
        max_epochs=budget.total_sequences / facts.train_sequences,
        val_sequences=val_sequences,
        eval_sequences=min(val_sequences, -(-eval_tokens // length)),
        warmup_updates=warmup_updates(budget.max_steps),
        total_flops=facts.flops_per_token * tokens if facts.flops_per_token else None,
        versions=versions,
        commit=commit,
    )
