"""Commands of the tests, and their workers, as forks of one process that has torch imported: that
import is most of what a tiny run costs.

`python -m tests.forks` is that process, and then each of its forks. LLMEXP_TEST_BF16=1 tests as on
a CPU with bf16 units, where precision=auto is bf16 (emulated: slow); fresh processes do not take
part in that.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import pkgutil
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import llmexp
from llmexp.system import child, workers

ALLOWED = True  # by the test that runs
ROOT = Path(__file__).resolve().parents[1]
ASSETS = ROOT / "tests" / "assets"  # the package `own`: parts of a user's own
# Packages may lie in a folder that PYTHONPATH names.
PATHS = os.pathsep.join(filter(None, [str(ROOT), str(ASSETS), os.environ.get("PYTHONPATH", "")]))
# Of the template; a test may have another home when it starts.
HERE = {**os.environ, "PYTHONPATH": PATHS}
# By the template, beside all of llmexp; torch._dynamo is DDP's, plotly's page is made at the end of
# each sweep.
PRELOADED = """
torch._dynamo torch.distributed.fsdp torch.distributed.tensor.parallel torch.profiler
torch.distributed.launcher.api scipy.stats wandb wandb.apis.public matplotlib.figure
matplotlib.backends.backend_agg plotly.io._json optuna.samplers cmaes requests encodings.idna
"""
PRETEND_BF16 = os.environ.get("LLMEXP_TEST_BF16") == "1"


def preload() -> None:
    """Import what commands, workers and tests import, as far as it is installed."""
    ours = (found.name for found in pkgutil.walk_packages(llmexp.__path__, "llmexp."))
    for name in (*(n for n in ours if not n.endswith("__main__")), *PRELOADED.split()):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    import torch
    from hydra.core.plugins import Plugins
    from plotly import graph_objects

    from llmexp.compose import app
    from llmexp.folders import versions
    from llmexp.optim.optimizers import library
    from tests.tiny import TINY

    # torchao looks for devices when it is imported, after which forks could not use CUDA
    for name in library.PACKAGES if torch.version.cuda is None else ():
        library._imported(name)
    graph_objects.Figure(graph_objects.Scatter(x=[0.0], y=[0.0]), {"template": "plotly"})
    Plugins.instance()  # looks through all of Hydra's plugins
    versions.versions()  # reads the metadata of packages
    with app.hydra_app(None) as hydra:  # its parsers learn their grammars
        app.compose(hydra, [*TINY, "data=synthetic", "hooks=[]", "hydra.run.dir=a/b"])


def pretend_bf16() -> None:
    """Make torch say that this CPU has bf16 units."""
    import torch

    there = torch.cpu.get_capabilities()
    torch.cpu.get_capabilities = lambda: {**there, "bf16": True}


def kind(env: dict[str, str]) -> str:
    """What of an environment something reads as it is imported, or as Python starts."""
    names = ("PYTHON", "LD_", "LC_", "LANG", "OMP_", "MKL_", "MALLOC_", "TORCH_")
    own = (one for one in env.items() if one[0].startswith(names) and one[0] != "PYTHON")
    return repr(sorted(own))


@functools.cache
def template() -> workers.Template:
    with mock.patch.object(workers, "_ANSWER_S", 1200.0):  # its imports, on a busy machine
        return workers.Template(HERE, "tests.forks")


def start(module: str, *arguments: str, env: dict[str, str], **more: Any) -> Any:
    """`python -m MODULE ARGUMENTS` as a child of this process, in a session of its own."""
    more |= {"env": env, "start_new_session": True}
    if ALLOWED and kind(env | {"PYTHONPATH": PATHS}) == kind(HERE):
        words = [sys.executable, "-m", "tests.forks", module, *arguments]
        try:
            return workers.Forked(template(), words, **more)
        except OSError:  # it has ended with the thread that started it
            template().end()
            template.cache_clear()
            return workers.Forked(template(), words, **more)
    return subprocess.Popen([sys.executable, "-m", module, *arguments], **more)


@contextlib.contextmanager
def warm() -> Iterator[None]:
    """Have workers that a command in this process starts be forks too."""
    with mock.patch.multiple(workers, _kind=kind, _templates={kind(HERE): template()}):
        with workers.warm():
            yield


def become_command() -> None:
    """Run what the arguments name, as a process whose workers are forks too."""
    ours, old = (text.split(os.pathsep) for text in (os.environ.get("PYTHONPATH", ""), PATHS))
    sys.path[:] = [*filter(None, ours), *(path for path in sys.path if path not in (*ours, *old))]
    sys.path.insert(0, os.getcwd())
    there = dict[str, str]()
    if os.environ.get("LLMEXP_ALLOW") or any(word.startswith("--allow") for word in sys.argv):
        there["PYTHONPATH"] = os.pathsep.join(filter(None, [os.getcwd(), *ours]))  # of its workers
    with mock.patch.dict(os.environ, there):
        workers.keep_template()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    if sys.argv[1].startswith(child.TEMPLATE):
        preload()
        if PRETEND_BF16:
            pretend_bf16()
        workers.serve_forks(int(sys.argv[1].removeprefix(child.TEMPLATE)))
    become_command()
