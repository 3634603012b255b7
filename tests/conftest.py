"""What the tests share: the command line as a process, runs made once, the project's data where it
is there."""

import contextlib
import gc
import itertools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# In this process as in those that it starts; `make test-processors` has others.
THREADS = os.environ["OMP_NUM_THREADS"] = os.environ.get("LLMEXP_TEST_THREADS", "1")
os.environ.pop("COLUMNS", None)
# Bytecode is kept, as for users, or each process would compile all of llmexp anew.
if os.environ.pop("PYTHONDONTWRITEBYTECODE", None):
    sys.dont_write_bytecode = False
# A shell ignores it for what runs in the background, which every child would inherit.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

import numpy as np
import pytest
from hypothesis import settings

from llmexp.config import values
from tests import forks, leftovers, suggestions, words
from tests.forks import ASSETS as ASSETS
from tests.forks import PATHS, ROOT
from tests.tiny import TINY

if forks.PRETEND_BF16:
    forks.pretend_bf16()

# of 200 ms an example, which a busy machine exceeds
settings.register_profile("all", deadline=None)
settings.load_profile("all")

BEGAN = time.monotonic()
HANG_S = 1200  # a limit only ends what hangs: a busy machine may be twenty times as slow
SHARED = ROOT.parent / "shared"
RUNS = "LLMEXP_TEST_RUNS"


# What takes longest comes first, or one process would end alone.
LONGEST = """
parallel slurm sweep hosts deciding shipped knobs in_and_out replay resume branches answer cli kills
corpus search page golden own_parts own_state ladder twins clip_reference clip_rules sync train end
geometry security fitting planning types refusals library memory agent window_loss tracker
"""


def pytest_configure(config: pytest.Config) -> None:
    """One folder of runs and one token file for all processes of the tests."""
    if RUNS not in os.environ:
        os.environ[RUNS] = tempfile.mkdtemp(prefix="llmexp-runs-")
        write_tokens(Path(os.environ[RUNS], "train.npy"))
        config.add_cleanup(lambda: shutil.rmtree(os.environ.pop(RUNS)))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Say how long the tests took, and what was skipped and why."""
    minutes, seconds = divmod(round(time.monotonic() - BEGAN), 60)
    reports = terminalreporter.stats.get("skipped", [])
    reasons = Counter(str(report.longrepr[2]).removeprefix("Skipped: ") for report in reports)
    terminalreporter.write_line("")
    terminalreporter.write_line(f"took {minutes}:{seconds:02} min, skipped {len(reports)}")
    for reason, count in reasons.most_common():
        terminalreporter.write_line(f"{count:4}  {reason[:90]}")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Commands are forks of a process that has imported torch, but for the modules that say
    FRESH_PROCESSES = True."""
    fresh = getattr(item.module, "FRESH_PROCESSES", False) or item.get_closest_marker("fresh")
    forks.ALLOWED = not fresh
    os.environ.pop("LLMEXP_ALLOW", None)  # by --allow of a command in this process


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    """The order of tests does not matter: each leaves the process as it found it."""
    with leftovers.refused():
        yield


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Hand out whole files in the order of the collection: `pytest -n 4`."""
    from xdist.scheduler import LoadFileScheduling

    class Files(LoadFileScheduling):
        def remove_node(self, node: Any) -> str | None:
            """Not try a test again that has ended its process, which would end all of them."""
            for unit in self.assigned_work[node].values():
                for test, done in unit.items():
                    if not done:
                        unit[test] = True
                        super().remove_node(node)
                        return test
            return super().remove_node(node)

    config.option.loadscopereorder = False
    return Files(config, log)


def pytest_collection_modifyitems(config: pytest.Config, items: list[Any]) -> None:
    if hasattr(config, "workerinput"):  # of pytest-xdist
        place = {f"test_{name}": n for n, name in enumerate(LONGEST.split())}
        items.sort(key=lambda item: place.get(item.path.stem, len(place)))
    if words.WRITING:
        items[:] = [item for item in items if "words" in item.fixturenames]


def pytest_collection_finish() -> None:
    """What was imported and collected stays: no collection of garbage needs to look at it."""
    gc.freeze()
    gc.set_threshold(20_000, 10, 10)


PORTS = itertools.count()


def free_port() -> int:
    """One that nobody listens on now, below those that the kernel hands out and those from 20000 on
    of Slurm's jobs, and others in each process."""
    for number in itertools.islice(PORTS, 1000):
        port = 10_000 + (os.getpid() * 97 + number) % 10_000
        with socket.socket() as s, contextlib.suppress(OSError):
            s.bind(("", port))
            return port
    raise OSError("none of 1000 ports is free")


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str
    folder: Path

    def rows(self) -> list[dict]:
        return [
            json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()
        ]

    def json(self, name: str) -> dict:
        return json.loads((self.folder / name).read_text())

    def checkpoint(self, step: int) -> Path:
        return self.folder / "checkpoints" / f"step_{step:08d}"


