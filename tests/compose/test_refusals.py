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


# Overrides on top of a valid run, and what the message has to say: the key, the value, and what is
# valid or near.
BAD = [
    # keys, groups, options, syntax
    ("modle=gpt_tiny", "modle: there is no such key", "Did you mean model?"),
    ("model=gpt3", "model=gpt3: there is no such option. Known: ", "llama_1b"),
    ("lr=3", "lr: there is no such key or group.", "Did you mean optimizer.lr?"),
    ("batch_size=3", "batch_size: there is no such key", "batch.micro_batch_size or "
                                                         "batch.real_batch_size?"),
    ("experiment=nope", "experiment=nope", "shakespeare_nanogpt_cpu"),
    ("model.n_layer=3", "model.n_layer:", "Did you mean model.n_layers?"),
    ("~train.sed", "train.sed:", "Did you mean train.seed?"),
    ("+train.sed=3", "train.sed:", "Did you mean seed?"),
    ("+train.seed=3", "train.seed:", "without the +"),
    ("+foo=3", "foo: there is no such key. A key of your own goes into the section user: "
               "+user.foo=", "Known:"),
    ("train.max_steps=3 train.max_epochs=1", "one budget is needed, not 2", "leave one out"),
    ("~train.seed", "train.seed:", "missing"),
    ("++model.widht=3", "model.widht:", "no such argument"),
    ("+optimizer.foo=3", "optimizer.foo:", "no such argument. Known: lr, beta1, "),
    ("model=5", "model=5", "gpt_tiny"),
    ("optimizer=null", "optimizer=null", "adamw"),
    ("train=3", "train=3", "a section of keys"),
    ("hydra=[]", "hydra: holds Hydra's own keys", "for example hydra.run.dir=outputs/try1"),
    ("hydra=null", "hydra: holds Hydra's own keys", "for example hydra.run.dir=outputs/try1"),
    ("train=[]", "train=[]: a section of keys is needed here, not a list", "train."),
    ("data=corpus data.val=[a]", "data.val=['a']: a section of keys", "data.val.web.files="),
    ("hooks={a:1}", "hooks={'a': 1}: a list is needed here, not keys", "hooks=[]"),
    ("optimizer.groups={match:'*'}", "optimizer.groups={'match': '*'}: a list is needed",
     "optimizer.groups=[{match: '*.mlp.*', lr: 0.3}]"),
    ("batch={max_steps:3}", "batch.max_steps: there is no such key", "Did you mean"),
    ("clip=[a]", "clip=a: there is no such option", "adaptive, none"),
    ("=3", "=3: is not an override", "train.max_steps=100"),
    ("foo", "foo: is not an override", "train.max_steps=100"),
    ("tracker.notes='a", "tracker.notes='a: is not an override", "quote"),
    ("train.max_steps=1,2", "train.max_steps=1,2", "-m"),
    ("train.seed=${nothing}", "train.seed:", "'nothing' not found"),
    ("tracker.notes=${oc.env:LLMEXP_NOT_SET}",
     "tracker.notes=${oc.env:LLMEXP_NOT_SET}: the environment variable", "LLMEXP_NOT_SET=..."),
    ("--config-dir=nowhere", "--config-dir nowhere", "no such folder"),
    ("--config-name=other", "--config-name other", "--config-dir"),
    ("--frobnicate", "--frobnicate", "train.max_steps=100"),
    ("--allow=../x", "--allow ../x", "--allow mypackage"),
    # types that YAML or a shell may change; tests/test_knobs.py tries each knob's type and range
    ("clip=off", "clip=off", "adaptive, none, norm, per_group, quantile, update, value, zscore"),
    ("clip.kind=false", "clip.kind=false", "value, zscore"),
    ("precision.kind=bf17", "precision.kind=bf17", "Did you mean bf16?"),
    # knobs that do nothing in the chosen option
    ("clip=none clip.max_norm=0.1", "clip.max_norm=0.1: does nothing with "
                                    "clip=none", "choose clip=norm"),
    ("clip.kind=none clip.max_norm=0.1", "clip.max_norm=0.1: does nothing", "choose clip=norm"),
    ("precision.init_scale=4", "precision.init_scale=4: does nothing with "
                               "precision=fp32", "choose precision=fp16"),
    ("parallelism.max_restarts=2", "does nothing with parallelism=single", "choose parallelism=ddp "
                                                                           "or"),
    ("train.profile_steps=5", "does nothing without train.profile_start", "leave it out"),
    ("train.tail=drop", "train.tail=drop: does nothing without train.max_epochs or "
                        "train.max_tokens", "leave it out"),
    ("schedule.warmup_steps=2 "
     "schedule.warmup_ratio=0.1", "does nothing beside schedule.warmup_steps=2", "leave"),
    ("clip={kind:none,max_norm:2}", "clip.max_norm=2.0: does nothing with "
                                    "clip=none", "leave it out"),
    # what acts in a sweep only, or in a single run only
    ("batch.memory_gib=1", "with batch.micro_batch_size=null", "micro_batch_size=auto"),
    ("sweep.halving=0.5", "sweep.halving=0.5: does nothing without -m", "add -m"),
    ("hydra/launcher=slurm", "hydra/launcher=slurm: does nothing without -m", "add -m"),
    ("hydra.sweep.dir=x", "hydra.sweep.dir=x: does nothing without -m", "add -m"),
    ("-m hydra.run.dir=x", "hydra.run.dir=x: names the folder of a single "
                           "run", "hydra.sweep.dir=x"),
    ("-m train.stop_step=2", "train.stop_step=2: does nothing in a sweep", "train.max_steps=2"),
    ("train.max_steps=5 train.stop_step=6", "train.stop_step=6: is past the end of the "
                                            "run", "leave it out"),
    ("train.max_steps=5 "
     "train.profile_start=6", "train.profile_start=6: is past the end of", "train.profile_start=5"),
    ("schedule=constant schedule.end_ratio=0", "schedule=constant has no such knob",
    "cosine, inverse_sqrt, linear, power, wsd"),
    ("data=text data.train_files=good.txt data.val_files=good.txt data.val_ratio=0.3",
     "data.val_ratio=0.3: does nothing beside data.val_files=good.txt", "leave it out"),
    ("experiment=clipped --config-dir=own", "set in own/experiment/clipped.yaml",
    "take it out with ~clip.max_norm"),
    ("experiment=nowhere --config-dir=own", "own/experiment/nowhere.yaml must begin "
                                            "with", "# @package _global_"),
    # what does not fit together
    ("model.n_heads=3", "model.n_heads=3", "1, 2, 4"),
    ("batch.sequence_length=33", "batch.sequence_length=33", "32 positions"),
    ("model.vocab_size=100", "model.vocab_size=100", "257"),
    ("batch.real_batch_size=10 batch.micro_batch_size=3", "batch.real_batch_size=10", "9 or 12"),
    ("batch.real_batch_size=7 batch.micro_batch_size=2 batch.gradient_accumulation_steps=4",
     "batch.real_batch_size=7", "= 8"),
    ("batch.real_batch_size=10000", "batch.real_batch_size=10000", "374 training sequences"),
    ("batch.micro_batch_size=10000", "batch.micro_batch_size=10000: micro_batch_size 10000 "
                                     "x", "batch_size=374"),
    ("batch.gradient_accumulation_steps=500", "batch.gradient_accumulation_steps=500: "
                                              "micro_batch_size 8", "= 4000 is"),
    ("schedule=wsd schedule.warmup_steps=99 "
     "train.max_steps=100", "schedule.warmup_steps=99: the warm-up of 99 updates",
     "schedule.warmup_steps=80"),
    ("parallelism.nproc_per_node=2", "parallelism.nproc_per_node=2", "parallelism=ddp"),
    ("precision=tf32 train.device=cpu", "precision.kind=tf32", "precision=fp32"),
    # data
    ("data=text", "data.train_files=null", "glob"),
    ("data=text data.train_files=nope.txt", "data.train_files=nope.txt", "no file matches"),
    ("data=text data.train_files=empty.txt", "data.train_files=empty.txt", "empty"),
    ("data=text data.train_files=short.txt", "batch.sequence_length=12", "at least 13 training "
                                                                         "tokens"),
    ("data=text data.train_files=latin.txt", "latin.txt", "not UTF-8 at byte 60"),
    ("data=tokens data.train_files=odd.bin", "data.train_files=odd.bin", "101 bytes"),
    ("data=tokens data.train_files=[a.bin,b.bin]", "b.bin", "5000 at position 100"),
    ("data=tokens data.train_files=floats.npy", "data.train_files=floats.npy", "float64"),
    ("data=tokens data.train_files=a.bin data.dtype=int8", "data.dtype=int8", "uint16, int32"),
    ("data=text data.train_files=some.zst", "some.zst: is cut short or damaged", "get the file"),
    ("data=corpus", "data.sources: name one source", "data.sources.web.files=corpus/*.jsonl"),
    ("data=corpus data.sources.web.files=nope*", "data.sources.web.files=nope*: no file matches",
     "looked in"),
    ("data=corpus data.sources.web.file=good.txt", "data.sources.web.file: there is no such key",
     "Did you mean files?"),
    ("tokenizer=file", "tokenizer.path=null", "tokenizer.path=tokenizer.json"),
    ("tokenizer=file tokenizer.path=good.txt", "tokenizer.path=good.txt: is neither",
     "sentencepiece"),
    ("data=text data.train_files=pipe.txt", "pipe.txt is a pipe", "plain file"),
    ("data=tokens data.train_files=/dev/zero", "/dev/zero is a pipe or a device", "plain file"),
    # the folder
    ("name=../../x", "name='../../x'", "one folder name"),
    ("name=", "name=''", "one folder name"),
    ("name='a\nb'", r"name='a\nb'", "one folder name"),
    ("name=" + "x" * 300, "name='xxx", "80 characters"),
    ("hydra.run.dir=", "hydra.run.dir=", "a folder is needed"),
    ("hydra.run.dir=${nothing}", "hydra.run.dir:", "not found"),
    ("hydra.run.dir=good.txt/run", "hydra.run.dir=good.txt/run", "good.txt is not a folder"),
    # _target_
    ("model._target_=os.system", "model._target_=os.system", "--allow mypackage"),
    ("optimizer._target_=torch.optim.AdamW", "optimizer._target_=torch.optim.AdamW",
    "--allow mypackage"),
    ("hooks=[os.system]", "hooks=os.system", "--allow mypackage"),
]  # fmt: skip


