"""A config and a name must not call code, read secrets or print them, each tried with a canary.

What is refused at the command line is in tests/refusals/security.yaml.
"""

import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from llmexp.__main__ import run
from llmexp.compose import app, security
from llmexp.compose.command_line import recordable
from llmexp.config import targets, variables
from llmexp.config.convert import build
from llmexp.config.sections import plain
from llmexp.config.values import ConfigError
from llmexp.folders import ending, rundir
from llmexp.sweep import slurm
from llmexp.sweep.points import point_label
from llmexp.system import redact
from tests.conftest import ASSETS, ROOT, TINY, llmexp
from tests.tools import composed

DATA = ["data=synthetic", "data.n_tokens=5000"]
SYNTHETIC = [*TINY, *DATA]
KEY, NETRC_KEY, NOTE = "canary-key-0123456789", "canary-netrc-987654321", "canary-note-555"
RATE, TOKEN = "0.0012345678", "canary-token-24680"
CANARIES = (KEY, NETRC_KEY, NOTE, TOKEN, "canary-folder")


@pytest.fixture
def home(tmp_path, monkeypatch) -> Path:
    """An empty folder to be in, with the tests' package `own` on the path and not allowed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("LLMEXP_ALLOW", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.syspath_prepend(str(ASSETS))
    return tmp_path


# Secrets and the environment.


def holding(path: Path, *canaries: str) -> list[str]:
    """The files at or under `path` that hold one of the texts, in their content or their name."""
    found = []
    for file in path.rglob("*"):
        content = file.name.encode() + (file.read_bytes() if file.is_file() else b"")
        if file.suffix != ".diff":  # of this checkout, which may have this test in it
            found += [f"{file}: {text}" for text in canaries if text.encode() in content]
    return found


def test_no_file_of_a_run_holds_what_came_from_the_environment(tmp_path):
    """It was told everything by oc.env, and fails with all its environment in the error; another
    value of a variable makes another run, a renewed secret does not."""
    folder = tmp_path / "run"
    data = tmp_path / "canary-folder"
    data.mkdir()
    np.save(data / "train.npy", (np.arange(3000) % 50).astype(np.uint16))
    (tmp_path / ".netrc").write_text(f"machine api.wandb.ai login user password {NETRC_KEY}\n")
    env = {"WANDB_API_KEY": KEY, "CANARY_NOTE": NOTE, "CANARY_RATE": RATE, "HF_TOKEN": TOKEN}
    env |= {"CANARY_DATA": str(data), "HOME": str(tmp_path)}
    theirs = ("n_layers", "n_heads", "d_model", "d_ff", "gelu", "residual", "dropout",
              "max_position_embeddings", "parametrization")  # fmt: skip
    told = [
        "model._target_=own.tricks.Model", "+model.secret=${oc.env:HF_TOKEN}", "data=tokens",
        "data.train_files=${oc.env:CANARY_DATA}/train.npy", "optimizer.lr=${oc.env:CANARY_RATE}",
        "tracker.mode=offline", "tracker.notes=about ${oc.env:CANARY_NOTE}",
        *(f"~model.{name}" for name in theirs),
        *(word for word in TINY if not word.startswith(("model", "tracker"))),
    ]  # fmt: skip
    steps = ["checkpoint.every=2", "train.max_steps=4", "train.log_every=1", "hydra.run.dir=run"]
    own = ["--allow=own", "hooks=[own.tricks.breaks]"]
    result = llmexp("train", *own, *told, *steps, cwd=tmp_path, **env)
    assert result.code == 3, result.err
    assert holding(folder, *CANARIES) == []
    assert not [text for text in CANARIES if text in result.err]
    error = result.json("status.json")["error"]
    assert "my own environment is" in error
    assert "<$WANDB_API_KEY>" in error
    # The rate itself is a figure of the rows; but no record has it from the environment.
    for name in ("config.yaml", "run.json", "status.json"):
        assert RATE not in (folder / name).read_text()
    config = rundir.read_config(folder)
    assert config["optimizer"]["lr"] == "${oc.env:CANARY_RATE}"
    assert config["data"]["train_files"] == "${oc.env:CANARY_DATA}/train.npy"
    assert config["tracker"]["notes"] == "about ${oc.env:CANARY_NOTE}"
    assert "optimizer.lr=${oc.env:CANARY_RATE}" in result.json("run.json")["overrides"]
    assert list(folder.rglob("*.wandb"))
    assert max(row["lr"] for row in result.rows()) == float(RATE)
    without = {k: v for k, v in env.items() if k != "CANARY_RATE"}
    for other in (env | {"CANARY_RATE": "0.5"}, without):
        refused = llmexp("resume", "run", "--allow=own", cwd=tmp_path, **other)
        assert (refused.code, "CANARY_RATE" in refused.err) == (2, True), refused.err
    renewed = env | {"WANDB_API_KEY": KEY[::-1]}
    again = llmexp("resume", "run", "--allow=own", "hooks=[]", cwd=tmp_path, **renewed)
    assert again.code == 0, again.err
    assert holding(folder, *CANARIES, KEY[::-1]) == []
    assert [row["step"] for row in result.rows()] == [1, 2, 3, 4]


def test_texts_keep_their_variables_and_numbers_take_them(monkeypatch):
    for name, value in {"CANARY": "canary-value", "STEPS": "12", "RATE": "1e-3"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("NOT_SET", raising=False)
    config = composed(
        "tracker.notes=${oc.env:CANARY}", "tracker.tags=[x,'a-${oc.env:CANARY}']",
        "+data.where=${tracker.notes}/b",
        "+data.default='${oc.env:NOT_SET,${oc.env:CANARY}}'", "+data.other=${oc.env:NOT_SET,7}",
        "+data.decoded='${oc.decode:${oc.env:STEPS}}'", "train.max_steps=${oc.env:STEPS}",
        "name=of-${oc.env:STEPS}", "tracker.project=p-${oc.env:STEPS}",
        "clip.max_norm='${oc.decode:${oc.env:RATE}}'",
    )  # fmt: skip
    assert "canary-value" not in json.dumps(plain(config))
    assert config.tracker.notes == "${oc.env:CANARY}"
    assert config.tracker.tags == ["x", "a-${oc.env:CANARY}"]
    data = {"where": "${oc.env:CANARY}/b", "default": "${oc.env:CANARY}", "other": 7}
    assert {**data, "decoded": "${oc.env:STEPS}"}.items() <= config.data.items()
    assert (config.train.max_steps, config.clip.max_norm) == (12, 0.001)
    assert (config.name, config.tracker.project) == ("of-12", "p-12")
    assert build(plain(config)) == config
    monkeypatch.setenv("STEPS", "canary-value")
    with pytest.raises(ConfigError, match=r"train.max_steps=\$\{oc.env:STEPS\}: what the envir"):
        composed("train.max_steps=${oc.env:STEPS}")


TEXTS = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=12)
LEAVES = st.one_of(TEXTS, st.integers(), st.floats(), st.booleans(), st.none())


@given(st.data())
@settings(max_examples=200, derandomize=True)
def test_a_secret_is_found_wherever_it_is(data):
    """As a text, a part of one, a number or a key, at any depth, whatever characters it has."""
    draw = data.draw
    secret = draw(st.one_of(TEXTS.filter(bool).map(lambda t: t * 8), st.integers(10**7).map(str)))
    number = secret.isascii() and secret.isdecimal() and secret[0] != "0"
    whole = [secret, f"a{secret}b", {secret: 1}, {f"a{secret}": {}}]
    node = draw(st.sampled_from([*whole, int(secret)] if number else whole))
    for _ in range(draw(st.integers(0, 4))):
        others = draw(st.lists(LEAVES, max_size=2))
        deeper = {**dict.fromkeys("pq", others), "more": node}
        node = draw(st.sampled_from([[*others, node], deeper]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CANARY_API_KEY", secret)
        with pytest.raises(ConfigError, match=r"holds the value of \$CANARY_API_KEY"):
            security.refuse_secrets({"data": node})
        patch.delenv("CANARY_API_KEY")
        security.refuse_secrets({"data": node})


def test_a_ledger_has_names_in_place_of_values(tmp_path, tokens):
    """The reason why a point cannot run repeats the path that was not found."""
    shutil.copy(tokens, tmp_path / "train.npy")
    result = llmexp(
        "train", "-m", *TINY, "data=tokens", "train.max_steps=1", "sweep.on_infeasible=skip",
        "data.train_files=train.npy,'${oc.env:CANARY_DATA}/none.npy'", "hydra.sweep.dir=sweep",
        cwd=tmp_path, CANARY_DATA="canary-folder", WANDB_API_KEY=KEY,
    )  # fmt: skip
    assert result.code == 0, result.err
    assert "${oc.env:CANARY_DATA}/none.npy" in (tmp_path / "sweep" / "sweep.json").read_text()
    assert holding(tmp_path / "sweep", "canary-folder", KEY) == []
    assert "canary-folder" not in result.out + result.err


def test_a_data_file_that_was_cut_is_found_by_the_name_that_was_recorded(tmp_path, monkeypatch):
    monkeypatch.setenv("CANARY_DATA", str(tmp_path / "canary-folder"))
    (tmp_path / "canary-folder").mkdir()
    (tmp_path / "canary-folder" / "train.npy").write_bytes(b"x" * 10)
    name = "${oc.env:CANARY_DATA}/train.npy"
    (tmp_path / "run.json").write_text(json.dumps({"data_files": {name: 1000, "x": 1}}))
    told = ending.bus_error(tmp_path, -signal.SIGBUS)
    assert f"{name}: this token file was truncated from 1,000 to 10 bytes" in told
    assert "canary-folder" not in told


def test_names_that_only_sound_like_secrets_are_none(home, monkeypatch, capsys):
    """A launch script's counts and words, in a config and in a message; keys of a config."""
    for name in ("MAX_TOKENS", "NUM_TOKENS", "TRAIN_TOKENS", "MAX_TOKEN", "LAST_KEY"):
        monkeypatch.setenv(name, "10000000")
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(home))
    monkeypatch.setenv("SORT_KEY", "val/loss")
    for given_tokens in ("10000000", "${oc.env:MAX_TOKENS}"):
        budget = ["train.max_steps=null", f"train.max_tokens={given_tokens}"]
        notes = ["tracker.notes=by val/loss", f"+user.home={home}"]
        assert run(["plan", *SYNTHETIC, *budget, *notes]) == 0
        assert capsys.readouterr().err == ""
    assert redact.redacted("the sort key val/loss") == "the sort key val/loss"
    assert redact.secrets() == {}
    names = ("tokenizer", "max_tokens", "eos_token", "sample_tokens", "key_size", "secretary")
    security.refuse_secrets({"data": dict.fromkeys(names, "abc")})


