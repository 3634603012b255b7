"""What carries the project on names what there is: workflows and hooks run the commands of the
Makefile, and the templates of issues and changes are forms that GitHub reads."""

import ast
import re
import tomllib
from pathlib import Path

import pytest
import yaml

from tests.conftest import HANG_S, ROOT

MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))


def commands(target: str) -> list[str]:
    """The lines of a rule of the Makefile."""
    found = re.search(rf"^{target}:.*\n((?:\t.*\n)+)", MAKEFILE, re.M)
    assert found is not None, target
    return found[1].split("\n\t")


def jobs(path: Path) -> dict:
    return yaml.safe_load(path.read_text(encoding="utf-8"))["jobs"]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda p: p.stem)
def test_workflows_run_the_commands_of_the_makefile(path):
    runs = [step["run"] for job in jobs(path).values() for step in job["steps"] if "run" in step]
    assert runs
    for run in runs:
        assert run.startswith("make "), run
        assert commands(run.removeprefix("make "))


def test_the_two_commands_run_on_each_python_that_is_allowed():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    job = jobs(ROOT / ".github/workflows/test.yml")["test"]
    first, end = (int(minor) for minor in re.findall(r"3\.(\d+)", project["requires-python"]))
    assert job["strategy"]["matrix"]["python"] == [f"3.{minor}" for minor in range(first, end)]
    assert [s["run"] for s in job["steps"] if "run" in s] == ["make train", "make test"]


def test_hooks_before_a_commit_are_what_make_check_runs():
    (repo,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text("utf-8"))["repos"]
    assert [hook["entry"] for hook in repo["hooks"]] == [x.strip() for x in commands("check")]
    assert not any(hook["pass_filenames"] for hook in repo["hooks"])


def test_a_limit_in_a_test_only_ends_what_hangs():
    """It counts the work of others on a machine that may be busy, so it is no figure of its own."""
    for path in (ROOT / "tests").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.keyword) and node.arg == "timeout":
                limit = getattr(node.value, "value", None)
                assert limit is None or limit >= HANG_S, f"{path.name}:{node.value.lineno}"


def test_tests_that_are_named_are_there():
    """Those of the Makefile and of the plan of mutants are named by no import."""
    for text in (MAKEFILE, (ROOT / "tools/mutants/plan.toml").read_text(encoding="utf-8")):
        for name in re.findall(r"tests/[\w/]+(?:\.py|(?=[\s\":]))", text):
            assert (ROOT / name).exists(), name


def test_the_site_has_each_page_once():
    nav = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2]
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    listed = re.findall(r": (?!reference/)(\S+\.md)$", nav, re.M)
    assert sorted(listed) == sorted(str(page.relative_to(ROOT)) for page in pages)
