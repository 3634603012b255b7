"""The check that a test leaves nothing behind finds what one would leave behind."""

import importlib
import os
import signal
import sys
import warnings

import pytest
import torch

from llmexp.optim import precision
from llmexp.system.child import STOP
from llmexp.system.workers import Forked
from tests import leftovers
from tests.conftest import start


def test_what_is_left_is_named(monkeypatch):
    gradients, dtype = torch.is_grad_enabled(), torch.get_default_dtype()
    for change, name in (
        (lambda: setattr(STOP, "training", True), "STOP.training"),
        (lambda: os.chdir("/"), "the working folder"),
        (lambda: precision.apply("tf32"), "torch's TF32"),
        (precision.make_deterministic, "torch's deterministic algorithms"),
        (lambda: torch.set_grad_enabled(False), "torch's gradients"),
        (lambda: torch.set_default_dtype(torch.float64), "torch's dtype"),
    ):
        with monkeypatch.context() as patched, precision.settings_kept():
            patched.chdir(os.getcwd())
            patched.setattr(STOP, "training", False)
            with pytest.raises(AssertionError, match=name), leftovers.refused():
                change()
            torch.set_grad_enabled(gradients)
            torch.set_default_dtype(dtype)


def test_what_a_command_leaves_is_put_back(monkeypatch):
    monkeypatch.delenv("LLMEXP_ALLOW", raising=False)
    monkeypatch.setenv("WANDB_MODE", "offline")
    old, environment = signal.getsignal(signal.SIGUSR2), dict(os.environ)
    with leftovers.refused():
        os.environ["LLMEXP_ALLOW"] = "mymodel"
        del os.environ["WANDB_MODE"]
        sys.path.insert(0, "/nowhere")
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    assert dict(os.environ) == environment
    assert "/nowhere" not in sys.path
    assert signal.getsignal(signal.SIGUSR2) == old


@pytest.mark.parametrize(("name", "value"), [("fp32_precision", "tf32"), ("allow_tf32", True)])
def test_settings_of_torch_are_put_back(name, value):
    """Also those that a program has set by their newer names, which torch lets nobody mix."""
    with precision.settings_kept(), warnings.catch_warnings():
        setattr(torch.backends.cuda.matmul, name, value)
        before = leftovers.state()
        with precision.settings_kept():
            precision.make_deterministic()
            precision.apply("fp32")
            assert leftovers.state() != before
        assert leftovers.state() == before


def test_commands_are_forks_whatever_torch_puts_into_the_environment(tmp_path):
    importlib.import_module("torch._inductor.runtime.cache_dir_utils").cache_dir()
    assert "TORCHINDUCTOR_CACHE_DIR" in os.environ
    process = start("--version", cwd=tmp_path)
    assert "llmexp" in process.communicate()[0]
    assert isinstance(process, Forked)
