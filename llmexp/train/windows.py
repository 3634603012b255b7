"""The windows of a run that this rank trains on."""

from __future__ import annotations

from collections.abc import Iterator

from llmexp.data.sampler import RankSlice, Sampler, read_windows
from llmexp.data.window import Window
from llmexp.mesh import Mesh
from llmexp.train.assembly.assemble import Parts


def order_of(parts: Parts) -> Sampler:
    """Return the order in which a run reads its training data."""
    run, config = parts.run, parts.config
    return Sampler(
        parts.corpus.train,
        run.sequence_length,
        run.real_batch_size,
        run.total_sequences,
        config.train.seed,
        config.data.get("shuffle", True),
        parts.mask,
        parts.corpus.mixed,
        run.skipped_sequences,
    )


def read_ahead(parts: Parts, joined: Mesh, start_step: int) -> Iterator[Window]:
    """Yield this rank's windows from `start_step` on, read ahead in the background."""
    run = parts.run
    return read_windows(
        order_of(parts),
        RankSlice(run.micro_batch_size, joined.dp_rank, joined.dp_size),
        start_step,
        run.max_steps,
        digest=parts.config.train.data_digest,
        pin_memory=joined.device.type == "cuda",
    )
