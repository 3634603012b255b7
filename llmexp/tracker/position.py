"""Keep tracker.json: how far the mirror of a run has come."""

from __future__ import annotations

import contextlib
import re
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from llmexp.config import ConfigError
from llmexp.fileio import read_json, write_json

POSITION_FILE = "tracker.json"
# wandb, a URL and a shell take such an id as it is.
SAFE_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")


@dataclass(frozen=True)
class Position:
    """The rows that wandb was given, and once the server confirms it, that all of them arrived."""

    run_id: str
    tokens_seen: int = -1
    step: int = -1
    # project, step, exit_code and url, once the server has confirmed them
    uploaded: dict[str, Any] | None = None
    entity: str | None = None  # the owner of the run, as wandb reports it
    sweep: str | None = None  # wandb's, where its agent started the run
    project: str | None = None  # of that sweep


def read_position(run_dir: Path) -> Position | None:
    """Return None where no position can be read: a row twice in an offline mirror is the worst that
    follows."""
    with contextlib.suppress(ConfigError, OverflowError, KeyError, TypeError, ValueError):
        saved = read_json(run_dir / POSITION_FILE)
        if SAFE_ID.fullmatch(saved["run_id"]):
            texts = {key: saved.get(key) for key in ("entity", "sweep", "project")}
            uploaded = saved.get("uploaded")
            return Position(
                saved["run_id"],
                int(saved["tokens_seen"]),
                int(saved["step"]),
                uploaded if isinstance(uploaded, dict) else None,
                **{key: text for key, text in texts.items() if isinstance(text, str)},
            )
    return None


def write_position(run_dir: Path, position: Position) -> None:
    """Raise OSError where tracker.json cannot be written."""
    saved = asdict(position).items()
    write_json(run_dir / POSITION_FILE, {key: value for key, value in saved if value is not None})


def owe(run_dir: Path, run_id: str) -> Position:
    """Record that the run has rows which wandb may lack, and return how far it came there."""
    position = read_position(run_dir) or Position(run_id)
    if position.run_id != run_id:
        position = replace(position, run_id=run_id, tokens_seen=-1, step=-1)
    position = replace(position, uploaded=None)
    write_position(run_dir, position)
    return position


def upload_is_pending(run_dir: Path) -> bool:
    """Return whether wandb was given rows of the run and its server is not known to have them
    all."""
    position = read_position(run_dir)
    return position is not None and position.uploaded is None
