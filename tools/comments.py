"""Write the comments of conf/ from the declarations of knobs: `python -m tools.comments`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from llmexp.cli.preparing import Prepare
from llmexp.config.knobs import fields
from llmexp.config.sections import conf_dir
from llmexp.config.targets import arguments_of, locate
from llmexp.config.values import Knob, section_knobs
from llmexp.forecast.section import PlanKnobs
from llmexp.sweep import ray, slurm
from llmexp.sweep.section import Sweep
from tests.tools import option

KNOBS = fields() | {
    f"{section}.{name}": knob
    for section, kind in (("sweep", Sweep), ("prepare", Prepare), ("plan", PlanKnobs))
    for name, knob in section_knobs(kind).items()
}
LAUNCHERS = {"slurm": slurm.Knobs, "ray": ray.Knobs}
LINE = re.compile(
    r"(?P<setting>(?P<indent> *)[\"]?(?P<name>\w+)[\"]?: *(?P<value>[^#]*?)) *(#.*)?$"
)


def files() -> Iterator[Path]:
    """Those that set knobs and are no diff over them."""
    yield conf_dir() / "config.yaml"
    for section in sorted({key.partition(".")[0] for key in KNOBS if "." in key}):
        yield from sorted(conf_dir().glob(f"base/{section}*.yaml"))
        yield from sorted(conf_dir().glob(f"{section}/*.yaml"))
    yield from (conf_dir() / "hydra" / "launcher" / f"{name}.yaml" for name in LAUNCHERS)


def arguments(path: Path) -> dict[str, Knob]:
    """Return the knobs of the function that the file of an option names, by their names."""
    if path.parent.name == "launcher":
        return section_knobs(LAUNCHERS[path.stem])
    tree = option(str(path.relative_to(conf_dir()).with_suffix("")))
    target = str(tree.get("_target_", "???"))
    if target == "???":
        return {}
    found = arguments_of(locate(f"{section_of(path)}._target_", target))
    return {name: knob for name, (_, knob) in found.items()}


def section_of(path: Path) -> str:
    """Return the section of the config that a file is of."""
    return path.stem.partition("_")[0] if path.parent.name == "base" else path.parent.name


def commented(path: Path) -> str:
    """Return the text of the file with a comment beside each knob, in one column a section.

    A knob that a file in conf/base explains gets none."""
    section, text = section_of(path), path.read_text(encoding="utf-8")
    main = path.name == "config.yaml"
    own = {} if main else arguments(path)
    bases = re.findall(r"- (?:/base/)?(\w+)@_here_", text)
    below = "".join((conf_dir() / "base" / f"{base}.yaml").read_text() for base in bases)
    lines: list[tuple[str, Knob | None]] = []
    for line in text.splitlines():
        found = LINE.fullmatch(line)
        if found is not None and main and not found["indent"]:
            section = "" if found["value"] else found["name"]
        if found is not None and main and len(found["indent"]) == 2:
            top = section.partition(".")[0]
            section = top if found["value"] else f"{top}.{found['name']}"
        name = found["name"] if found else ""
        knob = own.get(name) or KNOBS.get(".".join(filter(None, (section, name))))
        apart = name in ("hooks", "user") or (name == "kind" and "  - /base/" in text)
        apart = apart or re.search(rf"^{name}: .* # ", below, re.MULTILINE)
        lines.append((found["setting"] if found and knob else line, None if apart else knob))
    return "".join(f"{line}\n" for line in _aligned(lines))


def _aligned(lines: list[tuple[str, Knob | None]]) -> Iterator[str]:
    blocks: list[list[tuple[str, Knob | None]]] = [[]]
    for line, knob in lines:
        if not line:
            blocks.append([])
        blocks[-1].append((line, knob))
    for block in blocks:
        width = max((len(line) for line, knob in block if knob), default=0)
        for line, knob in block:
            yield f"{line:<{width}}  # {knob.meaning}" if knob else line


if __name__ == "__main__":
    for file in files():
        file.write_text(commented(file), encoding="utf-8")
