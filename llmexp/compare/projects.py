"""Read runs out of wandb: a project by its public API, offline folders without a network."""

from __future__ import annotations

import contextlib
import json
import struct
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any

from llmexp.compare.strangers import OtherRun, Row, axis_in, state_of
from llmexp.config.labels import parse_value
from llmexp.config.values import ConfigError, flatten
from llmexp.data.cache import cache_folder, cached
from llmexp.system.text import one_line
from llmexp.tracker.wandb import AT_A_TIME, JOB_TYPE, check_login, forget_wandb, mark_runs

ONLINE = "wandb:"  # begins what names a project
SILENT_S = 45.0  # that a server may take for an answer
_TIMEOUT_S, _PAGE = 20, 100
_BLOCK, _HEAD = 1 << 15, 7  # bytes of a block of a .wandb file, and of what begins a piece


def project_runs(where: str, filters: str | None) -> list[OtherRun]:
    """Return the runs of wandb:ENTITY/PROJECT[/GROUP], but for answers. Raises ConfigError."""
    entity, project, group = (*where.removeprefix(ONLINE).split("/", 2), "", "")[:3]
    if not entity or not project:
        text = "an entity and a project are needed; for example wandb:someone/llmexp"
        raise ConfigError("missing_value", f"{where}: {text}")
    chosen = _filters(filters) | ({"group": group} if group else {})
    check_login(where)
    path, found = f"{entity}/{project}", list[OtherRun]()

    def work() -> Iterator[str]:
        import wandb

        yield "the server is asked"
        runs = wandb.Api(timeout=_TIMEOUT_S).runs(path, filters=chosen, per_page=_PAGE, lazy=False)
        for run in runs:
            yield f"{len(found)} of {len(runs)} runs listed"
            if getattr(run, "job_type", None) != JOB_TYPE:
                found.append(_listed(run, f"{ONLINE}{path}/{run.id}"))

    _watched(where, work())
    if found:
        return found
    raise ConfigError("cannot_compare", f"{where}: there is no run, or none that --filter takes")


def _filters(given: str | None) -> dict[str, Any]:
    """Return what the server is to choose by: KEY=VALUE,... or JSON, as its API takes it."""
    try:
        if not given or given.lstrip().startswith("{"):
            return dict(json.loads(given or "{}"))
        return {k.strip(): parse_value(v) for k, v in (p.split("=") for p in given.split(","))}
    except ValueError:
        text = "is neither KEY=VALUE nor JSON; for example --filter config.lr=0.1,state=finished"
        raise ConfigError("wrong_type", f"--filter {given}: {text}") from None


def _listed(run: Any, path: str) -> OtherRun:
    heartbeat = getattr(run, "heartbeat_at", None)

    def fetch(keys: Sequence[str]) -> Any:
        def scan() -> list[Any]:
            return [*run.scan_history(keys=[*keys], use_cache=False)]

        about = [path, str(heartbeat), keys]
        return cached(cache_folder(None), "wandb", about, (), scan) if heartbeat else scan()

    name = getattr(run, "display_name", None) or run.id
    last = [_flat(run.summary_metrics)]
    return OtherRun(name, _flat(run.config), state_of(run.state), last, Path(path), True, fetch)


def _flat(given: Mapping[str, Any]) -> Row:
    """Return a config or a summary without what wandb and llmexp add, but for steps and seconds."""
    found = flatten(given)
    return {k: found[k] for k in found if not k.startswith(("_", "run.")) or axis_in(k)}


def fetch_figure(runs: Sequence[OtherRun], figure: str) -> None:
    """Give runs of wandb the rows that have the figure; without any their summaries stand.

    Those of a server are kept in the cache folder by run and heartbeat. Raises ConfigError.
    """

    def one(run: OtherRun) -> None:
        assert run.fetch is not None
        axes = {axis_in(k): k for k in reversed(run.rows[0]) if not k.startswith("_")}
        axes.pop("", None)
        for keys in ([figure, *axes.values(), "_step"], [figure, "_step"]):
            if rows := run.fetch(keys):
                run.rows = [{k: row[k] for k in keys} for row in rows]
                return

    def work() -> Iterator[str]:
        with ThreadPool(AT_A_TIME) as pool:
            for i, _ in enumerate(pool.imap_unordered(one, asked), 1):
                yield f"rows of {i} of {len(asked)} runs"

    if asked := [run for run in runs if run.fetch]:
        _watched(str(asked[0].path), work())


