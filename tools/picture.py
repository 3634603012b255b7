"""Take the pictures of the README and the tutorial: `python -m tools.picture outputs/rates`.

They show the top of a sweep's page: to its verdict in the one, to its curves in the other. It needs
Chromium (tests/browser/setup.sh).
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

FOLDER = Path(__file__).resolve().parents[1] / "docs/images"
ENDS = {"compare.png": "#verdict", "page.png": "#losses"}
SIZE = {"width": 1200, "height": 900}


def main() -> None:
    """Show the page in the light colours, each picture to the caption of its last figure."""
    page = (Path(sys.argv[1]) / "compare.html").resolve().as_uri()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"))
        shown = browser.new_page(viewport=SIZE, device_scale_factor=1.25, color_scheme="light")
        shown.goto(page)
        shown.wait_for_selector("#losses .main-svg")
        for name, part in ENDS.items():
            end = shown.evaluate(f"document.querySelector('{part} figcaption').offsetTop")
            clip = {"x": 0, "y": 0, "width": SIZE["width"], "height": end}
            shown.screenshot(path=FOLDER / name, clip=clip, full_page=True)
            Image.open(FOLDER / name).quantize(128).save(FOLDER / name, optimize=True)
        browser.close()


if __name__ == "__main__":
    main()
