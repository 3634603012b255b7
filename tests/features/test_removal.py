"""A feature is taken out by its folder, its line in the list and those of its knobs in conf/: what
is left stands, as its tests say."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from llmexp.features import FEATURES, HERE, part
from llmexp.settings.values import section_knobs
from tests.conftest import PATHS, ROOT, environment

LEFT = ["llmexp", "conf", "hydra_plugins", "tests", "pyproject.toml", ".importlinter"]
TESTS = [
    "tests/test_structure.py", "tests/test_types.py", "tests/test_knobs.py",
    "tests/train/test_end.py", "tests/train/test_train.py", "tests/compare/test_output.py",
    "tests/compare/test_page.py", "tests/features/test_own_feature.py",
]  # fmt: skip


def goes_with(name: str) -> list[str]:
    """Return a feature, and those that import from it."""
    begins = f"llmexp.features.{name}."
    others = [other for other in FEATURES if other != name]
    texts = {other: [f.read_text() for f in (HERE / other).glob("*.py")] for other in others}
    return [name, *(other for other in others if any(begins in text for text in texts[other]))]


def without(name: str, to: Path) -> None:
    """Copy the project, but for what goes with a feature."""
    for given in LEFT:
        if (ROOT / given).is_dir():
            shutil.copytree(ROOT / given, to / given, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / given, to / given)
    listed = to / "llmexp/features/__init__.py"
    for gone in goes_with(name):
        knobs = getattr(part(gone, "settings"), "Knobs", None)
        shutil.rmtree(to / "llmexp/features" / gone)
        shutil.rmtree(to / "tests/features" / gone, ignore_errors=True)
        text, lines = re.subn(rf'(?m)^    "{gone}",.*\n', "", listed.read_text())
        assert lines == 1
        listed.write_text(text)
        for file in (to / "conf").rglob("*.yaml") if knobs else ():
            keys = "|".join(section_knobs(knobs))
            file.write_text(re.sub(rf"(?m)^ +({keys}): .*\n", "", file.read_text()))


@pytest.mark.slow
@pytest.mark.parametrize("name", FEATURES)
def test_what_is_left_stands(name, tmp_path):
    without(name, tmp_path)
    paths = PATHS.replace(str(ROOT), str(tmp_path))
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *TESTS]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment(PYTHONPATH=paths), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]


def test_one_of_others_goes_with_each_of_them():
    assert goes_with("layers") == ["layers", "spikes"]
    assert goes_with("spikes") == ["spikes"]
