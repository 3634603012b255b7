"""Types are checked beside the other tests, on a core that may be free."""

import subprocess
import sys

from tests.conftest import ROOT


def test_types_are_right():
    done = subprocess.run([sys.executable, "-m", "mypy"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
