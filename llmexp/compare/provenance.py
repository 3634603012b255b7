"""Find how runs differ in what they were made of: commit, uncommitted changes, packages,
drivers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llmexp import provenance
from llmexp.compare.records import Record
from llmexp.redact import clean

NAMED = 3  # runs, packages


def differences(records: Sequence[Record]) -> tuple[str, ...]:
    """Return a line for each kind of difference; none where the runs are alike, or nothing is known
    of them.

    What a run was resumed with counts as its last one: a change in between has a line of its own.
    """
    found = [(r.name, provenance.folders(r.path)) for r in records]
    known = [(name, provenance.read(where[-1])) for name, where in found if where]
    lines = _code(known)
    lines += _packages([(name, where[-1]) for name, where in found if where], dict(known))
    for key, title in (
        ("driver", "NVIDIA driver"),
        ("cuda", "CUDA version"),
        ("cudnn", "cuDNN version"),
        ("container", "container"),
    ):
        lines += _differing(f"The {title} differs", [(run, about.get(key)) for run, about in known])
    if resumed := [name for name, where in found if len(where) > 1]:
        lines.append(
            f"Resumed with other code, packages or drivers than begun with: {_some(resumed)}."
        )
    return tuple(clean(line) for line in lines)


def _code(known: Sequence[tuple[str, dict[str, Any]]]) -> list[str]:
    lines: list[str] = []
    for repository in dict.fromkeys(name for _, about in known for name in _repositories(about)):
        having = [
            (run, one) for run, about in known if (one := _repositories(about).get(repository))
        ]
        commits = _differing(
            f"The commit of {repository} differs", [(run, _commit(one)) for run, one in having]
        )
        lines += commits
        if not commits:  # of one commit
            states = {_changes(one) for _, one in having}
            if len(states) > 1:
                some = [
                    next(run for run, one in having if _changes(one) == state)
                    for state in sorted(states)
                ]
                lines.append(
                    f"The uncommitted changes to {repository} differ: see provenance/ of "
                    f"{_some(some)}."
                )
    return lines


def _repositories(about: dict[str, Any]) -> dict[str, dict[str, Any]]:
    found = about.get("repositories")
    return (
        {str(one.get("name")): one for one in found if isinstance(one, dict)}
        if isinstance(found, list)
        else {}
    )


def _commit(one: dict[str, Any]) -> str | None:
    return str(one["commit"])[:10] if one.get("commit") else None


def _changes(one: dict[str, Any]) -> str:
    """Return what tells two states of one commit apart: the diff, else the names of what has
    changed."""
    return str(one.get("diff_sha256") or sorted(map(str, one.get("changed") or [])))


def _packages(places: Sequence[tuple[str, Path]], known: dict[str, dict[str, Any]]) -> list[str]:
    if len({known[name].get("packages_sha256") for name, _ in places}) < 2:
        return []
    lists = {name: provenance.read_packages(path) for name, path in places}
    names = dict.fromkeys(package for versions in lists.values() for package in versions)
    differing = [p for p in names if len({versions.get(p) for versions in lists.values()}) > 1]
    if not differing:
        return []
    told = [
        f"{package} {' or '.join(sorted({v.get(package) or 'none' for v in lists.values()}))}"
        for package in differing
    ]
    return [f"The packages differ: {_some(told)}."]


def _differing(title: str, values: Sequence[tuple[str, Any]]) -> list[str]:
    """Return a line with the runs of each value, where there are several values."""
    groups: dict[str, list[str]] = {}
    for run, value in values:
        if value is not None:
            groups.setdefault(str(value), []).append(run)
    if len(groups) < 2:
        return []
    return [f"{title}: {'; '.join(f'{text} in {_some(runs)}' for text, runs in groups.items())}."]


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more
