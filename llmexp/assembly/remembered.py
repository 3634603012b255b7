"""Remember what a run was found to take, for runs of the same kind: in the cache folder."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
from pathlib import Path
from typing import Any

from llmexp import fileio
from llmexp.config import Config, ConfigError, plain
from llmexp.data.files import cache_folder
from llmexp.metrics import hardware

MEMORY = "memory"  # what was measured, a folder of the cache
# Knobs of the section train that neither the memory nor the time of a step depends on.
NO_MATTER = (
    "max_steps", "max_epochs", "max_tokens", "tail", "seed", "twin", "log_every", "eval_every",
    "tasks_folder", "max_consecutive_skips", "stop_step", "profile_start", "profile_steps",
)  # fmt: skip


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
        "optimizer": tree["optimizer"]["_target_"],
        "clip": tree["clip"]["kind"],
        "async": tree["checkpoint"]["async"],
        **{name: tree[name] for name in ("batch", "model", "precision", "metrics")},
    }


_versions = functools.cache(hardware.versions)


def known_memory(config: Config, device_name: str) -> str | None:
    """Return in words what a run of this kind took; None where none was measured."""
    found = remembered(MEMORY, kind_of(config, device_name))
    if found is None or not isinstance(peak := found.get("peak_bytes"), (int, float)):
        return None
    return f"{peak / 2**30:,.3g} GiB a rank at its peak, measured before this run"


def _file(what: str, deciding: Any) -> Path:
    whole = [deciding, _versions()]
    text = json.dumps(whole, sort_keys=True, default=repr)
    name = hashlib.sha256(text.encode()).hexdigest()[:24]
    return cache_folder(None) / what / f"{name}.json"


def remembered(what: str, deciding: Any) -> dict[str, Any] | None:
    """Return what was found for these values; None where nothing was, or it cannot be read."""
    path = _file(what, deciding)
    with contextlib.suppress(ConfigError):
        found = fileio.read_json(path) if path.is_file() else None
        return found if isinstance(found, dict) else None
    return None


def remember(what: str, deciding: Any, found: dict[str, Any]) -> None:
    """Keep what was found; a disk that does not take it is no error."""
    path = _file(what, deciding)
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        fileio.write_json(path, found)