@pytest.mark.parametrize(("overrides", "key", "valid"), BAD, ids=[b[0][:50] for b in BAD])
def test_plan_refuses(capsys, home, overrides, key, valid):
    base = [o for o in SYNTHETIC if not ("data=" in overrides and o.startswith("data"))]
    split = [overrides] if overrides.startswith("name=") else overrides.split(" ")
    message = refused(capsys, home, "plan", *base, *split)
    assert key in message
    assert valid in message
    assert message.startswith(("llmexp: ", "usage: "))
    assert "Did you mean" not in message or "Known:" not in message
    assert len(message.splitlines()) == 1 or message.startswith("usage: ")


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


def test_a_broken_yaml_of_the_user(capsys, home):
    assert "mine.yaml" in refused(capsys, home, "plan", "--config-dir", "bad", "model=mine")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["trian"], "Did you mean train?"),
        (["resume"], "run_dir"),
        (["resume", "nowhere"], "nowhere: is no run folder"),
        (["sample", "nowhere"], "nowhere: is no run folder"),
        (["sample", "nowhere", "--tokens", "0"], "--tokens 0: must be at least 1"),
        (["prepare", "data=txt"], "Did you mean text?"),
        (["train", "--allow"], "--allow mypackage"),
        (["train", "--allow", "mymodle"], "--allow mymodle: there is no such module"),
        (
            ["resume", "nowhere", "--allow=json,json.nothing"],
            "--allow json.nothing: there is no such module",
        ),
        (["train", "--config-dir"], "expected one argument"),
    ],
)
def test_commands(capsys, home, arguments, says):
    assert says in refused(capsys, home, *arguments)


