"""Figures layer by layer on the page: what is drawn is what layers.jsonl has."""

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmexp.compare.page import page
from llmexp.features.layers.page import STEPS
from tests.compare.made import comparison, grid
from tests.compare.pages import array, browser, figures, menu, show

__all__ = ["browser", "show"]  # fixtures


def write_layers(run: Path, steps: int, every: int = 1, layers: int = 3) -> dict[int, list[float]]:
    """Write the figures of a run; return its ratios of update to weights by tokens. Of one figure,
    as of experts behind dense blocks, the first layer has none."""
    draw, found = random.Random(run.name).uniform, {}
    run.mkdir(parents=True)
    with open(run / "layers.jsonl", "w") as file:
        for step in range(every, steps + 1, every):
            line: dict[str, Any] = {"step": step, "tokens_seen": 64 * step, "logit_max": 1.0}
            for key in ("weight_norm", "update_norm"):
                line[key] = {f"blocks.{i}.mlp": draw(1, 2) for i in range(layers)}
            line["residual_rms"] = {f"blocks.{i}": draw(1, 2) for i in range(layers)}
            line["moe/dead"] = {"blocks.1": step, "blocks.2": 9.0}
            file.write(json.dumps(line) + "\n")
            pairs = zip(line["update_norm"].values(), line["weight_norm"].values(), strict=True)
            found[64 * step] = [update / weight for update, weight in pairs]
    return found


def whole_page(folder: Path) -> str:
    entries = grid(n=20, clip__max_norm=[0.5, 1.0])
    for i, e in enumerate(entries):
        e.runs = tuple(replace(r, path=folder / str(i)) for r in e.runs)
    return page(comparison(entries))


def test_the_maps_are_the_figures(tmp_path):
    """Of no more than some steps."""
    assert 'id="layers"' not in whole_page(tmp_path)
    known = [write_layers(tmp_path / str(i), *given) for i, given in enumerate(((6, 2), (1000, 1)))]
    figure = figures(whole_page(tmp_path))["layers"]
    few, many = figure["data"]
    assert array(few["x"]).tolist() == list(known[0])
    assert len(array(many["x"])) == STEPS
    assert (array(many["x"])[0], array(many["x"])[-1]) == (64, 64_000)
    for trace, ratios in zip((few, many), known, strict=True):
        wanted = np.array([ratios[int(at)] for at in array(trace["x"])]).T
        np.testing.assert_allclose(array(trace["z"]), wanted, 1e-6)
    keys = [button["label"] for button in figure["layout"]["updatemenus"][0]["buttons"]]
    dead = array(menu(figure, 0)[keys.index("moe/dead")][0]["z"][0])
    np.testing.assert_array_equal(dead, [[np.nan] * 3, [2, 4, 6], [9, 9, 9]])


@pytest.mark.parametrize(
    "damage",
    ["{", '{"step": 21}', '{"step": 21, "tokens_seen": "x"}', '{"step": 21, "tokens_seen": 9, '
     '"grad_norm": {"blocks.0.mlp": "x"}}', '{"step": 21, "tokens_seen": 9, "residual_rms": '
     '{"blocks.999999999999": 1.0}}'],
)  # fmt: skip
def test_what_stands_before_damage_is_drawn(tmp_path, damage):
    known = write_layers(tmp_path / "0", 20)
    with open(tmp_path / "0" / "layers.jsonl", "a") as file:
        file.write(damage + "\n")
    (trace,) = figures(whole_page(tmp_path))["layers"]["data"]
    assert array(trace["x"]).tolist()[:20] == list(known)


def test_menus_choose_figure_and_setting_in_the_browser(tmp_path, show):
    write_layers(tmp_path / "0", 20)
    write_layers(tmp_path / "1", 20)
    html = whole_page(tmp_path)
    (tmp_path / "page.html").write_text(html, encoding="utf-8")
    tab = show(tmp_path / "page.html", width=390, scheme="dark")
    tab.click("#layers summary")
    assert tab.evaluate("document.documentElement.scrollWidth") == 390
    plot, figure = "figure[data-plot=layers] .plot", figures(html)["layers"]
    keys = [button["label"] for button in figure["layout"]["updatemenus"][0]["buttons"]]
    rms = menu(figure, 0)[keys.index("residual_rms")]
    tab.evaluate(
        "([p, maps, of]) => Plotly.update(document.querySelector(p), ...maps)"
        ".then(() => Plotly.update(document.querySelector(p), ...of))",
        [plot, rms, menu(figure, 1)[1]],
    )
    visible = (
        "p => document.querySelector(p)._fullData.filter(t => t.visible === true)"
        ".map(t => t.z.map(row => Array.from(row)))"
    )
    np.testing.assert_array_equal(tab.evaluate(visible, plot), [array(rms[0]["z"][1])])
