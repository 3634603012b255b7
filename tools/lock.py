"""Write requirements-ci.txt: constraints.txt with the sha256 of each archive, for this platform.

`pip install --require-hashes -r requirements-ci.txt` then takes nothing else. The hashes are from
the report of pip's resolver (`--dry-run --report`), which installs nothing. An archive from a local
folder (pip's find-links) is marked: it may be another build than the one that the index has under
that version.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def line(found: dict[str, Any]) -> str:
    """Return a requirement with its hash. Raises ValueError for an archive without one."""
    name, version = found["metadata"]["name"], found["metadata"]["version"]
    archive = found["download_info"]
    sha256 = archive.get("archive_info", {}).get("hashes", {}).get("sha256")
    if not sha256:
        raise ValueError(f"{name}=={version}: {archive['url']} has no sha256")
    local = "# from a local folder:\n" if archive["url"].startswith("file:") else ""
    return f"{local}{name}=={version} --hash=sha256:{sha256}"


def main() -> None:
    with tempfile.TemporaryDirectory() as where:
        report = Path(where, "report.json")
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed"]
        subprocess.run([*pip, "--report", report, "-r", ROOT / "constraints.txt"], check=True)
        tree = json.loads(report.read_text())
    lines = sorted(
        (line(found) for found in tree["install"]), key=lambda text: text.split("\n")[-1].lower()
    )
    python = ".".join(map(str, sys.version_info[:2]))
    head = (
        f"# Python {python} on {sys.platform}; made by `python -m tools.lock` from "
        "constraints.txt\n"
    )
    (ROOT / "requirements-ci.txt").write_text(head + "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
