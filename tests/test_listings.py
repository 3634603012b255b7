"""The listings in the docs are what the commands print, but for what the machine decides: small
versions of them are run."""

from __future__ import annotations

import importlib.util
import re
import subprocess
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
    "page",
)  # only that the line is there
FAST = ("train",)
NUMBER = r"[-+]?\d[\d,.]*(e[-+]?\d+)?%?"


def shape(lines: list[str]) -> list[str]:
    """Undo the wrapping of the lines and write numbers and times as #.

    Keep only the label of a line that the machine decides, and one of several equal lines.
    """
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
        # Columns after the losses are there as far as they fit, which depends on the figures.
        line = re.sub(r"(train loss) [a-z].*?(?= # )", r"\1", line)
        line = re.sub(r"(± # # ± #|best # ± # # ± #)( #)+(?= # |$)", r"\1", line)
        if not found or found[-1] != line:
            found.append(line)
    return found


def is_slow(listing) -> bool:
    return listing.command not in FAST and bool(listing.small or listing.before)


@pytest.mark.parametrize(
    "listing",
    [pytest.param(x, marks=pytest.mark.slow if is_slow(x) else ()) for x in listings.LISTINGS],
    ids=lambda x: " ".join(x.command.split()[:2]),
)
def test_a_listing_is_what_its_command_prints(listing, tmp_path):
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
        timeout=900,
    )
    assert done.code == listing.code, done.err
    printed = done.out if listing.code == 0 else done.err
    assert shape(listings.shown(printed, listing.keep)) == shape(block[2].splitlines())
