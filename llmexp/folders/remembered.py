"""Remember what a run was found to take, for runs of the same kind: notes in the cache folder."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from llmexp.config.values import Plain
from llmexp.data.cache import cache_folder, entry_path, read_cache_entry, write_entry
from llmexp.folders import versions

MEMORY = "memory"  # measured by a run, a kind of note
# Faults of the cache, which must not stop a run: no home folder, keys of a section `user` without
# an order.
FAULTS = (RuntimeError, TypeError)
# Targets of ours that read no files, so that equal knobs have equal figures.
OURS = (
    "llmexp.models.gpt2.", "llmexp.models.llama.",
    *(f"llmexp.optim.optimizers.{name}." for name in ("adamw", "sgd", "lion", "muon")),
)  # fmt: skip


# Kept for this process alone: functions of the user's own may be others in the next one.
_own: dict[Path, Plain] = {}


def _note(what: str, *deciding: Any) -> Path:
    return entry_path(cache_folder(None), what, *deciding, versions.versions())


def _is_ours(kind: Plain) -> bool:
    """Return whether the version of llmexp decides what a run of this kind computes.

    No file and no function of the user's does.
    """
    targets = [str(kind[k]["_target_"]) for k in ("model", "optimizer")]
    return all(target.startswith(OURS) for target in targets) and not kind.get("hooks")


def remembered(what: str, kind: Plain, *more: Any) -> Plain | None:
    """Return what was found for these values; None where nothing was, or it cannot be read."""
    with contextlib.suppress(*FAULTS):
        note = _note(what, kind, *more)
        return read_cache_entry(note) or None if _is_ours(kind) else _own.get(note)
    return None


def remember(what: str, found: Plain, kind: Plain, *more: Any) -> None:
    """Keep what was found, in this process alone if it depends on a user's files or functions.

    A disk that does not take it is no error."""
    with contextlib.suppress(*FAULTS):
        note = _note(what, kind, *more)
        if _is_ours(kind):
            write_entry(note, found)
        else:
            _own[note] = found
