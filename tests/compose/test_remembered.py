"""What the tests remember of configs (tests/forks/composing.py) is what their files hold now."""

from __future__ import annotations

import pytest

from llmexp.compose import app
from llmexp.settings.values import ConfigError

GIVEN = ["model=gpt_tiny", "data=synthetic", "tracker=none", "experiment=mine"]


@pytest.mark.parametrize("way", ["--config-dir", "file", "pkg"])
def test_a_config_that_was_rewritten_is_read_anew(tmp_path, monkeypatch, way):
    name = f"rewritten_{way.strip('-').replace('-', '_')}"
    folder = tmp_path / name / "experiment"
    folder.mkdir(parents=True)
    for package in (folder, folder.parent):
        (package / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("LLMEXP_ALLOW", name)
    place = {"file": f"file://{folder.parent}", "pkg": f"pkg://{name}"}
    more = [f"hydra.searchpath=[{place[way]}]"] if way in place else []
    for steps, clip in ((7, "none"), (8, "value"), (9, "value")):
        head = f"# @package _global_\ndefaults: [override /clip: {clip}]\n"
        (folder / "mine.yaml").write_text(f"{head}train: {{max_steps: {steps}}}\n")
        with app.hydra_app(None if more else str(folder.parent)) as hydra:
            cfg, _ = app.compose(hydra, [*GIVEN, *more])
        assert (cfg.train.max_steps, cfg.clip.kind) == (steps, clip)


@pytest.mark.parametrize("way", ["--config-dir", "file", "pkg"])
def test_a_config_whose_aliases_make_it_endless_is_refused_wherever_it_is(
    tmp_path, monkeypatch, way
):
    (tmp_path / "endless" / "experiment").mkdir(parents=True)
    monkeypatch.syspath_prepend(str(tmp_path))
    tmp_path = tmp_path / "endless"
    (tmp_path / "__init__.py").touch()
    lines = [f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]" for n in range(1, 40)]
    (tmp_path / "experiment" / "mine.yaml").write_text("\n".join(["a0: &a0 1", *lines]))
    place = {"file": f"file://{tmp_path}", "pkg": "pkg://endless"}
    more = [f"hydra.searchpath=[{place[way]}]"] if way in place else []
    with (
        app.hydra_app(None if more else str(tmp_path)) as hydra,
        pytest.raises(ConfigError, match=r"mine\.yaml: .*more than 10,000 values"),
    ):
        app.compose(hydra, [*GIVEN, *more])
