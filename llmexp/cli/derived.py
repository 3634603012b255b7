"""Numbers that follow from the knobs: each number of a run with its meaning, its sources, and its
formula in words. The numbers themselves are computed in `run`."""

from __future__ import annotations

from dataclasses import dataclass

from llmexp.knobs import fields


@dataclass(frozen=True)
class Derived:
    """`sources`: the keys, or derived numbers, that it follows from; `formula` is filled with the
    numbers of a run."""

    meaning: str
    sources: tuple[str, ...]
    formula: str = ""


def _meaning(key: str) -> str:
    """Return what a knob means, without what null stands for: a solved number is never null."""
    return fields()[key].doc.partition(";")[0]


_BATCH = (
    "batch.micro_batch_size",
    "batch.gradient_accumulation_steps",
    "batch.real_batch_size",
    "dp_size",
)
_EQUATION = (
    "micro_batch_size {micro_batch_size} x gradient_accumulation_steps "
    "{gradient_accumulation_steps} x dp_size {dp_size} = real_batch_size {real_batch_size}"
)
_BUDGET = (
    "train.max_steps",
    "train.max_epochs",
    "train.max_tokens",
    "real_batch_size",
    "batch.sequence_length",
)
_DATA = ("data", "tokenizer")
_RANKS = ("parallelism.kind", "parallelism.nproc_per_node", "parallelism.nnodes")
_TEXT = (
    "{max_steps} optimizer steps = {max_tokens} tokens = {max_epochs} epochs; real_batch_size "
    "{real_batch_size} x sequence_length {sequence_length} = {tokens_per_step} tokens per step"
)

