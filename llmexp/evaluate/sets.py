"""Losses of a trained model over sets of sequences, with standard errors.

The sequences, the arithmetic and the targets that count are those of the run's own evaluations, so
the loss of a set is the `val/loss` of the row of that step. Only the order of summation differs:
here each target's loss goes into a float64 sum, there a micro-batch is summed in fp32 before.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from llmexp import mesh
from llmexp.config.sections import Config
from llmexp.config.values import ConfigError
from llmexp.config.variables import fill
from llmexp.data.sampler import RankSlice, TargetMask, eval_batches
from llmexp.data.stream import Corpus, TokenStream
from llmexp.data.text_bytes import TextBytes
from llmexp.folders import rundir
from llmexp.metrics.ratio import with_error
from llmexp.models.loss import SummedLoss, evaluation_mode
from llmexp.optim import precision
from llmexp.system.redact import as_recorded, redacted, warn
from llmexp.tasks import scoring
from llmexp.train.assembly.inputs import build_corpus, document_end
from llmexp.train.assembly.opening import Opened, device_of

SCAN_TOKENS = 1 << 20


def document_ends(stream: TokenStream, end: int | None) -> np.ndarray:
    """Return int64 [n]: the positions of the last ids of documents."""
    if end is None:
        return np.empty(0, np.int64)
    found = [at + np.flatnonzero(ids == end) for at, ids in stream.blocks(SCAN_TOKENS)]
    return np.concatenate([np.empty(0, np.int64), *found])


@dataclass
class Sums:
    """Sum nll, targets and bytes by unit.

    With `ends` units are documents, which may be cut into several sequences; else each sequence is
    one.
    """

    ends: np.ndarray
    _keys: list[np.ndarray] = field(default_factory=list)
    _sums: list[np.ndarray] = field(default_factory=list)

    @property
    def unit(self) -> str:
        return "documents" if len(self.ends) else "sequences"

    def add(
        self, starts_b: np.ndarray, nll_bt: np.ndarray, valid_bt: np.ndarray, bytes_bt: np.ndarray
    ) -> None:
        """Add rows whose inputs start at `starts_b`.

        A row that is no sequence has no valid target.
        """
        # the target of input i is the id at i + 1
        at_bt = starts_b[:, None] + 1 + np.arange(nll_bt.shape[1])
        if len(self.ends):
            at_bt = np.searchsorted(self.ends, at_bt)  # so many documents end before it
        else:
            at_bt = np.broadcast_to(starts_b[:, None], nll_bt.shape)
        units, index = np.unique(at_bt[valid_bt], return_inverse=True)
        what = (nll_bt[valid_bt], None, bytes_bt[valid_bt])
        self._keys.append(units)
        self._sums.append(np.stack([np.bincount(index, w, len(units)) for w in what]))

    def take(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the units, int64 [n], and their nll, targets and bytes, float64 [3, n].

        A unit is the number of a document, or the first position of a sequence.
        """
        if not self._keys:
            return np.empty(0, np.int64), np.empty((3, 0))
        units, index = np.unique(np.concatenate(self._keys), return_inverse=True)
        sums = np.concatenate(self._sums, axis=1)
        return units, np.stack([np.bincount(index, row, len(units)) for row in sums])


_BEGINNING_TOKENS = 24  # of a document, to show which one it is


@dataclass(frozen=True)
class PlacedModel:
    """A model in place, ready to score. `note`: why it does not compute as in its run."""

    opened: Opened
    loss: SummedLoss
    device: torch.device
    precision: str
    note: str


def placed_model(opened: Opened) -> PlacedModel:
    """Put the model where its run computed, or where it can be computed here."""
    config, note = opened.config, ""
    wanted = config.train.device
    device = torch.device(device_of(config))
    if wanted == "cuda" and device.type == "cpu":
        note = "no CUDA device is visible; computing on the CPU"
    kind = config.precision.kind
    try:
        kind, reason = precision.choose(kind, device)
        if "emulates" in reason:
            raise ValueError(f"precision.kind={kind}: {reason}")
    except ValueError as error:
        note, kind = f"{str(error).partition(';')[0]}; computing in fp32", "fp32"
    if opened.loss is not None:  # its parts are where they belong
        device = next(opened.model.parameters()).device
    else:
        opened.model.to(device)
    opened.model.eval()
    return PlacedModel(opened, opened.loss or SummedLoss(opened.model), device, kind, note)


@precision.settings_kept()
def evaluate_sets(
    model: PlacedModel,
    config: Config,
    tokens: int | None,
    by_document: bool,
) -> dict[str, Any]:
    """Return what `llmexp evaluate` finds on the data of `config`. Raises ConfigError."""
    precision.apply(model.precision)
    opened = model.opened
    ids = getattr(opened.model, "vocab_size", None) or opened.tokenizer.n_vocab
    batch = config.batch
    corpus = build_corpus(
        config.data, opened.tokenizer, ids, batch.sequence_length, batch.document_mask
    )
    recorded = rundir.read_run(opened.path).get("data_fingerprint")
    read = as_recorded(corpus.fingerprint)
    if config.data == opened.config.data and recorded not in (None, read):
        warn("the data changed since the run started")
    return {
        "device": model.device.type,
        "precision": model.precision,
        "data": redacted(corpus.description),
        "sets": [
            score_set(model, config, corpus, name, tokens, by_document)
            for name in streams_of(corpus)
        ],
    }


