"""A config and a name must not do these, each tried with a canary: call code, read and print
secrets."""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from llmexp.__main__ import run
from llmexp.compose import app, environment, guard
from llmexp.compose.command_line import recordable
from llmexp.runs import ending, rundir
from llmexp.settings import targets, variables
from llmexp.settings.config import plain
from llmexp.settings.convert import build
from llmexp.settings.values import ConfigError
from llmexp.sweep import slurm
from llmexp.sweep.points import point_label
from llmexp.system import redact
from tests.conftest import TINY, Result, llmexp
from tests.tools import composed

KEY, NETRC_KEY, NOTE, RATE = (
    "canary-key-0123456789",
    "canary-netrc-987654321",
    "canary-note-555",
    "0.0012345678",
)
ENV = {
    "WANDB_API_KEY": KEY,
    "CANARY_NOTE": NOTE,
    "CANARY_RATE": RATE,
    "HF_TOKEN": "canary-token-24680",
}
CODE = """
import functools
import os
import subprocess
from os import system

from torch import nn

EVERYTHING = str(dict(os.environ)) + open(os.path.expanduser("~/.netrc")).read() if "CANARY_NOTE" in os.environ else ""


class Model(nn.Module):
    def __init__(self, vocab_size: int, secret: str = "", base_width: None = None):
        super().__init__()
        self.vocab_size = vocab_size
        self.embed = nn.Embedding(vocab_size, 4)
        assert secret in ("", "canary-token-24680"), "the value did not arrive"

    def forward(self, tokens_bt):
        return self.embed(tokens_bt) @ self.embed.weight.T


def breaks(event, context):
    if event == "step_end" and context.step == 3:
        raise RuntimeError("my own environment is " + EVERYTHING)


def lying(command):
    return os.system(command)


small = functools.partial(Model, 7)
shell = functools.partial(subprocess.call, shell=True)
wrapped = functools.wraps(os.system)(lambda command: os.system(command))
cached = functools.lru_cache(lying)
bound = Model(3).forward
instance = Model(3)
"""  # noqa: E501


