"""Workers of the tests as forks of one process that has torch imported: that import is most of what
a tiny run costs.

See sitecustomize.py for what is the same and what is not. LLMEXP_TEST_FORKS=0 starts every worker
afresh. LLMEXP_TEST_BF16=1 tests as on a CPU with bf16 units, where precision=auto is bf16
(emulated: slow); fresh workers do not take part in that.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import importlib
import os
import pkgutil
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import llmexp
from tests.forks.sitecustomize import settings

HERE = Path(__file__).resolve().parent
ALLOWED = True  # by the test that runs
BEFORE = dict(os.environ)  # a test may have another home when the server starts
SHARED = "LLMEXP_TEST_FORKS_SHARED"
# By the server, beside all of llmexp; torch._dynamo is DDP's, plotly's page is made at the end of
# each sweep.
PRELOADED = """
torch._dynamo torch.distributed.fsdp torch.distributed.tensor.parallel torch.profiler
torch.distributed.launcher.api torch.utils.serialization.config numpy.ma scipy.stats wandb
wandb.apis.public matplotlib.figure matplotlib.backends.backend_agg plotly.io._json optuna.samplers
cmaes requests encodings.idna
"""
PRETEND_BF16 = os.environ.get("LLMEXP_TEST_BF16") == "1"


def preload() -> None:
    """Import what commands, workers and tests import, as far as it is installed."""
    ours = (found.name for found in pkgutil.walk_packages(llmexp.__path__, "llmexp."))
    for name in (*(n for n in ours if not n.endswith("__main__")), *PRELOADED.split()):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    import torch
    from plotly import graph_objects

    from llmexp.update.optimizers import library

    # torchao looks for devices when it is imported, after which forks could not use CUDA
    for name in library.PACKAGES if torch.version.cuda is None else ():
        library._imported(name)
    graph_objects.Figure(graph_objects.Scatter(x=[0.0], y=[0.0]), {"template": "plotly"})


def pretend_bf16() -> None:
    """Make torch say that this CPU has bf16 units."""
    import torch

    there = torch.cpu.get_capabilities()
    torch.cpu.get_capabilities = lambda: {**there, "bf16": True}


def in_large_pages() -> None:
    """Have the kernel keep this process's memory in pages of 2 MiB where it can (Linux 6.1): a fork
    copies the table of pages, which was most of what forking and ending cost."""
    size, collapse, libc = 2 << 20, 25, ctypes.CDLL(None)
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, access, _, _, _, *name = line.split()
        start, end = (int(address, 16) for address in addresses.split("-"))
        if access == "rw-p" and name in ([], ["[heap]"]):
            for at in range(-(-start // size) * size, end - size + 1, size):
                libc.madvise(ctypes.c_void_p(at), ctypes.c_size_t(size), collapse)


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
    deadline = time.monotonic() + 600  # seconds, of a busy machine
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