SWEEPS = [
    (["clip=none,norm", "clip.max_norm=0.1,5.0"],
     "0-clip_none+max_norm_0.1, 1-clip_none+max_norm_5.0: clip.max_norm=0.1,5.0: does", "leave"),
    (["model.n_heads=2,3"], "1-n_heads_3: model.n_heads=3 does not divide", "1, 2, 4"),
    (["batch.real_batch_size=10", "batch.micro_batch_size=3,5"], "0-micro_batch_size_3: "
                                                                 "batch.real_batch_size=10", "9"),
    (["train.sed=1,2,3,4,5"], "0-sed_1, 1-sed_2, 2-sed_3 and 2 more: "
                              "train.sed:", "Did you mean train.seed?"),
    (["train.seed=1,x"], "1-seed_x: train.seed=x", "whole number"),
    (["train.seed=1,2", "hydra.sweep.subdir=same"], "1-seed_2: hydra.sweep.subdir: resolves to the "
                                                    "same", "as 0-"),
    (["clip.kind=norm,none", "clip.max_norm=null"], "1-kind_none: resolves to the same config as "
                                                    "0-kind_norm", "can"),
    (["optimizer.rule=sqrt,linear", "optimizer.reference={lr: 0.1, B: 96}",
    "batch.micro_batch_size=8,16"],
     "2-rule_linear+micro_batch_size_8: resolves to the same config as "
     "0-rule_sqrt+micro_batch_size_8", "cannot"),
    (["train.seed=1,2,1"], "2-seed_1: resolves to the same config as 0-seed_1; its values were "
     "given twice", "leave one out"),
    (["train.seed=interval(0,1)"], "train.seed=interval(0,1)", "train.seed=0.1,0.2"),
    (["schedule=glob(c*)", "optimizer.foo=1"], "optimizer.foo: there is no such key", "lr"),
    (["optimizer=glob(*)", "optimizer.foo=1"], "optimizer.foo: there is no such key", "lr"),
    (["train.seed=range(1,1)"], "train.seed=range(1,1): there is no such value", "to train"),
    (["optimizer=glob(z*)"], "optimizer=glob(z*): there is no such value", "nothing to train"),
    (["train.seed=1,2", "sweep.twins=1,2"], "sweep.twins=1,2: holds for all", "sweep.twins=1"),
    (["train.seed=1,2", "plan.device=l4,t4"], "plan.device=l4,t4: holds for all", "plan.device=l4"),
    (["train.seed=interval(0,1)", "optimizer.foo=1"], "optimizer.foo: there is no such key", "lr"),
    (["train.seed=1,2", "tracker.notes=${hydra.job.num}"], "0-seed_1, 1-seed_2: tracker.notes: ",
     "hydra.job.num"),
]  # fmt: skip


@pytest.mark.parametrize("sweep", SWEEPS, ids=lambda s: s[0][0])
def test_plan_of_a_sweep_names_the_refused_points(capsys, home, sweep):
    overrides, name, valid = sweep
    message = refused(capsys, home, "plan", "-m", *SYNTHETIC, *overrides)
    assert name in message
    assert valid in message


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
