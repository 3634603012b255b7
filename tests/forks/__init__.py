"""Workers of the tests as forks of one process that has torch imported: that import is most of what
a tiny run costs.

See sitecustomize.py for what is the same and what is not. LLMEXP_TEST_FORKS=0 starts every worker
afresh. LLMEXP_TEST_BF16=1 tests as on a CPU with bf16 units, where precision=auto is bf16
(emulated: slow); fresh workers do not take part in that.
"""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.forks.sitecustomize import settings

HERE = Path(__file__).resolve().parent
ALLOWED = True  # by the test that runs
BEFORE = dict(os.environ)  # a test may have another home when the server starts
SHARED = "LLMEXP_TEST_FORKS_SHARED"
PRETEND_BF16 = os.environ.get("LLMEXP_TEST_BF16") == "1"


def pretend_bf16() -> None:
    """Make torch say that this CPU has bf16 units."""
    import torch

    there = torch.cpu.get_capabilities()
    torch.cpu.get_capabilities = lambda: {**there, "bf16": True}


def begin() -> str:
    """Start a server, which ends with this process; return where its socket will be."""
    folder = tempfile.mkdtemp(prefix="llmexp-forks-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    address = f"{folder}/socket"
    env = {**BEFORE, "PYTHONPATH": str(HERE.parents[1])}
    subprocess.Popen(
        [sys.executable, "-P", str(HERE / "server.py"), address], env=env, process_group=0
    )
    return address


@functools.cache
def server() -> str:
    """The socket of the server: of all test processes where one is shared, else of this one."""
    address = os.environ.get(SHARED) or begin()
    deadline = time.monotonic() + 120
    while not os.path.exists(address):
        assert time.monotonic() < deadline, "the server of forks did not start"
        time.sleep(0.02)
    return address


def offered(environment: dict[str, str]) -> dict[str, str]:
    """The environment in which a worker becomes a fork."""
    if os.environ.get("LLMEXP_TEST_FORKS") == "0":
        return environment
    path = os.pathsep.join(filter(None, [str(HERE), environment.get("PYTHONPATH")]))
    known = {"LLMEXP_TEST_FORKS": server(), "LLMEXP_TEST_FORKS_SETTINGS": settings()}
    return {**environment, "PYTHONPATH": path, **known}