@precision.settings_kept()
def evaluate_tasks(
    model: PlacedModel,
    names: Sequence[str],
    folder: str | None,
    by_item: bool,
    joined: mesh.Mesh | None,
) -> dict[str, Any]:
    """Return the figures of tasks, and with `by_item` the scores of each item.

    `joined`: ranks that share the model. Raises ConfigError.
    """
    precision.apply(model.precision)
    batch, tokenizer = model.opened.config.batch, model.opened.tokenizer
    found = []
    tasks = scoring.prepare_tasks(names, folder, tokenizer, batch.sequence_length)
    ranks = joined or mesh.join(model.device.type, "single", 1, 1, 1)
    tokens = int(batch.micro_batch_size or 8) * batch.sequence_length
    for task in tasks:
        figures, samples = scoring.score_task(task, model.loss, ranks, model.precision, tokens)
        found.append({"task": task.name, "items": len(task.items), **figures})
        if by_item:
            found[-1]["scores"] = samples
    return {"device": model.device.type, "precision": model.precision, "tasks": found}


def streams_of(corpus: Corpus) -> dict[str, TokenStream]:
    """Return the sets to evaluate: the validation sets, or all tokens where there is none."""
    if corpus.val is None:
        return {"train": corpus.train}
    return corpus.val_sets or {"val": corpus.val}


def score_set(
    model: PlacedModel,
    config: Config,
    corpus: Corpus,
    name: str,
    tokens: int | None,
    by_document: bool,
) -> dict[str, Any]:
    """Return the figures of a set, over `tokens` of it (None: all), spread evenly as in training.

    `config` has the data section of `corpus`. Raises ConfigError.
    """
    stream, length = streams_of(corpus)[name], config.batch.sequence_length
    there = stream.n_sequences(length)
    sequences = there if tokens is None else min(there, -(-tokens // length))
    if not sequences:
        raise ConfigError(
            "too_little_data",
            f"{name}: {len(stream):,} tokens do not fill one sequence; batch.sequence_length="
            f"{length} needs {length + 1:,}",
        )
    tokenizer = model.opened.tokenizer
    end = tokenizer.eot_token if corpus.is_text else None
    ends = document_ends(stream, end)
    sums = Sums(ends if len(ends) > 1 else ends[:0])
    with evaluation_mode(model.loss):
        add_all(model, config, corpus, stream, sequences, sums)
    units, figures = sums.take()
    if not len(units):
        raise ConfigError("too_little_data", f"{name}: has no target that counts")
    found = {
        "set": name,
        "unit": sums.unit,
        "units": len(units),
        "tokens": int(figures[1].sum()),
        "tokens_there": there * length,
        **_figures(*figures),
    }
    if not math.isfinite(found["loss"]):
        raise ConfigError("not_finite", f"{name}: the loss is not finite")
    if by_document:
        if sums.unit != "documents":
            raise ConfigError(
                "unsupported",
                f"--by document: {name} has no documents (no end-of-text id stands between them); "
                "use --by set",
            )
        starts = np.concatenate([[0], ends + 1])
        found["documents"] = [
            {
                "document": number,
                "begins": _beginning(model, stream, int(starts[number]), end),
                "tokens": int(column[1]),
                **_figures(*column[:, None]),
            }
            for number, column in zip(units.tolist(), figures.T, strict=True)
        ]
    return found


@torch.no_grad()
def add_all(
    model: PlacedModel,
    config: Config,
    corpus: Corpus,
    stream: TokenStream,
    sequences: int,
    sums: Sums,
) -> None:
    """Score so many sequences of a stream, and add what each target costs to `sums`."""
    tokenizer, batch = model.opened.tokenizer, config.batch
    vocab_size = getattr(model.opened.model, "vocab_size", None)
    text_bytes = TextBytes(tokenizer, corpus.is_text, vocab_size)
    ignored = fill(config.data.get("ignore_id"), "data.ignore_id")
    for starts_b, tokens_bt, targets_bt in eval_batches(
        stream,
        RankSlice(int(batch.micro_batch_size or 8)),
        sequence_length=batch.sequence_length,
        max_sequences=sequences,
        mask=TargetMask(ignored, document_end(tokenizer, batch.document_mask)),
    ):
        with precision.autocast(model.precision, model.device):
            nll_bt = model.loss(tokens_bt.to(model.device), targets_bt.to(model.device), each=True)
        targets = targets_bt.numpy()
        bytes_bt = text_bytes.at(stream, starts_b, targets)
        sums.add(starts_b, nll_bt.double().cpu().numpy(), targets >= 0, bytes_bt)


def _figures(nll_n: np.ndarray, targets_n: np.ndarray, bytes_n: np.ndarray) -> dict[str, Any]:
    """Return loss, perplexity and bits per byte, with those standard errors that are known.

    The error of the perplexity exp(loss) is exp(loss) times that of the loss.
    """
    found = with_error("loss", nll_n, targets_n)
    if found["loss"] < 700:  # beyond that exp overflows
        found["ppl"] = math.exp(found["loss"])
        if "loss_stderr" in found:
            found["ppl_stderr"] = found["loss_stderr"] * found["ppl"]
    if bytes_n.sum():
        found |= with_error("bits_per_byte", nll_n / math.log(2), bytes_n)
    return found


def _beginning(model: PlacedModel, stream: TokenStream, start: int, end: int | None) -> str:
    """Return the first words of a document, on one line."""
    ids = stream.read(start, min(_BEGINNING_TOKENS, len(stream) - start)).tolist()
    ids = ids[: ids.index(end)] if end in ids else ids
    return " ".join(model.opened.tokenizer.decode(ids, errors="replace").split())
