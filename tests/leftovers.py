"""What a test may leave changed in its process, for the tests that come after it."""

import contextlib
import logging
import os
import signal
import sys
from collections.abc import Iterator
from typing import Any

from llmexp.system import child

HANDLED = sorted({*child.PASSED_ON, signal.SIGUSR1, signal.SIGALRM})
BY_PYTEST = "PYTEST_CURRENT_TEST"  # set before each part of a test


def state() -> dict[str, Any]:
    """What no test may leave changed: one value for each name."""
    found: dict[str, Any] = {"the working folder": os.getcwd()}
    found |= {f"STOP.{name}": value for name, value in vars(child.STOP).items()}
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "compile"):  # no import leaves it otherwise
        return found
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    return found | {
        "torch's deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "torch's filling of memory": torch.utils.deterministic.fill_uninitialized_memory,
        "torch's cuDNN attention": torch.backends.cuda.cudnn_sdp_enabled(),
        "torch's TF32": (matmul.fp32_precision == "tf32", cudnn.conv.fp32_precision == "tf32"),
        "torch's dtype": torch.get_default_dtype(),
        "torch's gradients": torch.is_grad_enabled(),
        "torch's threads": torch.get_num_threads(),
        "torch's process group": torch.distributed.is_initialized(),
    }


@contextlib.contextmanager
def put_back() -> Iterator[None]:
    """Put back what a command leaves changed, since it ends its process, and a test runs on."""
    environment, paths, raising = dict(os.environ), list(sys.path), logging.raiseExceptions
    root = logging.getLogger()
    writers, level = list(root.handlers), root.level
    handlers = {number: signal.getsignal(number) for number in HANDLED}
    held = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    yield
    sys.path[:] = paths
    logging.raiseExceptions = raising
    root.setLevel(level)
    for writer in [each for each in root.handlers if each not in writers]:
        root.removeHandler(writer)  # Hydra's --info adds one to a stream that is then closed
    for name in os.environ.keys() | environment.keys():
        if name not in environment:
            del os.environ[name]
        elif os.environ.get(name) != environment[name] and name != BY_PYTEST:
            os.environ[name] = environment[name]
    for number, handler in handlers.items():
        if signal.getsignal(number) != handler:
            signal.signal(number, handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, held)


@contextlib.contextmanager
def refused() -> Iterator[None]:
    """Raise AssertionError where what is run inside leaves the process changed."""
    before = state()
    with put_back():
        yield
    after = state()
    found = [f"{k}: {before[k]!r} became {after[k]!r}" for k in before if before[k] != after[k]]
    assert not found, f"left changed for the tests that follow: {'; '.join(found)}"
