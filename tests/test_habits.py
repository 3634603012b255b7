"""What carries the project on names what there is: workflows and hooks run the commands of the
Makefile, `make quick` the tests that a change needs."""

import ast
import re
import tomllib

import pytest
import yaml

from tests.conftest import HANG_S, ROOT
from tools.quick import NAMED, near

MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
WORKFLOWS = {path.stem: path for path in (ROOT / ".github/workflows").glob("*.yml")}


def commands(target: str) -> list[str]:
    """The lines of a rule of the Makefile."""
    found = re.search(rf"^{target}:.*\n((?:\t.*\n)+)", MAKEFILE, re.M)
    assert found is not None, target
    return [line.strip() for line in found[1].split("\n\t")]


def jobs(workflow: str) -> dict:
    return yaml.safe_load(WORKFLOWS[workflow].read_text(encoding="utf-8"))["jobs"]


def test_workflows_run_the_commands_of_the_makefile():
    for name in WORKFLOWS:
        steps = [step for job in jobs(name).values() for step in job["steps"]]
        runs = [step["run"] for step in steps if "run" in step]
        assert runs, name
        assert all(run.startswith("make ") and commands(run[5:]) for run in runs), runs


def test_the_two_commands_run_on_each_python_that_is_allowed():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    job = jobs("test")["test"]
    first, end = (int(minor) for minor in re.findall(r"3\.(\d+)", project["requires-python"]))
    assert job["strategy"]["matrix"]["python"] == [f"3.{minor}" for minor in range(first, end)]
    assert [s["run"] for s in job["steps"] if "run" in s] == ["make train", "make test"]


def test_hooks_before_a_commit_are_what_make_check_runs():
    (repo,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text("utf-8"))["repos"]
    assert [hook["entry"] for hook in repo["hooks"]] == commands("check")
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
    assert all((ROOT / test).exists() for tests in NAMED.values() for test in tests)


def test_the_site_has_each_page_once():
    nav = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2]
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    listed = re.findall(r": (?!reference/)(\S+\.md)$", nav, re.M)
    assert sorted(listed) == sorted(str(page.relative_to(ROOT)) for page in pages)


@pytest.mark.parametrize(
    ("file", "first"),
    [
        ("tests/test_rows.py", "tests/test_rows.py"),
        ("llmexp/optim/schedule.py", "tests/test_schedule.py"),
        ("llmexp/verify/page.css", "tests/verify/"),
        ("llmexp/verify/gone.py", "tests/verify/"),
        ("tools/packages.py", "tests/test_docs.py"),
        ("docs/scaling-laws.md", "tests/test_docs.py"),
    ],
)
def test_the_nearest_tests_are_among_the_first(file, first):
    assert any(test.startswith(first) for test in near([file])[:9])


def test_a_room_is_near_to_each_of_its_files():
    found = near(["llmexp/compare/inference.py", "docs/scaling-laws.md"])
    assert {f"tests/compare/{p.name}" for p in ROOT.glob("tests/compare/test_*.py")} <= {*found}
