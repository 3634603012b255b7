"""Read runs out of wandb: a project by its public API, offline folders without a network."""

from __future__ import annotations

import contextlib
import hashlib
import json
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any

from llmexp.config.values import ConfigError
from llmexp.data.cache import cache_folder
from llmexp.system.fileio import read_json, write_json
from llmexp.system.text import one_line
from llmexp.tracker.wandb import (
    AT_A_TIME,
    JOB_TYPE,
    forget_wandb,
    has_login,
    import_wandb,
    mark_runs,
)

SILENT_S = 45.0  # that a server may take for an answer
_TIMEOUT_S, _PAGE = 20, 100
_BLOCK, _HEAD = 1 << 15, 7  # bytes of a block of a .wandb file, and of what begins a piece
_Rows = list[dict[str, Any]]


@dataclass
class WandbRun:
    """A run as wandb has it."""

    path: str  # entity/project/id, or its folder
    name: str
    state: str  # wandb's word
    config: dict[str, Any] = field(default_factory=dict)
    summary: dict[str, Any] = field(default_factory=dict)
    heartbeat: str = ""  # of its last change
    rows: _Rows = field(default_factory=list)
    scan: Callable[[list[str]], _Rows] | None = None  # asks the server for rows that have all keys


def project_runs(where: str, filters: dict[str, Any]) -> list[WandbRun]:
    """Return the runs of ENTITY/PROJECT[/GROUP], but for answers. Raises ConfigError."""
    entity, _, rest = where.partition("/")
    project, _, group = rest.partition("/")
    if not entity or not project:
        text = "an entity and a project are needed; for example wandb:someone/llmexp"
        raise ConfigError("missing_value", f"wandb:{where}: {text}")

    try:
        settings = import_wandb()
    except ImportError as error:
        text = f"wandb cannot be imported ({one_line(error)}); to install it: pip install wandb"
        raise ConfigError("missing_package", text) from None
    if not has_login(settings):
        text = f"no login for {settings.base_url}; to log in: wandb login, or set WANDB_API_KEY"
        raise ConfigError("network", f"wandb:{where}: {text}")

    def work(tell: Callable[[str], None]) -> list[WandbRun]:
        import wandb

        chosen = filters | ({"group": group} if group else {})
        api, found = wandb.Api(timeout=_TIMEOUT_S), list[WandbRun]()
        tell("the server is asked")
        runs = api.runs(f"{entity}/{project}", filters=chosen, per_page=_PAGE, lazy=False)
        for run in runs:
            tell(f"{len(found)} of {len(runs)} runs listed")
            if getattr(run, "job_type", None) != JOB_TYPE:
                found.append(_listed(run, f"{entity}/{project}/{run.id}"))
        return found

    return _watched(f"wandb:{where}", work)


def _listed(run: Any, path: str) -> WandbRun:
    def scan(keys: list[str]) -> _Rows:
        return [dict(row) for row in run.scan_history(keys=keys, use_cache=False)]

    heartbeat = str(getattr(run, "heartbeat_at", None) or "")
    summary = dict(run.summary_metrics)
    name = str(getattr(run, "display_name", None) or run.id)
    return WandbRun(path, name, run.state, dict(run.config), summary, heartbeat, scan=scan)


def fetch_rows(runs: Sequence[WandbRun], keys_of: Callable[[WandbRun], list[list[str]]]) -> None:
    """Fetch the rows that have the first of the lists of keys that some row has.

    They are kept in the cache folder by run and heartbeat. Raises ConfigError.
    """
    asked = [run for run in runs if run.scan]
    if not asked:
        return

    def work(tell: Callable[[str], None]) -> None:
        def one(run: WandbRun) -> None:
            run.rows = next(filter(None, (_rows(run, keys) for keys in keys_of(run))), [])

        with ThreadPool(AT_A_TIME) as pool:
            for i, _ in enumerate(pool.imap_unordered(one, asked), 1):
                tell(f"rows of {i} of {len(asked)} runs")

    _watched(f"wandb:{asked[0].path}", work)


def _rows(run: WandbRun, keys: list[str]) -> _Rows:
    """Return rows out of the cache, else as the server has them."""
    assert run.scan is not None
    about = json.dumps([run.path, run.heartbeat, keys])
    file = cache_folder(None) / "wandb" / f"{hashlib.sha256(about.encode()).hexdigest()[:24]}.json"
    with contextlib.suppress(ConfigError, OSError):
        if run.heartbeat and file.exists():
            return list(read_json(file)["rows"])
    rows = run.scan(keys)
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        write_json(file, {"rows": rows})
    return rows


