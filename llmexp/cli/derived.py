"""Numbers that follow from the knobs: each number of a run with its meaning, its sources, and its
formula in words. The numbers themselves are computed in `run`."""

from __future__ import annotations

from dataclasses import dataclass

from llmexp.settings.knobs import fields


@dataclass(frozen=True)
class Derived:
    """`sources`: the keys, or derived numbers, that it follows from; `formula` is filled with the
    numbers of a run."""

    meaning: str
    sources: tuple[str, ...]
    formula: str = ""


def _follows(meaning: str, sources: str = "", formula: str = "") -> Derived:
    return Derived(meaning, tuple(sources.split()), formula)


def _knob(key: str, sources: str = "", formula: str = "") -> Derived:
    """Return what a knob means, without what null stands for: a solved number is never null."""
    return _follows(fields()[key].doc.partition(";")[0], sources or key, formula)


_BATCH = (
    "batch.micro_batch_size batch.gradient_accumulation_steps batch.real_batch_size dp_size",
    "micro_batch_size {micro_batch_size} x gradient_accumulation_steps "
    "{gradient_accumulation_steps} x dp_size {dp_size} = real_batch_size {real_batch_size}",
)
_BUDGET = "train.max_steps train.max_epochs train.max_tokens real_batch_size batch.sequence_length"
_TAIL = f"{_BUDGET} train.tail"
_DATA = "data tokenizer"
_RANKS = "parallelism.kind parallelism.nproc_per_node parallelism.nnodes"
_TOKENS = "real_batch_size {real_batch_size} x sequence_length {sequence_length}"
_TEXT = "{max_steps} optimizer steps = {max_tokens} tokens = {max_epochs} epochs; "
_TEXT += f"{_TOKENS} = {{tokens_per_step}} tokens per step"
_SEQUENCES = " - 1) / sequence_length {sequence_length}, rounded down"
_FLOPS = "flops_per_token {flops_per_token} x max_tokens {max_tokens}, of a fork less its parent's"

DERIVED = {
    "micro_batch_size": _knob("batch.micro_batch_size", *_BATCH),
    "gradient_accumulation_steps": _knob("batch.gradient_accumulation_steps", *_BATCH),
    "real_batch_size": _knob("batch.real_batch_size", *_BATCH),
    "sequence_length": _knob("batch.sequence_length"),
    "tokens_per_step": _follows(
        "target tokens of a full optimizer step", "real_batch_size batch.sequence_length", _TOKENS
    ),
    "max_steps": _follows("optimizer steps of the whole run", _TAIL, _TEXT),
    "max_tokens": _follows("target tokens of the whole run", _TAIL, _TEXT),
    "max_epochs": _follows(
        "passes over the training sequences", f"{_BUDGET} train_sequences", _TEXT
    ),
    "total_sequences": _follows("sequences of the whole run, all epochs", _TAIL, _TEXT),
    "tail_sequences": _follows("sequences in the last window where it is short, else 0", _TAIL),
    "dropped_sequences": _follows("sequences of the budget that fill no window", _TAIL),
    "train_sequences": _follows(
        "sequences in the training data",
        "train_tokens batch.sequence_length",
        f"(train_tokens {{train_tokens}}{_SEQUENCES}; of a corpus, of each source by itself",
    ),
    "sources": _follows("sequences and epochs of each source of a corpus", f"{_BUDGET} {_DATA}"),
    "val_sequences": _follows(
        "sequences in the validation data",
        "val_tokens batch.sequence_length",
        f"(val_tokens {{val_tokens}}{_SEQUENCES}",
    ),
    "eval_sequences": _follows(
        "sequences of one evaluation", "val_sequences train.eval_tokens batch.sequence_length"
    ),
    "warmup_updates": _follows(
        "updates of warm-up",
        "schedule.warmup_steps schedule.warmup_ratio max_steps",
        "of {max_steps} updates",
    ),
    "total_flops": _follows(
        "floating-point operations of the run; of a fork, without its parent's",
        "flops_per_token max_tokens",
        _FLOPS,
    ),
    "dp_size": _follows(
        "replicas that share a real batch",
        f"{_RANKS} parallelism.tensor_parallel_size",
        "world_size {world_size} / tensor_parallel_size {tensor_parallel_size}",
    ),
    "world_size": _follows(
        "ranks on all hosts", _RANKS, "nnodes {nnodes} x nproc_per_node {nproc_per_node}"
    ),
    "nnodes": _knob("parallelism.nnodes"),
    "nproc_per_node": _knob(
        "parallelism.nproc_per_node", "parallelism.nproc_per_node train.device"
    ),
    "replicate_size": _follows(
        "groups of ranks that each hold the whole model", f"{_RANKS} parallelism.replicate_size"
    ),
    "shard_size": _follows("ranks over which parameters and optimizer state are spread", _RANKS),
    "tensor_parallel_size": _follows(
        "ranks that compute each layer together", f"{_RANKS} parallelism.tensor_parallel_size"
    ),
    "parallelism": _knob("parallelism.kind"),
    "threads_per_rank": _follows("CPU threads of each rank", "nproc_per_node"),
    "train_tokens": _follows("tokens of the training data", _DATA),
    "val_tokens": _follows("tokens of the validation data", _DATA),
    "data": _follows("the data in words", _DATA),
    "model": _follows("the model in words", "model"),
    "initial": _follows("the weights that the model begins with", "model.init_from"),
    "parent": _follows("the checkpoint that a fork goes on from", "fork.run fork.step"),
    "memory": _follows(
        "what a rank held at its peak in such a run before", "batch.micro_batch_size"
    ),
    "parameters": _follows("parameters of the model, each once", "model vocab_size"),
    "max_position_embeddings": _follows(
        "tokens; the longest sequence allowed", "model.max_position_embeddings"
    ),
    "flops_per_token": _follows(
        "floating-point operations per target token, forward and backward",
        "model batch.sequence_length",
        "{flops_formula}",
    ),
    "flops_formula": _follows("how flops_per_token is counted", "model"),
    "loss_kernel": _follows("how the loss is computed", "model train.device"),
    "tokenizer": _follows("the tokenizer's name", "tokenizer"),
    "tokenizer_vocab_size": _follows("token ids of the tokenizer", "tokenizer"),
    "vocab_size": _follows(
        "rows of the model's embedding",
        "model.vocab_size tokenizer_vocab_size",
        "the tokenizer has {tokenizer_vocab_size} ids",
    ),
    "device": _follows("where the run computes", "train.device"),
    "device_name": _follows("the device's own name", "train.device"),
    "precision": _knob("precision.kind", "precision.kind device"),
    "precision_reason": _follows("why this arithmetic", "precision.kind device"),
    "compiled": _follows("whether the model is compiled, and why", "train.compile device"),
    "rates": _follows(
        "how the rates follow the real batch",
        "optimizer.lr optimizer.lr_rule optimizer.reference_batch real_batch_size",
    ),
    "warnings": _follows("what the start warns of"),
    "versions": _follows("versions of Python and packages"),
    "commit": _follows("commit of llmexp"),
}


def used_by(key: str) -> list[str]:
    """Return the derived numbers that follow directly from a key, or from another derived
    number."""
    section, _, name = key.rpartition(".")
    there = {key, name} if name in DERIVED and section == "batch" else {key}
    if (group := key.partition(".")[0]) in ("model", "data", "tokenizer"):
        there.add(group)
    return [other for other, d in DERIVED.items() if there & set(d.sources) and other != name]
