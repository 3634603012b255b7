"""Remember what a run was found to take, for runs of the same kind: in the cache folder."""

from __future__ import annotations

import contextlib
import hashlib
import json
from pathlib import Path
from typing import Any

from llmexp.data.cache import cache_folder
from llmexp.runs import provenance
from llmexp.settings.config import Config, plain
from llmexp.settings.values import ConfigError
from llmexp.system import fileio
from llmexp.system.text import gib

MEMORY = "memory"  # what was measured, a folder of the cache
# Faults of the cache, which must not stop a run: no home folder, a folder that cannot be read, keys
# of a section `user` that have no order.
FAULTS = (ConfigError, OSError, RuntimeError, TypeError)
# Knobs of the section train that neither the memory nor the time of a step depends on.
NO_MATTER = (
    "max_steps", "max_epochs", "max_tokens", "tail", "seed", "twin", "log_every", "eval_every",
    "eval_every_tokens", "tasks_folder", "max_consecutive_skips", "stop_step",
    "profile_start", "profile_steps",
)  # fmt: skip
OURS = ("llmexp.models.gpt2.", "llmexp.models.llama.", "llmexp.update.optim.")  # no files
VALUES = ("lr", "weight_decay", "beta1", "beta2")  # of the optimizer, likewise


def kind_of(config: Config, device_name: str) -> dict[str, Any]:
    """Return what of a solved run the memory and the time of its steps depend on, but for its
    data."""
    tree = plain(config)
    train = {k: v for k, v in tree["train"].items() if k not in NO_MATTER}
    for name in ("sample_every", "tasks_every"):  # whether they come at all
        train[name] = train[name] is not None
    parallelism = {k: v for k, v in tree["parallelism"].items() if "timeout" not in k}
    return {
        "device": device_name,
        "train": train,
        "parallelism": parallelism,
        "optimizer": {k: v for k, v in tree["optimizer"].items() if k not in VALUES},
        "clip": tree["clip"]["kind"],
        "async": tree["checkpoint"]["async"],
        **{k: tree[k] for k in ("batch", "model", "precision", "metrics", "hooks", "user")},
    }


_own: dict[Path, dict[str, Any]] = {}  # of the user's own, which may be something else later


def known_memory(config: Config, device_name: str) -> str | None:
    """Return in words what a run of this kind took; None where none was measured."""
    found = remembered(MEMORY, kind_of(config, device_name))
    if found is None or not isinstance(peak := found.get("peak_bytes"), (int, float)):
        return None
    return f"{gib(peak)} GiB a rank at its peak, measured before this run"


def _file(what: str, deciding: Any) -> Path:
    text = json.dumps([deciding, provenance.versions()], sort_keys=True, default=repr)
    name = hashlib.sha256(text.encode()).hexdigest()[:24]
    return cache_folder(None) / what / f"{name}.json"


def _is_ours(kind: dict[str, Any]) -> bool:
    """Return whether the version of llmexp says what a run of this kind computes, and no file and
    no function of the user's."""
    targets = [str(kind[k]["_target_"]) for k in ("model", "optimizer")]
    return all(target.startswith(OURS) for target in targets) and not kind.get("hooks")


def remembered(what: str, kind: dict[str, Any], *more: Any) -> dict[str, Any] | None:
    """Return what was found for these values; None where nothing was, or it cannot be read."""
    with contextlib.suppress(*FAULTS):
        path = _file(what, [kind, *more])
        if not _is_ours(kind):
            return _own.get(path)
        found = fileio.read_json(path) if path.is_file() else None
        return found if isinstance(found, dict) else None
    return None


def remember(what: str, found: dict[str, Any], kind: dict[str, Any], *more: Any) -> None:
    """Keep what was found: in this process alone where it depends on files or functions of
    the user's. A disk that does not take it is no error."""
    with contextlib.suppress(*FAULTS):
        path = _file(what, [kind, *more])
        if not _is_ours(kind):
            _own[path] = found
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        fileio.write_json(path, found)
