"""The listings in the docs are what the commands print, but for what the machine decides: small
versions of them are run."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from types import ModuleType

import pytest
import zstandard

from tests.conftest import HANG_S, ROOT, llmexp


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("listings", ROOT / "docs" / "listings.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["listings"] = module
    spec.loader.exec_module(module)
    return module


listings = load()
MACHINE = (
    "device",
    "precision",
    "folder",
    "picture",
    "next",
    "data",
    "page",
)  # only that the line is there
FAST = ("train",)
DURATION = r"\b\d[\d.,]*(h|m|s)( \d+[ms])*\b"
NUMBER = r"[-+]?\d[\d,.]*(e[-+]?\d+)?%?"


def shape(lines: list[str]) -> list[str]:
    """Undo the wrapping of the lines and write numbers and times as #.

    Keep only the label of a line that the machine decides, and one of several equal lines.
    """
    whole: list[str] = []
    for line in lines:
        if line.startswith("  ") and whole:
            whole[-1] += " " + line.strip()
        else:
            whole.append(line)
    found: list[str] = []
    for line in whole:
        line = (
            line.partition("  ")[0]
            if line.startswith(tuple(f"{label}  " for label in MACHINE))
            else line
        )
        line = re.sub(DURATION, "# s", line)
        line = re.sub(r"killed in (the save of )?step", "killed in step", line)
        line = re.sub(
            r"(in step #, )+", "", re.sub(NUMBER, "#", re.sub(r"eta +[^|]*", "eta #", line))
        )
        line = re.sub(
            r"in (the save of )?step #(, in (the save of )?step #)*",
            "in steps",
            " ".join(line.split()),
        )
        line = re.sub(r"after step #( step #)+", "after step #", line)
        # Columns after the losses are there as far as they fit, which depends on the figures.
        line = re.sub(r"(train loss) [a-z].*?(?= # )", r"\1", line)
        line = re.sub(r"(± # # ± #|best # ± # # ± #)( #)+(?= # |$)", r"\1", line)
        if not found or found[-1] != line:
            found.append(line)
    return found


def unbroken(lines: list[str], code: int) -> list[str]:
    """Return the lines with a sentence, or a refusal, in one of them, wherever it was broken."""
    if code:
        return [" ".join(lines)]
    text = "\n".join(lines)
    return re.sub(r"^Undecided[^:]*:.*?tell\.$", joined, text, flags=re.M | re.S).splitlines()


def joined(found: re.Match[str]) -> str:
    return " ".join(found[0].split())


def is_slow(listing) -> bool:
    return listing.command not in FAST and bool(listing.small or listing.before or listing.corpus)


def test_each_example_with_its_output_is_a_listing():
    """All but those by hand, which name their tests."""
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))):
        name, text = str(path.relative_to(ROOT)), path.read_text()
        shown = {m.start() for m in re.finditer(r"^\$ (llmexp|python) ", text, re.M)}
        for listing in listings.LISTINGS:
            if listing.file == name:
                shown.discard(listings.find(listing, text).start())
        by_hand = listings.BY_HAND.get(name, ())
        for start in sorted(shown):
            block = re.split(r"```|\n\$ ", text[start:])[0]
            output = re.sub(r"\$ (.*\\\n)*.*\n?", "", block)
            assert not output or any(words in block for words in by_hand), block


@pytest.mark.parametrize(
    "listing",
    [pytest.param(x, marks=pytest.mark.slow if is_slow(x) else ()) for x in listings.LISTINGS],
    ids=lambda x: " ".join(x.command.split()[:2]),
)
def test_a_listing_is_what_its_command_prints(listing, tmp_path):
    listings.lay_out(listing, tmp_path)
    if listing.corpus and listing.file == "README.md":  # its own, not those of docs/corpus.md
        held_back = (tmp_path / "prose-val.jsonl.zst").read_bytes()
        assert len(zstandard.decompress(held_back).splitlines()) == 9
    for command in listing.before:
        small = listings.SMALL if command.startswith("train") else ()
        assert llmexp(*command.split(), *small, cwd=tmp_path).code == 0
    block = listings.find(listing, (ROOT / listing.file).read_text())
    if listing.line == listing.command:  # of another program
        python = listings.arguments(listing.command)
        out = subprocess.run(
            python, cwd=tmp_path, capture_output=True, text=True, check=True
        ).stdout
        assert shape(out.splitlines()) == shape(block[2].splitlines())
        return
    done = llmexp(
        *listing.command.split(),
        *listing.small,
        cwd=tmp_path,
        COLUMNS=listings.COLUMNS,
        timeout=HANG_S,
    )
    assert done.code == listing.code, done.err
    printed = listings.printed(listing, done.out, done.err)
    found, wanted = listings.shown(printed, listing.keep), block[2].rstrip().splitlines()
    assert shape(unbroken(found, listing.code)) == shape(unbroken(wanted, listing.code))