def send_marks(marks: Mapping[Path, dict[str, Any]]) -> None:
    """Put values into the summaries of runs of wandb by their paths. Raises ConfigError."""
    there = {str(p).removeprefix(ONLINE): m for p, m in marks.items() if str(p).startswith(ONLINE)}
    if not there:
        text = "is of runs of wandb; for example llmexp compare wandb:someone/llmexp --answer"
        raise ConfigError("idle_knob", f"--answer: {text}")

    def work() -> Iterator[str]:
        paths = [*there]
        for i in range(0, len(paths), AT_A_TIME):
            yield f"{i} of {len(paths)} runs marked"
            mark_runs({path: there[path] for path in paths[i : i + AT_A_TIME]})

    _watched("wandb", work())


def _watched(what: str, work: Iterator[str]) -> None:
    """Do work that yields its progress; raise ConfigError for a server that is silent."""
    moved, shown = time.monotonic(), sys.stderr.isatty()

    def run() -> None:
        nonlocal moved
        for text in work:
            moved = time.monotonic()
            if shown:
                print(f"\r{what}: {text}\033[K", end="", file=sys.stderr, flush=True)

    pool = ThreadPool(1)
    done = pool.apply_async(run)
    pool.close()
    while not done.ready() and time.monotonic() - moved < SILENT_S:
        done.wait(0.1)
    if shown:
        print("\r\033[K", end="", file=sys.stderr, flush=True)
    try:
        if not done.ready():
            raise TimeoutError(f"no answer for {SILENT_S:.0f} s")
        done.get()
    except ConfigError:
        raise
    except Exception as error:
        forget_wandb(kill=True)
        text = "is the name right, and the server there? Runs that are here are read offline"
        text = f"{what}: {one_line(error)}; {text}: wandb/offline-run-*"
        raise ConfigError("network", text) from None


def offline_files(path: Path) -> list[Path]:
    """Return the .wandb files of a run's folder in wandb's, or of a folder of these."""
    if path.suffix == ".wandb":
        return [path]
    return sorted(path.glob("*.wandb")) or sorted(path.glob("*run-*/*.wandb"))


def offline_run(path: Path) -> OtherRun:
    """Return a run out of a .wandb file, as far as it was written. Raises ConfigError."""
    from wandb.proto.wandb_internal_pb2 import Record

    name, state, rows = path.stem.removeprefix("run-"), "", list[dict[str, Any]]()
    config, summary = dict[str, Any](), dict[str, Any]()
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError("disk", f"{path}: cannot be read: {error.strerror}") from None
    if data[:4] != b":W&B":
        raise ConfigError("damaged_file", f"{path}: is not a file of wandb; name its folder")
    for piece in _records(data):
        record = Record()
        try:
            record.ParseFromString(piece)
        except Exception:  # protobuf's own
            break
        name = record.run.display_name or name
        config |= _items(record.run.config.update) | _items(record.config.update)
        summary |= _items(record.summary.update)
        if row := _items(record.history.item):
            rows.append({"_step": record.history.step.num} | row)
        if record.HasField("exit"):
            state = "failed" if record.exit.exit_code else "finished"

    def fetch(keys: Sequence[str]) -> list[Row]:
        return [row for row in map(flatten, rows) if row.keys() >= {*keys}]

    return OtherRun(name, _flat(config), state, [_flat(summary)], path.parent, True, fetch)


def _items(items: Any) -> dict[str, Any]:
    """Return those of a record that are JSON."""
    found = {}
    for item in items:
        with contextlib.suppress(ValueError):
            found[item.key or ".".join(item.nested_key)] = json.loads(item.value_json)
    return found


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
