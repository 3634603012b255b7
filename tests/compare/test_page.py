"""The page: what it holds is read from its text, what it does is done in headless Chromium."""

from __future__ import annotations

import base64
import json
import re
import shutil
from dataclasses import replace
from html.parser import HTMLParser
from importlib.resources import files
from typing import Any

import numpy as np
import pytest

from llmexp.compare.comparing import compare
from llmexp.compare.curves import AXES, scale
from llmexp.compare.inference import Difference
from llmexp.compare.page import PLOTLY_FILE, page, write_beside
from llmexp.compare.plot_search import search_plots
from llmexp.compare.plot_training import POINTS, SMOOTHED
from llmexp.compare.records import Column, Result
from llmexp.settings.labels import short_label
from llmexp.system.text import shown, with_interval
from tests.compare.made import comparison, entry, grid
from tests.compare.synthetic import make_sweep
from tests.tools import amend

ACCUMULATION, CLIP, RATE = "batch__gradient_accumulation_steps", "clip__max_norm", "optimizer__lr"
FOUR_BY_THREE = {ACCUMULATION: [1, 2, 4, 8], CLIP: [0.5, 1.0, 2.0]}
EVIL = """</script><img src=x onerror="document.title='owned'">&amp;<b>"""


def array(packed: dict[str, str]) -> np.ndarray:
    return np.frombuffer(base64.b64decode(packed["bdata"]), dtype="<" + packed["dtype"]).astype(
        float
    )


def figures(html: str) -> dict[str, Any]:
    """What the page draws, by the name of the figure."""
    found = re.search(r'<script type="application/json" id="data">([^<]*)</script>', html)
    assert found
    return json.loads(found.group(1))["figures"]


def menu(figure: dict[str, Any], number: int) -> list[list[Any]]:
    """What each option of a menu changes: of the traces, of the layout, in which traces."""
    return [button["args"] for button in figure["layout"]["updatemenus"][number]["buttons"]]


def labelled(made: Result) -> Result:
    return replace(
        made, settings=tuple(replace(e, label=short_label(e.values)) for e in made.settings)
    )


class Outline(HTMLParser):
    """Tags with their attributes, and text outside of scripts and styles."""

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
    assert {"page.css", "page.html", "page.js"} <= {
        f.name for f in files("llmexp.compare").iterdir()
    }


def test_nothing_is_fetched_and_no_script_but_its_own_may_run(tmp_path):
    made = comparison(grid(n=30, **FOUR_BY_THREE))
    written = write_beside(made, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"compare.html", PLOTLY_FILE}
    for html, allowed in ((page(made), ()), (written.read_text(encoding="utf-8"), (PLOTLY_FILE,))):
        outline = Outline(html)
        loads = [
            v
            for _, a in outline.tags
            for k, v in a.items()
            if k in ("src", "href", "srcset", "action", "data")
        ]
        assert all(v is not None and v.startswith(("#", "data:,", *allowed)) for v in loads)
        policy = next(a["content"] for t, a in outline.tags if t == "meta" and a.get("http-equiv"))
        assert policy is not None
        assert policy.startswith("default-src 'none'; script-src 'sha256-")
        assert "unsafe-inline" not in policy.split("style-src")[0]
        assert "unsafe-eval" not in policy
        assert "http" not in policy


def test_the_title_names_the_sweep_where_all_runs_are_of_it():
    made = comparison(grid(n=20, **{CLIP: [0.5, 1.0]}))
    assert "<h1>2 runs of runs/accumulation_x_clip</h1>" in page(made)
    first, second = made.settings
    alone = replace(second, runs=(replace(second.runs[0], sweep=None),))
    assert "<h1>2 runs</h1>" in page(replace(made, settings=(first, alone)))


