"""Refusals: exit code 2, one message that names key and value and what is valid, and nothing
written."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

from llmexp.__main__ import run
from llmexp.settings.values import ConfigError
from llmexp.train.assembly import placement
from tests.conftest import TINY, llmexp

pytestmark = pytest.mark.usefixtures("suggestions_are_read")

SYNTHETIC = [*TINY, "data=synthetic", "data.n_tokens=5000"]


def files(folder: Path) -> set[str]:
    """Return what lies there, but for what a plan remembers of a model, and prepared texts."""
    found = {str(p.relative_to(folder)) for p in folder.rglob("*")}
    ours = ("cache/facts", "cache/corpus", "cache/notes")
    return {path for path in found if path != "cache" and not path.startswith(ours)}


@pytest.fixture
def home(tmp_path, monkeypatch) -> Path:
    """A folder with data of every bad kind, that is also HOME and holds the cache: whatever is
    written shows there."""
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("LLMEXP_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("LLMEXP_ALLOW", raising=False)
    (work / "empty.txt").touch()
    (work / "short.txt").write_text("hi")
    (work / "latin.txt").write_bytes(b"x" * 60 + b"\xff" + b"x" * 300)
    (work / "good.txt").write_text("hello world, how are you? " * 50)
    (work / "odd.bin").write_bytes(bytes(101))
    np.array([1] * 400, np.uint16).tofile(work / "a.bin")
    np.array([1] * 100 + [5000], np.uint16).tofile(work / "b.bin")
    np.save(work / "floats.npy", np.zeros(50))
    (work / "some.zst").write_bytes(b"\x28\xb5\x2f\xfd" + bytes(100))
    os.mkfifo(work / "pipe.txt")
    (work / "bad").mkdir()
    (work / "bad" / "model").mkdir()
    (work / "bad" / "model" / "mine.yaml").write_text("a: [1\nb")
    (work / "own" / "experiment").mkdir(parents=True)
    clipped = "# @package _global_\ndefaults:\n  - override /clip: none\nclip:\n  max_norm: 0.5\n"
    (work / "own" / "experiment" / "clipped.yaml").write_text(clipped)
    both = (
        "# @package _global_\nsweep: {halving: 0.5}\ntrain: {stop_step: 5}\nhydra: {run: {dir: "
        "here}}\n"
    )
    (work / "own" / "experiment" / "swept.yaml").write_text(both)
    (work / "own" / "experiment" / "nowhere.yaml").write_text("train:\n  max_steps: 5\n")
    return tmp_path


def refused(capsys, home: Path, *arguments: str) -> str:
    """Runs the command in this process; the message, after checking its form."""
    before = files(home)
    try:
        code = run(list(arguments))
    except SystemExit as ended:  # argparse
        code = ended.code
    out, err = capsys.readouterr()
    assert code == 2, out + err
    assert files(home) == before
    assert "Traceback" not in err
    assert out == "" or "plan" in arguments[:1]
    return err


LEFT = ["clip.kind=none", "schedule.warmup_steps=2", "tracker.name=x", "optimizer=sgd "
                                                                       "optimizer.momentum=0",
        "data=text data.train_files=good.txt data.val_files=good.txt",
        "train.max_tokens=1000 train.tail=drop", "schedule.warmup_steps=2 "
                                                 "schedule.warmup_ratio=null",
        "--config-dir own experiment=swept", "-m --config-dir own experiment=swept "
                                             "train.seed=1,2"]  # fmt: skip


@pytest.mark.parametrize("overrides", LEFT)
def test_a_default_that_does_nothing_is_not_refused(home, overrides):
    """Nobody asked for the option's own limit, ratio or seed, or for what a file has for a sweep or
    for a run."""
    base = [o for o in SYNTHETIC if not ("data=" in overrides and o.startswith("data"))]
    assert run(["plan", *base, *overrides.split()]) == 0


def test_the_valid_run_is_not_refused_and_plan_writes_to_the_cache_alone(capsys, home):
    before = files(home)
    assert run(["plan", *SYNTHETIC]) == 0
    assert run(["plan", *TINY, "data=text", "data.train_files=good.txt"]) == 0
    assert files(home) == before
    out, err = capsys.readouterr()
    assert "1,170 tokens, 97 sequences of 12" in out
    assert err == ""


def test_the_banner_tells_the_width_of_the_mlp(capsys, home):
    """A new d_model alone leaves it as it was."""
    assert run(["plan", *SYNTHETIC, "model.d_model=48", "model.d_ff=24"]) == 0
    assert "48 wide, d_ff 24 = 0.5 x d_model" in " ".join(capsys.readouterr().out.split())


def test_a_warmup_longer_than_the_run_is_a_loud_warning(capsys, home):
    assert run(["plan", *SYNTHETIC, "schedule.warmup_steps=500", "train.max_steps=20"]) == 0
    assert "warning" in (out := capsys.readouterr().out)
    assert "warm-up of 500 updates is longer than the run of 20" in " ".join(out.split())


def test_compile_without_a_compiler(capsys, home, monkeypatch):
    monkeypatch.setenv("PATH", str(home))
    message = refused(capsys, home, "plan", *SYNTHETIC, "train.compile=true", "train.device=cpu")
    assert "train.compile=true" in message
    assert "train.compile=false" in message


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
APART = [  # options of a group, knobs that not all of them have, and the options of both
    ("optimizer=muon,library", [RADAM], "muon,library_torch_optim_RAdam"),
    ("optimizer=library,adamw", [BETAS, f"{RADAM},torch.optim.NAdam", "optimizer.lr=1e-3,2e-3"],
     "library_0_9_0_98_torch_optim_RAdam,library_0_9_0_98_torch_optim_NAdam,adamw"),
    ("clip=norm,value,none", ["clip.max_norm=0.5,1", "clip.max_value=2"],
     "norm_0_5,norm_1,value_2,none"),
    ("clip=norm,value", ["clip.max_norm=1e-20,1e+20"], "norm_1e_20,norm_1e_20_,value"),
]  # fmt: skip


@pytest.mark.parametrize(("swept", "knobs", "both"), APART, ids=str)
def test_a_knob_of_some_options_of_a_sweep_is_given_by_files(capsys, home, swept, knobs, both):
    """What the refusal gives to paste is the whole sweep, with all else that was typed."""
    message = refused(capsys, home, "plan", "-m", *SYNTHETIC, swept, *knobs)
    _, recipe = message.split("beside the others: ")  # once, however many points are refused
    recipe = recipe.splitlines()[0]
    *making, last = recipe.split(" && ")
    subprocess.run(" && ".join(making), shell=True, check=True)
    words = shlex.split(last)
    assert words[:3] == ["llmexp", "plan", "-m"]
    kept = {*SYNTHETIC, *(k for k in knobs if k.startswith("optimizer.lr="))}
    assert {*words[5:]} == {f"{swept.partition('=')[0]}={both}", *kept}
    assert run(words[1:]) == 0
    assert {*both.split(",")} <= {*capsys.readouterr().out.split()}


def test_a_wrong_value_of_a_knob_of_some_options_gets_no_files(capsys, home):
    """A file would hold it too; the options that lack the knob are told how they get it."""
    swept = [*SYNTHETIC, "clip=norm,value", "clip.max_norm=1,-1"]
    wrong, lacks = refused(capsys, home, "plan", "-m", *swept).splitlines()[-2:]
    assert wrong.endswith("for example clip.max_norm=1.0")
    assert "leave it out, or choose clip=norm" in lacks
    assert "beside the others: mkdir" in lacks


def test_a_recipe_of_a_measured_plan_measures_too(capsys, home):
    swept = ["optimizer=adamw,muon", "optimizer.momentum=0.3", "optimizer.lr=-1"]
    message = refused(capsys, home, "plan", "-m", *SYNTHETIC, *swept, "--measure")
    assert "&& llmexp plan --measure -m --config-dir own" in message
    assert "for example optimizer=" not in message


def test_a_screen_is_given_files_where_it_has_two_options_with_them(capsys, home):
    swept = ["sweep.screen=auto", "clip=norm,value", "optimizer.lr=1,2", "model.dropout=0,0.1"]
    two = refused(capsys, home, "plan", "-m", *SYNTHETIC, *swept, "clip.max_norm=0.5")
    three = refused(capsys, home, "plan", "-m", *SYNTHETIC, *swept, "clip.max_norm=0.5,1")
    assert "clip=norm_0_5,value" in two
    assert "leave it out, or choose clip=norm" in three
    assert "beside the others" not in three


def test_a_knob_that_is_swept_over_another_option_names_its_own(capsys, home):
    message = refused(capsys, home, "plan", "-m", *SYNTHETIC, "optimizer.name=RAdam,NAdam")
    assert "these have it: library; for example optimizer=library optimizer.name=RAd" in message
    words = message.rpartition("for example ")[2].split()
    assert run(["plan", "-m", *SYNTHETIC, *words]) == 0


def test_train_writes_nothing_when_it_refuses(home, tmp_path):
    """The same through `train`, whose worker finds what the parent cannot see; and the stream that
    a user reads."""
    base = [o for o in SYNTHETIC if not o.startswith("data")]
    cases = [
        ([*SYNTHETIC, "optimizer.lr=nan"], "optimizer.lr=nan"),
        ([*base, "data=tokens", "data.train_files=[a.bin,b.bin]"], "5000 at position 100"),
        ([*SYNTHETIC, "hydra.run.dir=/proc/llmexp"], "hydra.run.dir=/proc/llmexp"),
        (["-m", *SYNTHETIC, "model.n_heads=2,3"], "1-n_heads_3: model.n_heads=3"),
    ]
    before = files(tmp_path) - {"cache"}
    for overrides, says in cases:
        result = llmexp("train", *overrides, cwd=tmp_path / "work", HOME=str(tmp_path))
        assert result.code == 2, result.err
        assert says in result.err
        assert "Traceback" not in result.err
        assert result.out == ""
        assert files(tmp_path) == before
    assert not os.path.exists("/proc/llmexp")
