"""The windows of a run that this rank trains on."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from llmexp.data.sampler import Mark, RankSlice, Sampler, read_windows
from llmexp.data.window import Window
from llmexp.mesh import Mesh
from llmexp.run.stages import BatchStage
from llmexp.train.assembly.assemble import Parts


def sampler_of(parts: Parts, stage: BatchStage | None = None) -> Sampler:
    """Return the sampler of the windows of one batch stage: the first, unless another is given."""
    run, config = parts.run, parts.config
    stage = stage or run.stages[0]
    return Sampler(
        parts.corpus.train,
        run.sequence_length,
        stage.real_batch_size,
        run.total_sequences,
        config.train.seed,
        config.data.get("shuffle", True),
        parts.mask,
        parts.corpus.mixed,
        stage.offset,
    )


def sequences_of(parts: Parts, step: int) -> tuple[int, list[int]]:
    """Return the place in the order of a step's first sequence, and the first token of each.

    `step` counts from 1."""
    begin, end = parts.run.sequences_at(step - 1), parts.run.sequences_at(step)
    return begin, sampler_of(parts).starts(np.arange(begin, end)[None])[0].tolist()


def read_ahead(
    parts: Parts, joined: Mesh, start_step: int, mark: Mark | None = None
) -> Iterator[Window]:
    """Yield this rank's windows from `start_step` on, read ahead in the background."""
    run = parts.run
    rank_slice = RankSlice(run.micro_batch_size, joined.dp_rank, joined.dp_size)
    ends = [stage.first_step for stage in run.stages[1:]] + [run.max_steps]
    for stage, end in zip(run.stages, ends, strict=True):
        if start_step < end:
            yield from read_windows(
                sampler_of(parts, stage),
                rank_slice,
                max(start_step, stage.first_step),
                end,
                mark=mark,
                pin_memory=joined.device.type == "cuda",
            )