def environment(**more: str) -> dict[str, str]:
    hidden = ("WANDB_", "LLMEXP_", "HYDRA_", "PYTHONPATH", "COLUMNS", "PYTEST_")
    kept = {k: v for k, v in os.environ.items() if not k.startswith(hidden)}
    cache = os.environ.get("LLMEXP_TEST_CACHE", "/tmp/llmexp-test-cache")
    ours = {"OMP_NUM_THREADS": THREADS, "WANDB_MODE": "offline", "LLMEXP_CACHE_DIR": cache}
    return kept | ours | more


def start(*arguments: str, cwd: Path, **env: str) -> subprocess.Popen[str]:
    """`llmexp ARGUMENTS` as a process of its own group."""
    return forks.start(
        "llmexp", *arguments, cwd=cwd, env=environment(**{"PYTHONPATH": PATHS, **env}), text=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def llmexp(*arguments: str, cwd: Path, timeout: float = HANG_S, **env: str) -> Result:
    """Runs `llmexp ARGUMENTS` to its end; `folder` is that of hydra.run.dir, or cwd."""
    process = start(*arguments, cwd=cwd, **env)
    out, err = process.communicate(timeout=timeout)
    chosen = [a.partition("=")[2] for a in arguments if a.startswith("hydra.run.dir=")]
    return Result(process.returncode, out, err, cwd / chosen[0] if chosen else cwd)


def train(cwd: Path, name: str, *overrides: str, **env: str) -> Result:
    """A tiny run into cwd/name that has to succeed."""
    result = llmexp("train", *TINY, f"hydra.run.dir={name}", *overrides, cwd=cwd, **env)
    assert result.code == 0, result.err + result.out
    return result


@pytest.fixture
def suggestions_are_read(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Whatever a test has refused in its own process, what the refusal suggests can be pasted."""
    texts: list[str] = []

    def made(kind: type, text: str, *_: Any, **__: Any) -> Any:
        texts.append(text)
        return ValueError.__new__(kind, text)

    monkeypatch.setattr(values.ConfigError, "__new__", made)
    yield
    for text in texts:
        suggestions.check(text)


@pytest.fixture
def forking(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Have workers that a command in this process starts be forks too."""
    for name, value in environment(PYTHONPATH=PATHS).items():
        monkeypatch.setenv(name, value)
    with forks.warm():
        yield


@pytest.fixture(scope="session")
def runs() -> Any:
    from tests.runs import Runs  # which needs this module

    return Runs(Path(os.environ[RUNS]))


@pytest.fixture(name="words")
def _words() -> words.Words:
    return words.Words()


def write_tokens(path: Path) -> Path:
    """Write a token file: 12 x 50 + 1 tokens of 60 ids with some structure, where id 7 serves as
    the one to ignore."""
    rng = np.random.default_rng(0)
    ids = (np.cumsum(rng.integers(0, 3, 12 * 50 + 1)) * 5) % 60
    np.save(path, ids.astype(np.uint16))
    return path


@pytest.fixture(scope="session")
def tokens() -> Path:
    return Path(os.environ[RUNS], "train.npy")