def test_the_answer_is_the_comparisons_own():
    first, second = grid(n=20, **{CLIP: [0.5, 1.0]})
    seeds = Difference(0.0173, 0.0046 / 2.7764, df=4, seeds=3, most=3)
    second = replace(second, mark="undecided", size=0.0173, difference=seeds)
    made = comparison(
        [first, second], headline="clip=0.5 leads.", notes=("Budgets differ.",), why=("A.",)
    )
    made = replace(made, settings=(replace(made.settings[0], mark="lowest"), second))
    html = page(made)
    answer = html[html.index('class="answer"') : html.index("</section>")]
    assert re.findall(r"<p[^>]*>([^<]*)</p>", answer) == [
        "clip=0.5 leads.",
        "Budgets differ.",
        "A.",
    ]
    assert answer.index("<details>") < answer.index("A.")
    _, *rows = re.findall(r"<tr>.*?</tr>", html[html.index('class="runs"') :])[:3]
    assert ["★" in row for row in rows] == [True, False]
    assert ">lowest<" in rows[0]
    assert re.search(r'<td class="word"[^>]*>undecided<', rows[1])
    assert ">+0.0173 ± 0.0046<" in rows[1]
    assert ">3 seeds<" in rows[1]
    assert "Alike in all: Tokens" in html
    assert "Alike" not in page(comparison([entry(0, {})]))


def test_why_a_run_failed_stands_under_its_name_and_long_values_are_short():
    long = 0.012345678901234568
    broken = replace(
        entry(1, {"optimizer.lr": long}, state="failed"), note="a rank was killed (SIGKILL)"
    )
    html = page(comparison([entry(0, {"optimizer.lr": 0.25}), broken]))
    (row,) = [r for r in re.findall(r"<tr>.*?</tr>", html) if "SIGKILL" in r]
    assert "SIGKILL" in row.partition("</th>")[0]
    assert ">0.0123457<" in row
    assert scale(grid(n=20, **{RATE: [1e-4, long]}), "optimizer.lr").labels == [
        "0.0001",
        "0.0123457",
    ]
    near = scale(grid(n=20, **{RATE: [long, long + 1e-12]}), "optimizer.lr").labels
    assert len(set(near)) == 2  # they still look different


def test_parts_without_data_are_absent():
    bare = replace(
        entry(0, {}).runs[0], columns={"step": np.zeros(0)}, status={}, facts={}, config={}
    )
    alone = replace(entry(0, {}), runs=(bare,), figures={})
    parts = r'<(?:section|details class="part") id="([\w-]+)"'
    assert re.findall(
        parts, page(comparison([alone], columns=(), headline="", notes=(), align_at=None))
    ) == ["table"]
    whole = page(comparison(grid(n=30, **FOUR_BY_THREE), problems=("x: no run",)))
    expected = ["losses", "settings", "table", "other-curves", "clip", "noise", "problems"]
    assert re.findall(parts, whole) == expected


def test_a_comparison_of_nothing_is_a_page():
    some = comparison(grid(n=30))
    empty = replace(
        some,
        settings=(),
        columns=(),
        differing=(),
        headline="",
        notes=(),
        problems=("x: no run",),
        align_at=None,
    )
    assert "x: no run" in Outline(page(empty)).text()


def test_what_comes_from_runs_is_text():
    record = entry(0, {"clip.max_norm": 1.0}).runs[0]
    evil = replace(
        record, name=EVIL, config=record.config | {EVIL: EVIL},
        facts=record.facts | {"commit": EVIL, "versions": {EVIL: EVIL}},
        status=record.status | {"host": EVIL, "noise": {"verdict": EVIL}},
    )  # fmt: skip
    judged = dict(mark=EVIL, size=0.5, difference=Difference(0.5, 0.1, df=4, seeds=3, most=3))
    words = dict(name=EVIL, label=EVIL, note=EVIL, state=EVIL)
    first = replace(entry(0, {"clip.max_norm": EVIL}), runs=(evil,), **judged, **words)
    more = dict(
        problems=(EVIL,), metric=Column(EVIL, EVIL), headline=EVIL, notes=(EVIL,), why=(EVIL,)
    )
    html = page(comparison([first, entry(1, {"clip.max_norm": 1.0})], **more))
    outline = Outline(html)
    assert not [a for t, a in outline.tags if t == "img"]
    assert outline.text().count("onerror=") >= 10
    assert html.count("<script") == html.count("</script>") == 3


