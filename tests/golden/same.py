"""Compare two checkouts on this machine bit by bit: `make same BASE=<commit>`.

Each case of test_golden runs with the sources of BASE and with those of this folder. Rows (but
times), weights, status, `--json` and exit codes have to be equal; exit code 1 where they are not.
"""

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests import forks
from tests.conftest import ROOT, write_tokens
from tests.golden.test_golden import CASES, differences, produce

SHOWN = 12  # differences of a case


def digests(folder: Path) -> dict[str, str]:
    """Return a digest of each tensor of each safetensors file, from its bytes."""
    found = {}
    for path in sorted(folder.rglob("checkpoints/**/*.safetensors")):
        raw = path.read_bytes()
        start = 8 + int.from_bytes(raw[:8], "little")
        for name, one in json.loads(raw[8:start]).items():
            if name != "__metadata__":
                a, b = one["data_offsets"]
                digest = hashlib.sha256(raw[start + a : start + b]).hexdigest()
                found[f"{path.relative_to(folder)}:{name}"] = digest
    return found


def replay(name: str, checkout: Path) -> dict[str, Any]:
    """Run a case with the sources of a checkout; return all that has to be equal."""
    with tempfile.TemporaryDirectory(prefix="llmexp-same-") as place:
        folder = Path(place) / "case"  # of equal length for both: it may stand in a file
        folder.mkdir()
        write_tokens(folder / "train.npy")
        found = produce(folder, CASES[name].commands, PYTHONPATH=str(checkout))
        return found | {"tensors": digests(folder)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("base", help="a commit, for example main or HEAD~1")
    parser.add_argument("cases", nargs="*", default=list(CASES), help="default: all")
    args = parser.parse_args()
    forks.ALLOWED = False  # a fork would have this checkout's modules
    git = ["git", "-C", str(ROOT)]
    equal = True
    with tempfile.TemporaryDirectory(prefix="llmexp-base-") as place:
        base = Path(place) / "checkout"
        subprocess.run([*git, "worktree", "add", "-q", "--detach", base, args.base], check=True)
        try:
            with ThreadPoolExecutor(2) as pool:
                for name in args.cases:
                    before, after = pool.map(replay, [name, name], [base, ROOT])
                    found = differences(after, before, 0.0)
                    print(f"{name}: {'equal' if not found else f'{len(found)} differences'}")
                    for line in found[:SHOWN]:
                        print(f"  {line[:200]}", flush=True)
                    equal = equal and not found
        finally:
            subprocess.run([*git, "worktree", "remove", "--force", base], check=True)
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
