"""A run goes out as a folder of Hugging Face and comes back as the first weights of another run, at
the command line."""

from __future__ import annotations

import ast
import json
import math
import os
import re
import shutil
import subprocess
import sys
import types
from dataclasses import replace
from pathlib import Path

import pytest
import tiktoken
import torch
from safetensors.torch import load_file, save_file

from llmexp.__main__ import run as command
from llmexp.data.tokenizers import as_tokenizer
from llmexp.exchange.tokenizer import tokenizer_files
from llmexp.models.hf import HuggingFace
from llmexp.runs import rundir
from llmexp.settings.config import Config
from llmexp.settings.values import ConfigError
from llmexp.train.assembly.assemble import assemble
from tests.conftest import PATHS, ROOT, TINY, Result, environment, llmexp, start, train
from tests.tools import amend, composed, run_here, same_state, wait_for, weights


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Result:
    folder = tmp_path_factory.mktemp("inout")
    more = ("train.max_steps=4", "checkpoint.every=2", "train.log_every=1", "data.max_tokens=20000")
    result = train(folder, "a", *more)
    assert command(["export", str(result.folder), "--to", "hf", str(folder / "hf")]) == 0
    return result


@pytest.fixture(scope="module")
def config() -> Config:
    return composed(*TINY)


LLAMA = {
    "model_type": "llama",
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 32,
    "rope_scaling": {"rope_type": "llama3", "factor": 8},
}


