"""Prepare a corpus by tasks of a Ray cluster: each writes a part."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llmexp.config.kinds import kind_of_error
from llmexp.config.values import ConfigError
from llmexp.data.progress import ProgressBar
from llmexp.data.shards import prepare_part
from llmexp.data.work import Part, Work
from llmexp.sweep import ray as cluster

CPUS = 4  # of a task: one reads, and feeds so many that encode
_PARTS = 4  # for each task that has room at a time, where there are units enough
_LOOK_S = 1.0


def write_all(works: Sequence[Work], cache: Path) -> None:
    """Write all shards as tasks of a Ray cluster.

    It is the one that this machine is part of or RAY_ADDRESS names, else one that is started here.
    Raises ConfigError.
    """
    import ray

    begun = not ray.is_initialized()
    if begun:
        _connect(ray)
    try:
        cpus = [node["Resources"].get("CPU", 0) for node in ray.nodes() if node.get("Alive")]
        each = min([CPUS, *(int(count) for count in cpus if count >= 1)])
        at_once = max(1, sum(int(count // each) for count in cpus))
        units = sum(len(work.units) for work in works)
        of = min(max(units, at_once), _PARTS * at_once)
        environment = {key: os.environ[key] for key in cluster.KEPT if key in os.environ}
        content = ray.put(pickle.dumps(list(works)))
        task = ray.remote(_task).options(num_cpus=each)
        parts = [(number, of) for number in range(1, of + 1)]
        handles = [task.remote(content, part, cache, each, environment) for part in parts]
        _wait(ray, handles, works)
    finally:
        if begun:
            ray.shutdown()


def _connect(ray: Any) -> None:
    try:
        cluster.connect(ray, "auto", {}, "prepare.on=ray")
    except ConfigError:
        if "RAY_ADDRESS" in os.environ:
            raise
        cluster.connect(ray, None, {}, "prepare.on=ray")


def _task(
    content: bytes, part: tuple[int, int], cache: Path, threads: int, environment: dict[str, str]
) -> None:
    """Write a part. What the works need of the environment is there before they are."""
    os.environ.update(environment)
    prepare_part(pickle.loads(content), Part(*part), cache, threads)


def _wait(ray: Any, handles: list[Any], works: Sequence[Work]) -> None:
    """Return when all tasks are done; show their progress by the chunks in the cache.

    Raises ConfigError.
    """
    total = sum(sum(work.unit_bytes()) for work in works)
    progress = ProgressBar(f"{len(handles)} parts on Ray", total)
    left, seen = list(handles), set[Path]()
    _new_text(works, seen)
    while left:
        done, left = ray.wait(left, num_returns=len(left), timeout=_LOOK_S)
        for handle in done:
            try:
                ray.get(handle)
            except ray.exceptions.RayTaskError as error:
                raise ConfigError(kind_of_error(error.cause, "failed"), str(error.cause)) from None
            except ray.exceptions.RayError as error:
                raise ConfigError("failed", f"prepare.on=ray: {error}") from None
        finished = (len(handles) - len(left)) * total // len(handles)
        progress.add(_new_text(works, seen), finished)
    progress.end()


def _new_text(works: Sequence[Work], seen: set[Path]) -> int:
    """Return the bytes of text in chunks that are not among the seen ones, and note these."""
    new = [path for work in works for path in work.folder.glob("*-*.json") if path not in seen]
    seen.update(new)
    found = (json.loads(path.read_text())["shards"].values() for path in new)
    return sum(shard["text_bytes"] for several in found for shard in several)
