"""Write the comments of conf/ from what `llmexp.settings.config` says of each knob: `python -m tests.comments`."""  # noqa: E501

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from llmexp.cli.preparing import Prepare
from llmexp.forecast.settings import Plan
from llmexp.settings.config import conf_dir
from llmexp.settings.knobs import fields
from llmexp.settings.values import Knob, knobs_of
from llmexp.sweep.settings import Sweep

KNOBS = fields() | {
    f"{section}.{name}": knob
    for section, kind in (("sweep", Sweep), ("prepare", Prepare), ("plan", Plan))
    for name, knob in knobs_of(kind).items()
}
LINE = re.compile(
    r"(?P<setting>(?P<indent> *)[\"]?(?P<name>\w+)[\"]?: *(?P<value>[^#]*?)) *(#.*)?$"
)


def files() -> Iterator[Path]:
    """Those that set knobs of closed sections and are no diff over them."""
    yield conf_dir() / "config.yaml"
    for section in sorted({key.partition(".")[0] for key in KNOBS if "." in key}):
        yield from sorted(conf_dir().glob(f"base/{section}*.yaml"))
        yield from sorted(conf_dir().glob(f"{section}/*.yaml"))


def commented(path: Path) -> str:
    """The text of the file with a comment beside each closed knob, in one column a section; not
    beside a `kind` that a file in conf/base has explained."""
    section, text = path.parent.name, path.read_text(encoding="utf-8")
    if section == "base":
        section = path.stem.partition("_")[0]
    main = path.name == "config.yaml"
    lines: list[tuple[str, Knob | None]] = []
    for line in text.splitlines():
        found = LINE.fullmatch(line)
        if found is not None and main and not found["indent"]:
            section = "" if found["value"] else found["name"]
        key = ".".join(filter(None, (section, found["name"]))) if found else ""
        apart = key in ("hooks", "user") or (key.endswith(".kind") and "  - /base/" in text)
        knob = KNOBS.get(key)
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
