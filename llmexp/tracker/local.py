"""The run folder's side of the tracker: a run's fields, what the environment adds, how far the
mirror has come. Knows no wandb."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

POSITION_FILE = "tracker.json"
MAX_TAG_CHARS = 64  # wandb refuses longer ones
MAX_NAME_CHARS = 128  # and so its server
PROJECT = "llmexp"  # where neither the config nor the environment names one
RUN_ID, SWEEP_ID = (
    "WANDB_RUN_ID",
    "WANDB_SWEEP_ID",
)  # `wandb agent` sets both for the command that it starts
VARIABLES = {
    "project": "WANDB_PROJECT",
    "entity": "WANDB_ENTITY",
    "name": "WANDB_NAME",
    "group": "WANDB_RUN_GROUP",
    "notes": "WANDB_NOTES",
    "tags": "WANDB_TAGS",
    "mode": "WANDB_MODE",
}
MODES = ("online", "offline", "dryrun", "disabled")
# wandb, a URL and a shell take it as it is
SAFE_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")


@dataclass(frozen=True)
class Position:
    """tracker.json: what was handed to the tracker, and once it is known, that all of it
    arrived."""

    run_id: str
    tokens_seen: int = -1
    step: int = -1
    # project, step, exit_code and url, once the server has confirmed them
    uploaded: dict[str, Any] | None = None
    entity: str | None = None  # whose run it is, as wandb said
    sweep: str | None = None  # wandb's, where its agent started the run
    project: str | None = None  # of that sweep


def with_environment(
    tracker: Mapping[str, Any], env: Mapping[str, str]
) -> tuple[dict[str, Any], list[str]]:
    """Return the section `tracker` with wandb's variables where it has nothing, and a line for each
    that is not used.

    The config goes before the environment, but for project and entity of a run that wandb's agent
    has started. Raises ValueError for a value that wandb would not take.
    """
    filled, unused = dict(tracker), []
    if filled.get("kind") == "none":
        return filled, []
    for key, variable in VARIABLES.items():
        value: Any = env.get(variable, "").strip()
        own = filled.get(key)
        if not value:
            continue
        if key == "tags":
            value = [tag.strip() for tag in value.split(",") if tag.strip()]
        if key == "mode" and value not in MODES:
            raise ValueError(
                f"{variable}={value}: must be one of {', '.join(MODES)}; for example "
                f"{variable}=offline"
            )
        if key in ("project", "entity") and SWEEP_ID in env:
            if own not in (None, value):
                unused.append(
                    f"tracker.{key}={own} is not used: the run is wandb's agent's, of the {key} "
                    f"{value}"
                )
            filled[key] = value
        elif own is None or own == []:
            filled[key] = value
        elif own not in (
            value,
            "auto",
        ):  # of mode: the variable is asked for when the tracker is opened
            unused.append(
                f"{variable}={env[variable]} is not used: tracker.{key}={own} goes before it"
            )
    if (run_id := env.get(RUN_ID)) and not SAFE_ID.fullmatch(run_id):
        raise ValueError(
            f"{RUN_ID}={run_id[:80]}: 1 to 64 letters, digits, _, . and - are needed; for example "
            "run-1"
        )
    if env.get("WANDB_RESUME"):
        unused.append("WANDB_RESUME is not used: llmexp resume goes on with a run, here and there")
    filled["project"] = filled.get("project") or PROJECT
    return filled, unused


def run_fields(run_dir: Path, config: dict[str, Any], recorded: dict[str, Any]) -> dict[str, Any]:
    """Return what the tracker shows of a run besides its rows, from config.yaml and run.json as
    plain values.

    The group is the sweep's <name>/<stamp>, the name the run's label, and the tags have the swept
    keys with values.
    """
    chosen, known = config["tracker"], read_position(run_dir)
    overrides = [str(o) for o in recorded.get("overrides") or []]
    swept = set(recorded.get("swept") or [])
    sweep = [part for part in Path(recorded.get("group") or "").parts[-2:] if part != os.sep]
    group = chosen["group"] or "/".join(sweep)
    tags = [*chosen["tags"], *(o.lstrip("+") for o in overrides if o.partition("=")[0] in swept)]
    label = str(recorded.get("label") or "")
    name = " ".join(filter(None, (chosen["name"], label))) or ",".join(overrides) or run_dir.name
    project = (
        chosen["project"] or os.environ.get("WANDB_PROJECT") or PROJECT
    )  # null where the run had no tracker
    entity = chosen.get("entity") or (known and known.entity) or os.environ.get("WANDB_ENTITY")
    if known and known.sweep:
        project, entity = known.project or project, known.entity or entity
    made = hashlib.sha256(
        f"{project}/{run_dir.resolve()}".encode(errors="surrogateescape")
    ).hexdigest()[:12]
    return {
        "project": project,
        "entity": entity or None,
        "name": cut(name, MAX_NAME_CHARS),
        "group": cut(group, MAX_NAME_CHARS) or None,
        "tags": cut_tags(tags),
        "notes": chosen["notes"],
        "config": config | {"run": {k: v for k, v in recorded.items() if k != "data_fingerprint"}},
        "run_id": known.run_id if known else made,  # it stays when the folder is moved
    }


def given_run_id(
    run_dir: Path, run_id: str, point: bool, env: Mapping[str, str]
) -> tuple[str, str]:
    """Return the id of a run that is about to train, and why it is not that of the environment, if
    it is not.

    `run_id` is its own; `point` says whether it is one of a sweep.
    """
    given = env.get(RUN_ID) or run_id
    if given == run_id or SWEEP_ID in env:  # the agent's run has the agent's id
        return given, ""
    if point:
        return run_id, f"{RUN_ID}={given} is not used: it names one run, and this is one of a sweep"
    if read_position(run_dir):
        return run_id, f"{RUN_ID}={given} is not used: this run has the id {run_id} there already"
    return given, ""


def cut(text: str, limit: int) -> str:
    """Return `text` in at most `limit` characters; texts that differ stay different."""
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:8]
    return text if len(text) <= limit else f"{text[: limit - 9]}~{digest}"


def cut_tags(tags: list[str]) -> list[str]:
    """Return each tag once, as wandb takes it."""
    return list(dict.fromkeys(cut(tag, MAX_TAG_CHARS) for tag in tags if tag))


def safe_id(run_id: str) -> str:
    """Return `run_id` in the letters that wandb and a shell both take as they are; changed ones
    stay distinct."""
    if SAFE_ID.fullmatch(run_id):
        return run_id
    digest = hashlib.sha256(run_id.encode("utf-8", "surrogatepass")).hexdigest()[:12]
    return f"{re.sub(r'[^a-z0-9]+', '-', run_id.lower())[:48]}-{digest}".lstrip("-")


def next_id(run_id: str) -> str:
    """Return the id after this one: r, r-2, r-3, ..."""
    base, _, number = run_id.rpartition("-")
    if base and re.fullmatch(r"[1-9][0-9]{0,3}", number):
        return f"{base}-{int(number) + 1}"
    return f"{run_id[:58]}-2"


def read_position(run_dir: Path) -> Position | None:
    """None where there is no position that can be read: the worst that follows is a row twice in an
    offline mirror."""
    path = run_dir / POSITION_FILE
    with contextlib.suppress(
        OSError, ValueError, OverflowError, KeyError, TypeError, RecursionError
    ):
        saved = json.loads(path.read_text(encoding="utf-8"))
        uploaded = saved.get("uploaded") if isinstance(saved, dict) else None
        run_id = saved["run_id"]
        if isinstance(run_id, str) and run_id == safe_id(run_id):
            known = uploaded if isinstance(uploaded, dict) else None
            where = [
                t if isinstance(t := saved.get(key), str) else None
                for key in ("entity", "sweep", "project")
            ]
            return Position(run_id, int(saved["tokens_seen"]), int(saved["step"]), known, *where)
    return None


def write_position(run_dir: Path, position: Position) -> None:
    """Write tracker.json whole or not at all. Raises OSError."""
    path = run_dir / POSITION_FILE
    # no name that a link could have
    temporary = path.with_name(f".{path.name}.{os.urandom(4).hex()}.tmp")
    saved = {key: value for key, value in asdict(position).items() if value is not None}
    try:
        with open(temporary, "x", encoding="utf-8") as file:
            json.dump(saved, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def upload_is_pending(run_dir: Path) -> bool:
    """Return whether a tracker was given rows of the run and its server is not known to have them
    all."""
    position = read_position(run_dir)
    return position is not None and position.uploaded is None