def send_marks(marks: dict[str, dict[str, Any]]) -> None:
    """Put values into the summaries of runs by their paths. Raises ConfigError."""
    if not marks:
        text = "is of runs of wandb; for example llmexp compare wandb:someone/llmexp --answer"
        raise ConfigError("idle_knob", f"--answer: {text}")

    def work(tell: Callable[[str], None]) -> None:
        paths = list(marks)
        for i in range(0, len(paths), AT_A_TIME):
            mark_runs({path: marks[path] for path in paths[i : i + AT_A_TIME]})
            tell(f"{i} of {len(paths)} runs marked")

    _watched("wandb", work)


def _watched(what: str, work: Callable[[Callable[[str], None]], Any]) -> Any:
    """Do work that tells its progress in a line; raise ConfigError for a server that is silent."""
    moved, ended, shown = [time.monotonic()], list[Any](), sys.stderr.isatty()

    def tell(text: str) -> None:
        moved[0] = time.monotonic()
        if shown:
            print(f"\r{what}: {text}\033[K", end="", file=sys.stderr, flush=True)

    def run() -> None:
        try:
            ended.append(work(tell))
        except BaseException as error:  # the caller raises it
            ended.append(error)

    thread = threading.Thread(target=run, name="wandb", daemon=True)
    thread.start()
    while thread.is_alive() and time.monotonic() - moved[0] < SILENT_S:
        thread.join(0.1)
    found = ended[0] if ended else TimeoutError(f"no answer for {SILENT_S:.0f} s")
    if shown:
        print("\r\033[K", end="", file=sys.stderr, flush=True)
    if isinstance(found, Exception) and not isinstance(found, ConfigError):
        forget_wandb(kill=True)
        text = "is the name right, and the server there? Runs that are here are read offline"
        raise ConfigError("network", f"{what}: {one_line(found)}; {text}: wandb/offline-run-*")
    if isinstance(found, BaseException):
        raise found
    return found


def offline_files(path: Path) -> list[Path]:
    """Return the .wandb files of a run's folder in wandb's, or of a folder of these."""
    if path.suffix == ".wandb":
        return [path]
    return sorted(path.glob("*.wandb")) or sorted(path.glob("*run-*/*.wandb"))


def offline_run(path: Path) -> WandbRun:
    """Return a run out of a .wandb file, as far as it was written. Raises ConfigError."""
    from wandb.proto.wandb_internal_pb2 import Record

    run = WandbRun(str(path.parent), path.stem.removeprefix("run-"), "")
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError("disk", f"{path}: cannot be read: {error.strerror}") from None
    if data[:4] != b":W&B":
        raise ConfigError("damaged_file", f"{path}: is no file of wandb; name its folder")
    for piece in _records(data):
        record = Record()
        try:
            record.ParseFromString(piece)
        except Exception:  # protobuf's own
            break
        kind = record.WhichOneof("record_type")
        if kind == "run":
            run.name = record.run.display_name or run.name
            _update(run.config, record.run.config.update)
        elif kind == "config":
            _update(run.config, record.config.update)
        elif kind == "summary":
            _update(run.summary, record.summary.update)
        elif kind == "history":
            row = {"_step": record.history.step.num}
            _update(row, record.history.item)
            run.rows.append(row)
        elif kind == "exit":
            run.state = "failed" if record.exit.exit_code else "finished"
    return run


def _update(into: dict[str, Any], items: Any) -> None:
    for item in items:
        key = item.key or ".".join(item.nested_key)
        with contextlib.suppress(ValueError):
            into[key] = json.loads(item.value_json)


def _records(data: bytes) -> Iterator[bytes]:
    """Yield the records of a log of LevelDB: pieces with a header, in blocks, up to a torn one."""
    at, whole = _HEAD, b""
    while at + _HEAD <= len(data):
        if (left := _BLOCK - at % _BLOCK) < _HEAD:
            at += left
            continue
        _, size, kind = struct.unpack_from("<IHB", data, at)
        piece = data[at + _HEAD : at + _HEAD + size]
        if not 1 <= kind <= 4 or len(piece) < size:
            return
        at += _HEAD + size
        whole = piece if kind in (1, 2) else whole + piece  # a first one begins anew
        if kind in (1, 4):
            yield whole
