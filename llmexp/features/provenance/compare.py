"""Find how runs differ in what they were made of.

That is commit, uncommitted changes, packages, drivers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from llmexp.compare.records import Record
from llmexp.features.provenance.runs import folders, read_packages, read_provenance
from llmexp.system.redact import clean
from llmexp.system.text import first_of

_MACHINE = {
    "driver": "NVIDIA driver",
    "cuda": "CUDA version",
    "cudnn": "cuDNN version",
    "container": "container",
}


def differences(records: Sequence[Record]) -> list[str]:
    """Return a line for each kind of difference; none where nothing is known to differ.

    What a run was resumed with counts as its last one: a change in between has a line of its own.
    """
    found = {r.name: there for r in records if (there := folders(r.path))}
    last = {name: there[-1] for name, there in found.items()}
    known = {name: read_provenance(folder) for name, folder in last.items()}
    lines = _code(known)
    if len({about.get("packages_sha256") for about in known.values()}) > 1:
        lists = list(map(read_packages, last.values()))
        names = dict.fromkeys(name for versions in lists for name in versions)
        by_name = {name: {versions.get(name) or "none" for versions in lists} for name in names}
        parts = [f"{name} {' or '.join(sorted(v))}" for name, v in by_name.items() if len(v) > 1]
        lines += [f"The packages differ: {first_of(parts)}."] * bool(parts)
    for key, title in _MACHINE.items():
        lines += _differing(f"The {title}", {run: about.get(key) for run, about in known.items()})
    if resumed := [name for name, there in found.items() if len(there) > 1]:
        text = "Resumed with other code, packages or drivers than begun with"
        lines.append(f"{text}: {first_of(resumed)}.")
    return list(map(clean, lines))


def _code(known: Mapping[str, dict[str, Any]]) -> list[str]:
    """Compare commits, and the uncommitted changes of one commit.

    These are compared by the diff, else by the names of what has changed.
    """
    commits: dict[str, dict[str, str]] = defaultdict(dict)  # of each run, by repository
    changes: dict[str, dict[str, str]] = defaultdict(dict)  # the first run of each
    for run, about in known.items():
        for one in about.get("repositories", ()):
            name = one.get("name", "")
            commits[name][run] = one.get("commit", "")[:10]
            changed = one.get("diff_sha256") or sorted(one.get("changed", []))
            changes[name].setdefault(str(changed), run)
    lines = []
    for name, of_runs in commits.items():
        differing = _differing(f"The commit of {name}", of_runs)
        if len(changes[name]) > 1 and not differing:
            runs = first_of([changes[name][state] for state in sorted(changes[name])])
            differing = [f"The uncommitted changes to {name} differ: see provenance/ of {runs}."]
        lines += differing
    return lines


def _differing(what: str, values: Mapping[str, Any]) -> list[str]:
    """Return a line with the runs of each value, where there are several values."""
    groups: dict[str, list[str]] = defaultdict(list)
    for run, value in values.items():
        if value:
            groups[str(value)].append(run)
    if len(groups) < 2:
        return []
    parts = [f"{text} in {first_of(runs)}" for text, runs in groups.items()]
    return [f"{what} differs: {'; '.join(parts)}."]
