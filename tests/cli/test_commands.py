"""What is printed to be pasted can be pasted: each command is run, or planned, as it stands."""

import ast
import fcntl
import os
import re
import shlex
import shutil
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from llmexp.__main__ import COMMANDS
from llmexp.compare.comparing import compare
from llmexp.compare.next_step import propose
from llmexp.config.commands import EXTRAS, command, how_to_install, own_parts
from llmexp.folders import ledger
from tests.conftest import ROOT, TINY, llmexp
from tests.suggestions import PARSER, commands, read
from tests.tools import amend, run_here

SOURCE = ROOT / "llmexp"
WORDS = st.text(st.characters(codec="utf-8", exclude_categories=["C"]), min_size=1, max_size=12)
PACKAGES = st.lists(st.sampled_from(["mine", "mine.deep", "other", "third.a.b"]), max_size=3)


@example([], "-s 1", "x")
@given(st.lists(WORDS), WORDS, WORDS)
def test_words_come_back_from_a_shell(words, path, value):
    text = command("train", *words, Path(path), ("name", value))
    name, *found = shlex.split(text)[1:]
    assert (name, found[: len(words)]) == ("train", words)
    assert Path(found[-2]) == Path(path)
    assert not found[-2].startswith("-")
    if "$" not in value:
        assert PARSER.parse_override(found[-1]).value() == value


@given(PACKAGES, PACKAGES, st.sampled_from(COMMANDS))
def test_what_is_allowed_stands_once_and_covers_each_part(before, parts, name):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LLMEXP_ALLOW", ",".join(before))
        words = shlex.split(command(name, parts=[f"{part}.f" for part in parts]))[2:]
    if name in ("compare", "next", "fit", "runs", "sync") or not [*before, *parts]:
        assert words == []
        return
    flag, packages = words
    known = packages.split(",")
    assert (flag, sorted(set(known))) == ("--allow", sorted(known))
    outside = [p for p in parts if not any(f"{p}.".startswith(f"{b}.") for b in before)]
    assert {*known} == {*before} | {part.partition(".")[0] for part in outside}


def test_parts_of_ones_own_are_found_in_nested_and_flat_configs():
    tree = {"model": {"_target_": "mine.M", "x": "a.b"}, "hooks": ["h.f", {"_target_": "g.k"}],
            "optimizer": {"_target_": "llmexp.optim.optimizers.adamw.adamw"}}  # fmt: skip
    flat = {"model._target_": "mine.M", "hooks": tree["hooks"], "data.name": "x.y"}
    assert own_parts(tree) == own_parts(flat) == ["mine.M", "h.f", "g.k"]


def nodes() -> Iterator[tuple[Path, ast.AST]]:
    """Each node of the source."""
    for path in sorted(SOURCE.rglob("*.py")):
        yield from ((path, node) for node in ast.walk(ast.parse(path.read_text())))


def test_no_command_with_a_slot_is_made_by_hand():
    """f"llmexp train {key}={value}" forgets quotes or --allow: `command` makes all of them."""
    by_hand = re.compile(rf"llmexp ({'|'.join(COMMANDS)})\b[^;,`(]*\0")
    for path, node in nodes():
        if isinstance(node, ast.JoinedStr) and path != SOURCE / "__main__.py":
            parts = [p.value if isinstance(p, ast.Constant) else "\0" for p in node.values]
            found = by_hand.search("".join(parts))
            assert not found or "exit code" in found[0], f"{path}:{node.lineno}"


def test_each_command_in_the_source_is_read():
    """Those of one line without a word that the user has to fill in: FILE, N, PATH."""
    slot, found = re.compile(r"\b[A-Z]{2,}\b|\bN\b|\.\.\."), []
    for path, node in nodes():
        for line in str(node.value).splitlines() if isinstance(node, ast.Constant) else []:
            line = re.split(" says | prints ", line.rpartition("for example ")[2])[0]
            if re.match(r"llmexp .*(=|outputs/)", line) and not slot.search(line):
                found += [(path.name, words) for words in commands(line)]
    assert len(found) > 7
    for at, words in found:
        assert words, at
        read(words)


THROUGH = {"aiohttp": "fsspec[http]", "huggingface_hub": "datasets", "accelerate": "lm_eval[hf]"}


