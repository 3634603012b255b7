"""Every shipped YAML composes, fits its function and runs for a step; every knob says what it is;
the wheel works."""

import csv
import dataclasses
import importlib.metadata
import importlib.util
import json
import re
import shutil
import statistics
import subprocess
import sys
import typing
import zipfile
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import yaml

from llmexp import __version__
from llmexp.__main__ import COMMANDS, run
from llmexp.config.knobs import dead, fields
from llmexp.config.sections import Config
from llmexp.config.values import flatten
from llmexp.data.tokenizers.training import train_bpe
from llmexp.tracker.stores import STORES
from tests.conftest import ROOT, SHARED, TINY, environment, llmexp
from tests.tools import HAS_CUDA, PACKAGE_OF, option
from tools import comments, reference

CONF = ROOT / "conf"
OPTIONS = {
    folder.name: sorted(p.stem for p in folder.glob("*.yaml"))
    for folder in sorted(CONF.iterdir())
    if folder.is_dir() and folder.name not in ("base", "hydra")
}
OPTIONS["model"].remove("hf")  # it needs a folder: tests/exchange
GROUPS = [name for name in OPTIONS if name != "experiment"]
SECTIONS = typing.get_type_hints(Config)
# Models at a size at which a step costs nothing, for any of them.
SHRUNK = {"n_layers": 1, "n_heads": 2, "n_kv_heads": 1, "d_model": 16, "d_ff": 16,
          "max_position_embeddings": 16, "vocab_size": 320}  # fmt: skip
# Overrides that an option needs beside itself.
NEEDS = {
    "text": ["data.train_files=words.txt"],
    "tokens": ["data.train_files=ids.bin"],
    "stdlib": ["data.max_tokens=4000"],
    "synthetic": ["data.n_tokens=4000"],
    "corpus": ["data.sources.words.files=words.txt"],
    "file": ["tokenizer.path=tokenizer.json"],
    "library": ["optimizer.name=RAdam"],
}
NEEDS_A_GPU = {("precision", "tf32")}
NEEDS_FILES = {("tokenizer", name) for name in ("gpt2", "cl100k_base", "o200k_base")}


