"""The listings in the docs are what the commands print, but for what the machine decides: small
versions of them are run."""

import re
import subprocess

import pytest

from docs import listings
from tests.conftest import ROOT, llmexp

# Only that the line is there: the machine decides what it says.
MACHINE = ("device", "precision", "folder", "picture", "next", "data", "page")
FAST = ("train",)
ALIKE = (
    (r"\b\d[\d.,]*(h|m|s)( \d+[ms])*\b", "# s"),
    (r"killed in (the save of )?step", "killed in step"),
    (r"eta +[^|]*", "eta #"),
    (r"[-+]?\d[\d,.]*(e[-+]?\d+)?%?", "#"),
    (r"(in step #, )+", ""),
    (r"\s+", " "),
    (r"in (the save of )?step #(, in (the save of )?step #)*", "in steps"),
    (r"after step #( step #)+", "after step #"),
    # Columns after the losses are there as far as they fit, which depends on the figures.
    (r"(train loss) [a-z].*?(?= # )", r"\1"),
    (r"(± # # ± #|best # ± # # ± #)( #)+(?= # |$)", r"\1"),
)


def shape(lines: list[str]) -> list[str]:
    """Undo the wrapping of the lines and write numbers and times as #.

    Keep only the label of a line that the machine decides, and one of several equal lines.
    """
    found: list[str] = []
    for line in re.sub(r"\n {2,}", " ", "\n".join(lines)).split("\n"):
        if line.startswith(tuple(f"{label}  " for label in MACHINE)):
            line = line.partition("  ")[0]
        for pattern, instead in ALIKE:
            line = re.sub(pattern, instead, line)
        if found[-1:] != [line.strip()]:
            found.append(line.strip())
    return found


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
    for command in listing.before:
        small = listings.SMALL if command.startswith("train") else ()
        assert llmexp(*command.split(), *small, cwd=tmp_path).code == 0
    wanted = listings.find(listing, (ROOT / listing.file).read_text())[2].rstrip().splitlines()
    if listing.line == listing.command:  # of another program
        python = listings.arguments(listing.command)
        run = subprocess.run(python, cwd=tmp_path, capture_output=True, text=True, check=True)
        found = run.stdout.splitlines()
    else:
        command = [*listing.command.split(), *listing.small]
        done = llmexp(*command, cwd=tmp_path, COLUMNS=listing.columns)
        assert done.code == listing.code, done.err
        found = listings.shown(listings.printed(listing, done.out, done.err), listing.keep)
    if listing.code:  # a refusal may be broken anywhere
        found, wanted = [" ".join(found)], [" ".join(wanted)]
    assert shape(found) == shape(wanted)
