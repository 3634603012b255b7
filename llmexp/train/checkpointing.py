"""Save a checkpoint in stages between the steps, and decide what follows when that fails.

save           starts: each rank copies its part, and writes it in the background
advance_save   the next stage, once no rank is writing: rank 0 commits what all have written, then
               the checkpoint counts as saved
finish_save    waits through the stages that are left: all ranks call together
finish_alone   the same for a run that ends by an exception, where other ranks may be gone

`checkpoint/saving` does the work on the disk: snapshot, write_pieces, commit_checkpoint.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
import time

from llmexp import mesh
from llmexp.checkpoint import saving
from llmexp.data.stream import DataChanged
from llmexp.folders import rundir
from llmexp.folders.ending import COMES_AGAIN
from llmexp.optim import eval_weights, updating
from llmexp.system.text import first_of
from llmexp.train.state import Loop, Saving
from llmexp.train.step import TrainingFailed

OTHERS_S = 2.0  # for other ranks to write their parts, where a run ends by an exception


def save(loop: Loop, wait: bool = True, must: bool = False) -> None:
    """Save a checkpoint of the current step, which is finished; its rows reach the disk first.

    Without `wait` it returns as soon as the state is copied to host memory, and `advance_save` does
    the rest between later steps. A failure is a warning, up to checkpoint.max_failures of them in a
    row; one that comes after these, or where this save `must` succeed, raises TrainingFailed.
    """
    setup, step, chosen = loop.setup, loop.progress.step, loop.config.checkpoint
    finish_save(loop)
    if loop.newest_step == step:
        return
    refuse_changed_data(loop)
    loop.saved_at = time.monotonic()
    tokens_seen = loop.meter.tokens_seen()
    if loop.rows is not None:
        loop.rows.sync()
    loop.features.at("sync")
    sizes = ("real_batch_size", "sequence_length", "dp_size", "world_size", "parallelism")
    geometry = {name: getattr(loop.run, name) for name in sizes}
    meta = {"tokens_seen": tokens_seen, "geometry": geometry, **loop.fixed}
    if loop.meter.timed_steps:  # not in state.pt, which is equal in runs that are
        meta["since_row"] = loop.meter.since_row()
    state = {
        "progress": dataclasses.asdict(loop.progress),
        "meter": {"tokens_seen": tokens_seen},
        "scaler": setup.scaler.state_dict(),
        **loop.features.by_name("state_dict"),
    }
    more = loop.features.by_name("tensors")
    ranks = loop.mesh.rank, loop.mesh.world_size
    with eval_weights.evaluating(setup.optimizers, setup.module) as trained:
        copy = not wait or bool(trained)  # the live tensors are others again afterwards
        pieces = saving.snapshot(setup.model, setup.optimizers, *ranks, copy, more, trained)
    # what no run could go on from, on all ranks: a rate that is none, or tensors of some rank
    wrong = updating.wrong_rate(setup.optimizers)
    bad = mesh.ranks_where(loop.mesh, bool(pieces.bad or wrong))
    if wrong and not pieces.bad:
        raise not_saved(loop, f"optimizer: {wrong}")
    if bad:
        if not pieces.bad:
            time.sleep(1.0)  # give the rank that knows the tensors time to report first
        raise not_finite(loop, first_of(pieces.bad) or mesh.numbered(bad))
    place = loop.path / rundir.CHECKPOINTS, step, pieces
    kept = chosen.keep, tuple(loop.saved), chosen.keep_every
    commit = functools.partial(saving.commit_checkpoint, *place, state, meta, *kept)
    loop.saving = Saving(step, commit, loop.writer.submit(saving.write_pieces, *place))
    if wait:
        finish_save(loop, must)


def not_finite(loop: Loop, where: str) -> TrainingFailed:
    """Return the error for values that an update has left not finite, which are never saved."""
    return not_saved(loop, f"values that are not finite: {where}; {COMES_AGAIN}")


def not_saved(loop: Loop, why: str) -> TrainingFailed:
    return TrainingFailed(f"what step {loop.progress.step:,} has left is not saved: {why}")


def refuse_changed_data(loop: Loop) -> None:
    """Raise TrainingFailed where a data file was written to under the run.

    What is saved must be of one corpus."""
    text, harmless = None, list[str]()
    try:
        harmless = loop.parts.corpus.check_content()
    except DataChanged as error:
        text = str(error)
    if ranks := mesh.ranks_where(loop.mesh, text is not None):
        raise _data_changed(loop, text, ranks)
    if loop.main and not loop.warned_of_data:
        for text in harmless:
            loop.warned_of_data = True
            loop.console.line(f"WARNING: {text}; resuming needs the old content")


def _data_changed(loop: Loop, text: str | None, ranks: list[int]) -> TrainingFailed:
    where = f" ({mesh.numbered(ranks)})" if loop.mesh.distributed else ""
    since = "the beginning" if loop.newest_step is None else f"step {loop.newest_step:,}"
    if text is None:
        time.sleep(1.0)  # give the rank that knows the file time to report first
    return TrainingFailed(
        f"{text or 'a data file changed under the run'}{where}; the steps since {since} may "
        f"have seen other data, and step {loop.progress.step:,} is not saved"
    )


def advance_save(loop: Loop, must: bool = False) -> None:
    """Take the next task of the checkpoint that is on its way; all ranks are at the same step.

    Raises TrainingFailed as `save` does."""
    saving = loop.saving
    assert saving is not None
    error: OSError | None = None
    try:
        saving.task.result()
    except OSError as failed:
        error = failed
    if failing := mesh.ranks_where(loop.mesh, error is not None):
        loop.saving = None
        warn_of_failed(loop, saving.step, error, mesh.numbered(failing), must)
    elif not saving.committing:
        saving.committing = True
        if loop.main:
            saving.task = loop.writer.submit(saving.commit)
    else:
        loop.saving, loop.failed_saves = None, 0
        loop.saved.append(saving.step)
        loop.features.at("saved", saving.step)


def warn_of_failed(loop: Loop, step: int, error: OSError | None, ranks: str, must: bool) -> None:
    """Warn of a save that failed on some `ranks`, with this rank's `error` if it is one of them.

    Raises TrainingFailed for a failure too many, or where the save `must` succeed."""
    console, most = loop.console, loop.config.checkpoint.max_failures
    what = f"the checkpoint of step {step:,} could not be saved"
    loop.failed_saves += 1
    if loop.main:  # all ranks have written, or failed to
        saving.remove_leftovers(loop.path / rundir.CHECKPOINTS)
    if must or loop.failed_saves > most:
        if error is None:
            time.sleep(1.0)  # give the rank that knows the cause time to report first
        limit = f"checkpoint.max_failures={most} in a row"
        limit = "the run may not end without it" if must else limit
        raise TrainingFailed(f"{what} ({error or f'{ranks} could not write'}); {limit}") from error
    if loop.main:
        reason = error or f"{ranks} could not write; its log says why"
        saved = loop.newest_step
        newest = "none is saved so far" if saved is None else f"the newest is of step {saved}"
        count = f"failure {loop.failed_saves} of at most {most} in a row (checkpoint.max_failures)"
        console.line(f"WARNING: {what} ({reason}); {newest}; {count}")
    elif error is not None:
        print(f"{what}: {error}", file=sys.stderr)


def finish_save(loop: Loop, must: bool = False) -> None:
    """Wait until the checkpoint that is on its way, if there is one, is committed.

    Raises TrainingFailed as `save` does."""
    while loop.saving is not None:
        # Ask again and again: one wait for a large checkpoint could be longer than ranks may be
        # silent.
        pause = 0.001
        while mesh.any_rank(loop.mesh, loop.is_writing)[0]:
            time.sleep(pause)
            pause = min(2 * pause, 0.2)
        advance_save(loop, must)


def save_what_can_be(loop: Loop) -> None:
    """Finish the checkpoint that is on its way where a run ends; what goes wrong is a line.

    What has ended the run comes first. All ranks call together."""
    try:
        finish_save(loop)
    except TrainingFailed as error:
        loop.console.line(f"WARNING: {error}")


def finish_alone(loop: Loop, due: Saving) -> None:
    """Finish the checkpoint that is on its way, on this rank alone; print why where it cannot be.

    Other ranks may be gone, or write their parts meanwhile: rank 0 waits OTHERS_S for these."""
    loop.saving = None
    try:
        due.task.result()
        if loop.main and not due.committing:
            place = loop.path / rundir.CHECKPOINTS, due.step, loop.mesh.world_size
            end = time.monotonic() + OTHERS_S
            while (missing := saving.not_written(*place)) and time.monotonic() < end:
                time.sleep(0.05)
            if missing:
                raise OSError(f"{mesh.numbered(missing)} has not written its part")
            due.commit()
        loop.saved.append(due.step)
    except OSError as error:
        if loop.main:
            loop.console.line(
                f"WARNING: the checkpoint of step {due.step:,} was not finished: {error}"
            )
