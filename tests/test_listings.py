"""The listings in the docs are what the commands print: small versions of them, but for what the
machine decides."""

from __future__ import annotations

import importlib.util
import re
import sys
from types import ModuleType

import pytest

from tests.conftest import ROOT, llmexp


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
)  # only that the line is there
NUMBER = r"[-+]?\d[\d,.]*(e[-+]?\d+)?%?"


def shape(lines: list[str]) -> list[str]:
    """The lines with their wrapping undone, numbers and times as #; of a line that the machine
    decides its label. Of lines alike that follow each other, such as those of kills in random
    places, one."""
    whole: list[str] = []
    for line in lines:
        if line.startswith("  "):
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
        line = re.sub(r"killed in (the save of )?step", "killed in step", line)
        line = re.sub(
            r"(in step #, )+", "", re.sub(NUMBER, "#", re.sub(r"eta +[^|]*", "eta #", line))
        )
        line = re.sub(
            r"in (the save of )?step #(, in (the save of )?step #)*",
            "in steps",
            " ".join(line.split()),
        )
        if not found or found[-1] != line:
            found.append(line)
    return found


@pytest.mark.parametrize(
    "listing",
    [
        pytest.param(x, marks=() if x.command == "train" else pytest.mark.slow)
        for x in listings.LISTINGS
    ],
    ids=lambda x: x.command,
)
def test_a_listing_is_what_its_command_prints(listing, tmp_path):
    done = llmexp(
        *listing.command.split(),
        *listing.small,
        cwd=tmp_path,
        COLUMNS=listings.COLUMNS,
        timeout=900,
    )
    assert done.code == 0, done.err
    block = listings.find(listing, (ROOT / listing.file).read_text())
    assert shape(listings.shown(done.out, listing.keep)) == shape(block[2].splitlines())
