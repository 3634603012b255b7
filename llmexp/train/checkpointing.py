"""When a checkpoint is saved, in stages between the steps, and what follows when that fails."""

from __future__ import annotations

import dataclasses
import functools
import sys
import time

from llmexp import mesh
from llmexp.checkpoint import saving
from llmexp.runs import rundir
from llmexp.train.hooks import call_hooks
from llmexp.train.state import Loop, Saving
from llmexp.train.step import TrainingFailed


def save(loop: Loop, wait: bool = True, must: bool = False) -> None:
    """Save a checkpoint of the current step, which is settled; its rows reach the disk first.

    Without `wait` it returns as soon as the state is copied to host memory, and `go_on_saving` does
    the rest between later steps. A failure is a warning, up to checkpoint.max_failures of them in a
    row; one that comes after these, or where this save `must` succeed, raises
    TrainingFailed.
    """
    setup, progress, out = loop.setup, loop.progress, loop.out
    finish_saving(loop)
    if loop.saved_step == progress.step:
        return
    refuse_changed_data(loop)
    loop.saved_at = time.monotonic()
    tokens_seen = loop.meter.tokens_seen()
    run, root, keep = loop.run, out.path / rundir.CHECKPOINTS, loop.config.checkpoint.keep
    if out.rows is not None:
        out.rows.sync()
    geometry = {
        k: getattr(run, k) for k in ("real_batch_size", "sequence_length", "dp_size", "world_size")
    }
    meta = {
        "tokens_seen": tokens_seen,
        "geometry": {**geometry, "parallelism": run.parallelism},
        **loop.fixed,
    }
    state = {
        "progress": dataclasses.asdict(progress),
        "meter": {"tokens_seen": tokens_seen},
        "norms": loop.measured.norms.state_dict(),
        "noise": loop.measured.noise.state_dict(),
        "outliers": setup.outliers.state_dict(),
        "scaler": setup.scaler.state_dict(),
    }
    pieces = saving.snapshot(
        setup.model,
        setup.optimizers,
        loop.mesh.rank,
        loop.mesh.world_size,
        copy=not wait,
        ema=None if setup.ema is None else setup.ema.average,
    )
    whole = tuple(loop.saved)
    loop.saving = Saving(
        progress.step,
        functools.partial(
            saving.commit,
            root,
            progress.step,
            pieces,
            state,
            meta,
            keep,
            whole,
            loop.config.checkpoint.keep_every,
        ),
    )
    loop.writer.start(functools.partial(saving.write, root, progress.step, pieces))
    if wait:
        finish_saving(loop, must)


def refuse_changed_data(loop: Loop) -> None:
    """Raise TrainingFailed where a data file was written to under the run: what is saved must be of
    one corpus."""
    corpus, joined = loop.setup.parts.corpus, loop.mesh
    text = next(corpus.differences(harmful=True), None)
    if ranks := mesh.ranks_where(joined, text is not None):
        where = f" (rank {', '.join(map(str, ranks))})" if joined.distributed else ""
        since = "the beginning" if loop.saved_step is None else f"step {loop.saved_step:,}"
        if text is None:
            time.sleep(1.0)  # give the rank that knows the file time to report first
        raise TrainingFailed(
            f"{text or 'a data file changed under the run'}{where}; the steps since {since} may "
            f"have seen other data, and step {loop.progress.step:,} is not saved"
        )
    if loop.out.main and not loop.warned_of_data:
        for text in corpus.differences(harmful=False):
            loop.warned_of_data = True
            loop.out.console.line(f"WARNING: {text}; resuming needs the old content")


def go_on_saving(loop: Loop, must: bool = False) -> None:
    """Take the next stage of the checkpoint that is on its way. All ranks are here at the same
    step. Raises TrainingFailed for a failure too many, or for one that `must` not be."""
    due, joined = loop.saving, loop.mesh
    assert due is not None
    error: OSError | None = None
    try:
        loop.writer.wait()
    except OSError as failed:
        error = failed
    if failing := mesh.ranks_where(joined, error is not None):
        loop.saving = None
        loop.failed_saves += 1
        most = loop.config.checkpoint.max_failures
        ranks = ", ".join(map(str, failing))
        if loop.out.main:  # all ranks have written, or failed to
            saving.clean(loop.out.path / rundir.CHECKPOINTS)
        if must or loop.failed_saves > most:
            if error is None:
                time.sleep(1.0)  # give the rank that knows the cause time to report first
            why = error or f"rank {ranks} could not write"
            limit = (
                "the run may not end without it"
                if must
                else f"checkpoint.max_failures={most} in a row"
            )
            raise TrainingFailed(
                f"the checkpoint of step {due.step:,} could not be saved ({why}); {limit}"
            ) from error
        if loop.out.main:
            reason = error or f"rank {ranks} could not write; its log says why"
            kept = (
                f"the newest is of step {loop.saved_step}"
                if loop.saved_step is not None
                else "there is none yet"
            )
            loop.out.console.line(
                f"WARNING: the checkpoint of step {due.step:,} could not be saved ({reason}); "
                f"training goes on, {kept}; failure {loop.failed_saves} of at most {most} in a row "
                "(checkpoint.max_failures)"
            )
        elif error is not None:
            print(
                f"the checkpoint of step {due.step:,} could not be saved: {error}", file=sys.stderr
            )
        return
    if not due.committing:
        due.committing = True
        if loop.out.main:
            loop.writer.start(due.commit)
        return
    loop.saving, loop.failed_saves = None, 0
    loop.saved.append(due.step)
    call_hooks(loop, "saved", due.step)


def finish_saving(loop: Loop, must: bool = False) -> None:
    """Wait until the checkpoint that is on its way, if there is one, is committed. Raises
    TrainingFailed as `save` does."""
    while loop.saving is not None:
        # By turns, not in one long wait: a large checkpoint may take longer than a rank may be
        # missing.
        pause = 0.001
        while mesh.any_rank(loop.mesh, loop.writer.busy())[0]:
            time.sleep(pause)
            pause = min(2 * pause, 0.2)
        go_on_saving(loop, must)


def leave_saving(loop: Loop) -> None:
    """Before a run ends by an exception: the checkpoint that is on its way is finished where no
    other rank is needed for that, and else reported as lost."""
    due, loop.saving = loop.saving, None
    if due is None:
        return
    try:
        if loop.mesh.distributed and not due.committing:
            raise OSError("another rank may not have written its part")
        loop.writer.wait()
        if not due.committing:
            due.commit()
        loop.saved.append(due.step)
    except OSError as error:
        if loop.out.main:
            loop.out.console.line(
                f"WARNING: the checkpoint of step {due.step:,} was not finished: {error}"
            )
