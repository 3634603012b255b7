"""Validation: the loss of the whole run over its validation sets."""

from __future__ import annotations

import functools
import math

import torch

from llmexp import mesh
from llmexp.data.sampler import RankSlice, eval_batches
from llmexp.data.stream import TokenStream
from llmexp.folders.ending import COMES_AGAIN
from llmexp.models.operands import IGNORE_INDEX
from llmexp.optim import eval_weights, precision
from llmexp.train.assembly.assemble import Parts
from llmexp.train.step import Setup, TrainingFailed


def validate(parts: Parts, setup: Setup) -> dict[str, float]:
    """Return the validation losses over all ranks, weighted by tokens and summed in float64.

    They are of the main set, of each named one, and of the average of the weights.
    """
    main, run = parts.corpus.val, parts.run
    if main is None or not run.eval_sequences:
        return {}
    losses = functools.partial(evaluate_stream, parts, setup)
    main_losses = functools.partial(losses, main, run.eval_sequences)
    mesh.share_buffers(setup.mesh, setup.model)
    with eval_weights.evaluating(setup.optimizers, setup.module):
        found = main_losses("val")
        most, sets = parts.config.train.eval_tokens, dict[str, float]()
        for name, stream in parts.corpus.val_sets.items():
            if stream is main:
                sets |= {f"val/{name}/{key[4:]}": value for key, value in found.items()}
                continue
            there = stream.n_sequences(run.sequence_length)
            sequences = min(there, -(-most // run.sequence_length)) if most else there
            sets |= losses(stream, sequences, f"val/{name}")
        for evaluate in setup.features.on("evaluate"):
            sets |= evaluate(main_losses)
    return found | {key: value for key, value in sets.items() if not key.endswith("/ppl")}


def evaluate_stream(
    parts: Parts,
    setup: Setup,
    stream: TokenStream,
    sequences: int,
    name: str,
) -> dict[str, float]:
    """Return loss, perplexity and bits per byte over so many sequences, which are spread evenly."""
    run, device = parts.run, setup.mesh.device
    sums = torch.zeros(3, dtype=torch.float64, device=device)  # nll, targets, bytes
    batches = eval_batches(
        stream,
        RankSlice(run.micro_batch_size, setup.mesh.dp_rank, setup.mesh.dp_size),
        sequence_length=run.sequence_length,
        max_sequences=sequences,
        mask=parts.mask,
    )
    with setup.loss.evaluating():
        for starts_b, tokens_bt, targets_bt in batches:
            with precision.autocast(parts.precision, device):
                sums[0] += setup.loss(tokens_bt.to(device), targets_bt.to(device))
            targets = targets_bt.numpy()
            sums[1] += int((targets != IGNORE_INDEX).sum())
            if parts.corpus.is_text:
                sums[2] += float(parts.text_bytes.at(stream, starts_b, targets).sum())
    nll, targets, count_bytes = mesh.total_(setup.mesh, sums).tolist()
    if not targets:
        return {}
    if not math.isfinite(nll):
        raise TrainingFailed(f"the validation loss is not finite; {COMES_AGAIN}", "not_finite")
    loss = nll / targets
    found = {f"{name}/loss": loss}
    if loss < 700:  # beyond that exp overflows
        found[f"{name}/ppl"] = math.exp(loss)
    if count_bytes:
        found[f"{name}/bits_per_byte"] = nll / math.log(2) / count_bytes
    return found
