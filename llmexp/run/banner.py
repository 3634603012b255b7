"""Say what a run is about to do: the sections of its banner and of `llmexp plan`."""

from __future__ import annotations

from llmexp.config.labels import plural
from llmexp.run import Parent, Run
from llmexp.run.shares import GroupShare, SourceShare


def _stage_texts(run: Run) -> list[str]:
    """Return each stage of a ramp in words."""
    ends = [stage.first_step for stage in run.stages[1:]] + [run.max_steps]
    texts = []
    for stage, end in zip(run.stages, ends, strict=True):
        size, accumulation = stage.real_batch_size, stage.gradient_accumulation_steps
        text = (
            f"from token {run.tokens_at(stage.first_step):,} on {size} sequences a step, "
            f"{run.micro_batch_size} x {accumulation} x {run.dp_size}: "
            f"{plural(end - stage.first_step, 'step')}"
        )
        texts.append(text if run.rule is None else f"{text}, rate x {stage.rate:.4g}")
    return texts


def ranks_sentence(run: Run) -> str:
    """Return who computes, in words: hosts, ranks, how they share the work, threads."""
    layout, kind = run.layout, run.parallelism
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
    threads = plural(run.threads_per_rank, "CPU thread")
    return f"{hosts}{layout.nproc_per_node} ({kind}: {' x '.join(parts)}), {threads} each"


def _source_text(run: Run, source: SourceShare) -> str:
    count, total = source.sequences, run.total_sequences
    part = f"{count:,} of {total:,} sequences ({count / total:.4g} of them)"
    return (
        f"{source.name}: {f'all {total:,} sequences' if count == total else part}, "
        f"{source.epochs:.4g} epochs of its {source.tokens:,} tokens"
    )


def _group_text(group: GroupShare) -> str:
    size = f"{plural(group.tensors, 'tensor')}, {plural(group.parameters, 'parameter')}"
    if not group.match:
        return f"all others: {size}, rate and weight decay of the optimizer"
    return f"{group.match}: {size}, rate x {group.lr:g}, weight decay x {group.weight_decay:g}"


def _parent_text(parent: Parent) -> str:
    return (
        f"step {parent.step:,} of {parent.folder}, with its {parent.tokens:,} tokens; budgets and "
        f"steps count them too; the data {parent.order}"
    )


def banner_sections(run: Run, folder: str) -> list[tuple[str, str]]:
    """Return (label, text) pairs that say in plain words what is about to happen."""
    an_epoch = f"{run.train_sequences / run.real_batch_size:,.2f}".rstrip("0").rstrip(".")
    budget = (
        f"{run.max_steps:,} steps = {run.max_tokens:,} tokens = {run.max_epochs:.4g} "
        f"epochs{'' if run.ramp else f' of {an_epoch} steps'}"
    )
    if run.tail_sequences:
        size = run.stage_at(run.max_steps - 1).real_batch_size
        budget += f"; the last step has {run.tail_sequences} of {size} sequences"
    if run.dropped_sequences:
        budget += f"; {run.dropped_sequences} sequences that fill no step are left out"
    if run.budget_given:
        budget += f"; {run.budget_given}"
    length = run.sequence_length
    train = f"{run.train_tokens:,} tokens, {run.train_sequences:,} sequences of {length:,}"
    rest = run.train_tokens - 1 - run.train_sequences * length  # 1: a last target
    if rest and not run.sources:
        train += f", {plural(rest, 'token')} left over"
    val = f"{run.val_tokens:,} tokens, {run.val_sequences:,} sequences"
    if run.eval_sequences < run.val_sequences:
        val += f", of which an evaluation reads {run.eval_sequences:,}"
    batch = (
        f"micro_batch_size {run.micro_batch_size} x gradient_accumulation_steps "
        f"{run.gradient_accumulation_steps} x dp_size {run.dp_size} = real_batch_size "
        f"{run.real_batch_size}; x sequence_length {length} = "
        f"{run.tokens_per_step:,} tokens per step{', at the end of the ramp' if run.ramp else ''}"
    )
    flops = None
    if run.total_flops is not None and run.flops_per_token is not None:
        of = f"its own {run.own_tokens:,} tokens" if run.parent else "tokens"
        flops = f"{run.total_flops:.3e} = {run.flops_per_token:,} per token x {of}"
    active = f", {run.parameters_active:,} of them active" if run.parameters_active else ""
    reason = f" ({run.precision_reason})" if run.precision_reason else ""
    rows: list[tuple[str, str | None]] = [
        ("data", f"{run.data}; tokenizer {run.tokenizer}"),
        ("train", train),
        *[("source", _source_text(run, source)) for source in run.sources],
        ("validation", val if run.val_sequences else "none"),
        ("model", f"{run.model}, {run.parameters:,} parameters{active}"),
        ("shape", run.shape),
        ("begins with", run.initial),
        ("forks from", _parent_text(run.parent) if run.parent else None),
        ("batch", batch),
        *[("stage", text) for text in (_stage_texts(run) if run.ramp else ())],
        ("budget", budget),
        ("rule", run.rule),
        ("width", run.parametrization),
        *[("group", _group_text(group)) for group in run.groups],
        ("warm-up", plural(run.warmup_updates, "step")),
        ("FLOPs", flops),
        ("device", f"{run.device_name} ({run.device})"),
        ("ranks", ranks_sentence(run) if run.world_size > 1 else None),
        ("precision", f"{run.precision}{reason}"),
        ("compile", run.compiled),
        ("memory", run.memory),
    ]
    known = [(label, text) for label, text in rows if text]
    return [*known, ("folder", folder), *(("warning", text) for text in run.warnings)]
