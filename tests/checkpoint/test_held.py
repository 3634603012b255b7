"""What ranks hold at a start, a save and a load: their share, and no whole model."""

import subprocess
import sys

import pytest

from tests.conftest import ROOT


@pytest.mark.slow
def test_four_ranks_hold_no_more_than_their_shares():
    """Of 23 M parameters, by the benchmark that docs/large-models.md has figures of."""
    command = [sys.executable, "benchmarks/held.py", "--layers", "4", "--width", "512"]
    done = subprocess.run(
        [*command, "--vocabulary", "20000"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