@pytest.fixture(scope="module")
def work(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("shipped")
    (folder / "words.txt").write_text("so many words, so little time. " * 150)
    trained = train_bpe(["so many words, so little time. " * 9], 260, "gpt2")
    (folder / "tokenizer.json").write_text(trained.tokenizer_json)
    (np.arange(4000) % 250).astype(np.uint16).tofile(folder / "ids.bin")
    return folder


@pytest.fixture(scope="module")
def tiktoken_cache(work) -> Path:
    """A copy: tiktoken deletes a file that it takes for damaged."""
    if not (SHARED / "tiktoken").is_dir():
        pytest.skip("the tokenizers' files are not on this machine")
    return Path(shutil.copytree(SHARED / "tiktoken", work / "tiktoken", dirs_exist_ok=True))


def test_files_say_what_they_are_for_and_what_the_declarations_say_of_the_knobs():
    for path in (CONF / "experiment").glob("*.yaml"):
        assert path.read_text().splitlines()[1].startswith("# "), path  # after @package
    for path in comments.files():
        written = path.read_text(encoding="utf-8")
        assert written == comments.commented(path), f"{path.name}: python -m tools.comments"


def test_closed_sections_list_every_knob_that_acts():
    """A knob that is in no YAML cannot be found, and cannot be overridden without a +; one that
    does nothing in an option is not listed there."""
    main = yaml.safe_load((CONF / "config.yaml").read_text())
    for section in (name for name, kind in SECTIONS.items() if dataclasses.is_dataclass(kind)):
        known = {key for key in fields() if key.startswith(f"{section}.")}
        if section in main:
            assert set(flatten({section: main[section]})) == known
        for name in OPTIONS[section] if section not in main else ():
            tree = flatten({section: option(f"{section}/{name}")})
            assert set(tree) == known - set(dead({key: tree.get(key) for key in known})), name


@pytest.mark.parametrize(
    ("name", "parameters"), [("gpt2_xl", "1,557,611,200"), ("llama3_8b", "8,030,261,248")]
)
def test_models_of_full_size_are_planned(name, parameters, work, capsys, monkeypatch):
    """On the meta device: no memory, no time. tests/models/test_model_configs.py counts the
    parameters of all."""
    monkeypatch.chdir(work)
    assert run(["plan", f"model={name}", "data=synthetic", "batch.sequence_length=256"]) == 0
    assert f" x d_model, {parameters} parameters" in " ".join(capsys.readouterr().out.split())


def kinds_of_models() -> list[str]:
    """One of several models that differ in numbers only; tests/test_knobs.py trains with others."""
    found: dict[str, str] = {}
    for name in OPTIONS["model"]:
        knobs = option(f"model/{name}")
        kept = {k: v for k, v in knobs.items() if k not in (*SHRUNK, "head_dim")}
        kind = {k: v if isinstance(v, str | bool) else type(v) for k, v in kept.items()}
        found.setdefault(str(kind), name)
    return list(found.values())


def rounds() -> list[list[tuple[str, str]]]:
    """Runs that together take every option of every group, as many as the largest group needs."""

    missing = NEEDS_FILES | (set() if HAS_CUDA else NEEDS_A_GPU)
    missing |= {("tracker", name) for name in STORES if find_spec(name) is None}
    missing |= {("optimizer", n) for n, package in PACKAGE_OF.items() if find_spec(package) is None}
    there = {g: [o for o in OPTIONS[g] if (g, o) not in missing] for g in GROUPS}
    there["model"] = kinds_of_models()
    count = max(map(len, there.values()))
    there["tracker"] += ["none"] * (count - len(there["tracker"]))  # wandb takes a second
    return [[(g, options[n % len(options)]) for g, options in there.items()] for n in range(count)]


@pytest.mark.parametrize("choice", rounds(), ids=lambda c: ",".join(option for _, option in c))
def test_every_option_trains_for_two_steps(choice, work):
    picked = dict(choice)
    if picked["clip"] == "update":  # which limits AdamW's
        picked["optimizer"] = "adamw"
    overrides = [word for group, chosen in picked.items()
                 for word in (f"{group}={chosen}", *NEEDS.get(chosen, []))]  # fmt: skip
    sizes = option(f"model/{picked['model']}").keys() & SHRUNK.keys()
    result = llmexp(
        "train", *overrides, *(f"model.{name}={SHRUNK[name]}" for name in sizes),
        "batch.sequence_length=16", "batch.micro_batch_size=2", "train.max_steps=2",
        "train.log_every=1", "train.eval_tokens=64", "train.sample_tokens=4",
        "checkpoint.every=null", f"hydra.run.dir={'_'.join(picked.values())}", cwd=work,
    )  # fmt: skip
    assert result.code == 0, result.err
    rows = result.rows()
    assert [row["step"] for row in rows] == [1, 2]
    assert all(3 < row["train/loss"] < 9 for row in rows)  # about log(320) = 5.8
    computed = result.json("run.json")["precision"]
    assert computed == picked["precision"] or (
        picked["precision"] == "auto" and computed in ("fp32", "bf16")
    )
    assert ("grad_norm_post_clip" in rows[0]) == ("grad_norm" in rows[0])


@pytest.mark.parametrize("tokenizer", [name for group, name in sorted(NEEDS_FILES)])
def test_tokenizers_with_files(tokenizer, work, tiktoken_cache, capsys, monkeypatch):
    monkeypatch.chdir(work)
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tiktoken_cache))
    overrides = [
        "data=text",
        *NEEDS["text"],
        "batch.sequence_length=32",
        "batch.micro_batch_size=2",
    ]
    waits = "tokenizer.download_timeout_s=1e-9"  # for the network: what is cached may take long
    assert run(["plan", f"tokenizer={tokenizer}", waits, *overrides]) == 0
    assert f"tokenizer {tokenizer}" in capsys.readouterr().out


# Ready-made sweeps, with the number of their points; of some, one value of what is swept beside.
SWEEPS = {"accumulation_iso_batch": 4, "accumulation_scaling": 4, "clip_sweep": 5, "clip_rules": 8,
          "accumulation_x_clip": 4, "throughput_grid": 6, "moe_balance": 3}  # fmt: skip
