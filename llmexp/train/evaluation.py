"""Validation: the loss of the whole run over its validation sets, and scores of tasks."""

from __future__ import annotations

import math

import torch

from llmexp import mesh
from llmexp.data.sampler import RankSlice, eval_batches
from llmexp.data.stream import TokenStream
from llmexp.data.text_bytes import TextBytes
from llmexp.metrics.keys import EMA
from llmexp.runs.ending import COMES_AGAIN
from llmexp.tasks import scoring
from llmexp.train.assembly.assemble import Parts
from llmexp.train.step import Setup, TrainingFailed
from llmexp.update import faces, precision


def validate(parts: Parts, setup: Setup, text_bytes: TextBytes) -> dict[str, float]:
    """Return the validation losses over all ranks, weighted by tokens and summed in float64.

    They are of the main set, of each named one, and of the average of the weights. The training RNG
    is not touched.
    """
    if parts.corpus.val is None or not parts.run.eval_sequences:
        return {}
    with faces.evaluating(setup.optimizers, setup.module):
        return _of_all_sets(parts, setup, parts.corpus.val, text_bytes)


def _of_all_sets(
    parts: Parts, setup: Setup, main: TokenStream, text_bytes: TextBytes
) -> dict[str, float]:
    """Return the losses of the weights that are in place, and of their average."""
    run, corpus = parts.run, parts.corpus
    found = evaluate_stream(parts, setup, main, run.eval_sequences, text_bytes, "val")
    most, sets = parts.config.train.eval_tokens, dict[str, float]()
    for name, stream in corpus.val_sets.items():
        if stream is main:
            given = {f"val/{name}/{key[4:]}": value for key, value in found.items()}
        else:
            there = stream.n_sequences(run.sequence_length)
            sequences = min(there, -(-most // run.sequence_length)) if most else there
            given = evaluate_stream(parts, setup, stream, sequences, text_bytes, f"val/{name}")
        sets |= given
    if setup.ema is not None:
        with setup.ema.in_place():
            sets |= evaluate_stream(parts, setup, main, run.eval_sequences, text_bytes, EMA)
    return found | {key: value for key, value in sets.items() if not key.endswith("/ppl")}


def score_tasks(parts: Parts, setup: Setup) -> dict[str, float]:
    """Return the scores of the run's tasks by the keys of a row, such as task/NAME/acc.

    All ranks share the items. The training RNG is not touched.
    """
    row = dict[str, float]()
    tokens = parts.run.micro_batch_size * parts.run.sequence_length
    was_training = setup.model.training
    setup.model.eval()
    with faces.evaluating(setup.optimizers, setup.module):
        for task in parts.tasks:
            try:
                found, _ = scoring.score_task(task, setup.loss, setup.mesh, parts.precision, tokens)
            except ValueError as error:
                raise TrainingFailed(str(error)) from None
            row |= {f"task/{task.name}/{key}": value for key, value in found.items()}
    setup.model.train(was_training)
    return row


def evaluate_stream(
    parts: Parts,
    setup: Setup,
    stream: TokenStream,
    sequences: int,
    text_bytes: TextBytes,
    name: str,
) -> dict[str, float]:
    """Return loss, perplexity and bits per byte over so many sequences, which are spread evenly."""
    run = parts.run
    sums = torch.zeros(3, dtype=torch.float64, device=setup.mesh.device)  # nll, targets, bytes
    batches = eval_batches(
        stream,
        RankSlice(run.micro_batch_size, setup.mesh.dp_rank, setup.mesh.dp_size),
        sequence_length=run.sequence_length,
        max_sequences=sequences,
        mask=parts.mask,
    )
    with setup.loss.evaluating():
        for starts_b, tokens_bt, targets_bt in batches:
            with precision.autocast(parts.precision, setup.mesh.device):
                sums[0] += setup.loss(
                    tokens_bt.to(setup.mesh.device), targets_bt.to(setup.mesh.device)
                )
            targets = targets_bt.numpy()
            sums[1] += int((targets >= 0).sum())
            sums[2] += float(text_bytes.at(stream, starts_b, targets).sum())
    nll, targets, count_bytes = mesh.total(setup.mesh, sums).tolist()
    if not targets:
        return {}
    if not math.isfinite(nll):
        raise TrainingFailed(f"the validation loss is not finite; {COMES_AGAIN}")
    found = {f"{name}/loss": nll / targets}
    if nll / targets < 700:  # beyond that exp overflows
        found[f"{name}/ppl"] = math.exp(nll / targets)
    if count_bytes:
        found[f"{name}/bits_per_byte"] = nll / math.log(2) / count_bytes
    return found
