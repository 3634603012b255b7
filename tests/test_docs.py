"""The pages for users and developers name what exists: links, files, functions, tests, packages."""

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
from tests.test_structure import MODULES
from tools import packages

FOLDERS = ("docs", "benchmarks/results")
PAGES = [*ROOT.glob("*.md"), *(page for one in FOLDERS for page in (ROOT / one).rglob("*.md"))]
ARCHITECTURE = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
TOUR = (ROOT / "docs/tour.md").read_text(encoding="utf-8")


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub makes of a page's titles."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if not link.startswith("http"):
            file, _, anchor = link.partition("#")
            target = (page.parent / file).resolve() if file else page
            assert target.exists(), link
            assert not anchor or anchor in anchors(target), link


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_files_that_a_page_names_exist(page):
    text = page.read_text(encoding="utf-8")
    for name in re.findall(r"`((?:llmexp|tests|tools|docs|launchers)/[\w./-]+\.\w+)", text):
        assert (ROOT / name).exists(), name
    for name, test in re.findall(r"`(?:tests/)?([\w/]*test_\w+\.py)(?:::(test_\w+))?", text):
        code = (ROOT / "tests" / name).read_text(encoding="utf-8")
        assert not test or re.search(rf"def {test}\b", code), f"{name}::{test}"


def length(path: Path, name: str) -> int:
    """Lines of a function or a class, or of the whole file where `name` is empty."""
    text = path.read_text(encoding="utf-8")
    if not name:
        return text.count("\n")
    found = [
        (node.end_lineno or 0) - node.lineno + 1
        for node in ast.parse(text).body
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name == name
    ]
    assert found, f"{path}:{name}"
    return found[0]


def test_the_tour_has_ten_stops_of_one_evening():
    stops = re.findall(r"^## \d+\. (.*)$", TOUR, re.M)
    assert len(stops) == 10
    named = re.findall(r"`([\w/]+\.(?:py|yaml))(?::(\w+))?`", " ".join(stops))
    assert sum(length(ROOT / file, name) for file, name in named) <= 1700
    for file, name in re.findall(r"`(llmexp/[\w/]+\.py)(?::(\w+))?`", TOUR):
        assert length(ROOT / file, name)


def test_the_keys_of_a_row_are_those_of_the_table():
    page = (ROOT / "docs/metrics.md").read_text(encoding="utf-8")
    rows = page.partition("\n## Rows\n")[2].partition("\n## ")[0]
    named = re.findall(r"^\|([^|]*)\|", rows, re.M)
    assert sorted(re.findall(r"`([^`]+)`", " ".join(named))) == sorted(ROW_KEYS)


def test_the_table_of_packages_is_written_by_the_tool():
    assert packages.written(ARCHITECTURE) == ARCHITECTURE, "python -m tools.packages"


def test_each_private_api_is_used_and_watched_by_a_test():
    rows = yaml.safe_load((ROOT / "tests/private_apis.yaml").read_text(encoding="utf-8"))
    for row in rows:
        text = (ROOT / "llmexp" / row["file"]).read_text(encoding="utf-8")
        assert not [name for name in row["names"] if name not in text], row
        path, function = row["test"].split("::")
        assert f"def {function}(" in (ROOT / "tests" / path).read_text(encoding="utf-8"), row
    listed = {row["file"] for row in rows}
    for path in MODULES.values():
        if re.search(r"from hydra\._internal|import hydra\._internal", path.read_text("utf-8")):
            assert str(path.relative_to(ROOT / "llmexp")) in listed, path


@pytest.mark.parametrize(
    "package", sorted(p.parent for p in MODULES.values() if p.name == "__init__.py"), ids=str
)
def test_a_package_lists_its_files(package):
    found = ast.get_docstring(ast.parse((package / "__init__.py").read_text("utf-8"))) or ""
    if package.parent.name == "features":
        found += features.__doc__ or ""  # which names the files that are alike in all
    for file in package.glob("*.py"):
        if not file.name.startswith("__") and package.name != "llmexp":
            assert re.search(rf"\b{file.stem}\b", found), file


def test_the_kinds_of_refusals_are_those_of_the_schema_and_each_is_used():
    assert list(MEANING) == list(typing.get_args(Kind))
    schema = json.loads((ROOT / "llmexp/schema-2.json").read_text(encoding="utf-8"))
    error = schema["$defs"]["error"]["properties"]["error"]["properties"]
    assert error["code"]["enum"] == list(MEANING)
    sources = [p for p in (ROOT / "llmexp").rglob("*.py") if p.stem != "kinds"]
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in sources]
    words = {n.value for tree in trees for n in ast.walk(tree) if isinstance(n, ast.Constant)}
    assert not set(MEANING) - words