NARROWED = {"clip_rules": ["train.seed=1"], "moe_balance": ["train.seed=1"],
            "accumulation_x_clip": ["clip.max_norm=1.0"],
            "throughput_grid": ["batch.sequence_length=128", "precision=bf16"]}  # fmt: skip

LADDERS = ("isoflop", "lr_ladder", "batch_ladder", "horizon")  # tests/train/test_ladder.py


@pytest.mark.parametrize("name", SWEEPS)
def test_ready_made_sweeps_are_planned(name, work, capsys, monkeypatch):
    monkeypatch.chdir(work)
    assert run(["plan", f"experiment={name}", *NARROWED.get(name, [])]) == 0
    # what all have alike is told below
    table, _, alike = capsys.readouterr().out.partition(f"\n{SWEEPS[name]} runs; ")
    header, *rows = [line.split() for line in table.splitlines()]
    assert len(rows) == SWEEPS[name]
    assert alike
    of_one_batch = ("accumulation_iso_batch", "clip_rules", "clip_sweep", "moe_balance")
    assert ("batch" not in header) == (name in of_one_batch)
    if "tokens" in header:  # unequal ones would cut some short in the comparison
        at = 1 + header.index("tokens")  # after its number
        assert len({row[at] for row in rows}) == 1 or name == "throughput_grid"


def test_the_throughput_grid_ends_in_its_tables(work):
    small = [
        "model.n_layers=1", "model.d_model=16", "model.d_ff=16", "model.n_heads=2",
        "data.n_tokens=20000", "batch.micro_batch_size=1,2", "precision=fp32", "train.max_steps=6",
        "batch.gradient_accumulation_steps=2", "batch.sequence_length=16",
    ]  # fmt: skip
    given = ["experiment=throughput_grid", *small, "hydra.sweep.dir=throughput"]
    done = llmexp("train", *given, cwd=work)
    assert done.code == 0, done.err + done.out
    lines = (work / "throughput" / "throughput.csv").read_text().splitlines()
    titles, *rows = csv.reader(lines)
    for cells, micro in zip(rows, ("1", "2"), strict=True):
        row = dict(zip(titles, cells, strict=True))
        shape = [row[key] for key in ("micro-batch", "accumulation", "length", "ranks")]
        assert shape == [micro, "2", "16", "1"]
        (folder,) = (work / "throughput").glob(f"*-micro_batch_size_{micro}")
        recorded = json.loads((folder / "run.json").read_text())
        _, *logged = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
        rate = statistics.median(r["tokens_per_sec"] for r in logged)
        seconds = statistics.median(r["step_time"] for r in logged)
        wanted = {
            "tokens/s": rate,
            "it/s": 1 / seconds,
            "TFLOP/s per rank (6ND)": 6 * recorded["parameters"] * rate / 1e12,
            "TFLOP/s per rank (exact)": recorded["flops_per_token"] * rate / 1e12,
        }
        assert {key: float(row[key]) for key in wanted} == pytest.approx(wanted)
        assert not row.get("verdict")  # this device's peak is not known
    assert "share of peak" not in titles
    printed = [line.split("  ")[0] for line in done.out.splitlines()]
    assert [line.partition(",")[0] for line in printed].count("GPT2") == 2


@pytest.mark.parametrize(
    "name",
    [name for name in OPTIONS["experiment"] if name not in (*SWEEPS, *LADDERS, "lr_optuna")],
)
def test_experiments_are_planned(name, work, tiktoken_cache, capsys, monkeypatch):
    text = SHARED / "data" / "tinyshakespeare.txt"
    if not text.exists():
        pytest.skip("Shakespeare's plays are not on this machine")
    monkeypatch.chdir(work)
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tiktoken_cache))
    assert run(["plan", f"experiment={name}", f"data.train_files=[{text}]"]) == 0
    out = capsys.readouterr().out
    assert f"outputs/{name}/" in out
    if name == "gpt2_small_minimal":
        assert "90,000 tokens, 87 sequences of 1,024, 911 tokens left over" in out


