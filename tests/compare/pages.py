"""Pages as tests look at them: their text, what they draw, and pages open in headless Chromium."""

import base64
import json
import re
import shutil
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.words import Words

EVIL = """</script><img src=x onerror="document.title='owned'">&amp;<b>"""
SLOW_MS = 180_000  # a page has to be there by then, on a machine that does much else too
PLOT = "figure[data-plot=losses] .plot"
# Words and figures of tables that stand on several lines; values of keys may.
BROKEN = """[...document.querySelectorAll('.runs td:not(.value)')].flatMap(c => [...c.childNodes])
.filter(n => {
    const words = document.createRange();
    words.selectNodeContents(n);
    const tops = [...words.getClientRects()].map(r => Math.round(r.top));
    return n.nodeType === 3 && new Set(tops).size > 1;
}).map(n => n.data)"""
# Texts of figures that reach beyond their figure.
CUT = """[...document.querySelectorAll('.plot')].filter(p => p.offsetParent).flatMap(p => [
    ...p.querySelectorAll('.updatemenu-item-text, .xtick text, .ytick text, .xtitle, .ytitle, '
        + '.legendtext, .annotation-text')].filter(t => {
    const [a, b] = [t.getBoundingClientRect(), p.getBoundingClientRect()];
    return a.left < b.left - 1 || a.right > b.right + 1
        || a.top < b.top - 1 || a.bottom > b.bottom + 1;
}).map(t => t.textContent))"""
TRACES = """p => document.querySelector(p)._fullData.map(t => (
    {group: t.legendgroup, visible: t.visible, x: Array.from(t.x ?? []), y: Array.from(t.y ?? [])}))"""  # noqa: E501


def array(packed: Any) -> np.ndarray:
    """The numbers of a trace, packed or plain."""
    if not isinstance(packed, dict):
        return np.asarray(packed)
    data = base64.b64decode(packed["bdata"])
    numbers = np.frombuffer(data, dtype="<" + packed["dtype"]).astype(float)
    return numbers.reshape(*map(int, packed["shape"].split(","))) if "shape" in packed else numbers


def figures(html: str) -> dict[str, Any]:
    """What the page draws, by the name of the figure."""
    found = re.search(r'<script type="application/json" id="data">([^<]*)</script>', html)
    assert found
    return json.loads(found.group(1))["figures"]


def menu(figure: dict[str, Any], number: int) -> list[list[Any]]:
    """What each option of a menu changes: of the traces, of the layout, in which traces."""
    return [button["args"] for button in figure["layout"]["updatemenus"][number]["buttons"]]


def same_figures(words: Words, name: str, drawn: dict[str, Any]) -> None:
    """Hold what a page draws, with numbers of five digits, against a golden file."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict) and "bdata" not in value:
            return {k: plain(v) for k, v in value.items() if k not in ("colorbar", "hoverlabel")}
        if isinstance(value, (dict, list)):
            numbers = array(value) if isinstance(value, dict) else value
            return [plain(v) for v in numbers]
        if isinstance(value, np.ndarray):
            return [plain(v) for v in value]
        return float(f"{value:.5g}") if isinstance(value, float) else value

    for part, figure in drawn.items():
        layout = {k: plain(figure["layout"].get(k)) for k in ("xaxis", "yaxis", "updatemenus")}
        lines = [f"{kind}: {what}" for kind, what in layout.items() if what]
        for trace in map(plain, figure["data"]):
            lines.append("trace")
            lines += [f"  {k}: {json.dumps(v, ensure_ascii=False)}" for k, v in trace.items()]
        words(name, "\n".join(lines), part)


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
        if tag in ("section", "details", "h2", "tr", "p"):
            self.words.append("\n")
        elif tag in ("td", "th"):
            self.words.append(" | ")

    def handle_data(self, text: str) -> None:
        if self.inside not in ("script", "style"):
            self.words.append(re.sub(r"\s+", " ", text))

    def text(self) -> str:
        lines = (line.strip() for line in "".join(self.words).splitlines())
        return "\n".join(line for line in lines if line)


@pytest.fixture(scope="module")  # as only one may run in a process, and modules import this
def browser() -> Iterator[Any]:
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    names = ("chromium", "chromium-browser", "google-chrome")
    found = next(filter(None, map(shutil.which, names)), None)
    if found is None:
        pytest.skip("no Chromium here (tests/browser/setup.sh installs Debian's)")
    with api.sync_playwright() as playwright:
        # As root Chromium has no sandbox; the only pages that it opens are our own.
        chromium = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture
def show(browser: Any) -> Iterator[Any]:
    """Opens a page; at the end nothing may have gone wrong in it, or been asked of the network."""
    wrong: list[str] = []
    contexts = []

    def asked(request: Any) -> None:
        if not request.url.startswith(("file:", "data:", "blob:")):
            wrong.append(request.url)

    def opened(page: Path, width: int = 1280, scheme: str = "light") -> Any:
        size = {"width": width, "height": 844}
        contexts.append(browser.new_context(viewport=size, color_scheme=scheme))
        contexts[-1].set_default_timeout(SLOW_MS)
        tab = contexts[-1].new_page()
        tab.on("console", lambda message: wrong.append(f"{message.type}: {message.text}"))
        tab.on("pageerror", lambda error: wrong.append(str(error)))
        tab.on("request", asked)
        tab.goto(page.as_uri())
        tab.wait_for_selector("html[data-ready]")
        return tab

    yield opened
    for context in contexts:
        context.close()
    assert wrong == []


def fits(tab: Any, cut: bool = False) -> None:
    """The page fits a desk and a phone: nothing scrolls sideways, is cut or stands on two lines."""
    for width in (1400, 390):
        tab.set_viewport_size({"width": width, "height": 844})
        narrow = "w => document.querySelector('.plot svg').clientWidth <= w"
        tab.wait_for_function(narrow, arg=width)
        assert tab.evaluate("document.documentElement.scrollWidth") == width
        assert cut or tab.evaluate(CUT) == []
        assert tab.evaluate(BROKEN) == []
