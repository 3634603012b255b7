"""Find how runs differ in what they were made of: commits, changes, packages, drivers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from llmexp.compare.records import Record
from llmexp.features.provenance.folders import folders, read_packages, read_provenance
from llmexp.system.redact import clean
from llmexp.system.text import first_of

_MACHINE = {
    "driver": "NVIDIA driver",
    "cuda": "CUDA version",
    "cudnn": "cuDNN version",
    "container": "Container",
}


def differences(records: Sequence[Record]) -> list[str]:
    """Return a line for each kind of difference between runs as they ended; none where none is.

    Uncommitted changes are compared where the commit is one: by the diff, else by names.
    """
    found = {r.name: there for r in records if (there := folders(r.path))}
    made: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for run, there in found.items():
        about = read_provenance(there[-1])
        facts = {}
        for one in about.get("repositories", ()):
            name, commit = one.get("name", ""), one.get("commit", "")[:10]
            changed = (one.get("diff_sha256") or "")[:10] or ", ".join(one.get("changed", []))
            facts[f"Commit of {name}"] = commit
            facts[f"Uncommitted changes to {name} at {commit}"] = changed or "none"
        facts["Packages"] = about.get("packages_sha256")
        facts |= {title: about.get(key) for key, title in _MACHINE.items()}
        for what, value in facts.items():
            if value:
                made[what][str(value)].append(run)
    lines = []
    for what, runs in made.items():
        if len(runs) < 2:
            continue
        parts = [" or ".join(f"{value} in {first_of(names)}" for value, names in runs.items())]
        if what == "Packages":
            lists = [read_packages(there[-1]) for there in found.values()]
            of = {name: {v.get(name) or "none" for v in lists} for known in lists for name in known}
            parts = [f"{name} {' or '.join(sorted(v))}" for name, v in of.items() if len(v) > 1]
        lines += [f"{what}: {first_of(parts)}."] * bool(parts)
    if resumed := [name for name, there in found.items() if len(there) > 1]:
        lines.append(f"Resumed with other code, packages or drivers: {first_of(resumed)}.")
    return list(map(clean, lines))