def test_the_reference_pages_have_every_knob_and_every_command():
    """Each cell of a table is one cell, whatever it holds."""
    settings, commands = reference.settings(), reference.commands()
    assert {*re.findall(r"^\| `([\w.]+)` \| \S", settings, re.M)} >= {*comments.KNOBS} - {"user"}
    assert re.findall(r"^## (\w+)$", commands, re.M) == sorted(COMMANDS)
    assert commands.count("```\nusage: llmexp ") == len(COMMANDS)
    for page in (settings, reference.rows(), reference.kinds()):
        for block in re.findall(r"(?:^\|.*\n)+", page, re.M):
            assert len({line.count("|") for line in block.splitlines()}) == 1


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The folder of a wheel's files, built from this source as version 7.8.9."""
    if importlib.util.find_spec("hatchling") is None:
        pytest.skip("hatchling, which builds the wheel, is not installed")
    path = tmp_path_factory.mktemp("wheel")
    source, target = path / "source", path / "target"
    source.mkdir()
    for name in ("llmexp", "hydra_plugins", "conf", "launchers", "pyproject.toml", "README.md"):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, source / name)
    package = source / "llmexp" / "__init__.py"
    package.write_text(package.read_text().replace(f'"{__version__}"', '"7.8.9"'))
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", path]
    subprocess.run(build, cwd=source, check=True, capture_output=True)
    (file,) = path.glob("*.whl")
    zipfile.ZipFile(file).extractall(target)
    return target


def of_wheel(wheel: Path, cwd: Path, *arguments: str) -> str:
    """What a command of the wheel prints."""
    done = subprocess.run(
        [sys.executable, "-m", "llmexp", *arguments], cwd=cwd,
        env=environment(PYTHONPATH=str(wheel)), capture_output=True, text=True, check=True,
    )  # fmt: skip
    return done.stdout


@pytest.mark.fresh
def test_the_wheel_brings_its_configuration_and_has_one_version(wheel, tmp_path):
    """The command and the run's folder have it too."""
    (about,) = wheel.glob("llmexp-*.dist-info")
    assert importlib.metadata.Distribution.at(about).version == "7.8.9"
    assert of_wheel(wheel, tmp_path, "--version") == "llmexp 7.8.9\n"
    of_wheel(
        wheel, tmp_path, "train", "--create-only", *TINY, "data=synthetic", "hydra.run.dir=run"
    )
    assert json.loads((tmp_path / "run" / "run.json").read_text())["versions"]["llmexp"] == "7.8.9"


@pytest.mark.slow
@pytest.mark.fresh
def test_the_wheel_is_installed_and_answers_in_an_environment_of_its_own(wheel, tmp_path):
    """The other packages are those of this environment: nothing is downloaded."""
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    binaries, empty = tmp_path / "venv" / "bin", tmp_path / "empty"
    (site,) = (tmp_path / "venv").glob("lib/*/site-packages")
    others = [path for path in sys.path if Path(path).name == "site-packages"]
    (site / "others.pth").write_text("\n".join(others))
    empty.mkdir()

    def of_venv(*words: object) -> str:
        done = subprocess.run(
            [binaries / str(words[0]), *map(str, words[1:])],
            cwd=empty, env=environment(PYTHONPATH=""), capture_output=True, text=True,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout

    (file,) = wheel.parent.glob("*.whl")
    of_venv("pip", "install", "--quiet", "--no-index", "--no-deps", "--force-reinstall", file)
    where = of_venv("python", "-c", "import llmexp, hydra_plugins.llmexp as h; print(h.__file__)")
    assert Path(where.strip()).is_relative_to(site)
    assert of_venv("llmexp", "--version") == "llmexp 7.8.9\n"
    of_venv(
        "llmexp", "train", "-m", *TINY, "data=synthetic", "optimizer.lr=1e-3,1e-2",
        "train.seed=1,2,3", "hydra.sweep.dir=outputs/rates",
    )  # fmt: skip
    answer = json.loads(of_venv("llmexp", "compare", "--json"))
    assert len(answer["runs"]) == 2  # each with three seeds
    assert (empty / "outputs" / "rates" / "compare.html").is_file()