DERIVED = {
    "micro_batch_size": Derived(_meaning("batch.micro_batch_size"), _BATCH, _EQUATION),
    "gradient_accumulation_steps": Derived(
        _meaning("batch.gradient_accumulation_steps"), _BATCH, _EQUATION
    ),
    "real_batch_size": Derived(_meaning("batch.real_batch_size"), _BATCH, _EQUATION),
    "sequence_length": Derived(_meaning("batch.sequence_length"), ("batch.sequence_length",)),
    "tokens_per_step": Derived(
        "target tokens of a full optimizer step",
        ("real_batch_size", "batch.sequence_length"),
        "real_batch_size {real_batch_size} x sequence_length {sequence_length}",
    ),
    "max_steps": Derived("optimizer steps of the whole run", (*_BUDGET, "train.tail"), _TEXT),
    "max_tokens": Derived("target tokens of the whole run", (*_BUDGET, "train.tail"), _TEXT),
    "max_epochs": Derived(
        "passes over the training sequences", (*_BUDGET, "train_sequences"), _TEXT
    ),
    "total_sequences": Derived(
        "sequences of the whole run, all epochs", (*_BUDGET, "train.tail"), _TEXT
    ),
    "tail_sequences": Derived(
        "sequences in the last window where it is short, else 0", (*_BUDGET, "train.tail")
    ),
    "dropped_sequences": Derived(
        "sequences of the budget that fill no window", (*_BUDGET, "train.tail")
    ),
    "train_sequences": Derived(
        "sequences in the training data",
        ("train_tokens", "batch.sequence_length"),
        "(train_tokens {train_tokens} - 1) / sequence_length {sequence_length}, rounded down; "
        "of a corpus, of each source by itself",
    ),
    "sources": Derived("sequences and epochs of each source of a corpus", (*_BUDGET, *_DATA)),
    "val_sequences": Derived(
        "sequences in the validation data",
        ("val_tokens", "batch.sequence_length"),
        "(val_tokens {val_tokens} - 1) / sequence_length {sequence_length}, rounded down",
    ),
    "eval_sequences": Derived(
        "sequences of one evaluation",
        ("val_sequences", "train.eval_tokens", "batch.sequence_length"),
    ),
    "warmup_updates": Derived(
        "updates of warm-up",
        ("schedule.warmup_steps", "schedule.warmup_ratio", "max_steps"),
        "of {max_steps} updates",
    ),
    "total_flops": Derived(
        "floating-point operations of the run; of a fork, without its parent's",
        ("flops_per_token", "max_tokens"),
        "flops_per_token {flops_per_token} x max_tokens {max_tokens}, of a fork less its parent's",
    ),
    "dp_size": Derived(
        "replicas that share a real batch",
        (*_RANKS, "parallelism.tensor_parallel_size"),
        "world_size {world_size} / tensor_parallel_size {tensor_parallel_size}",
    ),
    "world_size": Derived(
        "ranks on all hosts", _RANKS, "nnodes {nnodes} x nproc_per_node {nproc_per_node}"
    ),
    "nnodes": Derived(_meaning("parallelism.nnodes"), ("parallelism.nnodes",)),
    "nproc_per_node": Derived(
        _meaning("parallelism.nproc_per_node"), ("parallelism.nproc_per_node", "train.device")
    ),
    "replicate_size": Derived(
        "groups of ranks that each hold the whole model", (*_RANKS, "parallelism.replicate_size")
    ),
    "shard_size": Derived("ranks over which parameters and optimizer state are spread", _RANKS),
    "tensor_parallel_size": Derived(
        "ranks that compute each layer together", (*_RANKS, "parallelism.tensor_parallel_size")
    ),
    "parallelism": Derived(_meaning("parallelism.kind"), ("parallelism.kind",)),
    "threads_per_rank": Derived("CPU threads of each rank", ("nproc_per_node",)),
    "train_tokens": Derived("tokens of the training data", _DATA),
    "val_tokens": Derived("tokens of the validation data", _DATA),
    "data": Derived("the data in words", _DATA),
    "model": Derived("the model in words", ("model",)),
    "initial": Derived("the weights that the model begins with", ("model.init_from",)),
    "parent": Derived("the checkpoint that a fork goes on from", ("fork.run", "fork.step")),
    "memory": Derived("what a rank held at its peak in such a run before", _BATCH[:1]),
    "parameters": Derived("parameters of the model, each once", ("model", "vocab_size")),
    "max_position_embeddings": Derived(
        "tokens; the longest sequence allowed", ("model.max_position_embeddings",)
    ),
    "flops_per_token": Derived(
        "floating-point operations per target token, forward and backward",
        ("model", "batch.sequence_length"),
        "{flops_formula}",
    ),
    "flops_formula": Derived("how flops_per_token is counted", ("model",)),
    "loss_kernel": Derived("how the loss is computed", ("model", "train.device")),
    "tokenizer": Derived("the tokenizer's name", ("tokenizer",)),
    "tokenizer_vocab_size": Derived("token ids of the tokenizer", ("tokenizer",)),
    "vocab_size": Derived(
        "rows of the model's embedding",
        ("model.vocab_size", "tokenizer_vocab_size"),
        "the tokenizer has {tokenizer_vocab_size} ids",
    ),
    "device": Derived("where the run computes", ("train.device",)),
    "device_name": Derived("the device's own name", ("train.device",)),
    "precision": Derived(_meaning("precision.kind"), ("precision.kind", "device")),
    "precision_reason": Derived("why this arithmetic", ("precision.kind", "device")),
    "compiled": Derived("whether the model is compiled, and why", ("train.compile", "device")),
    "rates": Derived(
        "how the rates follow the real batch",
        ("optimizer.lr", "optimizer.lr_rule", "optimizer.reference_batch", "real_batch_size"),
    ),
    "single_rank_rate": Derived(
        "tokens per second of one rank, as measured", ("metrics.single_rank_rates",)
    ),
    "warnings": Derived("what the start warns of", ()),
    "versions": Derived("versions of Python and packages", ()),
    "commit": Derived("commit of llmexp", ()),
}


def used_by(key: str) -> list[str]:
    """Return the derived numbers that follow directly from a key, or from another derived
    number."""
    name = key.rpartition(".")[2]
    section = key.partition(".")[0]
    there = {key, name} if name in DERIVED and key.startswith("batch.") else {key}
    if section in ("model", "data", "tokenizer"):
        there.add(section)
    return [other for other, d in DERIVED.items() if there & set(d.sources) and other != name]
