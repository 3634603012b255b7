"""The page: what it holds is read from its text, what it does is done in headless Chromium."""

from __future__ import annotations

import base64
import gzip
import json
import re
import shutil
from dataclasses import replace
from html.parser import HTMLParser
from importlib.resources import files
from typing import Any

import numpy as np
import pytest

from llmexp.compare.page import page
from llmexp.compare.pagedata import POINTS, chart_data
from llmexp.compare.records import Comparison
from llmexp.compare.table import shown
from tests.compare.made import comparison, entry, grid

ACCUMULATION, CLIP = "batch__gradient_accumulation_steps", "clip__max_norm"
FOUR_BY_THREE = {ACCUMULATION: [1, 2, 4, 8], CLIP: [0.5, 1.0, 2.0]}
EVIL = """</script><img src=x onerror="document.title='owned'">&amp;<b>"""


def array(packed: dict[str, str]) -> np.ndarray:
    return np.frombuffer(base64.b64decode(packed["bdata"]), dtype="<" + packed["dtype"]).astype(float)


def embedded(html: str, name: str) -> str:
    found = re.search(rf'<script type="text/plain" id="{name}">([^<]*)</script>', html)
    assert found
    return gzip.decompress(base64.b64decode(found.group(1))).decode()


class Outline(HTMLParser):
    """Headings, tags, attributes that could load something, and text outside of scripts and styles."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.inside = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self.inside = tag

    def handle_data(self, text: str) -> None:
        if self.inside not in ("script", "style"):
            self.words.append(text)

    def text(self) -> str:
        return "".join(self.words)


def test_the_assets_are_in_the_package():
    assert {"page.css", "page.js"} <= {f.name for f in files("llmexp.compare").iterdir()}


def test_nothing_is_fetched_and_no_script_but_its_own_may_run():
    html = page(comparison(grid(n=30, **FOUR_BY_THREE)))
    outline = Outline(html)
    loads = [v for _, a in outline.tags for k, v in a.items() if k in ("src", "href", "srcset", "action", "data")]
    assert all(v is not None and v.startswith(("#", "data:,")) for v in loads)
    policy = next(a["content"] for t, a in outline.tags if t == "meta" and a.get("http-equiv"))
    assert policy is not None
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe-inline" not in policy.split("style-src")[0]
    assert "unsafe-eval" not in policy
    assert "http" not in policy


def test_the_title_names_the_sweep_where_all_runs_are_of_it():
    made = comparison(grid(n=20, **{CLIP: [0.5, 1.0]}))
    assert "<h1>2 runs of runs/accumulation_x_clip</h1>" in page(made)
    first, second = made.entries
    alone = replace(second, runs=(replace(second.runs[0], sweep=None),))
    assert "<h1>2 runs</h1>" in page(replace(made, entries=(first, alone)))


def test_what_broke_off_is_never_the_best():
    entries = grid(n=20, **{CLIP: [0.5, 1.0, 2.0]})
    broken = replace(entries[0], runs=(replace(entries[0].runs[0], state="cut"),), state="cut")
    html = page(comparison([broken, *entries[1:]]))
    rate = [shown(e.figures["mean tokens_per_sec"], 4) for e in entries]
    assert rate[0] > rate[1] > rate[2]
    assert re.findall(r'class="number best" data-value="[^"]*">([^<]*)<', html).count(rate[1]) == 1
    assert f'best" data-value="{entries[0].figures["mean tokens_per_sec"]!r}"' not in html


def test_only_what_has_ended_is_marked_best_and_nothing_where_all_are_alike():
    first, second, third = grid(n=20, **{CLIP: [0.5, 1.0, 2.0]})
    going = replace(first, runs=(replace(first.runs[0], state="preempted"),), state="preempted")
    alike = {e.name: e.figures | {"peak_memory_gib": 11.25} for e in (going, second, third)}
    html = page(comparison([replace(e, figures=alike[e.name]) for e in (going, second, third)]))
    marked = [float(v) for v in re.findall(r'class="number best" data-value="([^"]*)"', html)]
    assert second.figures["final val/loss"] in marked
    assert first.figures["final val/loss"] not in marked
    assert 11.25 not in marked


def test_why_a_run_failed_stands_under_its_name_and_long_values_are_short():
    long = 0.012345678901234568
    broken = replace(entry(1, {"optimizer.lr": long}, state="failed"), note="a rank was killed (SIGKILL)")
    html = page(comparison([entry(0, {"optimizer.lr": 0.25}), broken]))
    (row,) = [r for r in re.findall(r"<tr>.*?</tr>", html) if "SIGKILL" in r]
    assert "SIGKILL" in row.partition("</th>")[0]
    assert f'data-value="{long!r}">0.0123457<' in row
    axes = chart_data(comparison(grid(n=20, **FOUR_BY_THREE, optimizer__lr=[1e-4, long])))["parallel"]["axes"]
    assert [label for _, label in axes[2]["ticks"]] == ["0.0001", "0.0123457"]
    near = chart_data(comparison(grid(n=20, **FOUR_BY_THREE, optimizer__lr=[long, long + 1e-12])))["parallel"]["axes"]
    assert len({label for _, label in near[2]["ticks"]}) == 2  # they still look different


def test_the_same_comparison_gives_the_same_bytes():
    made = comparison(grid(n=30, **{CLIP: [0.5, 1.0]}))
    assert page(made) == page(made)


def test_parts_without_data_are_absent():
    bare = replace(entry(0, {}).runs[0], columns={"step": np.zeros(0)}, status={}, facts={}, config={})
    alone = replace(entry(0, {}), runs=(bare,), figures={})
    html = page(comparison([alone], columns=(), sentences=(), align_at=None))
    assert re.findall(r"<h2 id=\"(\w+)\"", html) == ["table"]
    assert 'id="plotly"' not in html
    assert "default-src 'none'" in html
    whole = page(comparison(grid(n=30, **FOUR_BY_THREE), problems=("x: no run",)))
    expected = ["answer", "table", "curves", "heat", "clip", "noise", "config", "environment", "problems"]
    assert re.findall(r"<h2 id=\"(\w+)\"", whole) == expected


def test_a_comparison_of_nothing_is_a_page():
    some = comparison(grid(n=30))
    empty = replace(
        some, entries=(), columns=(), differing=(), headline="", notes=(), problems=("x: no run",), align_at=None
    )
    assert "x: no run" in Outline(page(empty)).text()


def test_what_comes_from_runs_is_text():
    record = entry(0, {"clip.max_norm": 1.0}).runs[0]
    evil = replace(
        record, name=EVIL, config=record.config | {EVIL: EVIL},
        facts=record.facts | {"commit": EVIL, "versions": {EVIL: EVIL}},
        status=record.status | {"host": EVIL, "noise": {"verdict": EVIL}},
    )  # fmt: skip
    first = replace(entry(0, {"clip.max_norm": EVIL}), name=EVIL, runs=(evil,), note=EVIL, state=EVIL)
    html = page(comparison([first, entry(1, {"clip.max_norm": 1.0})], sentences=(EVIL,), problems=(EVIL,), metric=EVIL))
    outline = Outline(html)
    assert not [a for t, a in outline.tags if t in ("img", "b")]
    assert outline.text().count("onerror=") >= 8
    assert html.count("<script") == html.count("</script>") == 3


def test_curves_keep_their_spikes_their_evaluations_and_their_precision():
    made = comparison([entry(0, {}, n=10_000)])
    columns = made.entries[0].runs[0].columns
    columns["train/loss"][6_543] = 77.25
    curves = chart_data(made)["curves"]
    (train,), (val,) = curves["train/loss"], curves["val/loss"]
    y = array(train["y"])
    assert len(y) <= POINTS
    assert y.max() == 77.25
    at = int(array(train["steps"])[y.argmax()])
    assert at == columns["step"][6_543]
    # Counts are stored as float64, so exactly; the seconds as float32: 2^-24 of their size.
    assert array(train["tokens"])[y.argmax()] == columns["tokens_seen"][6_543]
    seconds = sum(10 * t for t in columns["step_time"][: 6_543 + 1])
    assert array(train["time"])[y.argmax()] == pytest.approx(seconds, rel=2**-23)
    evaluated = np.isfinite(columns["val/loss"])
    assert array(val["steps"]).tolist() == columns["step"][evaluated].tolist()
    assert array(val["y"]) == pytest.approx(columns["val/loss"][evaluated], rel=2**-23)


def test_the_heat_map_has_each_figure_in_its_place():
    made = comparison(grid(n=20, **FOUR_BY_THREE)[::-1])
    heat = chart_data(made)["heat"]
    assert (heat["x"]["title"], heat["x"]["levels"]) == ("batch.gradient_accumulation_steps", ["1", "2", "4", "8"])
    assert (heat["y"]["title"], heat["y"]["levels"]) == ("clip.max_norm", ["0.5", "1.0", "2.0"])
    figure = next(f for f in heat["figures"] if f["key"] == "final val/loss")
    for e in made.entries:
        x = heat["x"]["levels"].index(str(e.values["batch.gradient_accumulation_steps"]))
        y = heat["y"]["levels"].index(str(e.values["clip.max_norm"]))
        assert figure["z"][y][x] == e.figures["final val/loss"]


def test_the_framed_cell_is_of_a_run_that_counts_and_of_two_in_a_cell_the_better_stays():
    entries = grid(n=20, **FOUR_BY_THREE)  # the best one first
    for change in (dict(state="failed"), dict(rung=0.5), dict(lost="says finished at step 9, but its rows end at 4")):
        out = replace(entries[0], runs=(replace(entries[0].runs[0], **change),))
        again = replace(entries[1], name="again", figures={k: v + 1 for k, v in entries[1].figures.items()})
        heat = chart_data(comparison([*entries[1:], again, out]))["heat"]
        figure = next(f for f in heat["figures"] if f["key"] == "final val/loss")
        x = heat["x"]["levels"].index(str(entries[1].values["batch.gradient_accumulation_steps"]))
        y = heat["y"]["levels"].index(str(entries[1].values["clip.max_norm"]))
        assert figure["best"] == [[y, x]]
        assert figure["z"][y][x] == entries[1].figures["final val/loss"]
        assert min(min(row) for row in figure["z"]) == entries[0].figures["final val/loss"]  # it is still shown
    without = next(f for f in heat["figures"] if f["key"] == "tokens_seen")
    assert without["best"] == []  # neither more nor less is better


def test_more_than_two_keys_are_parallel_coordinates_from_end_to_end():
    data = chart_data(comparison(grid(n=20, **FOUR_BY_THREE, optimizer__lr=[1e-4, 1e-3])))
    assert "heat" not in data
    assert [axis["title"] for axis in data["parallel"]["axes"]][2:] == ["optimizer.lr", "Final val loss"]
    for axis in data["parallel"]["axes"]:
        assert (min(axis["places"]), max(axis["places"])) == (0.0, 1.0)
        assert all(0 <= place <= 1 for place, _ in axis["ticks"])


def test_two_hundred_long_runs_are_a_page_under_20_megabytes():
    one = entry(0, {}, n=10_000).runs[0]
    entries = []
    for i in range(200):  # the values differ, so that nothing is packed away as a repetition
        e = entry(i, {"optimizer.lr": 1e-4 * (i + 1)}, n=20)
        noise = np.random.default_rng(i).standard_normal(10_000)
        noisy = {k: v * (1 + 1e-3 * noise) if k in ("train/loss", "grad_norm", "step_time", "tokens_per_sec") else v
                 for k, v in one.columns.items()}  # fmt: skip
        entries.append(replace(e, runs=(replace(e.runs[0], columns=noisy),)))
    html = page(comparison(entries))
    assert len(html.encode()) < 20e6
    assert len(json.loads(embedded(html, "data"))["curves"]["train/loss"]) == 200


# In the browser


@pytest.fixture(scope="module")
def browser():
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if found is None:
        pytest.skip("no Chromium here (tests/browser/setup.sh installs Debian's)")
    with api.sync_playwright() as playwright:
        # Inside a container or as root Chromium has no sandbox; the only page that it opens is our own.
        chromium = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture
def show(browser, tmp_path):
    """Opens the page of a comparison; at the end nothing may have gone wrong in it, or been asked of the network."""
    wrong: list[str] = []
    contexts = []

    def opened(made: Comparison, width: int = 1280, scheme: str = "light") -> Any:
        (tmp_path / "page.html").write_text(page(made), encoding="utf-8")
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        contexts.append(context)
        tab = context.new_page()
        tab.on("console", lambda message: wrong.append(f"{message.type}: {message.text}"))
        tab.on("pageerror", lambda error: wrong.append(str(error)))
        tab.on("request", lambda r: None if r.url.startswith(("file:", "data:", "blob:")) else wrong.append(r.url))
        tab.goto((tmp_path / "page.html").as_uri())
        tab.wait_for_selector("html[data-ready]", timeout=60_000)
        return tab

    yield opened
    for context in contexts:
        context.close()
    assert wrong == []


def drawn(tab: Any, plot: str = "curves-plot") -> list[dict[str, Any]]:
    """The traces of a plot as Plotly has them."""
    script = (
        "id => document.getElementById(id)._fullData.map(t => ({name: t.name, mode: t.mode, x: Array.from(t.x ?? [])}))"
    )
    return tab.evaluate(script, plot)


def column(tab: Any, number: int) -> list[str]:
    return tab.eval_on_selector_all(".runs tbody tr", "(rows, n) => rows.map(r => r.cells[n].innerText.trim())", number)


def test_sorting_by_click_and_by_keyboard(show):
    entries = grid(n=30, **FOUR_BY_THREE)
    entries[2] = entry(2, entries[2].values, n=30, state="failed")  # without a figure
    tab = show(comparison(entries))
    heads = tab.eval_on_selector_all(
        ".runs th[aria-sort]", "hs => hs.map(h => h.innerText.replace(/\\s+/g, ' ').trim())"
    )
    loss, rate = heads.index("Final val loss"), heads.index("Tokens/s")
    head = tab.locator(".runs thead th").nth(loss)
    assert head.get_attribute("aria-sort") == "ascending"  # as it comes
    head.click(position={"x": 2, "y": 2})  # beside its words
    assert head.get_attribute("aria-sort") == "descending"
    figures = column(tab, loss)
    assert figures[-1] == ""  # what is unknown stays last, whichever the direction
    known = [e.figures["final val/loss"] for e in entries if "final val/loss" in e.figures]
    assert figures[:-1] == [shown(f, 4) for f in sorted(known, reverse=True)]
    tab.locator(".runs thead th").nth(rate).locator("button").focus()
    tab.keyboard.press("Enter")
    assert head.get_attribute("aria-sort") == "none"
    assert tab.locator(".runs thead th").nth(rate).get_attribute("aria-sort") == "descending"  # higher is better
    rates = [float(r.replace(",", "")) for r in column(tab, rate) if r]
    assert rates == sorted(rates, reverse=True)
    tab.keyboard.press("Space")
    assert [float(r.replace(",", "")) for r in column(tab, rate) if r] == sorted(rates)
    assert column(tab, rate)[-1] == ""


def test_the_legend_toggles_and_isolates(show):
    made = comparison(grid(n=30, **FOUR_BY_THREE))
    tab = show(made)
    buttons = tab.locator(".legend button")
    names = [e.name for e in made.entries]

    def shown() -> set[str]:
        return {t["name"] for t in drawn(tab)}

    assert shown() == set(names)
    buttons.nth(3).click()
    assert buttons.nth(3).get_attribute("aria-pressed") == "false"
    assert shown() == set(names) - {names[3]}
    buttons.nth(3).focus()
    tab.keyboard.press("Enter")
    assert shown() == set(names)
    buttons.nth(5).dblclick()
    assert shown() == {names[5]}
    assert tab.locator(".legend button[aria-pressed=true]").count() == 1
    buttons.nth(5).dblclick()
    assert shown() == set(names)
    buttons.nth(2).focus()
    tab.keyboard.press("Shift+Enter")
    assert shown() == {names[2]}
    tab.click("#show-all")
    assert shown() == set(names)


def test_quantity_axis_and_scale_can_be_chosen(show):
    made = comparison(grid(n=30, **{CLIP: [0.5, 1.0]}))
    tab = show(made)
    columns = made.entries[0].runs[0].columns
    assert len(drawn(tab)) == 4  # training and validation of both
    tab.select_option("#quantity", "grad_norm")
    tab.select_option("#axis", "steps")
    assert [t["x"] for t in drawn(tab)] == [columns["step"].tolist()] * 2
    tab.select_option("#axis", "time")
    seconds = np.cumsum(10 * columns["step_time"])
    assert drawn(tab)[-1]["x"] == pytest.approx(seconds.tolist(), rel=2**-23)  # held as float32
    tab.check("#log")
    assert tab.evaluate("document.getElementById('curves-plot').layout.yaxis.type") == "log"
    tab.select_option("#quantity", "val/loss")
    assert {t["mode"] for t in drawn(tab)} == {"lines+markers"}


def test_ticks_of_logarithmic_axes_are_whole_values(show):
    """The limits are 0.25 to 4, the noise scales about 20 to 40."""
    made = comparison(grid(n=30, **{CLIP: [0.5, 1.0]}))
    tab = show(made)
    ticks = (
        "id => [...document.querySelectorAll(`#${id} .${id[0] === 'c' ? 'x' : 'y'}tick text`)].map(t => t.textContent)"
    )
    limits = [float(t) for t in tab.evaluate(ticks, "clip-plot")]
    assert set(limits) >= {0.5, 1.0, 2.0}
    assert limits == sorted(limits)
    sequences = [float(t) for t in tab.evaluate(ticks, "noise-plot")]
    assert 20.0 in sequences
    assert sequences == sorted(sequences)


def test_a_label_that_is_markup_shows_as_text_and_does_nothing(show):
    evil = replace(entry(0, {"clip.max_norm": EVIL}, n=30), name=EVIL)
    evil = replace(evil, runs=(replace(evil.runs[0], name=EVIL),))
    more = [replace(entry(i, {"clip.max_norm": EVIL * i, "optimizer.lr": i % 2}, n=30)) for i in range(1, 5)]
    tab = show(comparison([evil, *more], sentences=(EVIL,)))
    assert tab.locator(".answer p").first.inner_text() == EVIL
    assert tab.locator(".legend button").first.inner_text().replace("\n", "") == EVIL
    assert column(tab, 0)[0].replace("\n", "") == EVIL
    assert tab.locator("img").count() == 0
    assert "owned" not in tab.title()
    tab.locator("#curves-plot").hover()  # the label over the curve
    words = tab.locator(".plot text, .plot tspan").all_text_contents()
    assert any("<img src=x onerror=" in word for word in words)  # the levels of the map


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_fits_its_window_in_both_schemes(show, scheme):
    tab = show(comparison(grid(n=30, **FOUR_BY_THREE, optimizer__lr=[1e-4, 1e-3])), 1280, scheme)
    for width in (1280, 390):
        tab.set_viewport_size({"width": width, "height": 900})
        assert tab.evaluate("document.documentElement.scrollWidth") == width

    def brightness(script: str) -> int:
        return sum(int(channel) for channel in re.findall(r"\d+", tab.evaluate(script))[:3])

    background = brightness("getComputedStyle(document.body).backgroundColor")
    ink = brightness("getComputedStyle(document.querySelector('#curves-plot .xtick text')).fill")
    # Of 3 x 255: nearly white and nearly black, one upon the other.
    assert (background > 650, ink < 150) == ((True, True) if scheme == "light" else (False, False))
    assert (background < 100, ink > 600) == ((False, False) if scheme == "light" else (True, True))


def test_colours_follow_the_scheme_and_paper_is_white(show):
    tab = show(comparison(grid(n=30, **{CLIP: [0.5, 1.0]})), scheme="dark")

    def ink_becomes(light: bool) -> None:
        colour = "#1c2330" if light else "#e4e8ef"  # --text of page.css
        tab.wait_for_function("c => document.getElementById('curves-plot').layout.font.color === c", arg=colour)

    ink_becomes(light=False)
    tab.emulate_media(color_scheme="light")
    ink_becomes(light=True)
    tab.emulate_media(color_scheme="dark")
    ink_becomes(light=False)
    tab.evaluate("dispatchEvent(new Event('beforeprint'))")
    ink_becomes(light=True)
    tab.evaluate("dispatchEvent(new Event('afterprint'))")
    ink_becomes(light=False)