def test_curves_keep_their_spikes_and_their_evaluations():
    made = comparison([entry(0, {}, n=10_000)])
    columns = made.settings[0].runs[0].columns
    columns["train/loss"][6_543] = 77.25
    drawn = figures(page(made))["losses"]
    raw, smoothed, val = drawn["data"][:3]
    y = array(raw["y"])
    assert len(y) <= POINTS
    assert y.max() == 77.25
    places = [update[0]["x"] for update in menu(drawn, 0)]
    assert len(places) == len(AXES)
    steps = array(places[1][0])
    assert steps[y.argmax()] == columns["step"][6_543]
    seconds = sum(10 * t for t in columns["step_time"][: 6_543 + 1])
    # float32: 2^-24 of its size
    assert array(places[2][0])[y.argmax()] == pytest.approx(seconds, rel=2**-23)
    at = int(np.flatnonzero(columns["step"] == steps[300])[0])
    reach = min(int(SMOOTHED * 10_000) // 2, at, 9_999 - at)  # the same on both sides
    around = columns["train/loss"][at - reach : at + reach + 1]
    assert array(smoothed["y"])[300] == pytest.approx(around.mean(), rel=1e-6)
    evaluated = np.flatnonzero(np.isfinite(columns["val/loss"]))
    kept = np.isin(columns["step"][evaluated], array(places[1][2]))
    assert len(array(val["y"])) == kept.sum() <= POINTS
    assert array(val["y"]) == pytest.approx(columns["val/loss"][evaluated][kept], rel=2**-23)


def test_a_ramp_is_drawn_as_it_is():
    made = comparison(grid(n=100, **{CLIP: [0.5, 1.0]}))
    ramp = 10.0 - 0.1 * np.arange(100)
    for one in made.settings:
        one.runs[0].columns["train/loss"] = ramp
    _, smoothed, *_ = figures(page(made))["losses"]["data"]
    assert array(smoothed["y"]) == pytest.approx(ramp, rel=2**-23)  # float32


def test_a_band_spans_the_seeds():
    made = comparison(grid(n=40, seeds=3, **{CLIP: [0.5, 1.0]}))
    drawn = figures(page(made))["losses"]
    band = next(
        t for t in drawn["data"] if t.get("fill") == "toself" and len(array(t["y"])) < 20
    )  # validation
    high, low = np.split(array(band["y"]), 2)
    seeds = np.stack([r.columns["val/loss"] for r in made.settings[0].runs])
    evaluated = np.isfinite(seeds[0])
    assert high == pytest.approx(seeds[:, evaluated].max(axis=0), rel=1e-6)
    assert low[::-1] == pytest.approx(seeds[:, evaluated].min(axis=0), rel=1e-6)


def test_the_pointer_tells_the_last_evaluation_and_none_before_the_first():
    made = comparison([entry(0, {}, n=30)])
    columns = made.settings[0].runs[0].columns
    _, smoothed, *_ = figures(page(made))["losses"]["data"]
    assert smoothed["customdata"][8] == ""  # the first evaluation is that of the tenth row
    assert smoothed["customdata"][15] == f", val {columns['val/loss'][9]:.4f}"


@pytest.mark.parametrize(
    ("key", "values", "kind"),
    [
        ("optimizer.lr", [1e-3, 2e-3], "log"),
        ("batch.gradient_accumulation_steps", [1, 2, 4, 8], "log"),
        ("batch.micro_batch_size", [8, 16, 24, 32], "linear"),
        ("model.dropout", [0.0, 0.1, 0.2], "linear"),
        ("clip.max_norm", [None, 0.5], "category"),
        ("optimizer.nesterov", [False, True], "category"),
    ],
)
def test_an_axis_is_logarithmic_for_rates_and_for_factors(key, values, kind):
    assert scale([entry(i, {key: v}, n=20) for i, v in enumerate(values)], key).kind == kind


def test_each_swept_number_has_its_figure_with_the_intervals_of_the_seeds():
    made = comparison(
        grid(n=20, seeds=3, **{RATE: [1e-4, 1e-3, 1e-2], CLIP: [0.5, 1.0]}, model__kind=["a", "b"])
    )
    drawn = figures(page(made))
    assert [name for name in drawn if name.startswith("over")] == [
        "over optimizer.lr",
        "over clip.max_norm",
    ]
    traces = drawn["over optimizer.lr"]["data"]
    assert {t["name"] for t in traces} == {
        "clip=0.5 kind=a",
        "clip=0.5 kind=b",
        "clip=1.0 kind=a",
        "clip=1.0 kind=b",
    }
    points = {
        (x, y): half
        for t in traces
        for x, y, half in zip(t["x"], t["y"], t["error_y"]["array"], strict=True)
    }
    for e in made.settings:
        low, high = e.intervals["final val/loss"]
        assert points[e.values["optimizer.lr"], e.figures["final val/loss"]] == pytest.approx(
            (high - low) / 2
        )
    assert sum(t["marker"]["symbol"].count("star") for t in traces) == 1


def test_settings_of_other_budgets_are_drawn_and_one_alone_has_a_star():
    first, second, third = grid(n=20, **{CLIP: [0.5, 1.0, 2.0]})
    made = comparison([first, second, third])
    marks = ("lowest", "lowest of budget", "other budget")
    entries = tuple(replace(e, mark=m) for e, m in zip(made.settings, marks, strict=True))
    (trace,) = figures(page(replace(made, settings=entries)))["over clip.max_norm"]["data"]
    assert trace["x"] == [0.5, 1.0, 2.0]
    assert trace["marker"]["symbol"] == ["star", "circle", "circle"]


def test_the_heat_map_has_each_figure_in_its_place():
    made = comparison(grid(n=20, **FOUR_BY_THREE)[::-1])
    drawn = figures(page(made))["map batch.gradient_accumulation_steps and clip.max_norm"]
    layout, trace = drawn["layout"], drawn["data"][0]
    assert (layout["xaxis"]["ticktext"], layout["yaxis"]["ticktext"]) == (
        ["1", "2", "4", "8"],
        ["0.5", "1.0", "2.0"],
    )
    for e in made.settings:
        x, y = (
            [1, 2, 4, 8].index(e.values["batch.gradient_accumulation_steps"]),
            [0.5, 1.0, 2.0].index(e.values["clip.max_norm"]),
        )
        assert trace["z"][y][x] == e.figures["final val/loss"]
        assert trace["text"][y][x].endswith(shown(e.figures["final val/loss"], 4))
        assert ("★" in trace["text"][y][x]) == (e is made.settings[0])
    rates = menu(drawn, 0)[[c.key for c in made.columns].index("mean tokens_per_sec")]
    assert rates[1] == {"coloraxis.reversescale": False}  # more is better
    assert not any("★" in words for row in rates[0]["text"][0] for words in row)


def test_of_two_in_a_cell_the_better_stays_and_what_broke_off_is_in_the_map_but_in_no_line():
    entries = grid(n=20, **FOUR_BY_THREE)  # the best one first
    runs = (replace(entries[0].runs[0], out="failed"),)
    broken = replace(entries[0], mark="failed", state="failed", runs=runs)
    again = replace(
        entries[1], name="again", figures={k: v + 1 for k, v in entries[1].figures.items()}
    )
    drawn = figures(page(comparison([*entries[1:], again, broken])))
    trace = next(f for name, f in drawn.items() if name.startswith("map"))["data"][0]
    (star,) = [
        (y, x) for y, row in enumerate(trace["text"]) for x, words in enumerate(row) if "★" in words
    ]
    assert star == (1, 0)
    assert trace["z"][1][0] == entries[1].figures["final val/loss"]
    assert trace["text"][0][0] == f"{shown(entries[0].figures['final val/loss'], 4)}<br>failed"
    lines = [y for t in drawn["over clip.max_norm"]["data"] for y in t["y"]]
    assert entries[0].figures["final val/loss"] not in lines
    assert len(lines) == len(entries)


def test_each_pair_of_three_keys_has_its_map():
    drawn = figures(page(comparison(grid(n=20, **FOUR_BY_THREE, **{RATE: [1e-4, 1e-3]}))))
    assert sum(name.startswith("map") for name in drawn) == 3


def test_a_search_has_its_history_and_the_fresh_seeds_apart(tmp_path):
    points = {}
    for i, offsets in enumerate(([0.3], [0.0, 0.1, 0.2], [0.2], [0.1])):
        for seed, offset in enumerate(offsets, 1):
            rate = 1e-3 * (1 + i)
            points[f"{i}s{seed}"] = dict(
                offset=offset, seed=seed, optimizer__lr=rate, wobble=0,
                point={"overrides": [f"optimizer.lr={rate}", f"train.seed={seed}"]},
            )  # fmt: skip
    path = make_sweep(tmp_path / "s", points, ["optimizer.lr", "train.seed"])
    amend(path / "sweep.json", grid=False)
    c = compare([path])
    trials, fresh = search_plots(c)[0].figure.data
    values = {r.name: r.figures["val/loss"] for r in c.runs}
    order = ["0-0s1", "1-1s1", "4-2s1", "5-3s1"]
    assert (trials.x, trials.y) == ((1, 2, 3, 4), tuple(values[name] for name in order))
    seeds = (values["2-1s2"], values["3-1s3"])
    assert fresh.x == (5, 5, 5)
    assert fresh.y == (pytest.approx(sum(seeds) / 2), *seeds)
    assert 'data-plot="search"' in page(c)


@pytest.mark.parametrize(
    ("value", "half", "digits", "text"),
    [
        (1500.0, 0.0, 4, "1,500"),
        (34_534.0, 39_144.0, 4, "35,000 ± 39,000"),
        (2.56441, 0.011234, 5, "2.564 ± 0.011"),
        (2.56441, 0.00000012, 5, "2.5644"),
        (2.56441, 0.00006, 5, "2.56441 ± 0.00006"),
        (183_201.3, 450.0, 4, "183,200 ± 450"),
        (0.0, 0.0023, 2, "0.0000 ± 0.0023"),
        (2.5, None, 4, "2.500"),
    ],
)
def test_a_figure_has_as_many_digits_as_its_interval_bears(value, half, digits, text):
    assert with_interval(value, half, digits) == text


def test_two_hundred_long_runs_are_a_page_of_some_megabytes():
    one = entry(0, {}, n=3000).runs[0]  # more rows than points that are drawn
    entries = []
    for i in range(200):
        e = entry(i, {"optimizer.lr": 1e-4 * (i + 1)}, n=20)
        noise = np.random.default_rng(i).standard_normal(3000)
        noisy = {k: v * (1 + 1e-3 * noise) if k in ("train/loss", "grad_norm", "step_time",
        "tokens_per_sec") else v
                 for k, v in one.columns.items()}  # fmt: skip
        entries.append(replace(e, runs=(replace(e.runs[0], columns=noisy),)))
    html = page(comparison(entries), inline=False)
    assert len(html.encode()) < 10e6
    assert len([t for t in figures(html)["losses"]["data"] if "legendgroup" in t]) == 200 * 2


# In the browser


@pytest.fixture(scope="module")
def browser():
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    found = next(
        filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
    )
    if found is None:
        pytest.skip("no Chromium here (tests/browser/setup.sh installs Debian's)")
    with api.sync_playwright() as playwright:
        # Inside a container or as root Chromium has no sandbox; the only page that it opens is our
        # own.
        chromium = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield chromium
        chromium.close()


SLOW_MS = 180_000  # a page has to be there by then, on a machine that does much else too


@pytest.fixture
def show(browser, tmp_path):
    """Opens the page of a comparison; at the end nothing may have gone wrong in it, or been asked
    of the network."""
    wrong: list[str] = []
    contexts = []

    def opened(made: Result, width: int = 1280, scheme: str = "light", beside: bool = False) -> Any:
        where = write_beside(made, tmp_path) if beside else tmp_path / "page.html"
        if not beside:
            where.write_text(page(made), encoding="utf-8")
        context = browser.new_context(viewport={"width": width, "height": 844}, color_scheme=scheme)
        contexts.append(context)
        context.set_default_timeout(SLOW_MS)
        tab = context.new_page()
        tab.on("console", lambda message: wrong.append(f"{message.type}: {message.text}"))
        tab.on("pageerror", lambda error: wrong.append(str(error)))
        tab.on(
            "request",
            lambda r: (
                None if r.url.startswith(("file:", "data:", "blob:")) else wrong.append(r.url)
            ),
        )
        tab.goto(where.as_uri())
        tab.wait_for_selector("html[data-ready]")
        return tab

    yield opened
    for context in contexts:
        context.close()
    assert wrong == []


PLOT = "figure[data-plot=losses] .plot"


def drawn(tab: Any, plot: str = PLOT) -> list[dict[str, Any]]:
    """The traces of a plot as Plotly has them."""
    script = """p => document.querySelector(p)._fullData.map(
        t => ({group: t.legendgroup, visible: t.visible, x: Array.from(t.x ?? []), y: Array.from(t.y ?? [])}))"""  # noqa: E501
    return tab.evaluate(script, plot)


# Words and figures of the table that stand on several lines; values of keys may.
BROKEN = """[...document.querySelectorAll('.runs td:not(.value)')].flatMap(c => [...c.childNodes]).filter(n => {
    const words = document.createRange();
    words.selectNodeContents(n);
    return n.nodeType === 3 && new Set([...words.getClientRects()].map(r => Math.round(r.top))).size > 1;
}).map(n => n.data)"""  # noqa: E501


def column(tab: Any, number: int) -> list[str]:
    return tab.eval_on_selector_all(
        ".runs tbody tr", "(rows, n) => rows.map(r => r.cells[n].innerText.trim())", number
    )


def test_the_table_sorts_and_the_legend_hides(show):
    entries = grid(n=30, **{CLIP: [0.5, 1.0], ACCUMULATION: [1, 2]})
    entries[2] = entry(2, entries[2].values, n=30, state="failed")  # without a figure
    made = labelled(comparison(entries))
    tab = show(made)
    the_table_sorts_by_click_and_by_keyboard(tab, entries)
    the_legend_hides_and_shows_alone(tab, made)


def the_table_sorts_by_click_and_by_keyboard(tab, entries):
    buttons = tab.locator(".runs th button")
    heads = buttons.all_inner_texts()
    loss, rate = heads.index("Final val loss"), heads.index("Tokens/s")
    buttons.nth(loss).click()
    known = [e.figures["final val/loss"] for e in entries if "final val/loss" in e.figures]
    assert column(tab, loss) == [*(shown(f, 4) for f in sorted(known)), ""]
    buttons.nth(loss).click()
    assert column(tab, loss) == [
        *(shown(f, 4) for f in sorted(known, reverse=True)),
        "",
    ]  # the unknown stays last
    buttons.nth(rate).focus()
    tab.keyboard.press("Enter")
    rates = [float(r.replace(",", "")) for r in column(tab, rate) if r]
    assert rates == sorted(rates)


def the_legend_hides_and_shows_alone(tab, made):
    names = [e.name for e in made.settings]
    items = tab.locator(f"{PLOT} .legend .legendtoggle")

    def groups() -> set[str]:
        return {t["group"] for t in drawn(tab) if t["visible"] is True and t["group"]}

    titles = tab.locator(f"{PLOT} .legend .legendtext").all_text_contents()
    assert titles == ["★ clip=0.5 accum=1", *(e.label for e in made.settings[1:])]
    assert groups() == set(names)
    items.nth(2).click()
    tab.wait_for_function(
        "p => document.querySelector(p)._fullData.some(t => t.visible === 'legendonly')", arg=PLOT
    )
    assert groups() == set(names) - {names[2]}
    items.nth(1).dblclick()
    tab.wait_for_timeout(600)
    assert groups() == {names[1]}


def choose(tab: Any, number: int, option: str, plot: str = PLOT) -> None:
    tab.locator(f"{plot} .updatemenu-header").nth(number).click()
    tab.locator(f"{plot} .updatemenu-dropdown-button", has_text=option).first.click()


def test_menus_of_axis_and_range_change_what_is_drawn(show):
    made = comparison(grid(n=200, **{CLIP: [0.5, 1.0]}))
    tab = show(made)
    columns = made.settings[0].runs[0].columns
    assert np.ptp(np.diff(drawn(tab)[1]["y"])) < 0.5 * np.ptp(np.diff(drawn(tab)[0]["y"]))
    choose(tab, 0, "Steps")
    assert drawn(tab)[0]["x"] == columns["step"].tolist()
    top = f"document.querySelector('{PLOT}')._fullLayout.yaxis.range[1]"
    assert tab.evaluate(top) < columns["train/loss"].max() - 0.5
    choose(tab, 1, "all losses")
    assert tab.evaluate(top) > columns["train/loss"].max()
    choose(tab, 1, "log-log")
    assert tab.evaluate(f"document.querySelector('{PLOT}')._fullLayout.yaxis.type") == "log"
    tab.click("text=Other curves")
    others = "figure[data-plot=others] .plot"
    choose(tab, 0, "Learning rate", others)
    assert drawn(tab, others)[0]["y"] == pytest.approx(columns["lr"].tolist(), rel=1e-6)


def the_menu_of_one_run_alone_keeps_its_choice(tab):
    """Plotly would follow the property where the options set but one."""
    choose(tab, 0, "Steps")
    heads = tab.locator(f"{PLOT} .updatemenu-header").all_text_contents()
    assert [head.strip() for head in heads][:1] == ["Steps"]


def test_the_pointer_lists_all_runs_there(show):
    width = 390
    made = labelled(
        comparison(grid(n=60, **{CLIP: [0.5, 1.0, 2.0], RATE: [1e-4, 1e-3]}), align_at=500_000.0)
    )
    tab = show(made, width)
    place = tab.locator(f"{PLOT} .nsewdrag").first.bounding_box()
    tab.mouse.move(place["x"] + 0.6 * place["width"], place["y"] + 0.4 * place["height"])
    tab.wait_for_selector(f"{PLOT} .hoverlayer .legendtext")
    words = tab.locator(f"{PLOT} .hoverlayer .legendtext").all_text_contents()
    first, *others = (e.label for e in made.settings)
    assert [w.partition(" : ")[0] for w in words] == [f"★ {first}", *others]
    assert all(re.fullmatch(r".* : train \d\.\d{4}, val \d\.\d{4}", w) for w in words)
    box = tab.locator(f"{PLOT} .hoverlayer .legend").bounding_box()
    assert box["x"] >= 0
    assert box["x"] + box["width"] <= width


def test_a_label_that_is_markup_shows_as_text_and_does_nothing(show):
    evil = replace(entry(0, {"clip.max_norm": EVIL}, n=30), name=EVIL)
    evil = replace(evil, runs=(replace(evil.runs[0], name=EVIL),))
    more = [
        replace(entry(i, {"clip.max_norm": EVIL * i, "optimizer.lr": i % 2}, n=30))
        for i in range(1, 5)
    ]
    tab = show(comparison([evil, *more], headline=EVIL))
    assert tab.locator(".headline").inner_text() == EVIL
    assert EVIL in column(tab, 0)[0]
    assert tab.locator("main img").count() == 0
    assert "owned" not in tab.title()
    place = tab.locator(f"{PLOT} .nsewdrag").first.bounding_box()
    tab.mouse.move(place["x"] + 0.3 * place["width"], place["y"] + 0.4 * place["height"])
    words = tab.locator(".plot text, .plot tspan").all_text_contents()
    assert any("<img src=x" in word for word in words)


@pytest.mark.parametrize(
    ("count", "scheme"),
    [(1, "light"), (6, "dark"), pytest.param(48, "light", marks=pytest.mark.slow)],
)
def test_the_page_fits_a_desk_and_a_phone_in_both_schemes(show, tmp_path, count, scheme):
    keys = {
        1: {},
        6: {CLIP: [0.5, 1.0, 2.0], ACCUMULATION: [1, 2]},
        48: {**FOUR_BY_THREE, RATE: [1e-4, 3e-4, 1e-3, 3e-3]},
    }
    # several seeds have a verdict, whose title names a setting
    made = labelled(comparison(grid(n=30, seeds=1 + (count == 6), **keys[count])))
    tab = show(made, 1400, scheme, beside=count == 6)
    if count == 1:
        the_menu_of_one_run_alone_keeps_its_choice(tab)
    for width in (1400, 390):
        tab.set_viewport_size({"width": width, "height": 844})
        tab.wait_for_function(
            "w => document.querySelector('.plot svg').clientWidth <= w", arg=width
        )
        assert tab.evaluate("document.documentElement.scrollWidth") == width
        cut = """[...document.querySelectorAll('.plot')].filter(p => p.offsetParent).flatMap(p => [
            ...p.querySelectorAll('.updatemenu-item-text, .xtick text, .ytick text, .xtitle, .ytitle, .legendtext, .annotation-text')
            ].filter(t => {
                const [a, b] = [t.getBoundingClientRect(), p.getBoundingClientRect()];
                return a.left < b.left - 1 || a.right > b.right + 1 || a.top < b.top - 1 || a.bottom > b.bottom + 1;
            }).map(t => t.textContent))"""  # noqa: E501
        assert tab.evaluate(cut) == []
        assert tab.evaluate(BROKEN) == []
    first = tab.locator(".plot .nsewdrag").first.bounding_box()
    assert first["y"] + first["height"] < 844  # on the first screen of a phone

    def brightness(script: str) -> int:
        return sum(int(channel) for channel in re.findall(r"\d+", tab.evaluate(script))[:3])

    background = brightness("getComputedStyle(document.body).backgroundColor")
    ink = brightness("getComputedStyle(document.querySelector('.xtick text')).fill")
    # Of 3 x 255: nearly white and nearly black, one upon the other.
    assert (background > 650, ink < 150) == ((True, True) if scheme == "light" else (False, False))
    assert (background < 100, ink > 600) == ((False, False) if scheme == "light" else (True, True))
    if scheme == "dark":
        figures_follow_the_scheme_and_paper_is_white(tab)
        without_its_library_the_page_says_what_it_needs(tab, tmp_path)


def figures_follow_the_scheme_and_paper_is_white(tab):
    def ink_becomes(light: bool) -> None:
        colour = "#1c2330" if light else "#e4e8ef"  # --text of page.css
        tab.wait_for_function(
            f"c => document.querySelector('{PLOT}')._fullLayout.font.color === c", arg=colour
        )

    ink_becomes(light=False)
    tab.emulate_media(media="print")
    ink_becomes(light=True)
    tab.emulate_media(media="screen")
    ink_becomes(light=False)
    tab.emulate_media(color_scheme="light")
    ink_becomes(light=True)


def without_its_library_the_page_says_what_it_needs(tab, folder):
    assert len(drawn(tab)) > 0
    alone = folder / "alone"
    alone.mkdir()
    shutil.copy(folder / "compare.html", alone)
    tab = tab.context.browser.new_page()
    tab.goto((alone / "compare.html").as_uri())
    tab.wait_for_selector("html[data-ready]")
    assert PLOTLY_FILE in tab.locator(PLOT).inner_text()
    assert column(tab, 0)[0].startswith("clip=0.5")
