"""The run folder's side of the tracker: a run's fields, its id, and how far the mirror has come. Knows no wandb."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

POSITION_FILE = "tracker.json"
MAX_TAG_CHARS = 64  # wandb refuses longer ones
MAX_NAME_CHARS = 128  # and so its server


@dataclass(frozen=True)
class Position:
    """tracker.json: what was handed to the tracker, and once it is known, that all of it arrived."""

    run_id: str
    tokens_seen: int = -1
    step: int = -1
    uploaded: dict[str, Any] | None = None  # project, step, exit_code and url, once the server has confirmed them


def run_fields(run_dir: Path, config: dict[str, Any], recorded: dict[str, Any]) -> dict[str, Any]:
    """What the tracker shows of a run besides its rows, from config.yaml and run.json as plain values.

    The group is the sweep's <name>/<stamp>, the name the run's label, and the tags have the swept keys with values.
    """
    chosen = config["tracker"]
    overrides = [str(o) for o in recorded.get("overrides") or []]
    swept = set(recorded.get("swept") or [])
    sweep = [part for part in Path(recorded.get("group") or "").parts[-2:] if part != os.sep]
    group = chosen["group"] or "/".join(sweep)
    tags = [*chosen["tags"], *(o.lstrip("+") for o in overrides if o.partition("=")[0] in swept)]
    name = chosen["name"] or recorded.get("label") or ",".join(overrides) or run_dir.name
    return {
        "project": chosen["project"],
        "name": cut(name, MAX_NAME_CHARS),
        "group": cut(group, MAX_NAME_CHARS) or None,
        "tags": cut_tags(tags),
        "notes": chosen["notes"],
        "config": config | {"run": {k: v for k, v in recorded.items() if k != "data_fingerprint"}},
        "run_id": known_run_id(run_dir, chosen["project"]),
    }


def cut(text: str, limit: int) -> str:
    """`text` in at most `limit` characters; texts that differ stay different."""
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:8]
    return text if len(text) <= limit else f"{text[: limit - 9]}~{digest}"


def cut_tags(tags: list[str]) -> list[str]:
    """Each tag once, as wandb takes it."""
    return list(dict.fromkeys(cut(tag, MAX_TAG_CHARS) for tag in tags if tag))


def known_run_id(run_dir: Path, project: str) -> str:
    """The id that the folder's run has in the tracker, also after the folder was moved; else one from its path."""
    saved = read_position(run_dir)
    return (
        saved.run_id
        if saved
        else hashlib.sha256(f"{project}/{run_dir.resolve()}".encode(errors="surrogateescape")).hexdigest()[:12]
    )


def safe_id(run_id: str) -> str:
    """`run_id` in the letters that wandb and a shell both take as they are; changed ones stay distinct."""
    if re.fullmatch(r"[a-z0-9][a-z0-9-]{0,63}", run_id):
        return run_id
    digest = hashlib.sha256(run_id.encode("utf-8", "surrogatepass")).hexdigest()[:12]
    return f"{re.sub(r'[^a-z0-9]+', '-', run_id.lower())[:48]}-{digest}".lstrip("-")


def next_id(run_id: str) -> str:
    """The id after this one: r, r-2, r-3, ..."""
    base, _, number = run_id.rpartition("-")
    if base and re.fullmatch(r"[1-9][0-9]{0,3}", number):
        return f"{base}-{int(number) + 1}"
    return f"{run_id[:58]}-2"


def read_position(run_dir: Path) -> Position | None:
    """None where there is no position that can be read: the worst that follows is a row twice in an offline mirror."""
    path = run_dir / POSITION_FILE
    with contextlib.suppress(OSError, ValueError, OverflowError, KeyError, TypeError, RecursionError):
        if not path.is_file():  # the folder may be a stranger's, and a pipe or a device has no end
            return None
        saved = json.loads(path.read_text(encoding="utf-8"))
        uploaded = saved.get("uploaded") if isinstance(saved, dict) else None
        run_id = saved["run_id"]
        if isinstance(run_id, str) and run_id == safe_id(run_id):
            known = uploaded if isinstance(uploaded, dict) else None
            return Position(run_id, int(saved["tokens_seen"]), int(saved["step"]), known)
    return None


def write_position(run_dir: Path, position: Position) -> None:
    """Writes tracker.json whole or not at all. Raises OSError."""
    path = run_dir / POSITION_FILE
    temporary = path.with_name(f".{path.name}.{os.urandom(4).hex()}.tmp")  # no name that a link could have
    saved: dict[str, Any] = {"run_id": position.run_id, "tokens_seen": position.tokens_seen, "step": position.step}
    if position.uploaded is not None:
        saved["uploaded"] = position.uploaded
    try:
        with open(temporary, "x", encoding="utf-8") as file:
            json.dump(saved, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def upload_is_pending(run_dir: Path) -> bool:
    """Whether a tracker was given rows of the run and its server is not known to have them all."""
    position = read_position(run_dir)
    return position is not None and position.uploaded is None
