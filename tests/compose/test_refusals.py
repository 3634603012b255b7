"""What is not refused, and refusals that give files to make: the rest is in tests/refusals."""

import os
import shlex
import subprocess
from pathlib import Path

import pytest
import torch

from llmexp.config.values import ConfigError
from llmexp.train.assembly import placement
from tests.conftest import TINY, llmexp
from tests.refusals import homes
from tests.refusals.test_refusals import files
from tests.tools import run_here

pytestmark = pytest.mark.usefixtures("suggestions_are_read")

SYNTHETIC = [*TINY, "data=synthetic", "data.n_tokens=5000"]
TEXT = [*TINY, "data=text", "data.train_files=good.txt"]


@pytest.fixture
def home(tmp_path, monkeypatch, runs) -> Path:
    """A folder with files of every bad kind to be in; HOME and the cache are beside it."""
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("LLMEXP_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("LLMEXP_ALLOW", raising=False)
    homes.files(work, runs)
    text = "sweep: {halving: 0.5}\ntrain: {stop_step: 5}\nhydra: {run: {dir: here}}\n"
    (work / "own/experiment/swept.yaml").write_text(f"# @package _global_\n{text}")
    return tmp_path


@pytest.mark.parametrize(
    "overrides",
    [
        [*SYNTHETIC, "clip.kind=none"],
        [*SYNTHETIC, "schedule.warmup_steps=2"],
        [*SYNTHETIC, "schedule.warmup_steps=2", "schedule.warmup_ratio=null"],
        [*SYNTHETIC, "tracker.name=x"],
        [*SYNTHETIC, "optimizer=sgd", "optimizer.momentum=0"],
        [*TEXT, "data.val_files=good.txt"],
        [*SYNTHETIC, "train.max_tokens=1000", "train.tail=drop"],
        [*SYNTHETIC, "--config-dir=own", "experiment=swept"],
        ["-m", *SYNTHETIC, "--config-dir=own", "experiment=swept", "train.seed=1,2"],
    ],
)
def test_a_default_that_does_nothing_is_not_refused(home, capfd, overrides):
    """Nobody asked for the option's own limit, ratio or seed, or for what a file has for a sweep or
    for a run."""
    done = run_here(capfd, "plan", *overrides)
    assert done.code == 0, done.err


def test_a_plan_says_what_it_will_do_and_writes_to_the_cache_alone(capfd, home):
    before = files(home)
    wide = ["model.d_model=48", "model.d_ff=24", "schedule.warmup_steps=500", "train.max_steps=20"]
    for words, text in (
        (TEXT, "1,170 tokens, 97 sequences of 12"),
        ([*SYNTHETIC, *wide], "48 wide, d_ff 24 = 0.5 x d_model"),
        ([*SYNTHETIC, *wide], "warm-up of 500 updates is longer than the run of 20"),
    ):
        done = run_here(capfd, "plan", *words)
        assert (done.code, done.err) == (0, "")
        assert text in " ".join(done.out.split())
    assert "warning" in done.out
    assert files(home) == before


def test_compile_on_cuda(monkeypatch):
    """Chosen where all is there that it needs; else left out, or refused where it was asked for."""
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(placement.importlib.util, "find_spec", lambda name: None)
    assert placement._compiled("auto", cpu, offload=False) == (False, "")
    assert placement._compiled(False, gpu, offload=False) == (False, "")
    compiled, why = placement._compiled("auto", gpu, offload=False)
    assert not compiled
    assert why.startswith("off: compiling for CUDA needs Triton")
    with pytest.raises(ConfigError, match=r"train.compile=true: .*Triton.*train.compile=false"):
        placement._compiled(True, gpu, offload=False)
    monkeypatch.setattr(placement, "_missing_to_compile", lambda device: "")
    assert placement._compiled("auto", gpu, offload=False) == (True, "on, chosen for this GPU")
    assert placement._compiled(True, cpu, offload=False) == (True, "on")
    compiled, why = placement._compiled("auto", gpu, offload=True)
    assert not compiled
    assert "activation_checkpointing=offload moves" in why


RADAM, BETAS = "optimizer.name=torch.optim.RAdam", "optimizer.betas=[0.9,0.98]"
RATES = "optimizer.lr=1e-3,2e-3"
APART = [  # options of a group, knobs that not all of them have, and the options of both
    ("optimizer=muon,library", [RADAM], ["muon", "library_torch_optim_RAdam"]),
    (
        "optimizer=library,adamw",
        [BETAS, f"{RADAM},torch.optim.NAdam", RATES],
        [*(f"library_0_9_0_98_torch_optim_{name}" for name in ("RAdam", "NAdam")), "adamw"],
    ),
    (
        "clip=norm,value,none",
        ["clip.max_norm=0.5,1", "clip.max_value=2"],
        ["norm_0_5", "norm_1", "value_2", "none"],
    ),
    ("clip=norm,value", ["clip.max_norm=1e-20,1e+20"], ["norm_1e_20", "norm_1e_20_", "value"]),
]


@pytest.mark.parametrize(("swept", "knobs", "both"), APART, ids=str)
def test_a_knob_of_some_options_of_a_sweep_is_given_by_files(capfd, home, swept, knobs, both):
    """What the refusal gives to paste is the whole sweep, with all else that was typed."""
    refused = run_here(capfd, "plan", "-m", *SYNTHETIC, swept, *knobs)
    assert refused.code == 2
    _, recipe = refused.err.split("beside the others: ")  # once, however many points are refused
    *making, last = recipe.splitlines()[0].split(" && ")
    subprocess.run(" && ".join(making), shell=True, check=True)
    words = shlex.split(last)
    assert words[:3] == ["llmexp", "plan", "-m"]
    kept = {*SYNTHETIC, *(k for k in knobs if k == RATES)}
    assert {*words[5:]} == {f"{swept.partition('=')[0]}={','.join(both)}", *kept}
    done = run_here(capfd, *words[1:])
    assert done.code == 0
    assert {*both} <= {*done.out.split()}


def test_train_writes_nothing_when_it_refuses(home, tmp_path):
    """The same through `train`, whose worker finds what the parent cannot see; and the stream that
    a user reads."""
    bad = ["data=tokens", "data.train_files=[a.bin,b.bin]"]
    before = files(tmp_path)
    for overrides, says in (
        ([*SYNTHETIC, "optimizer.lr=nan"], "optimizer.lr=nan"),
        ([*TINY, *bad], "5000 at position 100"),
        ([*SYNTHETIC, "hydra.run.dir=/proc/llmexp"], "hydra.run.dir=/proc/llmexp"),
        (["-m", *SYNTHETIC, "model.n_heads=2,3"], "1-n_heads_3: model.n_heads=3"),
    ):
        result = llmexp("train", *overrides, cwd=tmp_path / "work", HOME=str(tmp_path))
        assert (result.code, result.out) == (2, ""), result.err
        assert says in result.err
        assert "Traceback" not in result.err
        assert files(tmp_path) == before
    assert not os.path.exists("/proc/llmexp")