def test_hints_of_missing_packages_name_an_extra_that_has_them():
    """By itself, or through a package that needs it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    known = {package: extra for extra, has in EXTRAS.items() for package in has.split()}
    known |= {name: name for name in ("ray", "optuna", "tensorboard", "mlflow", "trackio")}
    for package, extra in known.items():
        needed = " ".join(project["optional-dependencies"][extra]).replace("-", "_")
        assert THROUGH.get(package, package) in needed, (package, extra)
        assert how_to_install(f"{package}.x") == f"pip install 'llmexp[{extra}]'"
    asked = set()
    for _, node in nodes():
        called = getattr(getattr(node, "func", None), "id", "")
        first = node.args[0] if called in ("need_package", "how_to_install") else None
        if isinstance(first, ast.Constant):
            asked.add(first.value.partition(".")[0])
    assert {"tokenizers", "sentencepiece"} <= asked <= known.keys()


OWN = ["--config-dir", "my own", "--allow=own", "model=mine", "hooks=[own.faults.act]",
       *[word for word in TINY if not word.startswith("model=")]]  # fmt: skip
MORE = ["data=synthetic", "train.max_steps=4", "batch.micro_batch_size=2", "train.log_every=2"]
FOLDER = "it's 1e3"  # with a quote and a space


@pytest.fixture(scope="module")
def printed(tmp_path_factory):
    """A folder with runs and sweeps of a part of one's own, and all that was printed for them."""
    home = tmp_path_factory.mktemp("commands")
    (home / "my own" / "model").mkdir(parents=True)
    file = (ROOT / "conf/model/gpt_tiny.yaml").read_text()
    base = re.sub(r"_target_: \S+", "_target_: own.texts.Mine", file)
    (home / "my own" / "model" / "mine.yaml").write_text(base)
    texts = {}

    def told(name: str, *words: str) -> None:
        result = llmexp(*words, cwd=home)
        texts[name] = result.out + result.err

    dirs = [f"hydra.run.dir={value}" for value in ("a", "b", '"it\'s 1e3"')]
    own = ["--allow", "own"]
    told("end", "train", *OWN, *MORE, "optimizer.lr=1e-3", dirs[0])
    told("other", "train", *OWN, *MORE, "optimizer.lr=3e-3", dirs[1], "train.log_every=1")
    told("stop", "train", *OWN, *MORE, "train.stop_step=2", dirs[2])
    told("again", "train", *OWN, *MORE, dirs[0])
    told("finished", "resume", "a", *own, "batch.micro_batch_size=1")
    told("another", "resume", FOLDER, *own, "model.dropout=0.5")
    told("step", "resume", "a@4", *own)
    told("longer", "resume", "a", *own, "train.max_steps=9")
    told("replay", "replay", "a@99", *own)
    told("sweep", "train", "-m", *OWN, *MORE, "optimizer.lr=1e-3,3e-3", "hydra.sweep.dir=-s 1")
    shutil.copytree(home / "-s 1", home / "cut")
    for run_folder in sorted((home / "cut").glob("1-*")):
        amend(run_folder / "status.json", state="preempted")
    told("kept", "train", "-m", *OWN, *MORE, "hydra.sweep.dir=cut", "optimizer.lr=1e-3,3e-3")
    told("failed", "train", "-m", *OWN, *MORE, "optimizer.lr=1e-3,1e30", "hydra.sweep.dir=f")
    told("budgets", "plan", "-m", *OWN, *MORE, "batch.micro_batch_size=2,4", "plan.device=cpu")
    for name, paths in (("runs", ["a", "b"]), ("stopped", [FOLDER]), ("whole", ["./-s 1"]),
                        ("left", ["cut"])):  # fmt: skip
        told(f"next {name}", "next", *paths)
        told(f"compare {name}", "compare", *paths)
    os.environ.pop("LLMEXP_ALLOW", None)
    return home, texts


NAMES = ["end", "other", "stop", "again", "finished", "another", "step", "longer", "replay",
         "failed", "budgets", "next runs", "next stopped", "next whole", "next left",
         "compare left"]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_each_printed_command_does_what_it_says(name, printed, monkeypatch, capfd):
    home, texts = printed
    monkeypatch.chdir(home)
    given = list(commands(texts[name]))
    assert given, texts[name]
    for words in given:
        assert words[-2:] == ["--allow", "own"], words
        read(words)
        if words[0] == "train":
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("LLMEXP_ALLOW", "")
                result = run_here(capfd, "plan", *words[1:])
            assert result.code == 0, (words, result.err)
        elif words[0] in ("resume", "sample", "replay"):
            copy = home / "copy"
            shutil.copytree(home / words[1].partition("@")[0], copy)
            at = re.sub(r"^[^@]*", str(copy), words[1])
            result = llmexp(words[0], at, *words[2:], cwd=home)
            shutil.rmtree(copy)
            assert result.code in (0, 75, 1 if name == "failed" else 0), (words, result.err)


def test_next_goes_on_with_what_is_there(printed):
    """It leaves out what a sweep refuses and what tells no settings apart; it waits for a sweep
    that runs, and goes on with a stopped one."""
    home, _ = printed
    words = propose(compare([home / "a", home / "b"])).words
    assert words[:4] == ("train", "-m", "--config-dir", "my own")
    assert "model=mine" in words
    assert "train.stop_step" not in [word.partition("=")[0] for word in words]
    assert not any(word.startswith("train.log_every=") and "," in word for word in words)
    assert propose(compare([home / "cut"])).words[:2] == ("resume", str(home / "cut"))
    for path in (home / "cut", home / "-s 1"):  # the second is whole
        with open(path / ledger.LOCK, "a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            found = compare([path])
            assert (propose(found).rule, propose(found).words) == ("wait", ())
            assert not list(commands(" ".join(found.why)))
