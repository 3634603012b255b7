"""A feature is taken out by its folder, its line in the list and those of its knobs in conf/: what
is left stands, as its tests say."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from llmexp.config.values import section_knobs
from llmexp.features import FEATURES, HERE, part
from tests import forks
from tests.conftest import PATHS, ROOT, TINY, environment, llmexp

LEFT = ["llmexp", "conf", "hydra_plugins", "tests", "pyproject.toml", ".importlinter"]
TESTS = [
    "tests/test_structure.py", "tests/test_types.py", "tests/train/test_end.py",
    "tests/compare/test_output.py",
]  # fmt: skip
RUN = ["data=synthetic", "data.n_tokens=5000", "train.max_steps=4", "checkpoint.every=2"]


def goes_with(name: str) -> list[str]:
    """Return a feature, and those that import from it."""
    begins = f"llmexp.features.{name}."
    others = [other for other in FEATURES if other != name]
    texts = {other: [f.read_text() for f in (HERE / other).glob("*.py")] for other in others}
    return [name, *(other for other in others if any(begins in text for text in texts[other]))]


def knobs_of(name: str) -> list[str]:
    knobs = getattr(part(name, "config"), "Knobs", None)
    return [*section_knobs(knobs)] if knobs else []


def without(name: str, to: Path) -> None:
    """Copy the project, but for what goes with a feature."""
    for given in LEFT:
        if (ROOT / given).is_dir():
            shutil.copytree(ROOT / given, to / given, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / given, to / given)
    listed = to / "llmexp/features/__init__.py"
    for gone in goes_with(name):
        knobs = knobs_of(gone)
        shutil.rmtree(to / "llmexp/features" / gone)
        shutil.rmtree(to / "tests/features" / gone, ignore_errors=True)
        text, lines = re.subn(rf'(?m)^    "{gone}",.*\n', "", listed.read_text())
        assert lines == 1
        listed.write_text(text)
        settings = part(gone, "config")
        for rule in getattr(settings, "CLIP_RULES", ()):
            (to / "conf/clip" / f"{rule}.yaml").unlink()
        section = "metrics" if settings is None else settings.SECTION
        own = {*(to / "conf" / section).glob("*.yaml"), to / "conf/base" / f"{section}.yaml"}
        for file in (to / "conf").rglob("*.yaml") if knobs else ():
            start, keys = "" if file in own else " +", "|".join(knobs)
            file.write_text(re.sub(rf"(?m)^{start}({keys}): .*\n", "", file.read_text()))


@pytest.mark.slow
@pytest.mark.parametrize("name", FEATURES)
def test_what_is_left_stands(name, tmp_path, monkeypatch):
    monkeypatch.setattr(forks, "ALLOWED", False)  # of what is imported here nothing is gone
    without(name, tmp_path)
    paths = PATHS.replace(str(ROOT), str(tmp_path))
    env = environment(PYTHONPATH=paths)
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *TESTS]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
    gone = [key for other in goes_with(name) for key in knobs_of(other)]
    tiny = [word for word in TINY if word.partition("=")[0].rpartition(".")[2] not in gone]
    for code, words in (
        (75, ["train", *tiny, *RUN, "train.stop_step=2", "hydra.run.dir=a"]),
        (0, ["resume", "a", "train.stop_step=null"]),
        (0, ["train", *tiny, *RUN, "train.seed=2", "hydra.run.dir=b"]),
        (0, ["compare", "a", "b", "--out", "page.html"]),
        (0, ["evaluate", "a"]),
        (0, ["plan", *RUN]),
    ):
        found = llmexp(*words, cwd=tmp_path, PYTHONPATH=paths)
        assert found.code == code, (words, found.err)


def test_one_of_others_goes_with_each_of_them():
    assert goes_with("layers") == ["layers", "spikes"]
    assert goes_with("spikes") == ["spikes"]