def test_names_and_values_of_secrets_are_some(monkeypatch):
    some = {"WANDB_API_KEY": "12345678", "OPENAI_APIKEYS": "a-b-c-d-e",
            "AWS_SECRET_ACCESS_KEY": "abc/def+", "DB_PASSWORD": "hunter22",
            "MY_SECRETS": "hunter22", "AWS_ACCESS_KEY_ID": "AKIAIOSFODNN7EXAMPLE",
            "SSH_KEY": "abcdefghijklmnop", "GITHUB_TOKEN": "ghp_0123456789abcdef"}  # fmt: skip
    for name, value in some.items():
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            assert redact.redacted(f"it is {value}") == f"it is <${name}>"
            with pytest.raises(ConfigError, match=f"holds the value of .{name}"):
                security.refuse_secrets({"data": f"a {value}"})
    monkeypatch.setenv("MY_API_KEY", "long-value")
    monkeypatch.setenv("MY_OTHER_KEY", "long-value-longer\n")
    monkeypatch.setenv("SHORT_API_KEY", "ab")
    text = redact.redacted("ab long-value, long-value-longer\n, " + repr("long-value-longer\n"))
    assert text == "ab <$MY_API_KEY>, <$MY_OTHER_KEY>, '<$MY_OTHER_KEY>'"


