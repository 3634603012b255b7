"""The pages for users and developers name what exists (links, files, functions, tests, packages),
and pages and product speak plain English: short sentences, without words of the authors' own."""

import ast
import json
import re
import typing
from pathlib import Path

import pytest
import yaml

from llmexp import features
from llmexp.config.kinds import MEANING, Kind
from llmexp.metrics.keys import ROW_KEYS
from tests.conftest import ROOT
from tests.test_structure import MODULES, tree
from tools import packages

WRITTEN = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
PAGES = [*WRITTEN, *(ROOT / "benchmarks/results").rglob("*.md")]
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


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def odd_words(text: str) -> list[str]:
    return [f"{word}: {plain}" for word, plain in WORDS.items() if re.search(rf"\b{word}\b", text)]


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub makes of a page's titles."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_what_a_page_names_is_there(page):
    text = page.read_text(encoding="utf-8")
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if not link.startswith("http"):
            file, _, anchor = link.partition("#")
            target = (page.parent / file).resolve() if file else page
            assert target.exists(), link
            assert not anchor or anchor in anchors(target), link
    for name in re.findall(r"`((?:llmexp|tests|tools|docs|launchers)/[\w./-]+\.\w+)", text):
        assert (ROOT / name).exists(), name
    for name, test in re.findall(r"`(?:tests/)?([\w/]*test_\w+\.py)(?:::(test_\w+))?", text):
        code = read(f"tests/{name}")
        assert not test or re.search(rf"def {test}\b", code), f"{name}::{test}"


@pytest.mark.parametrize("page", WRITTEN, ids=lambda p: p.name)
def test_a_page_has_short_sentences_of_plain_words(page):
    """Without its listings, its code and the addresses of its links; cells of tables are sentences,
    too."""
    text = page.read_text(encoding="utf-8")
    text = re.sub(r"```.*?```|<!--.*?-->", "\n\n", text, flags=re.S)
    text = re.sub(r"\]\([^)]*\)", "]", re.sub(r"`[^`]*`", "code", text))
    for block in re.split(r"\n\s*\n|\n(?=\s*(?:[-*|#]|\d+\.) ?)", text):
        for cell in block.split("|"):
            for sentence in re.split(r"(?<=[.?!])\s+", cell):
                assert len(sentence.split()) <= LONGEST, sentence
    assert not odd_words(text.partition("| not | but |")[0])  # whose examples are such words


def test_what_the_product_prints_is_plain():
    """Texts in the code, without docstrings and single words, which are names."""
    for path in MODULES.values():
        nodes = [*ast.walk(tree(path))]
        docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
        for node in nodes:
            if isinstance(node, ast.Constant) and id(node) not in docstrings:
                text = str(node.value)
                assert " " not in text or not odd_words(text), f"{path}:{node.lineno}"


def length(file: str, name: str) -> int:
    """Lines of a function or a class, or of the whole file where `name` is empty."""
    if not name:
        return read(file).count("\n")
    (found,) = (node for node in tree(ROOT / file).body if getattr(node, "name", "") == name)
    return found.end_lineno - found.lineno + 1


def test_the_tour_has_ten_stops_of_one_evening():
    tour = read("docs/tour.md")
    stops = re.findall(r"^## \d+\. (.*)$", tour, re.M)
    assert len(stops) == 10
    named = re.findall(r"`([\w/]+\.(?:py|yaml))(?::(\w+))?`", " ".join(stops))
    assert sum(length(file, name) for file, name in named) <= 1700
    assert all(length(*found) for found in re.findall(r"`(llmexp/[\w/]+\.py)(?::(\w+))?`", tour))


def test_the_keys_of_a_row_are_those_of_the_table():
    rows = read("docs/metrics.md").partition("\n## Rows\n")[2].partition("\n## ")[0]
    named = re.findall(r"^\|([^|]*)\|", rows, re.M)
    assert sorted(re.findall(r"`([^`]+)`", " ".join(named))) == sorted(ROW_KEYS)


def test_the_table_of_packages_is_written_by_the_tool():
    page = read("docs/architecture.md")
    assert packages.written(page) == page, "python -m tools.packages"


def test_each_private_api_is_used_and_watched_by_a_test():
    rows = yaml.safe_load(read("tests/private_apis.yaml"))
    for row in rows:
        text = read(f"llmexp/{row['file']}")
        assert not [name for name in row["names"] if name not in text], row
        path, function = row["test"].split("::")
        assert f"def {function}(" in read(f"tests/{path}"), row
    listed = {ROOT / "llmexp" / row["file"] for row in rows}
    for path in MODULES.values():
        if re.search(r"from hydra\._internal|import hydra\._internal", path.read_text("utf-8")):
            assert path in listed, path


def test_a_package_lists_its_files():
    for package in (path.parent for path in MODULES.values() if path.name == "__init__.py"):
        found = ast.get_docstring(tree(package / "__init__.py")) or ""
        if package.parent.name == "features":
            found += features.__doc__ or ""  # which names the files that are alike in all
        for file in package.glob("*.py"):
            if not file.name.startswith("__") and package.name != "llmexp":
                assert re.search(rf"\b{file.stem}\b", found), file


def test_the_kinds_of_refusals_are_those_of_the_schema_and_each_is_used():
    assert list(MEANING) == list(typing.get_args(Kind))
    schema = json.loads(read("llmexp/schema-2.json"))
    error = schema["$defs"]["error"]["properties"]["error"]["properties"]
    assert error["code"]["enum"] == list(MEANING)
    trees = [tree(path) for path in MODULES.values() if path.stem != "kinds"]
    words = {n.value for each in trees for n in ast.walk(each) if isinstance(n, ast.Constant)}
    assert not set(MEANING) - words
