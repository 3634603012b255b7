"""Take the picture of the README from a sweep's page: `python -m tools.picture outputs/rates`.

It needs Chromium (tests/browser/setup.sh) and writes docs/images/compare.png.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

FILE = Path(__file__).resolve().parents[1] / "docs/images/compare.png"
SIZE = {"width": 1200, "height": 900}


def main() -> None:
    """Show the page in the light colours, to the end of its curves without their caption."""
    page = (Path(sys.argv[1]) / "compare.html").resolve().as_uri()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"))
        shown = browser.new_page(viewport=SIZE, device_scale_factor=1.25, color_scheme="light")
        shown.goto(page)
        shown.wait_for_selector("#losses .main-svg")
        end = shown.evaluate("document.querySelector('#losses figcaption').offsetTop")
        clip = {"x": 0, "y": 0, "width": SIZE["width"], "height": end}
        shown.screenshot(path=FILE, clip=clip, full_page=True)
        browser.close()
    Image.open(FILE).quantize(128).save(FILE, optimize=True)


if __name__ == "__main__":
    main()
