"""Claim and lock a run folder; read and write its small files, each whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import shlex
import socket
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from llmexp.checkpoint.folders import MANIFEST, checkpoint_folders, step_of
from llmexp.config.commands import command, own_parts
from llmexp.config.convert import build
from llmexp.config.sections import Config
from llmexp.config.values import ConfigError, Plain
from llmexp.folders import door
from llmexp.system.fileio import Unwritable, write_json
from llmexp.system.text import first_of

CONFIG, RUN, STATUS, METRICS, LOG, CHECKPOINTS = (
    "config.yaml",
    "run.json",
    "status.json",
    "metrics.jsonl",
    "train.log",
    "checkpoints",
)
RECORDED = ("overrides", "label", "group", "swept", "place")  # of a request, in run.json
# what a worker does in place of training (`modes`), and what it has found
ASKED, FOUND = "asked.json", "found.json"
AVERAGE = "average.json"  # makes a folder no run: it has no rows, and nothing goes on from it
LEAVE_S = 60.0  # for a run to save and leave whose starter is gone
SIGN_S = 1800.0  # rows of a large model may be this far apart
# of a status, but for the figures of an end
LASTING = ("state", "updated", "started", "ended", "pid", "host", "error", "exit_code")
_HELD: set[str] = set()  # locks that this process holds
NO_END = dict.fromkeys(("error", "exit_code", "ended"))  # in that of a run that goes on


def check_plain(path: Path) -> None:
    """Raise ConfigError where a folder of runs holds a link, a pipe or a device.

    The folder may come from somebody else: a link leads out of it, and a pipe or a device has no
    end. Called when a folder is opened, so nothing later looks again. wandb's own folder, which
    holds links, is passed over.
    """
    waiting = [os.fspath(path)]
    while waiting:
        with contextlib.suppress(OSError), os.scandir(waiting.pop()) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    if entry.name != "wandb":
                        waiting.append(entry.path)
                elif not entry.is_file(follow_symlinks=False) and os.path.lexists(entry.path):
                    kind = "a link" if entry.is_symlink() else "a pipe or a device"
                    raise ConfigError(
                        "not_allowed",
                        f"{entry.path}: is {kind}; the folder of a run or a sweep holds plain "
                        "files and folders only: move it away, or put a copy of what you trust in "
                        "its place",
                    )


def read_run(path: Path) -> Plain:
    """Return run.json, empty where there is none. Raises ConfigError when it is damaged."""
    if not (path / RUN).exists():
        return {}
    try:
        return door.object_in(path / RUN)
    except ConfigError as error:
        if error.kind == "other_format":
            raise
        way = f"give the file another name, and it is rebuilt: {how_to_resume(path)}"
        raise ConfigError(error.kind, f"{error}; {way}") from None


def is_run(path: Path) -> bool:
    return (path / CONFIG).is_file()


def why_no_run(path: Path) -> str:
    """Return why a folder is no run, with the runs that it holds, as that of a sweep does."""
    if not os.path.lexists(path):
        return nothing_at(path)
    text = f"is not a run folder (it has no {CONFIG})"
    inner = [p for p in path.iterdir() if is_run(p)] if path.is_dir() else []
    if not inner:
        return f"{text}; a run folder looks like outputs/default/..."
    named = [shlex.quote(str(p)) for p in sorted(inner, key=by_number)]
    return f"{text}; name a run in it: {first_of(named, 4)}"


def nothing_at(path: str | Path) -> str:
    """Return that a path does not exist, and where a relative one was looked for."""
    where = "" if os.path.isabs(path) else f" in {os.getcwd()}"
    return f"there is nothing of that name{where}; a run looks like outputs/default/..."


def by_number(path: Path) -> list[tuple[str, int]]:
    """Return a key that orders folders by the numbers in their names: 10 after 9."""
    parts = re.findall(r"([^0-9]*)([0-9]*)", path.name)
    return [(text, int(number or 0)) for text, number in parts]


def read_config(path: Path) -> Plain:
    """Return config.yaml as plain values. Raises ConfigError when there is none."""
    if not is_run(path):
        raise ConfigError("not_a_run", f"{path}: {why_no_run(path)}")
    return door.read_yaml(path / CONFIG)


def built_config(path: Path) -> Config:
    """Return the config of a run folder. Raises ConfigError naming its file."""
    tree = read_config(path)
    try:
        return build(tree)
    except ConfigError as error:
        raise ConfigError(error.kind, f"{path / CONFIG}: {error}") from None


def check_writable(wanted: Path, key: str = "hydra.run.dir") -> Path:
    """Return the deepest part of the path `wanted` that exists.

    `key`: the knob or flag that it is the value of; empty: a word of its own. Raises ConfigError
    when no folder can be made there; makes none.
    """
    word = f"{key}=" if "." in key else f"{key} ".lstrip()
    existing = next((p for p in (wanted, *wanted.parents) if p.exists()), wanted)
    if not existing.is_dir():
        wrong, other = "is not a folder", "outputs/try1"
    elif not os.access(existing, os.W_OK | os.X_OK):
        wrong, other = "cannot be written", "/tmp/try1"
    else:
        return existing
    raise ConfigError("disk", f"{word}{wanted}: {existing} {wrong}; for example {word}{other}")


def claim(wanted: Path, fixed: bool, key: str = "hydra.run.dir") -> Path:
    """Make the run folder and return it.

    No two runs share a folder: unless the user fixed the name, the next free one of NAME, NAME-2,
    NAME-3 is taken.
    """
    check_writable(wanted, key)
    try:
        if fixed:
            wanted.mkdir(parents=True, exist_ok=True)
            return wanted
        for number in range(1, 10_000):
            path = wanted if number == 1 else wanted.with_name(f"{wanted.name}-{number}")
            with contextlib.suppress(FileExistsError):
                path.mkdir(parents=True)
                return path
    except OSError as error:
        raise ConfigError("disk", f"{key}={wanted}: cannot be made: {error.strerror}") from None
    raise ConfigError("exists", f"{key}={wanted}: 9999 folders of that name exist")


@contextlib.contextmanager
def locked(path: Path, name: str = ".lock", doing: str = "training in") -> Iterator[None]:
    """Hold the folder's lock, which the kernel drops with the process.

    Raises ConfigError when another process holds it.
    """
    with open(path / name, "a") as f:
        attempts = 0
        while True:
            try:
                fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:  # a look of `is_locked` ends by itself, however slow it is
                attempts += is_locked(path, name)
                if attempts == 5:
                    raise ConfigError(
                        "busy", f"{path}: another process is {doing} this folder"
                    ) from None
                time.sleep(0.05)
        held = os.path.realpath(f.name)
        _HELD.add(held)
        try:
            yield
        finally:
            _HELD.discard(held)


def holds(path: Path, name: str = ".lock") -> bool:
    """Return whether this process itself holds the folder's lock."""
    return os.path.realpath(path / name) in _HELD


