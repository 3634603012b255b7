"""A run goes out as a folder of Hugging Face and comes back as the first weights of another run, at
the command line; tests/refusals/hf.yaml has what is refused."""

import ast
import io
import json
import math
import os
import re
import shutil
import sys
import types
from dataclasses import replace
from pathlib import Path

import pytest
import tiktoken
import torch
from safetensors.torch import load_file, save_file

from llmexp.__main__ import run as command
from llmexp.config.values import ConfigError
from llmexp.data.tokenizers.base import as_tokenizer
from llmexp.folders import rundir
from llmexp.hf.tokenizer import tokenizer_files
from llmexp.models.hf import HuggingFace
from llmexp.train.assembly.assemble import assemble
from tests.conftest import PATHS, ROOT, TINY, Result, llmexp, start, train
from tests.tools import amend, composed, run_here, same_state, wait_for, weights

DATA = ["data=synthetic", "data.n_tokens=5000"]
NO_MODEL = [*DATA, *(option for option in TINY if not option.startswith("model"))]


@pytest.fixture(scope="module")
def trained(runs) -> Result:
    return runs(*DATA, "train.max_steps=4", "checkpoint.every=2")


@pytest.fixture(scope="module")
def hf(trained, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("inout") / "hf"
    assert command(["export", str(trained.folder), "--to", "hf", str(folder)]) == 0
    return folder


def test_transformers_gives_the_same_ids_and_logits(trained, hf, words):
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(hf)
    text = "The na\u00efve fox's 12 dogs\n\n"
    assert tokenizer(text)["input_ids"] == list(text.encode())
    assert tokenizer.eos_token_id == 256
    model = transformers.AutoModelForCausalLM.from_pretrained(hf)
    kept = weights(trained, 4)["token_embedding.weight"][:257]  # without the padding to 320
    assert torch.equal(model.state_dict()["transformer.wte.weight"].double(), kept)
    assert (model.config.vocab_size, model.config.n_ctx) == (257, 32)
    page = (hf / "README.md").read_text()
    assert f"| val/loss (step 4) | {trained.rows()[-1]['val/loss']:.4f} |" in page
    words.hidden |= {r"\d+\.\d+\S*": "N", r"\| llmexp commit .*\n": ""}
    words("hf/card", page.partition("The config of the run")[0])


# From a folder of Hugging Face the next test begins a run.
@pytest.mark.usefixtures("forking")
def test_a_run_begins_with_the_weights_and_goes_on_without_them(trained, tmp_path):
    shutil.copytree(trained.folder, tmp_path / "a")
    more = [*DATA, "train.max_steps=3"]
    more += ["checkpoint.save_initial=true", "checkpoint.every=1", "checkpoint.keep=null"]
    stopped = [*TINY, *more, "hydra.run.dir=b", "train.stop_step=2"]
    first = llmexp("train", *stopped, "model.init_from=a", cwd=tmp_path)
    assert first.code == 75, first.err
    begun, given = weights(first, 0), weights(trained, 4)
    assert all(torch.equal(begun[key], tensor) for key, tensor in given.items())
    assert "a" in json.loads((first.folder / "run.json").read_text())["initial"]
    whole = train(tmp_path, "c", *more, "model.init_from=a@4")
    shutil.rmtree(tmp_path / "a")
    assert command(["resume", str(first.folder)]) == 0
    same_state(first.checkpoint(3), whole.checkpoint(3))


def test_a_larger_vocabulary_is_grown(trained, hf, tmp_path):
    more = [*DATA, f"model.init_from={hf}", "model.vocab_size=384", "model.init_grow=true"]
    more += ["checkpoint.save_initial=true", "train.max_steps=1"]
    grown, given = weights(train(tmp_path, "b", *more), 0), weights(trained, 4)
    key = "token_embedding.weight"
    assert torch.equal(grown[key][:257], given[key][:257])
    assert grown[key][257:].std() == pytest.approx(0.02, rel=0.2)  # 127 x 16 of them
    assert torch.equal(grown["final_norm.weight"], given["final_norm.weight"])


def spoil(folder: Path, what: str) -> None:
    """Spoil a tensor, or the tokenizer, of a copy of a Hugging Face folder."""
    if what == "tokenizer":  # "he" is a token as well
        ranks = {bytes([b]): b for b in range(256)} | {b"he": 256}
        special = {"special_tokens": {"<|endoftext|>": 257}}
        pieces = tiktoken.Encoding("he", pat_str=r"[\s\S]+", mergeable_ranks=ranks, **special)
        made = tokenizer_files(as_tokenizer(pieces), 32)
        (folder / "tokenizer.json").write_text(str(made["tokenizer.json"]))
        return
    tensors = load_file(folder / "model.safetensors")
    bias = tensors.pop("transformer.ln_f.bias")
    changed = {
        "few rows": {"transformer.ln_f.bias": bias[:-1].clone()},
        "whole numbers": {"transformer.ln_f.bias": bias.to(torch.int8)},
        "not finite": {"transformer.ln_f.bias": bias.where(bias != bias[3], math.inf)},
    }
    save_file({**tensors, **changed.get(what, {})}, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("what", "text", "of_theirs"),
    [
        ("lacking", "lacks tensors: transformer.ln_f.bias", "its weights lack transformer"),
        ("few rows", "has other tensors; differing: transformer.ln_f.bias", None),
        ("whole numbers", "holds weights of type I8; known: BF16, F16, F32, F64", None),
        ("not finite", "transformer.ln_f.bias has values that are not finite", "not finite"),
        ("tokenizer", "gives other ids than that of this run (bytes)", None),
    ],
)
def test_weights_that_do_not_fit_are_refused(hf, what, text, of_theirs, tmp_path):
    shutil.copytree(hf, tmp_path / "hf")
    spoil(tmp_path / "hf", what)
    config = composed(*TINY)
    model = config.model | {"init_from": str(tmp_path / "hf"), "vocab_size": 257}
    with pytest.raises(ConfigError, match=re.escape(text)) as refusal:
        assemble(replace(config, model=model)).new_model()  # values where they are read, once
    found = str(refusal.value)
    assert found.startswith("model.init_from=")
    assert found.partition("; use ")[0].count(str(tmp_path)) == 1  # the folder, once
    if of_theirs:
        with pytest.raises(ConfigError, match=of_theirs) as refusal:
            HuggingFace(str(tmp_path / "hf"))
        assert refusal.value.key == "model.path"


def test_a_run_that_cannot_be_begun_from_is_refused(trained, tmp_path, capsys):
    run = tmp_path / "a"
    shutil.copytree(trained.folder, run)
    plan = ["plan", *TINY, *DATA, f"model.init_from={run}"]
    with rundir.locked(run):
        assert command(plan) == 2
        assert f"is being trained; name a step, for example {run}@4" in capsys.readouterr().err
    weights = run / "checkpoints/step_00000004/model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    assert command(plan) == 0  # which reads no values
    two = ["parallelism=fsdp", "parallelism.nproc_per_node=2"]
    for layout in (two, []):  # a refused run does not hold its folder against the next try
        done = llmexp("train", *plan[1:], *layout, "hydra.run.dir=again", cwd=tmp_path)
        assert done.code == 2
        assert f"model.init_from={run}: " in done.err
        assert "does not match the size and sha256" in done.err
    assert command(["runs", str(tmp_path / "again")]) == 2


def test_a_model_of_transformers_trains_as_ours_does(hf, tmp_path):
    import transformers

    more = [*DATA, "train.max_steps=3", "train.log_every=1"]
    ours = train(tmp_path, "ours", *more, f"model.init_from={hf}").rows()
    given = ["model=hf", f"model.path={hf}", "hydra.run.dir=theirs", *more]
    theirs = llmexp("train", *NO_MODEL, *given, cwd=tmp_path)
    assert theirs.code == 0, theirs.err
    for key in ("train/loss", "grad_norm"):
        expected = [row[key] for row in ours]
        assert [row[key] for row in theirs.rows()] == pytest.approx(expected, rel=1e-4), key
    assert command(["export", str(theirs.folder), "--to", "hf", str(tmp_path / "out")]) == 0
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    for name, tensor in weights(theirs, 3).items():
        assert torch.equal(again[name.removeprefix("model.")].double(), tensor), name


def test_the_dropout_of_a_folder_applies_and_is_named(hf, tmp_path, capsys):
    """Also with its weights, which transformers reads into a model in evaluation."""
    folder = tmp_path / "dropped"
    shutil.copytree(hf, folder)
    amend(folder / "config.json", resid_pdrop=0.3, attn_pdrop=0.0, embd_pdrop=0.0)
    assert command(["plan", "model=hf", f"model.path={folder}", *NO_MODEL]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "dropout 0.3 in training" in out
    assert "in evaluation, as its code demands" not in out
    assert all(module.training for module in HuggingFace(str(folder)).modules())


def test_code_of_a_folder_is_never_run(tmp_path, monkeypatch, capfd):
    """Nor does anyone ask whether to: there is no prompt beside the answer."""
    folder, mark = tmp_path / "own", tmp_path / "ran"
    folder.mkdir()
    (folder / "modeling_own.py").write_text(f"open({str(mark)!r}, 'w').close()\n")
    config = {"model_type": "own", "auto_map": {"AutoConfig": "modeling_own.Config"}}
    (folder / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n"))
    done = run_here(capfd, "plan", "model=hf", f"model.path={folder}", "--json")
    assert (done.code, list(json.loads(done.out))) == (2, ["error"])
    assert "auto_map: {'AutoConfig': 'modeling_own.Config'}" in done.err
    assert not mark.exists()


def test_no_call_of_transformers_trusts_code_of_a_folder():
    names = ("from_pretrained", "from_config")
    texts = {file: file.read_text() for file in (ROOT / "llmexp").rglob("*.py")}
    for file, text in texts.items():
        for node in ast.walk(ast.parse(text)) if any(name in text for name in names) else ():
            called = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
            if called and node.func.attr in names:
                given = {word.arg: ast.unparse(word.value) for word in node.keywords}
                assert given.get("trust_remote_code") == "False", f"{file}:{node.lineno}"


def test_sizes_come_from_the_folder(trained, hf, capsys):
    sizes = {"n_layers": 2, "n_heads": 2, "d_model": 16, "d_ff": 24}
    for source, ids in ((hf, 257), (trained.folder, 320)):
        given = [f"model.init_from={source}", *DATA, "batch.sequence_length=12"]
        assert command(["plan", "model=gpt2_small", *given, "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        for key, value in (sizes | {"vocab_size": ids}).items():
            assert f"{key}={value}" in found["initial"]


# A library in the place of transformers that reads a text otherwise.
OTHER_IDS = """
from safetensors.torch import load_file
__version__ = "9"
class Model:
    def __init__(self, folder): self.state = load_file(folder / "model.safetensors")
    def state_dict(self): return self.state
    def named_parameters(self): return self.state.items()
class AutoConfig:
    from_pretrained = staticmethod(lambda folder, **more: folder)
class AutoModelForCausalLM:
    from_config = staticmethod(lambda folder, **more: Model(folder))
class Wrong:
    def __call__(self, text, **more): return {"input_ids": [0]}
class AutoTokenizer:
    from_pretrained = staticmethod(lambda folder, **more: Wrong())
"""


def test_an_export_is_checked_where_transformers_is(trained, tmp_path, monkeypatch, capfd):
    out = tmp_path / "out"
    export = ("export", str(trained.folder), "--to", "hf", str(out))
    kept = run_here(capfd, *export, "--keep-padding", "--no-check", "--dtype", "bf16")
    assert (kept.code, "left out" in kept.out) == (0, False)
    assert json.loads((out / "config.json").read_text())["vocab_size"] == 320
    assert "| stored as | bfloat16, rounded from float32 |" in (out / "README.md").read_text()
    shutil.rmtree(out)
    assert llmexp(*export, cwd=tmp_path).err == ""  # in a process of its own
    shutil.rmtree(out)
    monkeypatch.setitem(sys.modules, "transformers", None)
    done = run_here(capfd, *export)
    assert done.code == 0
    assert "not checked: the package transformers is missing" in done.err
    assert "left out: 63 rows of the vocabulary" in done.out
    shutil.rmtree(out)
    other = types.ModuleType("transformers")
    exec(OTHER_IDS, vars(other))
    monkeypatch.setitem(sys.modules, "transformers", other)
    done = run_here(capfd, *export)
    assert done.code == 2
    assert "Wrong of transformers 9 gives other ids than bytes" in done.err
    assert not list(tmp_path.glob("*out*"))
    refused = run_here(capfd, *export[:-1], "/proc/out")
    assert (refused.code, "/proc/out: /proc cannot be written: " in refused.err) == (2, True)


def test_the_next_export_removes_the_draft_of_a_killed_one(trained, tmp_path, monkeypatch):
    (tmp_path / "transformers.py").write_text("import time\ntime.sleep(9999)\n")
    paths = os.pathsep.join([str(tmp_path), PATHS])
    words = ("export", str(trained.folder), "--to", "hf", "out")
    monkeypatch.chdir(tmp_path)
    killed = start(*words, cwd=tmp_path, PYTHONPATH=paths)
    try:
        wait_for(lambda: list(tmp_path.glob(".out.*.tmp/README.md")), killed)
        assert command([*words, "--no-check"]) == 0
        assert len(list(tmp_path.glob(".out.*.tmp"))) == 1  # it leaves the draft of one at work
    finally:
        killed.kill()
        killed.communicate()
    shutil.rmtree(tmp_path / "out")
    assert len(list(tmp_path.glob(".out.*.tmp"))) == 1
    assert command([*words, "--no-check"]) == 0
    assert not list(tmp_path.glob(".out.*.tmp"))
