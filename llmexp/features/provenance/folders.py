"""Record the origins of a run in its folder's `provenance/`: code, packages, drivers.

provenance.json     repositories (commit, branch, changed and untracked files), packages, drivers,
                    container image
<repository>.diff   uncommitted changes; `git apply` of it on the commit gives the tree of the run
packages.txt        name==version of each installed distribution

The repositories are looked into on a thread beside the start of the run. Nothing here fails a run
or holds it up for longer than a git that hangs may take (`LIMIT_S`): what could not be found out is
left out, and provenance.json says why. Standard library only.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import importlib.util
import os
import platform
import re
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TypedDict

from llmexp.config.values import Plain
from llmexp.folders import door, rundir
from llmexp.folders.versions import LIMIT_S, Unknown, git
from llmexp.system import fileio
from llmexp.system.redact import as_recorded, redacted, warn

FOLDER, FILE, PACKAGES = "provenance", "provenance.json", "packages.txt"
MAX_DIFF = 2**20  # bytes of each repository's
MAX_NAMES = 200  # of changed files, and of untracked ones
DIFF = (
    "diff", "--no-ext-diff", "--no-textconv", "--no-color", "--no-relative", "--src-prefix=a/",
    "--dst-prefix=b/", "--find-renames", "--unified=3", "--submodule=short",
    "--ignore-submodules=dirty",
)  # fmt: skip
# A value that a line of a diff gives to a name such as API_KEY; a text that begins as the tokens of
# known services do.
ASSIGNED = re.compile(
    r"""(?m)^([+ -].*?\b[A-Z0-9_]*(?:KEY|TOKEN|SECRET|PASSWORD|PASSWD)["']?\s*[:=]\s*["']?)"""
    r"""(?!\$)[^\s"'<(\[{]{8,}(?=["']?[,;]?\s*$)"""
)
TOKEN = re.compile(r"\b(?:hf_|sk-|gh[pousr]_|github_pat_|AKIA|xox[abp]-)[A-Za-z0-9_-]{12,}")
IMAGE = "LLMEXP_CONTAINER_IMAGE"  # where nothing inside the container tells it, as with Docker


class _Repository(TypedDict, total=False):
    """Hold what `compare` reads of a repository in provenance.json."""

    name: str
    commit: str
    diff_sha256: str
    changed: list[str]


@dataclasses.dataclass(frozen=True)
class _Found:
    """The part of provenance.json about repositories, and their diffs by the names of the files."""

    about: Plain
    files: dict[str, bytes]


@functools.cache  # a process that makes many runs looks once
def start() -> Future[_Found]:
    """Look into the repositories on a thread, beside the start of a process that makes runs."""
    return ThreadPoolExecutor(1, "provenance").submit(gather)


def search_result() -> _Found:
    """Return what the search has found, after a wait for git at most."""
    try:
        return start().result(LIMIT_S + 1)
    except TimeoutError:
        why = f"not found out within {LIMIT_S:g} s"
    except Exception as error:  # such as of a folder that was removed under the command
        why = f"{type(error).__name__}: {error}"
    return _Found({"left_out": why}, {})


def record(run_dir: Path, resumed: bool) -> None:
    """Write the folder provenance/ of a run.

    A resumed run that finds another state of things gets provenance-2/ and so on. A run that its
    sweep has queued has the state of that moment until it starts. What fails is printed.
    """
    try:
        _write(run_dir, resumed)
    except Exception as error:  # whatever it is, it is not worth a training run
        why = error.strerror if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
        warn(f"{run_dir / FOLDER} could not be written: {why}; the run continues")


def _write(run_dir: Path, resumed: bool) -> None:
    packages = "".join(f"{line}\n" for line in installed()).encode()
    found = search_result()
    files = {name: _concealed(name, diff, found.about) for name, diff in found.files.items()}
    about = as_recorded(
        {
            "platform": platform.platform(),
            **drivers(),
            **found.about,
            "packages": PACKAGES,
            "packages_sha256": hashlib.sha256(packages).hexdigest(),
        }
    )
    written = folders(run_dir)
    before = read_provenance(written[-1]) if written else {}
    before.pop("gathered", None)
    if about == before:
        return
    path = run_dir / FOLDER  # also of a queued run: what it starts with is what counts
    if written and not before:  # a kill cut it short
        path = written[-1]
    elif written and resumed:
        path = run_dir / f"{FOLDER}-{len(written) + 1}"
    path.mkdir(exist_ok=True)
    for old in path.glob("*.diff"):
        if old.name not in files:
            old.unlink()
    for name, content in {PACKAGES: packages, **files}.items():
        fileio.write_whole(path / name, content)
    fileio.write_json(path / FILE, {"gathered": time.strftime("%Y-%m-%dT%H:%M:%S%z"), **about})


def _concealed(name: str, diff: bytes, about: Plain) -> bytes:
    """Return a diff without the values of secrets, with a note in `about` that it may not apply.

    Secrets are those of the environment, values given to a name such as API_KEY, and texts that
    begin as tokens do.
    """
    text = diff.decode("utf-8", "surrogateescape")
    clean = TOKEN.sub("<redacted>", ASSIGNED.sub(r"\1<redacted>", redacted(text)))
    note = "the diff has placeholders for the values of secrets, and may not apply"
    for one in about["repositories"]:
        if clean != text and one.get("diff") == name and note not in one["notes"]:
            one["notes"].append(note)
    return clean.encode("utf-8", "surrogateescape")


def folders(run_dir: Path) -> list[Path]:
    """Return provenance/, provenance-2/, ... of a run, as far as they are there."""
    found = [run_dir / FOLDER]
    while os.path.lexists(found[-1]):
        found.append(run_dir / f"{FOLDER}-{len(found) + 1}")
    return found[:-1]


def read_provenance(path: Path) -> Plain:
    """Return provenance.json of one of `folders`; an empty dict where none can be read."""
    with contextlib.suppress(rundir.ConfigError):
        return door.object_in(path / FILE, {"repositories": list[_Repository]})
    return {}


def read_packages(path: Path) -> dict[str, str]:
    """Return the versions in packages.txt of one of `folders`, by name."""
    lines = fileio.last_bytes(path / PACKAGES, MAX_DIFF).decode(errors="replace").splitlines()
    return {name: version for name, _, version in (line.partition("==") for line in lines)}


def gather() -> _Found:
    """Look into the repositories; git has LIMIT_S for each question."""
    files: dict[str, bytes] = {}
    about: Plain = {"repositories": []}
    for root in repositories():
        one: Plain = {"name": root.name, "folder": str(root), "notes": []}
        about["repositories"].append(one)
        try:
            _look_into(root, one)
            diff = _diff(root, one) if one["changed"] else b""
        except Unknown as reason:
            one["notes"].append(str(reason))
            continue
        if diff:
            name = re.sub(r"[^A-Za-z0-9._-]", "_", root.name) or "root"
            one["diff"] = f"{name}-{len(files)}.diff" if f"{name}.diff" in files else f"{name}.diff"
            files[one["diff"]] = diff
    if not about["repositories"]:
        about["left_out"] = f"{Path.cwd()} is in no git repository"
    return _Found(about, files)


def repositories() -> list[Path]:
    """Return the repositories of the current folder and of the allowed packages."""
    places = [Path.cwd()]
    for package in os.environ.get("LLMEXP_ALLOW", "").split(","):
        try:
            spec = importlib.util.find_spec(package.strip().partition(".")[0])
        except (ImportError, ValueError, AttributeError):
            continue
        if spec is not None:
            origins = [spec.origin] if spec.origin else spec.submodule_search_locations or []
            places += [Path(origin).resolve() for origin in list(origins)[:1]]
    tops: dict[Path, None] = {}
    for place in places:
        for folder in (place, *place.parents):
            if (folder / ".git").exists():
                tops[folder] = None
                break
    return list(tops)


def _look_into(root: Path, one: Plain) -> None:
    """Fill in what is known of a repository. Raises Unknown."""
    words = git(root, "rev-parse", "HEAD", "--abbrev-ref", "HEAD").decode().split()
    one["commit"], branch = words[0], words[-1]
    one["branch"] = branch if branch != "HEAD" else None  # detached
    status = git(root, "status", "--porcelain", "-z", "--no-renames", "--ignore-submodules=dirty")
    entries = [os.fsdecode(entry) for entry in status.split(b"\0") if entry]
    untracked = [entry[3:] for entry in entries if entry.startswith("??")]
    changed = [entry.strip() for entry in entries if not entry.startswith("??")]
    for key, names in (("changed", changed), ("untracked", untracked)):
        one[key] = names[:MAX_NAMES]
        if len(names) > MAX_NAMES:
            one["notes"].append(f"{len(names):,} {key} files, of which {MAX_NAMES} are named")
    if (root / ".gitmodules").exists():
        one["notes"].append("uncommitted changes inside submodules are left out")


def _diff(root: Path, one: Plain) -> bytes:
    """Return the uncommitted changes, without large binary files. Raises Unknown."""
    diff = git(root, *DIFF, "--binary", one["commit"], "--")
    one["diff_sha256"] = hashlib.sha256(diff).hexdigest()
    if len(diff) > MAX_DIFF:
        diff = git(root, *DIFF, one["commit"], "--")
        if len(diff) > MAX_DIFF:
            raise Unknown(f"the diff is left out: it is larger than {MAX_DIFF:,} bytes")
        one["notes"].append(
            f"the diff has no binary files: with them it is larger than {MAX_DIFF:,} bytes"
        )
    return diff


def installed() -> list[str]:
    """Return name==version of each installed distribution, from the names of their folders.

    Reading their metadata would take longer.
    """
    found = set()
    for entry in sys.path:
        for path in Path(entry or ".").glob("*.dist-info"):
            name, _, version = path.stem.rpartition("-")
            found.add(f"{name}=={version}")
    return sorted(found, key=str.lower)


def image() -> str | None:
    """Return the container's image, where the environment, Podman or Apptainer names it."""
    for name in (IMAGE, "APPTAINER_CONTAINER", "SINGULARITY_CONTAINER"):
        if value := os.environ.get(name):
            return value
    podman = fileio.last_bytes(Path("/run/.containerenv"), 2**16).decode(errors="replace")
    if found := re.search(r'^image="(.+)"', podman, re.M):
        return found[1]
    build = os.environ.get("NVIDIA_BUILD_ID")
    return f"of NVIDIA's build {build}" if build else None


def drivers() -> dict[str, str]:
    """Return image, versions of CUDA, cuDNN and NVIDIA's driver; what is not there is absent."""
    import torch

    found: Plain = {"cuda": torch.version.cuda, "container": image()}
    if torch.cuda.is_available():
        found["cudnn"] = torch.backends.cudnn.version()
    with contextlib.suppress(OSError):
        text = Path("/proc/driver/nvidia/version").read_text()
        version = re.search(r"Kernel Module.*?\s([0-9]+\.[0-9.]+)\s", text)
        found["driver"] = version[1] if version else None
    return {name: str(version) for name, version in found.items() if version is not None}
