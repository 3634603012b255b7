"""Name a run in wandb, and keep tracker.json: how far its mirror has come there.

Names are from the run's config and record, and from wandb's own variables.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from llmexp.config.tracking import PROJECT, RUN_ID, SAFE_ID, SWEEP_ID, VARIABLES
from llmexp.config.values import ConfigError
from llmexp.folders.door import fits
from llmexp.system.fileio import read_json, write_json

POSITION_FILE = "tracker.json"


@dataclass(frozen=True)
class MirrorPosition:
    """The rows that wandb was given, and once the server confirms it, that all of them arrived."""

    run_id: str
    tokens_seen: int = -1
    step: int = -1
    # project, step, exit_code and url, once the server has confirmed them
    uploaded: dict[str, Any] | None = None
    entity: str | None = None  # the owner of the run, as wandb reports it
    sweep: str | None = None  # wandb's, where its agent started the run
    project: str | None = None  # of that sweep
    workspace: str | None = None  # of a sweep of ours, where it was saved


def read_position(run_dir: Path) -> MirrorPosition | None:
    """Return how far the mirror has come; None where that cannot be read.

    A row twice in an offline mirror is the worst that follows.
    """
    with contextlib.suppress(ConfigError):
        saved = read_json(run_dir / POSITION_FILE)
        if fits(MirrorPosition, saved) and SAFE_ID.fullmatch(saved["run_id"]):
            return MirrorPosition(**saved)
    return None


def write_position(run_dir: Path, position: MirrorPosition) -> None:
    """Raise OSError where tracker.json cannot be written."""
    saved = asdict(position).items()
    write_json(run_dir / POSITION_FILE, {key: value for key, value in saved if value is not None})


def owe(run_dir: Path, run_id: str) -> MirrorPosition:
    """Record that the run has rows which wandb may lack, and return how far it came there."""
    position = read_position(run_dir) or MirrorPosition(run_id)
    if position.run_id != run_id:
        position = replace(position, run_id=run_id, tokens_seen=-1, step=-1)
    position = replace(position, uploaded=None)
    write_position(run_dir, position)
    return position


def upload_is_pending(run_dir: Path) -> bool:
    """Return whether wandb was given rows of the run that may not have arrived."""
    position = read_position(run_dir)
    return position is not None and position.uploaded is None


MAX_TAG_CHARS = 64  # wandb refuses longer ones
MAX_NAME_CHARS = 128  # and so its server
# Set for training; wandb would put them over the records of runs that are uploaded later.
OF_ONE_RUN = (RUN_ID, SWEEP_ID, *(VARIABLES[key] for key in ("name", "group", "notes", "tags")))


@dataclass(frozen=True)
class Fields:
    """All that wandb shows of a run besides its rows."""

    project: str
    entity: str | None
    name: str
    group: str | None
    tags: list[str]
    notes: str | None
    config: dict[str, Any]
    run_id: str
    job_type: str | None = None  # of the answer of a sweep; of a run: train


def run_fields(run_dir: Path, config: dict[str, Any], recorded: dict[str, Any]) -> Fields:
    """Return what the tracker shows of a run, from config.yaml and run.json as plain values.

    The group is the sweep's <name>/<stamp>, the name the run's label, and the tags have the swept
    keys with values.
    """
    chosen, known = config["tracker"], read_position(run_dir)
    overrides = [str(o) for o in recorded.get("overrides") or []]
    swept = set(recorded.get("swept") or [])
    sweep = [part for part in Path(recorded.get("group") or "").parts[-2:] if part != os.sep]
    tags = [*chosen["tags"], *(o.lstrip("+") for o in overrides if o.partition("=")[0] in swept)]
    if isinstance(parent := recorded.get("parent"), dict):
        tags.append(f"fork:{parent.get('run_id')}@{parent.get('step')}")
    label = str(recorded.get("label") or "")
    name = " ".join(filter(None, (chosen["name"], label))) or ",".join(overrides) or run_dir.name
    # null where the run had no tracker
    project = chosen["project"] or os.environ.get("WANDB_PROJECT") or PROJECT
    entity = chosen.get("entity") or (known and known.entity) or os.environ.get("WANDB_ENTITY")
    if known and known.sweep:
        project, entity = known.project or project, known.entity or entity
    place = f"{project}/{run_dir.resolve()}".encode(errors="surrogateescape")
    return Fields(
        project=project,
        entity=entity or None,
        name=shorten(name, MAX_NAME_CHARS),
        group=shorten(chosen["group"] or "/".join(sweep), MAX_NAME_CHARS) or None,
        tags=cut_tags(tags),
        notes=chosen["notes"],
        config=config | {"run": {k: v for k, v in recorded.items() if k != "data_fingerprint"}},
        # it stays when the folder is moved
        run_id=known.run_id if known else hashlib.sha256(place).hexdigest()[:12],
    )


def given_run_id(
    run_dir: Path, run_id: str, point: bool, env: Mapping[str, str]
) -> tuple[str, str]:
    """Return the id of a run that is about to train, and why the environment's id is not used.

    The reason is empty where it is used or not given. `run_id` is the run's own; `point` says
    whether it is one of a sweep.
    """
    given = env.get(RUN_ID) or run_id
    if given == run_id or SWEEP_ID in env:  # the agent's run has the agent's id
        return given, ""
    if point:
        return run_id, f"{RUN_ID}={given} is not used: it names one run, and this is one of a sweep"
    if read_position(run_dir):
        return run_id, f"{RUN_ID}={given} is not used: this run has the id {run_id} there already"
    return given, ""


def shorten(text: str, limit: int) -> str:
    """Return `text` in at most `limit` characters; texts that differ stay different."""
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:8]
    return text if len(text) <= limit else f"{text[: limit - 9]}~{digest}"


def cut_tags(tags: list[str]) -> list[str]:
    """Return each tag once, as wandb takes it."""
    return list(dict.fromkeys(shorten(tag, MAX_TAG_CHARS) for tag in tags if tag))


def next_id(run_id: str) -> str:
    """Return the id after this one: r, r-2, r-3, ..."""
    base, _, number = run_id.rpartition("-")
    if base and re.fullmatch(r"[1-9][0-9]{0,3}", number):
        return f"{base}-{int(number) + 1}"
    return f"{run_id[:58]}-2"
