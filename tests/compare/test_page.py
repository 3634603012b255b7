"""The page: what it holds is read from its text, what it does is done in headless Chromium."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import llmexp
from llmexp.compare.curves import AXES, POINTS, SMOOTHED
from llmexp.compare.page import PLOTLY_FILE, page, write_beside
from llmexp.compare.plots import scale
from llmexp.compare.records import Result
from llmexp.system.text import shown
from tests.compare.made import comparison, entry, grid
from tests.compare.pages import (
    EVIL,
    PLOT,
    TRACES,
    Outline,
    array,
    browser,
    figures,
    fits,
    menu,
    same_figures,
    show,
)
from tests.compare.synthetic import make_sweep
from tests.tools import amend

__all__ = ["browser", "show"]  # fixtures

ACCUMULATION, CLIP, RATE = "batch__gradient_accumulation_steps", "clip__max_norm", "optimizer__lr"
FOUR_BY_THREE = {ACCUMULATION: [1, 2, 4, 8], CLIP: [0.5, 1.0, 2.0]}
F32 = 2**-23  # a page has float32


def written(made: Result, folder: Path) -> Path:
    (folder / "page.html").write_text(page(made), encoding="utf-8")
    return folder / "page.html"


def undecided() -> Result:
    """Two settings over three seeds that are near, and one of another sweep and budget."""
    near, far = grid(n=20, seeds=3, **{CLIP: [0.5, 1.0]}), entry(2, {"clip.max_norm": 2.0}, n=10)
    for i, noise in enumerate((0.05, -0.04, 0.01)):
        near[1].runs[i].columns["val/loss"][:] += noise
    far = replace(far, runs=(replace(far.runs[0], sweep=None),))
    return comparison([*near, far])


def failed() -> Result:
    """The best one broke off, a value is long, and each pair of three keys has its map."""
    entries = grid(n=20, **{RATE: [1e-4, 0.012345678901234568], CLIP: [0.5, 1.0]})
    entries[0] = entry(0, entries[0].values, n=20, state="failed")
    again = entry(7, entries[1].values | {"model.kind": "a"}, n=20)
    return comparison([*entries, again])


def bare() -> Result:
    run = replace(entry(0, {}).runs[0], columns={"step": np.zeros(0)}, status={}, facts={})
    return comparison([replace(entry(0, {}), runs=(replace(run, config={}, steps={}),))])


PAGES: dict[str, Callable[[], Result]] = {
    "whole": lambda: comparison(grid(n=30, **FOUR_BY_THREE)[::-1], problems=("x: no run",)),
    "seeds": lambda: comparison(grid(n=20, seeds=3, **{RATE: [1e-4, 1e-3, 1e-2]},
                                     model__kind=["a", "b"])),
    "undecided": undecided, "failed": failed, "bare": bare,
    "nothing": lambda: comparison([], problems=("x: no run",)),
}  # fmt: skip


@pytest.mark.parametrize("name", PAGES)
def test_the_text_and_the_figures_of_a_page(words, name):
    html = page(PAGES[name]())
    words.hidden |= {"This figure needs the file .*?page.html ?": ""}
    words("compare/page", Outline(html).text(), name)
    kept = {k: f for k, f in figures(html).items() if k.startswith(("over", "map"))}
    same_figures(words, f"compare/figures_{name}", kept)


def test_nothing_is_fetched_and_no_script_but_its_own_may_run(tmp_path):
    made = comparison(grid(n=30, **FOUR_BY_THREE))
    beside = write_beside(made, tmp_path).read_text(encoding="utf-8")
    assert {path.name for path in tmp_path.iterdir()} == {"compare.html", PLOTLY_FILE}
    for html, allowed in ((page(made), ()), (beside, (PLOTLY_FILE,))):
        tags = Outline(html).tags
        names = ("src", "href", "srcset", "action", "data")
        loads = [v for _, attributes in tags for k, v in attributes.items() if k in names]
        assert all(v is not None and v.startswith(("#", "data:,", *allowed)) for v in loads)
        policy = next(a["content"] for t, a in tags if t == "meta" and a.get("http-equiv"))
        assert policy is not None
        assert policy.startswith("default-src 'none'; script-src 'sha256-")
        assert "unsafe-inline" not in policy.split("style-src")[0]
        assert "unsafe-eval" not in policy
        assert "http" not in policy


def hostile() -> Result:
    """Labels and values that are markup with a script."""
    entries = [
        entry(i, {"clip.max_norm": EVIL * (i + 1), "optimizer.lr": i % 2}, n=30) for i in range(4)
    ]
    run = entries[0].runs[0]
    evil = replace(
        run, name=EVIL, config=run.config | {EVIL: EVIL},
        facts=run.facts | {"commit": EVIL, "versions": {EVIL: EVIL}},
        status=run.status | {"host": EVIL, "noise": {"verdict": EVIL}},
    )  # fmt: skip
    entries[0] = replace(entries[0], runs=(evil,))
    made = comparison(entries, problems=(EVIL,), headline=EVIL, notes=(EVIL,), why=(EVIL,))
    first = made.settings[0]
    first.label = first.note = first.state = first.mark = EVIL
    made.metric = replace(made.metric, title=EVIL)
    made.columns = tuple(made.metric if c.key == made.key else c for c in made.columns)
    return made


def test_what_comes_from_runs_is_text():
    html = page(hostile())
    outline = Outline(html)
    assert not [tag for tag, _ in outline.tags if tag == "img"]
    assert outline.text().count("onerror=") >= 10
    assert html.count("<script") == html.count("</script>") == 3
    made = failed()
    made.settings[-1].note = "a rank was killed (SIGKILL)"
    assert "a rank was killed (SIGKILL)" in Outline(page(made)).text()


def test_curves_keep_their_spikes_and_their_evaluations():
    run = entry(0, {}, n=10_000).runs[0]
    columns = run.columns
    columns["train/loss"][6_543] = 77.25
    drawn = figures(page(comparison([replace(entry(0, {}), runs=(run,))])))["losses"]
    raw, smoothed, val = drawn["data"][:3]
    y = array(raw["y"])
    assert len(y) <= POINTS
    assert y.max() == 77.25
    places = [update[0]["x"] for update in menu(drawn, 0)]
    assert len(places) == len(AXES)
    steps = array(places[1][0])
    assert steps[y.argmax()] == columns["step"][6_543]
    seconds = sum(10 * t for t in columns["step_time"][: 6_543 + 1])
    assert array(places[2][0])[y.argmax()] == pytest.approx(seconds, rel=F32)
    at = int(np.flatnonzero(columns["step"] == steps[300])[0])
    reach = min(int(SMOOTHED * 10_000) // 2, at, 9_999 - at)  # the same on both sides
    around = columns["train/loss"][at - reach : at + reach + 1]
    assert array(smoothed["y"])[300] == pytest.approx(around.mean(), rel=1e-6)
    evaluated = np.flatnonzero(np.isfinite(columns["val/loss"]))
    kept = np.isin(columns["step"][evaluated], array(places[1][2]))
    assert len(array(val["y"])) == kept.sum() <= POINTS
    assert array(val["y"]) == pytest.approx(columns["val/loss"][evaluated][kept], rel=F32)


def test_a_ramp_is_drawn_as_it_is_and_a_band_spans_the_seeds():
    """The pointer has the last evaluation."""
    entries = grid(n=100, seeds=3, **{CLIP: [0.5, 1.0]})
    ramp = 10.0 - 0.1 * np.arange(100)
    for run in entries[0].runs:
        run.columns["train/loss"][:] = ramp
    traces = figures(page(comparison(entries)))["losses"]["data"]
    smoothed = next(t for t in traces if "customdata" in t)
    assert array(smoothed["y"]) == pytest.approx(ramp, rel=F32)
    assert smoothed["customdata"][8] == ""  # the first evaluation is that of the tenth row
    seeds = np.stack([r.columns["val/loss"] for r in entries[0].runs])
    assert smoothed["customdata"][15] == f", val {seeds[:, 9].mean():.4f}"
    bands = [t for t in traces if t.get("fill") == "toself"]
    band = next(t for t in bands if len(array(t["y"])) < 50)  # of the validation loss
    high, low = np.split(array(band["y"]), 2)
    seeds = seeds[:, np.isfinite(seeds[0])]
    assert high == pytest.approx(seeds.max(axis=0), rel=1e-6)
    assert low[::-1] == pytest.approx(seeds.min(axis=0), rel=1e-6)


@pytest.mark.parametrize(
    ("key", "values", "kind"),
    [
        ("optimizer.lr", [1e-3, 2e-3], "log"),
        ("batch.gradient_accumulation_steps", [1, 2, 4, 8], "log"),
        ("batch.micro_batch_size", [8, 16, 24, 32], "linear"),
        ("model.dropout", [0.0, 0.1, 0.2], "linear"),
        ("clip.max_norm", [None, 0.5], "category"),
        ("optimizer.nesterov", [False, True], "category"),
        ("optimizer.lr", [0.0123456789, 0.0123456789 + 1e-12], "log"),
    ],
)
def test_an_axis_is_logarithmic_for_rates_and_for_factors(key, values, kind):
    axis = scale([entry(i, {key: v}, n=20) for i, v in enumerate(values)], key)
    assert axis.kind == kind
    assert len(set(axis.labels)) == len(values)  # they look different


def test_a_search_is_drawn_in_order_and_the_fresh_seeds_behind_it(tmp_path):
    points = {}
    for i, offsets in enumerate(([0.3], [0.0, 0.1, 0.2], [0.2], [0.1])):
        for seed, offset in enumerate(offsets, 1):
            rate = 1e-3 * (1 + i)
            given = {"overrides": [f"optimizer.lr={rate}", f"train.seed={seed}"]}
            more = {"seed": seed, "optimizer__lr": rate, "wobble": 0, "point": given}
            points[f"{i}s{seed}"] = {"offset": offset, **more}
    path = make_sweep(tmp_path / "s", points, ["optimizer.lr", "train.seed"])
    amend(path / "sweep.json", grid=False)
    answer = llmexp.compare(path)
    (trace,) = answer.figures["search"].data
    values = {r.name: r.figures["val/loss"] for r in answer.comparison.runs}
    order = ["0-0s1", "1-1s1", "4-2s1", "5-3s1", "2-1s2", "3-1s3"]
    assert trace.y == tuple(values[name] for name in order)
    assert trace.marker.symbol == ("circle-open",) * 4 + ("circle",) * 2


def test_two_hundred_long_runs_are_a_page_of_some_megabytes():
    one = entry(0, {}, n=3000).runs[0]  # more rows than points that are drawn
    entries = []
    for i in range(200):
        noise = 1 + 1e-3 * np.random.default_rng(i).standard_normal(3000)
        noisy = ("train/loss", "grad_norm", "step_time", "tokens_per_sec")
        columns = {k: v * noise if k in noisy else v for k, v in one.columns.items()}
        run = replace(one, path=Path(f"/r/{i}"), name=f"{i}", columns=columns,
                      config=one.config | {"optimizer.lr": 1e-4 * (i + 1)})  # fmt: skip
        entries.append(replace(entry(0, {}, n=1), runs=(run,)))
    html = page(comparison(entries), inline=False)
    assert len(html.encode()) < 10e6
    assert len([t for t in figures(html)["losses"]["data"] if "legendgroup" in t]) == 200 * 2


# In the browser


def drawn(tab: Any, plot: str = PLOT) -> list[dict[str, Any]]:
    """The traces of a plot as Plotly has them."""
    return tab.evaluate(TRACES, plot)


def column(tab: Any, number: int) -> list[str]:
    script = "(rows, n) => rows.map(r => r.cells[n].innerText.trim())"
    return tab.eval_on_selector_all(".runs tbody tr", script, number)


def choose(tab: Any, number: int, option: str, plot: str = PLOT) -> None:
    tab.locator(f"{plot} .updatemenu-header").nth(number).click()
    tab.locator(f"{plot} .updatemenu-dropdown-button", has_text=option).first.click()


def point_at(tab: Any, x: float, y: float) -> None:
    place = tab.locator(f"{PLOT} .nsewdrag").first.bounding_box()
    tab.mouse.move(place["x"] + x * place["width"], place["y"] + y * place["height"])


def test_the_table_sorts_the_legend_hides_and_menus_change_what_is_drawn(show, tmp_path):
    entries = grid(n=200, **{CLIP: [0.5, 1.0], RATE: [1, 2]})
    entries[2] = entry(2, entries[2].values, n=200, state="failed")  # without a figure
    made = comparison(entries)
    tab = show(written(made, tmp_path))
    buttons = tab.locator(".runs th button")
    heads = buttons.all_inner_texts()
    loss, rate = heads.index("val loss"), heads.index("tokens/s")
    known = sorted(s.figures["val/loss"] for s in made.settings if "val/loss" in s.figures)
    for order in (known, known[::-1]):
        buttons.nth(loss).click()
        assert column(tab, loss) == [*(shown(f, 5) for f in order), ""]  # the unknown stays last
    buttons.nth(rate).focus()
    tab.keyboard.press("Enter")
    rates = [float(r.replace(",", "")) for r in column(tab, rate) if r]
    assert rates == sorted(rates)

    columns = made.settings[0].runs[0].columns
    assert np.ptp(np.diff(drawn(tab)[1]["y"])) < 0.5 * np.ptp(np.diff(drawn(tab)[0]["y"]))
    choose(tab, 0, "Steps")
    assert drawn(tab)[0]["x"] == columns["step"].tolist()
    axis = f"document.querySelector('{PLOT}')._fullLayout.yaxis"
    assert tab.evaluate(f"{axis}.range[1]") < columns["train/loss"].max() - 0.5
    choose(tab, 1, "all losses")
    assert tab.evaluate(f"{axis}.range[1]") > columns["train/loss"].max()
    choose(tab, 1, "log-log")
    assert tab.evaluate(f"{axis}.type") == "log"
    tab.click("text=Other curves")
    others = "figure[data-plot=others] .plot"
    choose(tab, 0, "Learning rate", others)
    visible = next(t for t in drawn(tab, others) if t["visible"] is True)
    assert visible["y"] == pytest.approx(columns["lr"].tolist(), rel=1e-6)

    def groups() -> set[str]:
        return {t["group"] for t in drawn(tab) if t["visible"] is True and t["group"]}

    names = [s.name for s in made.settings]
    items = tab.locator(f"{PLOT} .legend .legendtoggle")
    titles = tab.locator(f"{PLOT} .legend .legendtext").all_text_contents()
    first, *labels = (s.label for s in made.settings)
    assert titles == [f"★ {first}", *labels]
    assert groups() == set(names)
    items.nth(2).click()
    hidden = "p => document.querySelector(p)._fullData.some(t => t.visible === 'legendonly')"
    tab.wait_for_function(hidden, arg=PLOT)
    assert groups() == set(names) - {names[2]}
    items.nth(1).dblclick()
    tab.wait_for_timeout(600)
    assert groups() == {names[1]}


def test_the_pointer_lists_all_runs_there(show, tmp_path):
    made = comparison(grid(n=60, **{CLIP: [0.5, 1.0, 2.0], RATE: [1e-4, 1e-3]}))
    tab = show(written(made, tmp_path), width=390)
    point_at(tab, 0.6, 0.4)
    tab.wait_for_selector(f"{PLOT} .hoverlayer .legendtext")
    words = tab.locator(f"{PLOT} .hoverlayer .legendtext").all_text_contents()
    first, *others = (s.label for s in made.settings)
    assert [w.partition(" : ")[0] for w in words] == [f"★ {first}", *others]
    assert all(re.fullmatch(r".* : train \d\.\d{4}, val \d\.\d{4}", w) for w in words)
    box = tab.locator(f"{PLOT} .hoverlayer .legend").bounding_box()
    assert 0 <= box["x"] <= 390 - box["width"]


def test_a_label_that_is_markup_shows_as_text_and_does_nothing(show, tmp_path):
    tab = show(written(hostile(), tmp_path))
    assert tab.locator(".headline").inner_text() == EVIL
    assert EVIL in column(tab, 0)[0]
    assert tab.locator("main img").count() == 0
    assert "owned" not in tab.title()
    point_at(tab, 0.3, 0.4)
    words = tab.locator(".plot text, .plot tspan").all_text_contents()
    assert any("<img src=x" in word for word in words)


FORTY_EIGHT = {**FOUR_BY_THREE, RATE: [1e-4, 3e-4, 1e-3, 3e-3]}


@pytest.mark.parametrize(
    ("keys", "seeds", "scheme"),
    [
        ({}, 1, "light"),
        # several seeds have a verdict, whose title names a setting
        ({CLIP: [0.5, 1.0, 2.0], ACCUMULATION: [1, 2]}, 2, "dark"),
        pytest.param(FORTY_EIGHT, 1, "light", marks=pytest.mark.slow),
    ],
)
def test_the_page_fits_a_desk_and_a_phone_in_both_schemes(show, tmp_path, keys, seeds, scheme):
    made, dark = comparison(grid(n=30, seeds=seeds, **keys)), scheme == "dark"
    where = write_beside(made, tmp_path) if dark else written(made, tmp_path)
    tab = show(where, 1400, scheme)
    if not keys:  # of one run alone plotly would follow the property that the options set
        choose(tab, 0, "Steps")
        heads = tab.locator(f"{PLOT} .updatemenu-header").all_text_contents()
        assert heads[0].strip() == "Steps"
    fits(tab)
    first = tab.locator(".plot .nsewdrag").first.bounding_box()
    assert first["y"] + first["height"] < 844  # on the first screen of a phone

    def brightness(script: str) -> int:  # of 3 x 255
        return sum(int(channel) for channel in re.findall(r"\d+", tab.evaluate(script))[:3])

    background = brightness("getComputedStyle(document.body).backgroundColor")
    ink = brightness("getComputedStyle(document.querySelector('.xtick text')).fill")
    assert (background < 100 and ink > 600) if dark else (background > 650 and ink < 150)
    if not dark:
        return
    # figures follow the scheme, and paper is white
    colour = f"c => document.querySelector('{PLOT}')._fullLayout.font.color === c"
    night, day = "#e4e8ef", "#1c2330"  # --text of page.css
    tab.wait_for_function(colour, arg=night)
    for media, text in (({"media": "print"}, day), ({"media": "screen"}, night),
                        ({"color_scheme": "light"}, day)):  # fmt: skip
        tab.emulate_media(**media)
        tab.wait_for_function(colour, arg=text)
    # without its library the page says what it needs
    (tmp_path / PLOTLY_FILE).unlink()
    tab = tab.context.browser.new_page()
    tab.goto(where.as_uri())
    tab.wait_for_selector("html[data-ready]")
    assert PLOTLY_FILE in tab.locator(PLOT).inner_text()
    assert column(tab, 0)[0].startswith("accum=1 clip=0.5")
