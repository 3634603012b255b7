"""Name the source and the commit of llmexp, and the versions of what it computes with."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path

from llmexp import __version__
from llmexp.system.redact import redacted

LIMIT_S = 5.0  # for an answer of git


class Unknown(Exception):
    """Report why something could not be found out."""


@functools.cache  # it parses the metadata of each package, a sixth of the start of a small run
def versions() -> dict[str, str]:
    """Return the versions of Python, of the llmexp that runs and of the packages that matter."""
    names = ("torch", "numpy", "hydra-core", "omegaconf", "tiktoken", "wandb", "safetensors")
    found = {"python": platform.python_version(), "llmexp": __version__}
    for name in names:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def source_digest() -> str:
    """sha256 over the package's source files, by name and content."""
    package = Path(__file__).resolve().parents[1]
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(str(path.relative_to(package)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def source_commit() -> str | None:
    """Return the commit that llmexp runs from, with `-dirty` for changes; None where unknown."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    words = ("describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")
    try:
        return git(root, *words).decode().strip()
    except Unknown:
        return None


def git(root: Path, *arguments: str) -> bytes:
    """Return a git command's output. Raises Unknown."""
    what = f"git {arguments[0]}"
    # A file system monitor is a program of the repository's; locks would be in the way of the
    # user's own git.
    command = ["git", "-c", "core.fsmonitor=false", "-c", "core.quotePath=true", *arguments]
    env = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    env |= {"GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C"}
    try:
        done = subprocess.run(
            command, cwd=root, env=env, timeout=LIMIT_S, process_group=0, stdin=subprocess.DEVNULL,
            capture_output=True,
        )  # fmt: skip
    except OSError as error:
        raise Unknown(f"{what}: {error.strerror} (is git installed?)") from None
    except subprocess.TimeoutExpired:
        raise Unknown(f"{what}: did not end within {LIMIT_S:g} s") from None
    if done.returncode:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        raise Unknown(redacted(f"{what}: {lines[0] if lines else 'no reason given'}"))
    return done.stdout
