"""Pages and product speak plain English: short sentences, without words of the authors' own."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import ROOT

PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]
LONGEST = 35  # words of a sentence
# What stands in place of a plain word, and the plain word.
WORDS = {
    "anew": "again",
    "told apart": "distinguished",
    "is none": "is not one",
    "gone on with": "continued",
    "in vain": "without success",
    "all that": "everything that",
    "witness": "evidence",
    "a stranger's": "untrusted",
    r"some \d[\d,.]*": "about N",
    "hangs on": "depends on",
    "has no meaning here": "is not supported",
    "sign of life": "output",
}


def prose(page: Path) -> str:
    """Return a page without its listings, its code and the addresses of its links."""
    text = page.read_text(encoding="utf-8")
    text = re.sub(r"```.*?```|<!--.*?-->", "\n\n", text, flags=re.S)
    return re.sub(r"\]\([^)]*\)", "]", re.sub(r"`[^`]*`", "code", text))


def sentences(page: Path) -> Iterator[str]:
    """Yield the sentences of a page, and the cells of its tables."""
    for block in re.split(r"\n\s*\n|\n(?=\s*(?:[-*|#]|\d+\.) ?)", prose(page)):
        for cell in block.split("|"):
            yield from re.split(r"(?<=[.?!])\s+", " ".join(cell.split()))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_sentence_is_long(page):
    assert not [one for one in sentences(page) if len(one.split()) > LONGEST]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_words_are_plain(page):
    text = prose(page)
    if page.name == "CONTRIBUTING.md":
        text = text.partition("| not | but |")[0]  # whose examples are such words
    found = [f"{word}: {plain}" for word, plain in WORDS.items() if re.search(rf"\b{word}\b", text)]
    assert not found


def test_what_the_product_prints_is_plain():
    """Texts in the code, without docstrings and single words, which are names."""
    found = list[str]()
    for path in sorted((ROOT / "llmexp").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
                node.value.value = ""  # a docstring
            if isinstance(node, ast.Constant) and " " in (text := str(node.value)):
                used = (word for word in WORDS if re.search(rf"\b{word}\b", text))
                found += [f"{path}:{node.lineno}: {word}" for word in used]
    assert not found
