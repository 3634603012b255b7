"""Find how runs differ in what they were made of: commit, uncommitted changes, packages,
drivers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from llmexp import provenance
from llmexp.compare.records import Record, as_dict
from llmexp.redact import clean

NAMED = 3  # runs, packages
_MACHINE = {
    "driver": "NVIDIA driver",
    "cuda": "CUDA version",
    "cudnn": "cuDNN version",
    "container": "container",
}


def differences(records: Sequence[Record]) -> tuple[str, ...]:
    """Return a line for each kind of difference; none where the runs are alike, or nothing is known
    of them.

    What a run was resumed with counts as its last one: a change in between has a line of its own.
    """
    found = {r.name: folders for r in records if (folders := provenance.folders(r.path))}
    known = {name: provenance.read(folders[-1]) for name, folders in found.items()}
    lines = _code(known)
    if len({about.get("packages_sha256") for about in known.values()}) > 1:
        lists = [provenance.read_packages(folders[-1]) for folders in found.values()]
        lines += _packages(lists)
    for key, title in _MACHINE.items():
        lines += _differing(f"The {title}", {run: about.get(key) for run, about in known.items()})
    if resumed := [name for name, folders in found.items() if len(folders) > 1]:
        lines.append(
            f"Resumed with other code, packages or drivers than begun with: {_some(resumed)}."
        )
    return tuple(clean(line) for line in lines)


def _code(known: Mapping[str, dict[str, Any]]) -> list[str]:
    repositories: dict[str, dict[str, dict[str, Any]]] = defaultdict(dict)  # of each run, by name
    for run, about in known.items():
        found = about.get("repositories")
        for one in map(as_dict, found if isinstance(found, list) else ()):
            repositories[str(one.get("name"))][run] = one
    lines = []
    for name, having in repositories.items():
        commits = {run: str(one.get("commit") or "")[:10] for run, one in having.items()}
        differing = _differing(f"The commit of {name}", commits)
        changes = {_changes(one): run for run, one in reversed(having.items())}
        lines += differing
        if len(changes) > 1 and not differing:  # of one commit
            some = _some([changes[state] for state in sorted(changes)])
            lines.append(f"The uncommitted changes to {name} differ: see provenance/ of {some}.")
    return lines


def _changes(one: dict[str, Any]) -> str:
    """Return what tells two states of one commit apart: the diff, else the names of what has
    changed."""
    return str(one.get("diff_sha256") or sorted(map(str, one.get("changed") or [])))


def _packages(lists: Sequence[dict[str, str]]) -> list[str]:
    parts = []
    for package in dict.fromkeys(name for versions in lists for name in versions):
        versions = {versions.get(package) or "none" for versions in lists}
        if len(versions) > 1:
            parts.append(f"{package} {' or '.join(sorted(versions))}")
    return [f"The packages differ: {_some(parts)}."] if parts else []


def _differing(what: str, values: Mapping[str, Any]) -> list[str]:
    """Return a line with the runs of each value, where there are several values."""
    groups: dict[str, list[str]] = defaultdict(list)
    for run, value in values.items():
        if value:
            groups[str(value)].append(run)
    if len(groups) < 2:
        return []
    parts = [f"{text} in {_some(runs)}" for text, runs in groups.items()]
    return [f"{what} differs: {'; '.join(parts)}."]


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more