def is_locked(path: Path, name: str = ".lock") -> bool:
    """Return whether a process holds the folder's lock, as far as this host can see."""
    try:
        with open(path / name, "rb") as f:
            fcntl.flock(f, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def is_held(path: Path) -> bool:
    """Return whether a process holds the run, or its ranks do, as far as this host can see."""
    return is_locked(path) or is_locked(path, ".lock-ranks")


def is_vacant(path: Path, since: float) -> bool:
    """Return whether nobody is at work in a folder, or had LEAVE_S to leave `since` a time."""
    return not is_held(path) or time.monotonic() - since > LEAVE_S


def wait_until_vacant(path: Path) -> None:
    """Return when nobody is at work in a folder any more, or after LEAVE_S."""
    since = time.monotonic()
    while not is_vacant(path, since):
        time.sleep(0.05)


def is_alive(path: Path, status: Plain) -> bool:
    """Return whether a run that is running by its status still is.

    A process holds its lock; or it runs on another host, whose locks may not be seen here, and has
    written something in the last `SIGN_S` seconds.
    """
    if is_held(path):
        return True
    if status.get("host") in (None, socket.gethostname()):
        return False
    signs = (f.stat().st_mtime for f in (path / METRICS, path / STATUS, path / LOG) if f.exists())
    return time.time() - max(signs, default=0.0) < SIGN_S


def read_status(path: Path) -> Plain:
    """Return status.json, or an empty dict where there is none that can be read."""
    with contextlib.suppress(ConfigError):
        return door.object_in(path / STATUS)
    return {}


def write_status(path: Path, state: str, **more: Any) -> None:
    """Write the state, the time and what is given into status.json.

    The rest is kept, except the figures of an end when the run goes on. A run that has finished
    stays finished, whatever goes wrong after that.
    """
    before = read_status(path)
    if state == "failed" and before.get("state") == "finished":
        return
    if state == "running":
        before = {key: value for key, value in before.items() if key in LASTING}
    status = {**before, "state": state, "updated": time.time(), **more}
    try:
        write_json(path / STATUS, status)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        _overwrite(path / STATUS, json.dumps(status, allow_nan=False))


def _overwrite(path: Path, text: str) -> None:
    """Write into the blocks that a file has, as a full disk has none for a second file.

    It is one write, which a kill does not tear (a power cut could).
    """
    with open(path, "r+b", buffering=0) as f:
        before = f.read()
        data = text.encode().ljust(len(before))  # spaces after the value are still JSON
        f.seek(0)
        if f.write(data) < len(data):  # no room for the longer text either
            f.seek(0)
            f.write(before)
            f.truncate(len(before))
            raise Unwritable(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        os.fsync(f.fileno())


def saved_steps(path: Path) -> list[int]:
    """Return the steps of the checkpoints of a run, the newest last."""
    found = checkpoint_folders(path / CHECKPOINTS)
    return [step_of(folder) for folder in found if (folder / MANIFEST).exists()]


def newest_step(path: Path) -> int | None:
    """Return the step of the newest checkpoint of a run."""
    return max(saved_steps(path), default=None)


def command_on(path: Path, name: str, *given: object) -> str:
    """Return a command that opens a run or a sweep, to paste; without more, with its folder alone.

    It allows the parts of the user's that the run, or the first run of the sweep, has."""
    parts: list[str] = []
    with contextlib.suppress(ConfigError, OSError):
        runs = [path] if is_run(path) else filter(is_run, sorted(path.iterdir(), key=by_number))
        parts = own_parts(next((read_config(run) for run in runs), {}))
    return command(name, *(given or (path,)), parts=parts)


def how_to_resume(path: Path, *given: object) -> str:
    """Return the command that goes on with a run or a sweep, with further words."""
    return command_on(path, "resume", path, *given)


def refuse_folder(wanted: Path, holds_run: bool, resume: str) -> None:
    """Raise ConfigError where checkpoint.resume does not allow a run in its chosen folder."""
    if holds_run and resume == "never":
        state = read_status(wanted).get("state", "unknown")
        raise ConfigError(
            "exists",
            f"hydra.run.dir={wanted}: holds a run already (state: {state}); to continue it: "
            f"{how_to_resume(wanted)}",
        )
    if not holds_run and resume == "must":
        raise ConfigError(
            "not_a_run",
            f"hydra.run.dir={wanted}: checkpoint.resume=must, but there is no run to resume",
        )


def check_new(folder: Path, key: str) -> None:
    """Raise ConfigError where something is there already, or no folder can be made."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError("exists", f"{folder}: is there already; name a new folder")
    existing = check_writable(folder, key)
    try:
        with tempfile.TemporaryDirectory(prefix=".llmexp-", dir=existing):
            pass  # a read-only file system, or a full one, is found out by trying
    except OSError as error:
        word = f"{key} ".lstrip()
        text = f"{word}{folder}: {existing} cannot be written: {error.strerror}"
        raise ConfigError("disk", f"{text}; for example {word}/tmp/new") from None