def told(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    capsys.readouterr()
    assert command(list(arguments)) == 2
    return capsys.readouterr().err


def test_transformers_gives_the_same_ids_and_logits(trained: Result) -> None:
    folder = trained.folder.parent / "hf"
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    text = "The na\u00efve fox's 12 dogs\n\n"
    assert tokenizer(text)["input_ids"] == list(text.encode())
    assert tokenizer.eos_token_id == 256
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    found = model.state_dict()
    own = weights(trained, 4)
    kept = own["token_embedding.weight"][:257]  # without the padding to 320
    assert torch.equal(found["transformer.wte.weight"].double(), kept)
    assert (model.config.vocab_size, model.config.n_ctx) == (257, 32)
    page = (folder / "README.md").read_text()
    assert "| vocabulary | 257 ids; 63 rows of padding left out |" in page
    assert "| stored as | float32 |" in page
    assert f"| val/loss (step 4) | {trained.rows()[-1]['val/loss']:.4f} |" in page


# From a folder of Hugging Face the next test begins a run.
@pytest.mark.parametrize(
    ("source", "same"), [pytest.param("hf", "hf", marks=pytest.mark.slow), ("a", "a@4")]
)
@pytest.mark.usefixtures("forking")
def test_a_run_begins_with_the_weights_and_goes_on_without_them(
    trained: Result, source: str, same: str, tmp_path: Path
) -> None:
    shutil.copytree(trained.folder.parent / source, tmp_path / source)
    more = ["data.max_tokens=20000", "train.max_steps=3"]
    more += ["checkpoint.save_initial=true", "checkpoint.every=1", "checkpoint.keep=null"]
    stopped = [*TINY, *more, "hydra.run.dir=b", "train.stop_step=2"]
    first = llmexp("train", *stopped, f"model.init_from={source}", cwd=tmp_path)
    assert first.code == 75, first.err
    begun, given = weights(first, 0), weights(trained, 4)
    for key, tensor in given.items():  # an export has no padding of the vocabulary
        assert torch.equal(begun[key], tensor[: len(begun[key])])
    assert len(begun["token_embedding.weight"]) == (257 if source == "hf" else 320)
    assert source in json.loads((first.folder / "run.json").read_text())["initial"]
    whole = train(tmp_path, "c", *more, f"model.init_from={same}")
    shutil.rmtree(tmp_path / source)
    assert command(["resume", str(first.folder)]) == 0
    same_state(first.checkpoint(3), whole.checkpoint(3))


def test_a_larger_vocabulary_is_refused_or_grown(
    trained: Result, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = trained.folder.parent / "hf"
    more = [f"model.init_from={source}", "model.vocab_size=384", "data.max_tokens=20000"]
    text = told(capsys, "plan", *TINY, *more, "model.n_layers=3")
    assert "model.n_layers=2" in text
    assert "model.vocab_size=257 (or model.init_grow=true)" in text
    more += ["model.init_grow=true", "checkpoint.save_initial=true", "train.max_steps=1"]
    grown, given = weights(train(tmp_path, "b", *more), 0), weights(trained, 4)
    key = "token_embedding.weight"
    assert torch.equal(grown[key][:257], given[key][:257])
    assert grown[key][257:].std() == pytest.approx(0.02, rel=0.2)  # 127 x 16 of them
    assert torch.equal(grown["final_norm.weight"], given["final_norm.weight"])


def broken(folder: Path, what: str) -> None:
    """Spoil a copy of a Hugging Face folder."""
    if what == "pickle":
        (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    elif what == "cut":
        (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:99])
    elif what == "gone":
        (folder / "model.safetensors").unlink()
    elif what == "lacking":
        tensors = load_file(folder / "model.safetensors")
        del tensors["transformer.ln_f.bias"]
        save_file(tensors, folder / "model.safetensors")
    elif what in ("few rows", "whole numbers", "not finite"):
        tensors = load_file(folder / "model.safetensors")
        bias = tensors["transformer.ln_f.bias"]
        changed = {"few rows": bias[:-1].clone(), "whole numbers": bias.to(torch.int8)}
        other = changed.get(what, bias.where(bias != bias[3], math.inf))
        save_file({**tensors, "transformer.ln_f.bias": other}, folder / "model.safetensors")
    elif what == "index":
        (folder / "model.safetensors.index.json").write_text('{"weight_map": ["a"]}')
    elif what == "tokenizer":
        made = tokenizer_files(as_tokenizer(pretrained_pieces()), 32)
        (folder / "tokenizer.json").write_text(str(made["tokenizer.json"]))
    else:
        change = json.loads(what) if what.startswith("{") else {"model_type": what}
        amend(folder / "config.json", **change)


def pretrained_pieces() -> tiktoken.Encoding:
    """Return an encoding of bytes in which "he" is a token as well."""
    ranks = {bytes([b]): b for b in range(256)} | {b"he": 256}
    return tiktoken.Encoding(
        "pieces", pat_str=r"[\s\S]+", mergeable_ranks=ranks, special_tokens={"<|endoftext|>": 257}
    )


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("pickle", "holds pickled weights (pytorch_model.bin), which may run code"),
        ("cut", "cannot be read"),
        ("gone", "model.safetensors is missing; download it again"),
        ("lacking", "lacks tensors: transformer.ln_f.bias"),
        ("bert", "model_type=bert: no model of ours computes it; known: gpt2, llama, mistral"),
        ("llama", "config.json: lacks hidden_size"),
        ("few rows", "has other tensors; differing: transformer.ln_f.bias"),
        ("whole numbers", "holds weights of type I8; known: BF16, F16, F32, F64"),
        ("not finite", "transformer.ln_f.bias has values that are not finite"),
        ("index", "index.json: holds no weight_map"),
        ("tokenizer", "gives other ids than that of this run (bytes)"),
        ('{"vocab_size": "320"}', "vocab_size='320': must be of type int"),
        (json.dumps(LLAMA), "rms_norm_eps"),
        (json.dumps({**LLAMA, "rms_norm_eps": 1e-5}), "low_freq_factor=None: must be a number"),
    ],
)
def test_weights_that_do_not_fit_are_refused(
    trained: Result, config: Config, what: str, text: str, tmp_path: Path
) -> None:
    shutil.copytree(trained.folder.parent / "hf", tmp_path / "hf")
    broken(tmp_path / "hf", what)
    model = config.model | {"init_from": str(tmp_path / "hf"), "vocab_size": 257}
    with pytest.raises(ConfigError, match=re.escape(text)) as refusal:
        assemble(replace(config, model=model)).new_model()  # values where they are read, once
    found = str(refusal.value)
    assert found.startswith("model.init_from=")
    assert found.partition("; use ")[0].count(str(tmp_path)) == 1  # the folder, once