@pytest.fixture
def home(tmp_path, monkeypatch) -> Path:
    """An empty folder to be in, with a user's own package that is not allowed yet."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("LLMEXP_ALLOW", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "ownparts.py").write_text(CODE)
    monkeypatch.delitem(sys.modules, "ownparts", raising=False)
    return tmp_path


# Secrets and the environment.


def holding(path: Path, *canaries: str) -> list[str]:
    """The files at or under `path` that hold one of the texts, in their content or their name."""
    return [
        f"{file}: {text}" for file in path.rglob("*") for text in canaries
        if text in file.name or (file.is_file() and text.encode() in file.read_bytes())
    ]  # fmt: skip


@pytest.fixture(scope="module")
def broken(tmp_path_factory) -> tuple[Path, dict[str, str], Result]:
    """A run that was told everything by oc.env and fails with the whole environment in its
    message."""
    cwd = tmp_path_factory.mktemp("secrets")
    data = cwd / "canary-folder"
    data.mkdir()
    np.save(data / "train.npy", (np.arange(3000) % 50).astype(np.uint16))
    (cwd / "ownparts.py").write_text(CODE)
    (cwd / ".netrc").write_text(f"machine api.wandb.ai login user password {NETRC_KEY}\n")
    env = ENV | {"CANARY_DATA": str(data), "HOME": str(cwd)}
    result = llmexp(
        "train", "model._target_=ownparts.Model", "~model.n_layers", "~model.n_heads",
        "~model.d_model", "~model.d_ff", "~model.gelu", "~model.residual",
        "~model.dropout", "~model.max_position_embeddings", "~model.parametrization",
        "+model.secret=${oc.env:HF_TOKEN}",
        "--allow=ownparts",
        *(o for o in TINY if not o.startswith(("model", "tracker"))), "tracker.mode=offline",
        "tracker.notes=about "
        "${oc.env:CANARY_NOTE}", "data=tokens", "data.train_files=${oc.env:CANARY_DATA}/train.npy",
        "optimizer.lr=${oc.env:CANARY_RATE}", "hooks=[ownparts.breaks]", "checkpoint.every=2",
        "train.max_steps=4",
        "train.log_every=1", "hydra.run.dir=run", cwd=cwd, **env,
    )  # fmt: skip
    return cwd, env, result


CANARIES = (KEY, NETRC_KEY, NOTE, "canary-token-24680", "canary-folder")


def test_no_file_of_a_run_holds_what_came_from_the_environment(broken):
    _, _, result = broken
    assert result.code == 3, result.err
    assert holding(result.folder, *CANARIES) == []
    assert not [text for text in CANARIES if text in result.err]
    assert "my own environment is" in result.json("status.json")["error"]
    assert "<$WANDB_API_KEY>" in result.json("status.json")["error"]
    assert "Traceback" not in (result.folder / "config.yaml").read_text()
    # The rate itself is a figure of the rows; but no record has it from the environment.
    records = [
        (result.folder / name).read_text() for name in ("config.yaml", "run.json", "status.json")
    ]
    assert RATE not in "".join(records)
    config = rundir.read_config(result.folder)
    assert config["optimizer"]["lr"] == "${oc.env:CANARY_RATE}"
    assert config["data"]["train_files"] == "${oc.env:CANARY_DATA}/train.npy"
    assert config["tracker"]["notes"] == "about ${oc.env:CANARY_NOTE}"
    assert "optimizer.lr=${oc.env:CANARY_RATE}" in result.json("run.json")["overrides"]
    assert list(result.folder.rglob("*.wandb"))
    assert max(row["lr"] for row in result.rows()) == float(RATE)


def test_a_variable_that_changed_is_another_run_and_a_renewed_secret_is_not(broken):
    cwd, env, result = broken
    changed = llmexp("resume", "run", "--allow=ownparts", cwd=cwd, **env | {"CANARY_RATE": "0.5"})
    assert changed.code == 2
    assert "another value of CANARY_RATE" in changed.err
    missing = llmexp(
        "resume",
        "run",
        "--allow=ownparts",
        cwd=cwd,
        **{k: v for k, v in env.items() if "RATE" not in k},
    )
    assert missing.code == 2
    assert (
        "optimizer.lr=${oc.env:CANARY_RATE}: the environment variable CANARY_RATE is not set"
        in missing.err
    )
    again = llmexp(
        "resume",
        "run",
        "--allow=ownparts",
        "hooks=[]",
        cwd=cwd,
        **env | {"WANDB_API_KEY": KEY[::-1]},
    )
    assert again.code == 0, again.err
    assert holding(result.folder, *CANARIES, KEY[::-1]) == []
    assert [row["step"] for row in result.rows()] == [1, 2, 3, 4]


def test_texts_keep_their_variables_and_numbers_take_them(monkeypatch):
    monkeypatch.setenv("CANARY", "canary-value")
    monkeypatch.setenv("STEPS", "12")
    monkeypatch.setenv("RATE", "1e-3")
    monkeypatch.delenv("NOT_SET", raising=False)
    config = composed(
        "tracker.notes=${oc.env:CANARY}", "tracker.tags=[x,'a-${oc.env:CANARY}']",
        "+data.where=${tracker.notes}/b",
        "+data.default='${oc.env:NOT_SET,${oc.env:CANARY}}'", "+data.other=${oc.env:NOT_SET,7}",
        "+data.decoded='${oc.decode:${oc.env:STEPS}}'", "train.max_steps=${oc.env:STEPS}",
        "name=of-${oc.env:STEPS}",
        "tracker.project=p-${oc.env:STEPS}", "clip.max_norm='${oc.decode:${oc.env:RATE}}'",
    )  # fmt: skip
    assert "canary-value" not in json.dumps(plain(config))
    assert config.tracker.notes == "${oc.env:CANARY}"
    assert config.tracker.tags == ["x", "a-${oc.env:CANARY}"]
    assert config.data["where"] == "${oc.env:CANARY}/b"
    assert config.data["default"] == "${oc.env:CANARY}"
    assert config.data["other"] == 7
    assert config.data["decoded"] == "${oc.env:STEPS}"
    assert (config.train.max_steps, config.clip.max_norm) == (12, 0.001)
    assert (config.name, config.tracker.project) == ("of-12", "p-12")
    assert build(plain(config)) == config
    monkeypatch.setenv("STEPS", "canary-value")
    with pytest.raises(
        ConfigError,
        match=r"train.max_steps=\$\{oc.env:STEPS\}: what the environment holds does not",
    ):
        composed("train.max_steps=${oc.env:STEPS}")


SECRETS = [
    ("+data.hf_token=abc", "data.hf_token: is a secret by its name"),
    ("+data.options={api_key:abc}", "data.options.api_key: is a secret by its name"),
    ("+model.AUTH_TOKEN=abc", "model.AUTH_TOKEN: is a secret by its name"),
    ("+data.db_password=abc", "data.db_password: is a secret by its name"),
    (f"tracker.tags=[{KEY}]", "tracker.tags: holds the value of $WANDB_API_KEY"),
    (f"+data.x=[{{y:a{KEY}}}]", "data.x.y: holds the value of $WANDB_API_KEY"),
    (f"+data.x=[1,{{{KEY}:1}}]", "data.x.<$WANDB_API_KEY>: holds the value of $WANDB_API_KEY"),
    ("+data.x=[{api_key:abc}]", "data.x.api_key: is a secret by its name"),
    ("+data.api_key=12345", "data.api_key: is a secret by its name"),
    (
        f"tracker.notes={NETRC_KEY}",
        "tracker.notes: holds the value of the password of api.wandb.ai",
    ),
    (
        "tracker.notes=${oc.env:WANDB_API_KEY}",
        "tracker.notes: WANDB_API_KEY is a secret by its name",
    ),
    ("name=${oc.env:SAME}", "name: holds the value of $WANDB_API_KEY"),
    ("hydra.run.dir=a/${oc.env:SAME}", "hydra.run.dir: holds the value of $WANDB_API_KEY"),
]


@pytest.mark.parametrize(("override", "says"), SECRETS, ids=[s[1][:40] for s in SECRETS])
def test_a_secret_by_name_or_value_is_refused_without_being_printed(
    home, monkeypatch, capsys, override, says
):
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.setenv("SAME", KEY)
    (home / ".netrc").write_text(f"machine api.wandb.ai login user password {NETRC_KEY}\n")
    assert run(["plan", *TINY, "data=synthetic", "data.n_tokens=5000", override]) == 2
    err = capsys.readouterr().err
    assert says in err
    assert KEY not in err
    assert NETRC_KEY not in err


def test_an_error_that_repeats_what_was_typed_does_not_tell_a_secret(home, monkeypatch, capsys):
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    assert run(["resume", f"none/{KEY}"]) == 2
    err = capsys.readouterr().err
    assert "none/<$WANDB_API_KEY>" in err
    assert KEY not in err


TEXTS = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=12)
LEAVES = st.one_of(TEXTS, st.integers(), st.floats(), st.booleans(), st.none())


@given(st.data())
@settings(max_examples=200, derandomize=True)
def test_a_secret_is_found_wherever_it_is(data):
    """As a text, a part of one, a number or a key, at any depth, whatever characters it has; and is
    not told."""
    draw = data.draw
    secret = draw(st.one_of(TEXTS.filter(bool).map(lambda t: t * 8), st.integers(10**7).map(str)))
    node = draw(st.sampled_from([secret, f"a{secret}b", {secret: 1}, {f"a{secret}": {}},
    *([int(secret)] if
                secret.isascii() and secret.isdecimal() and secret[0] != "0" else [])]))  # fmt: skip  # noqa: E501
    for _ in range(draw(st.integers(0, 4))):
        others = draw(st.lists(LEAVES, max_size=2))
        node = draw(
            st.sampled_from([[*others, node], {**dict.fromkeys("pq", others), "more": node}])
        )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CANARY_API_KEY", secret)
        with pytest.raises(ConfigError) as refused:
            environment.refuse_secrets({"data": node})
        assert "holds the value of $CANARY_API_KEY" in str(refused.value)
        patch.delenv("CANARY_API_KEY")
        environment.refuse_secrets({"data": node})


def test_a_ledger_has_names_in_place_of_values(tmp_path, tokens):
    """The reason why a point cannot run repeats the path that was not found."""
    (tmp_path / "train.npy").write_bytes(tokens.read_bytes())
    result = llmexp(
        "train", "-m", *TINY, "data=tokens",
        "data.train_files=train.npy,'${oc.env:CANARY_DATA}/none.npy'",
        "train.max_steps=1", "sweep.on_infeasible=skip", "hydra.sweep.dir=sweep",
        cwd=tmp_path, CANARY_DATA="canary-folder", WANDB_API_KEY=KEY,
    )  # fmt: skip
    assert result.code == 0, result.err
    assert (
        "${oc.env:CANARY_DATA}/none.npy: no file matches"
        in (tmp_path / "sweep" / "sweep.json").read_text()
    )
    assert holding(tmp_path / "sweep", "canary-folder", KEY) == []
    assert "canary-folder" not in result.out + result.err


def test_a_data_file_that_was_cut_is_found_by_the_name_that_was_recorded(tmp_path, monkeypatch):
    monkeypatch.setenv("CANARY_DATA", str(tmp_path / "canary-folder"))
    (tmp_path / "canary-folder").mkdir()
    (tmp_path / "canary-folder" / "train.npy").write_bytes(b"x" * 10)
    (tmp_path / "run.json").write_text(
        json.dumps({"data_files": {"${oc.env:CANARY_DATA}/train.npy": 1000, "x": 1}})
    )
    told = ending.bus_error(tmp_path, -signal.SIGBUS)
    assert "${oc.env:CANARY_DATA}/train.npy: this token file was cut from 1,000 to 10 bytes" in told
    assert "canary-folder" not in told


@pytest.mark.parametrize(
    "key", ["tokenizer", "max_tokens", "eos_token", "sample_tokens", "key_size", "secretary"]
)
def test_names_that_only_sound_like_secrets_are_none(key):
    environment.refuse_secrets({"data": {key: "abc"}})


COUNT = "10000000"


@pytest.mark.parametrize("given", [COUNT, "${oc.env:MAX_TOKENS}"])
def test_variables_that_only_sound_like_secrets_are_none(home, monkeypatch, capsys, given):
    """A launch script's counts and words, in a config and in a message."""
    for name in ("MAX_TOKENS", "NUM_TOKENS", "TRAIN_TOKENS", "MAX_TOKEN", "LAST_KEY"):
        monkeypatch.setenv(name, COUNT)
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(home))
    monkeypatch.setenv("SORT_KEY", "val/loss")
    budget = ["train.max_steps=null", f"train.max_tokens={given}", "tracker.notes=by val/loss"]
    budget.append(f"+user.home={home}")
    assert run(["plan", *TINY, "data=synthetic", "data.n_tokens=5000", *budget]) == 0
    assert capsys.readouterr().err == ""
    text = "the sort key val/loss"
    assert redact.redacted(text) == text
    assert redact.secrets() == {}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("WANDB_API_KEY", "12345678"),
        ("OPENAI_APIKEYS", "a-b-c-d-e"),
        ("AWS_SECRET_ACCESS_KEY", "abc/def+"),
        ("DB_PASSWORD", "hunter22"),
        ("MY_SECRETS", "hunter22"),
        ("AWS_ACCESS_KEY_ID", "AKIAIOSFODNN7EXAMPLE"),
        ("SSH_KEY", "abcdefghijklmnop"),
        ("GITHUB_TOKEN", "ghp_0123456789abcdef"),
    ],
)
def test_names_and_values_of_secrets_are_some(monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    assert redact.redacted(f"it is {value}") == f"it is <${name}>"
    with pytest.raises(ConfigError, match=f"holds the value of .{name}"):
        environment.refuse_secrets({"data": f"a {value}"})


def test_messages_name_the_variables_of_this_processs_runs_only(tmp_path, monkeypatch):
    """Reading another run's config, as compare does, replaces nothing in later messages."""
    monkeypatch.setenv("CANARY_OF_ANOTHER", "canary-of-another")
    tree = plain(BASE)
    tree["tracker"]["notes"] = "${oc.env:CANARY_OF_ANOTHER}"
    (tmp_path / "config.yaml").write_text(json.dumps(tree))
    config = rundir.built_config(tmp_path)
    assert redact.redacted("it is canary-of-another") == "it is canary-of-another"
    variables.remember_names(plain(config))  # as a process does with its own
    assert redact.redacted("it is canary-of-another") == "it is ${oc.env:CANARY_OF_ANOTHER}"


def test_redacted_text_has_names_for_values(monkeypatch):
    monkeypatch.setenv("MY_API_KEY", "long-value")
    monkeypatch.setenv("MY_OTHER_KEY", "long-value-longer\n")
    monkeypatch.setenv("SHORT_KEY", "ab")
    text = redact.redacted("ab long-value, long-value-longer\n, " + repr("long-value-longer\n"))
    assert text == "ab <$MY_API_KEY>, <$MY_OTHER_KEY>, '<$MY_OTHER_KEY>'"


# Calls.


def test_only_functions_and_classes_that_are_the_packages_own(home, monkeypatch):
    for name in ("Model", "lying", "breaks", "small", "cached"):
        monkeypatch.setenv("LLMEXP_ALLOW", "ownparts")
        assert callable(targets.locate("hooks", f"ownparts.{name}"))
    foreign = (
        "system",
        "os.system",
        "subprocess.call",
        "shell",
        "wrapped",
        "bound",
        "instance",
        "EVERYTHING",
    )
    for name in (
        *foreign,
        "nn.Module",
        "functools.partial",
        "__builtins__",
        "__loader__.exec_module",
    ):
        with pytest.raises(ConfigError, match="ownparts"):
            targets.locate("hooks", f"ownparts.{name}")
    own = sys.modules["ownparts"]
    # Objects that lie about where they are from, put where the config looks for them.
    stolen = types.FunctionType(subprocess.call.__code__, subprocess.call.__globals__, "stolen")
    stolen.__module__ = "ownparts"
    stolen_class = type("Stolen", (subprocess.Popen,), {"__module__": "ownparts"})
    renamed = functools.partial(functools.partial(stolen))
    alias = types.ModuleType("ownparts.alias")
    alias.system = os.system
    monkeypatch.setitem(sys.modules, "ownparts.alias", alias)
    for value in (stolen, stolen_class, renamed):
        monkeypatch.setattr(own, "trick", value, raising=False)
        with pytest.raises(ConfigError, match="outside the allowed"):
            targets.locate("model._target_", "ownparts.trick")
    with pytest.raises(ConfigError, match="outside the allowed"):
        targets.locate("model._target_", "ownparts.alias.system")


@pytest.mark.parametrize("section", ["model", "data", "tokenizer", "optimizer", "schedule"])
@pytest.mark.parametrize("word", targets.RESERVED)
def test_nothing_is_called_from_inside_a_section(section, word):
    for nested in ({"x": {word: "os.system"}}, {"x": [{"y": [{word: True}]}]}):
        with pytest.raises(ConfigError, match=f"{section}.x.*{word}"):
            targets.bind(section, {"_target_": "llmexp.update.optim.adamw", **nested}, {})
    if word != "_target_":
        with pytest.raises(ConfigError, match=f"{section}.{word}"):
            targets.refuse_calls(section, {word: "x"})


# Attacks: a file that somebody else wrote, the command that meets it, and what the refusal begins
# with. Each would make the file `canary`.
OPTUNA = "hydra_plugins.hydra_optuna_sweeper.optuna_sweeper.OptunaSweeper"
SLURM, RAY = "hydra/launcher=slurm", "hydra/launcher=ray"
MORE = "+hydra.launcher.additional_parameters"
SWEEP, EVIL = ["plan", "-m", "train.seed=1,2"], "experiment=evil"
CALLS = "_target_: os.system\ncommand: touch canary\n"
LOGS = (
    "version: 1\nformatters: {x: {(): os.system, command: touch canary}}\n"
    "handlers: {c: {class: logging.StreamHandler, formatter: x}}\n"
)
BRINGS = (
    "model: {x: {_target_: os.makedirs, name: canary}}\n"
    "hydra: {mode: MULTIRUN, sweeper: {max_batch_size: '${oc.select:model.x}'}}"
)
BY_HAND = ".* taken from a command line"


def sweep_of(*arguments: str) -> str:
    """A sweep.json that goes on with these arguments."""
    head = {
        "format": 1,
        "name": "strange",
        "group": "g",
        "launcher": "slurm",
        "swept": ["train.seed"],
        "created": 0.0,
    }
    whole = ["-m", *TINY, "data=synthetic", "train.seed=1,2", *arguments]
    return json.dumps({**head, "arguments": whole, "state": "failed", "points": []})


ATTACKS: list[tuple[str, str, list[str], str]] = [
    # Parts that are not the package's own, or that call something within.
    *((f"{section}/evil", text, ["plan", f"{section}=evil"], section)
      for section, text in (
          ("model", "{_target_: os.system, command: touch canary}"),
          ("model", "{_target_: llmexp.cli.worker.subprocess.Popen, args: [touch, canary]}"),
          ("model", "{_target_: llmexp.cli.worker.os.system, command: touch canary}"),
          ("model", "{_target_: builtins.open, file: canary, mode: w}"),
          ("model", "{_target_: llmexp.system.fileio.write_whole, path: canary, text: x}"),
          ("model", "{_target_: llmexp.models.gpt2.torch.save, obj: 1, f: canary}"),
          ("model", "{_target_: torch.hub.load, repo_or_dir: ., source: local, model: canary}"),
          ("model", "{_target_: llmexp.models.gpt2.GPT2, n_layers: "
           "{_target_: os.system, command: touch canary}}"),
          ("model", "{_target_: llmexp.models.gpt2.GPT2, _partial_: true, _args_: [touch canary]}"),
          ("data", "{_target_: pathlib.Path.touch, self: canary}"),
          ("optimizer", "{_target_: llmexp.compose.command_line.allow, packages: os}"),
          ("schedule", "{_target_: llmexp.models.gpt2.GPT2}"),
          ("tokenizer", "{_target_: os.system, command: touch canary}"))),
    *(("experiment/evil", f"hooks: [{{_target_: {hook}}}]\nuser: {{x: os.system}}",
       ["plan", EVIL], "hooks")
      for hook in (
          "os.system, command: touch canary",
          "llmexp.cli.worker.os.system, command: touch canary",
          "llmexp.verify.record.record, deeper: {_target_: os.system, command: touch canary}",
          "'${user.x}'")),
    # Objects that Hydra makes.
    ("hydra/hydra_logging/evil", LOGS, ["train", "--hydra-help", "hydra/hydra_logging=evil"],
     "hydra.hydra_logging"),
    ("hydra/hydra_logging/evil", LOGS, ["train", "--info", "all", "hydra/hydra_logging=evil"],
     "hydra.hydra_logging"),
    ("hydra/job_logging/evil", LOGS, ["plan", "hydra/job_logging=evil"], "hydra.job_logging"),
    ("hydra/launcher/evil", CALLS, ["train", "-m", "train.seed=1,2", "hydra/launcher=evil"],
     "hydra/launcher: os.system"),
    ("hydra/sweeper/evil", CALLS, ["train", "-m", "train.seed=1,2", "hydra/sweeper=evil"],
     "hydra.sweeper._target_=os.system"),
    ("experiment/evil", BRINGS, ["train", EVIL], "hydra.sweeper.max_batch_size"),
    ("experiment/evil", "hydra: {callbacks: {x: {_target_: os.system, command: touch canary}}}",
     ["plan", EVIL], "hydra.callbacks"),
    ("experiment/evil", "hydra: {callbacks: {x: {_target_: os.system, command: touch canary}}}",
     ["plan", "-m", "train.seed=1,2", EVIL], "hydra.callbacks"),
    # The environment, and where configs and packages are found.
    ("experiment/evil", "hydra: {job: {env_set: {LLMEXP_ALLOW: evilpackage}}}", ["plan", EVIL],
     "hydra.job.env_set"),
    ("experiment/evil",
     "hydra: {job: {env_copy: [HOME]}}\ntracker: {notes: '${hydra:job.env_set.HOME}'}",
     ["plan", EVIL], "hydra.job.env_"),
    ("", "", ["plan", "hydra.job.env_copy=[NOT_SET]"], ".*NOT_SET"),
    ("", "", ["plan", "hydra.searchpath=[pkg://evilpackage]"], "hydra.searchpath=pkg://evil"),
    ("", "", ["plan", "hydra.searchpath=[pkg\\://evilpackage/more]"],
     "hydra.searchpath=pkg://evilpackage/more"),
    ("config", "hydra: {searchpath: ['pkg://evilpackage']}", ["plan"],
     "--config-dir conf: config.yaml there would take the place"),
    # Shell lines for a cluster: of a file, as if they had been typed, and beside what was typed.
    ("experiment/evil", "hydra: {launcher: {setup: [touch canary]}}", [*SWEEP, SLURM, EVIL],
     f"hydra.launcher.setup: {BY_HAND}"),
    *(("experiment/evil", f"hydra: {{launcher: {{additional_parameters: {parameters}}}}}",
       [*SWEEP, SLURM, EVIL, *typed], f"hydra.launcher.additional_parameters: {BY_HAND}")
      for parameters, typed in (
          ("{prolog: x}", [f"{MORE}.constraint=h100"]),
          ("{prolog: x}", [f"{MORE}={{constraint:h100}}"]),
          ("{a: {prolog: x}}", [f"{MORE}.a={{b:1}}"]),
          ("{prolog: [x]}", ["~hydra.launcher.setup"]))),
    ("experiment/evil",
     "more: {prolog: x}\nhydra: {launcher: {additional_parameters: '${more}'}}",
     [*SWEEP, SLURM, EVIL], "hydra.launcher.additional_parameters=.*may only bring"),
    # A config says that a command line said it.
    ("", "", ["plan", "+hydra.overrides.hydra=['hydra.launcher.setup=x']"], "hydra.overrides: is"),
    *(("experiment/evil", f"more: {{hydra: [], task: []}}\nhydra: {{overrides: {told}}}",
       [*command, EVIL], "hydra.overrides: is|.*Merge error")
      for command in (["plan"], SWEEP)
      for told in ("{hydra: ['hydra.launcher.setup=x']}", "'${more}'", "{task: '${more.task}'}")),
    ("experiment/evil", "hydra: {overrides: {task: '${oc.create:[]}', hydra: ["
     + ", ".join(["'hydra.launcher.setup=[x]'"] * 12) + "]}}", [*SWEEP, EVIL],
     "hydra.overrides: is|.*Merge error"),
    # The sweep.json of another, and what the user adds when resuming it.
    *(("../strange/sweep.json", sweep_of(*arguments), ["resume", "strange", *typed],
       rf"hydra\.launcher\.{key}: {BY_HAND}")
      for key, arguments, typed in (
          ("setup", [SLURM, "~hydra.launcher.setup", "++hydra.launcher={setup:[touch canary]}"],
           []),
          ("setup", [SLURM, "++hydra={launcher:{setup:[touch canary]}}"], []),
          ("setup", [SLURM, "++hydra.launcher.setups=1", "++hydra.launcher={setup:[touch canary]}"],
           []),
          ("setup", [SLURM, "+notes='touch canary'", "++hydra.launcher={setup:['${notes}']}"], []),
          ("additional_parameters",
           [SLURM, f"{MORE}.a=1", "++hydra.launcher={additional_parameters:{prolog:x}}"], []),
          ("additional_parameters",
           [SLURM, "++hydra.launcher={additional_parameters:{prolog:x}}"],
           [f"{MORE}.constraint=h100"]),
          ("init", [RAY, "~hydra.launcher.init", "++hydra.launcher={init:{address:'ray://evil'}}"],
           []),
          ("address", [RAY, "++hydra.launcher={address:'ray://evil'}"], []))),
]  # fmt: skip


@pytest.mark.parametrize(
    ("file", "text", "command", "says"),
    ATTACKS,
    ids=[f"{a[1][:60]} {' '.join(a[2])}" for a in ATTACKS],
)
def test_a_file_of_another_runs_nothing(home, capsys, file, text, command, says):
    (home / "evilpackage").mkdir()
    (home / "evilpackage" / "__init__.py").write_text("open('canary', 'w').close()\n")
    path = home / "conf" / (file if file.endswith(".json") else f"{file or 'empty'}.yaml")
    for folder in (home / "conf", path.resolve().parent):
        folder.mkdir(parents=True, exist_ok=True)
    path.write_text(f"# @package _global_\n{text}\n" if "experiment" in file else text)
    if command[0] != "resume":
        command = [*command, "--config-dir", "conf"]
        if "--hydra-help" not in command:
            tiny = [*TINY, "data=synthetic", "data.n_tokens=5000"]
            chosen = (file.partition("/")[0] + "=", file.partition("/")[0] + ".")
            command += [word for word in tiny if not word.startswith(chosen)]
    assert run(command) == 2
    out, err = capsys.readouterr()
    assert re.match(f"llmexp: (error: )?{says}", err, re.S), err + out
    assert "Traceback" not in err
    assert not list(home.rglob("canary"))
    assert "LLMEXP_ALLOW" not in os.environ


# Settings under `hydra`, and what the refusal begins with.
HANDLER = {"class": "logging.FileHandler", "filename": "canary"}
NODES: list[tuple[dict[str, Any], str]] = [
    ({"sweeper": "${x.section}"}, "hydra.sweeper="),
    ({"job": "${x.section}"}, "hydra.job.env_set: "),
    ({"callbacks": "${x.section}"}, "hydra.callbacks: "),
    ({"launcher": {"init": "${x.list}"}}, "hydra.launcher.init="),
    ({"launcher": {"init": [{"a": "${x.section}"}]}}, "hydra.launcher.init.0.a="),
    ({"launcher": {"init": "${oc.create:{_target_:os.makedirs}}"}},
     "hydra.launcher.init=${oc.create:"),
    ({"launcher": {"init": "${oc.decode:'[1,2]'}"}}, "hydra.launcher.init=${oc.decode:"),
    ({"launcher": {"_target_": "${x.text}"}}, "hydra.launcher._target_="),
    ({"launcher": {"init": "${x.missing}"}}, "hydra.launcher.init: "),
    ({"launcher": {"partition": ["x"]}}, "hydra.launcher.partition="),
    *(({"launcher": {key: ["touch canary"]}}, f"hydra.launcher.{key}: runs what it says")
      for key in ("setup", "additional_parameters", "init", "address")),
    ({"sweeper": {"_target_": OPTUNA}}, f"hydra.sweeper._target_={OPTUNA}"),
    ({"sweeper": {"_target_": "ownparts.system"}}, "hydra.sweeper._target_=ownparts.system"),
    ({"sweeper": {"max_batch_size": {"_target_": "os.system"}}},
     "hydra.sweeper.max_batch_size._target_"),
    ({"sweeper": {"max_batch_size": "${oc.select:x.section}"}}, "hydra.sweeper.max_batch_size="),
    ({"job_logging": {"version": 1, "handlers": {"c": HANDLER}}}, "hydra.job_logging: "),
    ({"hydra_logging": "${x.section}"}, "hydra.hydra_logging: "),
]  # fmt: skip


def looked_at(own: dict[str, Any]) -> None:
    elsewhere = {
        "section": {"_target_": "os.makedirs", "name": "canary"},
        "list": [1],
        "text": "os.makedirs",
        "missing": "???",
        "number": 3,
    }
    guard.refuse_code(OmegaConf.create({"x": elsewhere, "hydra": own}))


@pytest.mark.parametrize(("own", "says"), NODES, ids=[str(own) for own, _ in NODES])
def test_what_hydra_would_call_is_refused(home, monkeypatch, own, says):
    monkeypatch.setenv("LLMEXP_ALLOW", "ownparts")
    with pytest.raises(ConfigError, match=re.escape(says)):
        looked_at(own)
    assert not (home / "canary").exists()


def test_plain_sweepers_and_launchers_are_not_refused(home, monkeypatch):
    monkeypatch.setenv("LLMEXP_ALLOW", "ownparts")
    looked_at({
        "sweeper": {"_target_": guard.SWEEPER, "params": {"optimizer.lr": "${x.number},4"}},
        "launcher": {"_target_": "hydra_plugins.llmexp.SlurmLauncher",
        "setup": ["module load ${x.number}"], "partition": "${x.text}"},
        "overrides": {"hydra": ["hydra.launcher.setup=['module load ${x.number}']"]},
        "job_logging": guard.NO_LOGGING, "callbacks": {}, "job": {"env_set": {}, "env_copy": []},
    })  # fmt: skip


@pytest.mark.parametrize("prefix", ["", "+", "++", "~"])
@pytest.mark.parametrize(
    "key", ["setup", "additional_parameters.prolog", "init.address", "address"]
)
def test_what_a_command_line_alone_may_say_is_not_recorded(prefix, key):
    assert recordable(["-m", f"{prefix}hydra.launcher.{key}=x", "name=a", "--allow", "b"]) == [
        "-m",
        "name=a",
    ]


def test_what_is_typed_for_a_launcher_is_taken(home):
    typed = ["hydra.launcher.setup=[module load cuda,'echo \"a, "
             "b\"']", f"{MORE}={{constraint:h100,a:{{b:[1,{{}}]}}}}",
             f"{MORE}.exclusive=true", f"{MORE}.none=null",
             "hydra.launcher.partition=gpu"]  # fmt: skip
    with app.hydra_app(None) as hydra:
        for _ in range(2):
            cfg, _ = app.compose(hydra, [*TINY, "data=synthetic", SLURM, *typed], multirun=True)
            point = hydra.config_loader.load_sweep_config(cfg, ["train.seed=1"])
    assert cfg.hydra.launcher == point.hydra.launcher
    assert cfg.hydra.launcher.setup == ["module load cuda", 'echo "a, b"']
    wanted = {"constraint": "h100", "a": {"b": [1, {}]}, "exclusive": True, "none": None}
    assert cfg.hydra.launcher.additional_parameters == wanted


@pytest.mark.parametrize("key", ["partition", "account", "qos"])
def test_no_line_of_a_shell_script_comes_from_a_name_in_slurm(monkeypatch, key):
    monkeypatch.setattr(slurm.shutil, "which", lambda name: name)
    values = {"partition": None, "account": None, "qos": None, "timeout_min": 60,
    "cpus_per_task": 1,
              "gpus_per_node": 0, "mem_gb": 1.0, "signal_delay_s": 60, "array_parallelism": 1,
              "setup": [],
              "additional_parameters": {}}  # fmt: skip
    slurm.check(slurm.Knobs(**values | {key: "gpu-a100,big"}))
    with pytest.raises(ConfigError, match=rf"hydra\.launcher\.{key}='gpu.*one word of letters"):
        slurm.check(slurm.Knobs(**values | {key: "gpu\ntouch canary #"}))


def test_every_config_that_hydra_composes_is_looked_at(home):
    """Also those that it composes by itself after the one that the command has seen."""
    with app.hydra_app(None) as hydra, pytest.raises(ConfigError, match=r"hydra\.callbacks"):
        hydra.config_loader.load_sweep_config(
            app.compose(hydra, [*TINY, "data=synthetic"], multirun=True)[0],
            ["+hydra.callbacks.x={_target_:os.makedirs,name:canary}"],
        )
    assert not (home / "canary").exists()


# Run folders of others.


BASE = composed(*TINY, "data=synthetic", "data.n_tokens=5000")
CONFIGS = {
    "python tags": ("x: !!python/object/apply:os.system ['touch canary']", "cannot be read"),
    "aliases without an end": (yaml.safe_dump({**plain(BASE), "user": None}).replace(
        "user: null", "\n ".join(["user:", "a: &a [x, x, x, x, x, x, x, x, x]"] + [
        f"{n}: &{n} [{', '.join([f'*{p}'] * 9)}]" for p, n in zip("abcdefghijkl", "bcdefghijklm",
        strict=True)
    ])), "more than 10,000 values"),
    "binary": ("\x00\x01", "cannot be read"),
}  # fmt: skip


@pytest.mark.parametrize("what", CONFIGS)
def test_the_config_of_another_runs_nothing_and_takes_no_time(home, capsys, what):
    (home / "run").mkdir()
    text, says = CONFIGS[what]
    (home / "run" / "config.yaml").write_text(text)
    for command in (["sample", "run"], ["resume", "run"], ["compare", "run"], ["runs", "run"]):
        (home / "run" / "run.json").write_text("{}")
        code = run(command)
        out, err = capsys.readouterr()
        assert code == 2 or command[0] in ("compare", "runs"), out
        assert "Traceback" not in err
        assert says in err or command[0] in ("compare", "runs"), err
        assert not (home / "canary").exists()


@pytest.fixture(scope="module")
def swept(tmp_path_factory) -> Path:
    """A sweep of one run."""
    cwd = tmp_path_factory.mktemp("swept")
    result = llmexp(
        "train", "-m", *TINY, "data=synthetic", "data.n_tokens=5000", "train.max_steps=3",
        "train.log_every=1",
        "train.eval_tokens=500", "train.seed=1", "hydra.sweep.dir=sweep", cwd=cwd,
    )  # fmt: skip
    assert result.code == 0, result.err
    return cwd / "sweep"


STRANGE = {
    "metrics.jsonl": (os.mkfifo, "a pipe or a device"),
    "logs": (lambda path: path.symlink_to(path.resolve().parents[2]), "a link"),
    "checkpoints/step_00000003/state.pt": (lambda path: path.symlink_to("/dev/zero"), "a link"),
}


@pytest.mark.parametrize("place", STRANGE)
@pytest.mark.usefixtures("forking")
def test_a_folder_with_a_link_a_pipe_or_a_device_is_refused_at_the_door(
    swept, tmp_path, monkeypatch, capfd, place
):
    """By each command that opens one, before anything is written; wandb keeps links of its own."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(swept, "sweep")
    point = Path("sweep/0-point")
    (point / "wandb").mkdir()
    (point / "wandb" / "latest-run").symlink_to("nowhere")
    rundir.check_plain(Path("sweep"))
    make, kind = STRANGE[place]
    (point / place).unlink(missing_ok=True)
    make(point / place)
    before = sorted(str(p) for p in Path("sweep").rglob("*"))
    says = (
        f"{point / place}: is {kind}; the folder of a run or a sweep holds plain files and "
        "folders only"
    )
    commands = [["resume", str(point)], ["resume", "sweep"], ["sample", str(point)], ["compare",
    "sweep"],
                ["sync", "--dry-run", "sweep"]]  # fmt: skip
    if place == "metrics.jsonl":  # these take longer
        base = [*TINY, "data=synthetic", "data.n_tokens=5000", "train.seed=1"]
        commands += [
            ["train", "-m", *base, "sweep.resume=sweep"],
            ["train", *base, f"hydra.run.dir={point}"],
        ]
    for command in commands:
        assert run(command) == (1 if command[0] == "sync" else 2), command
        out, err = capfd.readouterr()
        assert says in out + err, (command, out, err)
        assert "Traceback" not in err
    assert sorted(str(p) for p in Path("sweep").rglob("*")) == before


# Names.


@given(st.text(max_size=200), st.text(max_size=200))
@settings(max_examples=100, derandomize=True)
def test_a_label_is_one_folder_name_whatever_was_swept(key, value):
    name = "7-" + point_label([f"{key}={value}"], [key.partition("=")[0]])
    assert Path("/root/sweep", name).resolve() == Path("/root/sweep") / name
    assert len(name.encode()) < 200
    assert not set(name) & set("/\\\0\n\"'$;&|<>*?~` ")


@given(st.text(min_size=1, max_size=100))
@settings(max_examples=50, derandomize=True)
def test_a_name_stays_inside_the_output_root(name):
    tree = plain(BASE) | {"name": name.replace("${", "")}
    cfg = OmegaConf.create({**tree, "hydra": {"job": {}}}, flags={"allow_objects": False})
    try:
        config = app.typed_config(cfg)
    except ConfigError:  # the tests of refusals say for which ones
        return
    assert (Path("/root/outputs") / config.name).resolve().parent == Path("/root/outputs")


def test_plans_and_configs_on_the_terminal_tell_no_secret(home, capsys, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "canarysecret123456")
    base = [*TINY, "data=synthetic", "data.n_tokens=5000"]
    for command, code in (
        (["plan", "-m", *base, "train.seed=1,canarysecret123456"], 2),
        (["train", "--cfg", "job", *base, "tracker.notes=canarysecret123456"], 2),
        (["train", "--cfg", "job", "--resolve", *base, "+data.api_token=abc"], 2),
        (["train", "--cfg", "job", "--resolve", *base, "+data.words=${oc.env:WANDB_API_KEY}"], 0),
    ):
        assert run(command) == code, command
        out, err = capsys.readouterr()
        assert "canarysecret" not in out + err
        assert "api_token: abc" not in out
        assert code or "words: ${oc.env:WANDB_API_KEY}" in out


@pytest.mark.parametrize("subdir", ["../x", "/tmp/x", "a/../../x", ".", "${oc.env:UP}"])
def test_a_point_stays_inside_its_sweep(home, capsys, monkeypatch, subdir):
    monkeypatch.setenv("UP", "../up")
    overrides = [
        *TINY,
        "data=synthetic",
        "data.n_tokens=5000",
        "train.seed=1,2",
        f"hydra.sweep.subdir={subdir}",
    ]
    assert run(["plan", "-m", *overrides]) == 2
    assert "must be inside the sweep's folder" in capsys.readouterr().err