def test_messages_name_the_variables_of_this_processs_runs_only(tmp_path, monkeypatch):
    """Reading another run's config, as compare does, replaces nothing in later messages."""
    monkeypatch.setenv("CANARY_OF_ANOTHER", "canary-of-another")
    tree = plain(composed(*SYNTHETIC))
    tree["tracker"]["notes"] = "${oc.env:CANARY_OF_ANOTHER}"
    (tmp_path / "config.yaml").write_text(json.dumps(tree))
    config = rundir.built_config(tmp_path)
    assert redact.redacted("it is canary-of-another") == "it is canary-of-another"
    variables.remember_names(plain(config))  # as a process does with its own
    assert redact.redacted("it is canary-of-another") == "it is ${oc.env:CANARY_OF_ANOTHER}"


def test_a_config_on_the_terminal_has_the_name_of_a_variable(home, capsys, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    words = "+data.words=${oc.env:WANDB_API_KEY}"
    assert run(["train", "--cfg", "job", "--resolve", *SYNTHETIC, words]) == 0
    out, err = capsys.readouterr()
    assert KEY not in out + err
    assert "words: ${oc.env:WANDB_API_KEY}" in out


# Calls.


def test_only_functions_and_classes_that_are_the_packages_own(home, monkeypatch):
    monkeypatch.setenv("LLMEXP_ALLOW", "own")
    for name in ("Model", "lying", "breaks", "small", "cached"):
        assert callable(targets.locate("hooks", f"own.tricks.{name}"))
    foreign = ("system", "os.system", "subprocess.call", "shell", "wrapped", "bound", "instance",
               "TEXT", "nn.Module", "functools.partial", "__builtins__",
               "__loader__.exec_module")  # fmt: skip
    for name in foreign:
        with pytest.raises(ConfigError, match=r"own\.tricks"):
            targets.locate("hooks", f"own.tricks.{name}")
    # Objects that lie about where they are from, put where the config looks for them.
    stolen = types.FunctionType(subprocess.call.__code__, subprocess.call.__globals__, "stolen")
    stolen.__module__ = "own.tricks"
    stolen_class = type("Stolen", (subprocess.Popen,), {"__module__": "own.tricks"})
    alias = types.ModuleType("own.tricks.alias")
    alias.system = os.system
    monkeypatch.setitem(sys.modules, "own.tricks.alias", alias)
    renamed = functools.partial(functools.partial(stolen))
    for value in (stolen, stolen_class, renamed):
        monkeypatch.setattr(sys.modules["own.tricks"], "trick", value, raising=False)
        with pytest.raises(ConfigError, match="outside the allowed"):
            targets.locate("model._target_", "own.tricks.trick")
    with pytest.raises(ConfigError, match="outside the allowed"):
        targets.locate("model._target_", "own.tricks.alias.system")


def test_nothing_is_called_from_inside_a_section():
    adamw = {"_target_": "llmexp.optim.optimizers.adamw.adamw"}
    for section in ("model", "data", "tokenizer", "optimizer", "schedule"):
        for word in targets.RESERVED:
            for nested in ({"x": {word: "os.system"}}, {"x": [{"y": [{word: True}]}]}):
                with pytest.raises(ConfigError, match=f"{section}.x.*{word}"):
                    targets.bind(section, adamw | nested, {})
            if word != "_target_":
                with pytest.raises(ConfigError, match=f"{section}.{word}"):
                    targets.refuse_calls(section, {word: "x"})


def looked_at(own: object) -> None:
    """Check a section `hydra` past the types that Hydra gives to some of its keys."""
    section = {"_target_": "os.makedirs", "name": "canary"}
    elsewhere = {"section": section, "text": "gpu", "number": 3}
    security.refuse_code(OmegaConf.create({"x": elsewhere, "hydra": own}))


def test_what_hydra_would_call_is_refused_and_plain_sweepers_and_launchers_are_not(home):
    for own, says in (
        ({"sweeper": "${x.section}"}, r"hydra\.sweeper="),
        ({"job": "${x.section}"}, r"hydra\.job\.env_set: "),
        ({"sweeper": {"max_batch_size": {"_target_": "os.system"}}}, r"max_batch_size\._target_"),
        ({"sweeper": {"max_batch_size": "${oc.select:x.section}"}}, "max_batch_size="),
    ):
        with pytest.raises(ConfigError, match=says):
            looked_at(own)
    looked_at({
        "sweeper": {"_target_": security.SWEEPER, "params": {"optimizer.lr": "${x.number},4"}},
        "launcher": {"_target_": "hydra_plugins.llmexp.SlurmLauncher",
                     "setup": ["module load ${x.number}"], "partition": "${x.text}"},
        "job_logging": security.NO_LOGGING, "callbacks": {}, "job": {"env_set": {}, "env_copy": []},
    })  # fmt: skip
    # also in what Hydra composes by itself after the config that the command has seen
    with app.hydra_app(None) as hydra, pytest.raises(ConfigError, match=r"hydra\.callbacks"):
        hydra.config_loader.load_sweep_config(
            app.compose(hydra, SYNTHETIC, multirun=True)[0],
            ["+hydra.callbacks.x={_target_:os.makedirs,name:canary}"],
        )
    assert not (home / "canary").exists()


def test_what_a_command_line_alone_may_say_is_not_recorded():
    for prefix in ("", "+", "++", "~"):
        for key in ("setup", "additional_parameters.prolog", "init.address", "address"):
            words = ["-m", f"{prefix}hydra.launcher.{key}=x", "name=a", "--allow", "b"]
            assert recordable(words) == ["-m", "name=a"]


def test_what_is_typed_for_a_launcher_is_taken():
    more = "+hydra.launcher.additional_parameters"
    typed = ["hydra.launcher.setup=[module load cuda,'echo \"a, b\"']", f"{more}.none=null",
             f"{more}={{constraint:h100,a:{{b:[1,{{}}]}}}}", f"{more}.exclusive=true",
             "hydra.launcher.partition=gpu", "hydra/launcher=slurm"]  # fmt: skip
    with app.hydra_app(None) as hydra:
        for _ in range(2):
            cfg, _ = app.compose(hydra, [*TINY, "data=synthetic", *typed], multirun=True)
            point = hydra.config_loader.load_sweep_config(cfg, ["train.seed=1"])
    assert cfg.hydra.launcher == point.hydra.launcher
    assert cfg.hydra.launcher.setup == ["module load cuda", 'echo "a, b"']
    wanted = {"constraint": "h100", "a": {"b": [1, {}]}, "exclusive": True, "none": None}
    assert cfg.hydra.launcher.additional_parameters == wanted


def test_no_line_of_a_shell_script_comes_from_a_name_in_slurm(monkeypatch):
    monkeypatch.setattr(slurm.shutil, "which", lambda name: name)
    values = yaml.safe_load((ROOT / "conf/hydra/launcher/slurm.yaml").read_text())
    del values["_target_"]
    for key in ("partition", "account", "qos"):
        slurm.check(slurm.Knobs(**values | {key: "gpu-a100,big"}))
        with pytest.raises(ConfigError, match=rf"hydra\.launcher\.{key}='gpu.*one word of letters"):
            slurm.check(slurm.Knobs(**values | {key: "gpu\ntouch canary #"}))
    with pytest.raises(ConfigError, match=r"hydra\.launcher\.timeout_min=2: ends before its own"):
        slurm.check(slurm.Knobs(**values | {"timeout_min": 2}))


def test_a_config_whose_aliases_make_it_endless_is_refused_wherever_it_is(home, monkeypatch):
    (home / "endless" / "experiment").mkdir(parents=True)
    monkeypatch.syspath_prepend(str(home))
    monkeypatch.setenv("LLMEXP_ALLOW", "endless")
    (home / "endless" / "__init__.py").touch()
    lines = [f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]" for n in range(1, 40)]
    (home / "endless" / "experiment" / "mine.yaml").write_text("\n".join(["a0: &a0 1", *lines]))
    for place in ("", f"file://{home}/endless", "pkg://endless"):
        more = [f"hydra.searchpath=[{place}]"] if place else []
        with (
            app.hydra_app(None if more else "endless", more) as hydra,
            pytest.raises(ConfigError, match=r"mine\.yaml: .*more than 10,000 values"),
        ):
            app.compose(hydra, [*SYNTHETIC, "experiment=mine", *more])


# Run folders of others.


def test_the_config_of_another_runs_nothing_where_others_are_shown(home, capsys):
    (home / "run").mkdir()
    (home / "run" / "run.json").write_text("{}")
    for text in ("x: !!python/object/apply:os.system ['touch canary']", "\0\1"):
        (home / "run" / "config.yaml").write_text(text)
        for command in ("compare", "runs"):
            run([command, "run"])
            assert "Traceback" not in capsys.readouterr().err
    assert not (home / "canary").exists()


STRANGE = {
    "metrics.jsonl": (os.mkfifo, "a pipe or a device"),
    "logs": (lambda path: path.symlink_to(path.resolve().parents[2]), "a link"),
    "checkpoints/step_00000003/state.pt": (lambda path: path.symlink_to("/dev/zero"), "a link"),
}


@pytest.mark.usefixtures("forking")
def test_a_folder_with_a_link_a_pipe_or_a_device_is_refused_at_the_door(
    runs, tmp_path, monkeypatch, capfd
):
    """By each command that opens one, before anything is written; wandb keeps links of its own."""
    monkeypatch.chdir(tmp_path)
    words = [*DATA, "train.max_steps=3", "train.seed=1"]
    for number, (place, (make, kind)) in enumerate(STRANGE.items()):
        sweep, point = f"sweep{number}", Path(f"sweep{number}/0-run")
        runs.copy(tmp_path / sweep, "-m", *words)
        (point / "wandb").mkdir()
        (point / "wandb" / "latest-run").symlink_to("nowhere")
        rundir.check_plain(Path(sweep))
        (point / place).unlink(missing_ok=True)
        make(point / place)
        before = sorted(str(p) for p in Path(sweep).rglob("*"))
        commands = [["resume", str(point)], ["resume", sweep], ["sample", str(point)],
                    ["compare", sweep], ["sync", "--dry-run", sweep]]  # fmt: skip
        if place == "metrics.jsonl":  # these take longer
            commands += [["train", "-m", *TINY, *words, f"sweep.resume={sweep}"],
                         ["train", *TINY, *words, f"hydra.run.dir={point}"]]  # fmt: skip
        for command in commands:
            assert run(command) == (1 if command[0] == "sync" else 2), command
            out, err = capfd.readouterr()
            assert f"{point / place}: is {kind}; the folder" in out + err, (command, out, err)
            assert "Traceback" not in err
        assert sorted(str(p) for p in Path(sweep).rglob("*")) == before


# Names.


@given(st.text(max_size=200), st.text(max_size=200))
@settings(max_examples=100, derandomize=True)
def test_a_label_is_one_folder_name_whatever_was_swept(key, value):
    name = "7-" + point_label([f"{key}={value}"], [key.partition("=")[0]])
    assert Path("/root/sweep", name).resolve() == Path("/root/sweep") / name
    assert len(name.encode()) < 200
    assert not set(name) & set("/\\\0\n\"'$;&|<>*?~` ")


BASE = plain(composed(*SYNTHETIC))


def test_a_secret_by_its_name_is_refused_once_it_has_a_value():
    security.refuse_secrets({"user": {"api_key": None, "password": "", "token": False}})
    for value in ("hunter", 0):
        with pytest.raises(ConfigError, match="is a secret by its name"):
            security.refuse_secrets({"user": {"api_key": value}})


@given(st.text(min_size=1, max_size=100))
@settings(max_examples=50, derandomize=True)
def test_a_name_stays_inside_the_output_root(name):
    tree = BASE | {"name": name.replace("${", "")}
    cfg = OmegaConf.create(
        {**tree, "hydra": {"overrides": {"hydra": [], "task": []}}}, flags={"allow_objects": False}
    )
    try:
        config = app.typed_config(cfg)
    except ConfigError:  # the tests of refusals say for which ones
        return
    assert (Path("/root/outputs") / config.name).resolve().parent == Path("/root/outputs")