def test_a_run_that_cannot_be_begun_from_is_refused(
    trained: Result, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refusal(source: Path) -> str:
        return told(capsys, "plan", *TINY, f"model.init_from={source}")

    run = tmp_path / "a"
    shutil.copytree(trained.folder, run)
    step = run / "checkpoints" / "step_00000004"
    assert "is a file; name the folder" in refusal(step / "model.safetensors")
    assert f"is a checkpoint; name it {run}@4" in refusal(step)
    with rundir.locked(run):
        assert f"is being trained; name a step, for example {run}@4" in refusal(run)
    content = bytearray((step / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (step / "model.safetensors").write_bytes(content)
    assert command(["plan", *TINY, f"model.init_from={run}"]) == 0  # which reads no values
    two = ["parallelism=fsdp", "parallelism.nproc_per_node=2"]
    for layout in (two, []):  # a refused run does not hold its folder against the next try
        words = [f"model.init_from={run}", *layout, "hydra.run.dir=again"]
        done = llmexp("train", *TINY, *words, cwd=tmp_path)
        assert done.code == 2
        assert f"model.init_from={run}: " in done.err
        assert "does not match the size and sha256" in done.err
    assert command(["runs", str(tmp_path / "again")]) == 2


def test_a_model_of_transformers_trains_as_ours_does(
    trained: Result, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = trained.folder.parent / "hf"
    more = ["data.max_tokens=20000", "train.max_steps=3", "train.log_every=1"]
    ours = train(tmp_path, "ours", *more, f"model.init_from={folder}").rows()
    theirs = llmexp(
        "train",
        *(option for option in TINY if not option.startswith("model")),
        *("model=hf", f"model.path={folder}", "hydra.run.dir=theirs", *more),
        cwd=tmp_path,
    )
    assert theirs.code == 0, theirs.err
    for key in ("train/loss", "grad_norm"):
        expected = [row[key] for row in ours]
        assert [row[key] for row in theirs.rows()] == pytest.approx(expected, rel=1e-4), key
    assert command(["export", str(theirs.folder), "--to", "hf", str(tmp_path / "out")]) == 0
    import transformers

    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    for name, tensor in weights(theirs, 3).items():
        assert torch.equal(again[name.removeprefix("model.")].double(), tensor), name
    assert "config.json is needed" in told(capsys, "plan", "model=hf", "model.path=nowhere")
    for kind in ("[]", "{", '{"model_type": "t5"}', '{"model_type": "none"}', '{"auto_map": 1}'):
        (tmp_path / "kind").mkdir(exist_ok=True)
        (tmp_path / "kind" / "config.json").write_text(kind)
        with pytest.raises(ConfigError, match=r"^model\.path=.*/kind: ") as refused:
            HuggingFace(str(tmp_path / "kind"), pretrained=False)
        assert refused.value.key == "model.path"
    for what, text in (
        ("cut", "cannot be read"),
        ("pickle", "holds pickled weights (pytorch_model.bin)"),
        ("gone", "model.safetensors is missing"),
    ):
        shutil.copytree(folder, tmp_path / what)
        broken(tmp_path / what, what)
        assert text in told(capsys, "plan", "model=hf", f"model.path={tmp_path / what}", *TINY[6:7])
    for what, text in (
        ("lacking", "its weights lack transformer"),
        ("not finite", "transformer.ln_f.bias has values that are not finite"),
    ):
        shutil.copytree(folder, tmp_path / what)
        broken(tmp_path / what, what)
        with pytest.raises(ConfigError, match=text) as lacking:
            HuggingFace(str(tmp_path / what))
        assert lacking.value.key == "model.path"


MARK = "import pathlib\npathlib.Path({!r}).write_text('ran')\n"


def test_the_dropout_of_a_folder_applies_and_is_named(
    trained: Result, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also with its weights, which transformers reads into a model in evaluation."""
    folder = tmp_path / "dropped"
    shutil.copytree(trained.folder.parent / "hf", folder)
    described = json.loads((folder / "config.json").read_text())
    described |= {"resid_pdrop": 0.3, "attn_pdrop": 0.0, "embd_pdrop": 0.0}
    (folder / "config.json").write_text(json.dumps(described))
    rest = [option for option in TINY if not option.startswith("model")]
    capsys.readouterr()
    assert command(["plan", "model=hf", f"model.path={folder}", *rest, "data.max_tokens=9999"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "dropout 0.3 in training" in out
    assert "in evaluation, as its code says" not in out
    assert all(module.training for module in HuggingFace(str(folder)).modules())


def test_code_of_a_folder_is_never_run(tmp_path: Path) -> None:
    folder, mark = tmp_path / "own", tmp_path / "ran"
    folder.mkdir()
    (folder / "modeling_own.py").write_text(MARK.format(str(mark)))
    config = {"model_type": "own", "auto_map": {"AutoConfig": "modeling_own.Config"}}
    (folder / "config.json").write_text(json.dumps(config))
    done = subprocess.run(
        [sys.executable, "-m", "llmexp", "plan", "model=hf", f"model.path={folder}", "--json"],
        cwd=tmp_path, env=environment(PYTHONPATH=PATHS), input="y\n", text=True,
        capture_output=True,
    )  # fmt: skip
    assert (done.returncode, list(json.loads(done.stdout))) == (2, ["error"])  # no prompt beside it
    assert "code in the folder (auto_map: {'AutoConfig': 'modeling_own.Config'})" in done.stderr
    assert not mark.exists()


def test_no_call_of_transformers_trusts_code_of_a_folder() -> None:
    names = ("from_pretrained", "from_config")
    texts = {file: file.read_text() for file in (ROOT / "llmexp").rglob("*.py")}
    for file, text in texts.items():
        for node in ast.walk(ast.parse(text)) if any(name in text for name in names) else ():
            called = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
            if called and node.func.attr in names:
                given = {word.arg: ast.unparse(word.value) for word in node.keywords}
                assert given.get("trust_remote_code") == "False", f"{file}:{node.lineno}"


def test_sizes_come_from_the_folder(
    trained: Result, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    begin = f"model.init_from={trained.folder.parent / 'hf'}"
    sizes = {"n_layers": 2, "n_heads": 2, "d_model": 16, "d_ff": 24, "vocab_size": 257}
    for first in (begin, f"model.init_from={trained.folder}"):
        plan = ["plan", "model=gpt2_small", first, "batch.sequence_length=12", "--json"]
        assert command(plan) == 0
        found = json.loads(capsys.readouterr().out)
        wanted = sizes | {"vocab_size": 257 if first == begin else 320}
        for key, value in wanted.items():
            assert f"{key}={value}" in found["initial"]
    given = ["model=gpt2_small", begin, "batch.sequence_length=12"]
    text = told(capsys, "plan", *given, "model.n_layers=3", "model.d_ff=99")
    assert "needs model.n_layers=2 model.d_ff=24\n" in text
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "own.yaml").write_text("# @package _global_\nmodel:\n  d_ff: 99\n")
    own = ["experiment=own", "--config-dir", str(tmp_path)]
    assert "needs model.d_ff=24\n" in told(capsys, "plan", *given, *own)
    assert "choose model=gpt2_small" in told(capsys, "plan", "model=llama_100m", *given[1:])


def test_an_export_is_checked_where_transformers_is(
    trained: Result,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    export = ("export", str(trained.folder), "--to", "hf", str(tmp_path / "out"))
    kept = run_here(capfd, *export, "--keep-padding", "--no-check", "--dtype", "bf16")
    assert kept.code == 0
    assert "left out" not in kept.out
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["vocab_size"] == 320
    page = (tmp_path / "out" / "README.md").read_text()
    assert "| stored as | bfloat16, rounded from float32 |" in page
    shutil.rmtree(tmp_path / "out")
    assert llmexp(*export, cwd=tmp_path).err == ""  # in a process of its own
    shutil.rmtree(tmp_path / "out")
    monkeypatch.setitem(sys.modules, "transformers", None)
    done = run_here(capfd, *export)
    assert done.code == 0
    assert "note: not checked: the package transformers is missing" in done.err
    assert "left out: 63 rows of the vocabulary" in done.out
    shutil.rmtree(tmp_path / "out")
    other = types.ModuleType("transformers")
    exec(OTHER_IDS, vars(other))
    monkeypatch.setitem(sys.modules, "transformers", other)
    done = run_here(capfd, *export)
    assert done.code == 2
    assert "Wrong of transformers 9 gives other ids than bytes" in done.err
    assert not list(tmp_path.glob("*out*"))


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


def test_the_next_export_removes_the_draft_of_a_killed_one(
    trained: Result, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "transformers.py").write_text("import time\ntime.sleep(99)\n")
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


def test_exports_that_cannot_be_are_refused(
    trained: Result, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, out = str(trained.folder), str(tmp_path / "out")
    assert "those of 2, 4" in told(capsys, "export", f"{run}@3", "--to", "hf", out)
    there = str(trained.folder.parent / "hf")
    assert "is there already" in told(capsys, "export", run, "--to", "hf", there)
    assert not Path(out).exists()
    readonly = told(capsys, "export", run, "--to", "hf", "/proc/out")
    assert readonly.startswith("llmexp: /proc/out: /proc cannot be written: ")
    assert readonly.endswith("; for example /tmp/new\n")
