"""What a run is called in wandb, where a login is found, and the position of its mirror."""

import json
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import wandb
from hypothesis import example, given
from hypothesis import strategies as st

from llmexp.compose.security import fill_tracker
from llmexp.config.tracking import SAFE_ID, with_environment
from llmexp.tracker.fields import (
    MirrorPosition,
    cut_tags,
    given_run_id,
    next_id,
    owe,
    read_position,
    run_fields,
    shorten,
    upload_is_pending,
    write_position,
)
from llmexp.tracker.wandb import has_login, may_have_login
from tests.tools import option
from tests.tracker.made import KEY


def test_a_position_is_kept_and_owed_by_the_same_run_id_and_a_damaged_one_is_none(tmp_path):
    done = MirrorPosition("r", 5, 2, {"step": 2}, sweep="s")
    write_position(tmp_path, done)
    assert read_position(tmp_path) == done
    assert not upload_is_pending(tmp_path)
    assert owe(tmp_path, "r") == read_position(tmp_path) == replace(done, uploaded=None)
    assert upload_is_pending(tmp_path)
    assert owe(tmp_path, "another") == MirrorPosition("another", sweep="s")
    known = {"run_id": "r", "tokens_seen": 1, "step": 1}
    wrong = [{"tokens_seen": "x"}, {"step": float("inf")}, {"run_id": 3}, {"run_id": "a/b"}]
    damaged = ["", "{", "[]", "null", "{}", "\udcff", "[" * 200_000]
    for text in [*damaged, *(json.dumps(known | one) for one in wrong)]:
        (tmp_path / "tracker.json").write_bytes(text.encode("utf-8", "surrogateescape"))
        assert read_position(tmp_path) is None, text[:99]
        assert not upload_is_pending(tmp_path)
    (tmp_path / "tracker.json").unlink()
    assert read_position(tmp_path) is None


@pytest.fixture
def nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """No login and no settings of whoever runs the tests; the home is the current folder."""
    monkeypatch.chdir(tmp_path)
    for name in [n for n in os.environ if n.startswith("WANDB_") or n == "NETRC"]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    return monkeypatch


def machine(name: str) -> str:
    return f"machine {name}\n  login user\n  password {KEY}\n"


@pytest.mark.parametrize(
    ("env", "netrc", "settings_key", "expected"),
    [
        ({}, "", None, False),
        ({"WANDB_API_KEY": KEY}, "", None, True),
        ({"WANDB_API_KEY": ""}, "", None, False),
        ({"WANDB_IDENTITY_TOKEN_FILE": "/token"}, "", None, True),
        ({}, "", KEY, True),
        ({}, machine("api.wandb.ai"), None, True),
        ({}, f"default\n  login user\n  password {KEY}\n", None, True),
        ({}, machine("other.host"), None, False),
        ({}, "machine api.wandb.ai\n  login user\n", None, False),
        ({}, "not a netrc file", None, False),
    ],
)
def test_where_a_login_is_found(nobody, env, netrc, settings_key, expected):
    for name, value in env.items():
        nobody.setenv(name, value)
    if netrc:
        Path(".netrc").write_text(netrc)
    settings = SimpleNamespace(base_url="https://api.wandb.ai", api_key=settings_key)
    assert has_login(settings) is expected
    assert may_have_login() is (expected and settings_key is None)


@pytest.mark.parametrize("folder", [".config/wandb", "wandb", ".wandb"])
def test_files_of_settings_give_a_login_where_wandb_finds_one(tmp_path, nobody, folder):
    Path(".netrc").write_text(machine("other.host"))
    file = Path(folder, "settings")
    file.parent.mkdir(parents=True)
    for text, expected in (
        ("", False),
        ("no settings", False),
        ("[default]\nentity = me\nmode = online\n", False),
        (f"[default]\napi_key = {KEY}\n", True),
        ("[default]\nbase_url = https://other.host\n", True),
    ):
        file.write_text(text)
        settings = wandb.Settings(settings_system=str(tmp_path / ".config/wandb/settings"))
        settings.update_from_system_settings()
        assert may_have_login() is has_login(settings) is expected, text


def test_both_configs_have_what_a_later_upload_uses():
    wandb, none = option("tracker/wandb"), option("tracker/none")
    assert (wandb.pop("kind"), none.pop("kind")) == ("wandb", "none")
    assert none.keys() == {"also", "project", "entity", "name", "group", "tags", "notes"}
    assert none.items() <= wandb.items()


LONG = [f"model.a_long_key_of_a_model.another_one.and_a_third={'x' * 30}{n}" for n in range(3)]


@example(LONG)
@given(st.lists(st.text(max_size=100), max_size=8))
def test_tags_are_cut_and_stay_distinct(tags: list[str]):
    kept = cut_tags(tags)
    assert all(1 <= len(tag) <= 64 for tag in kept)
    assert len(kept) == len(set(kept)) == len(set(tags) - {""})
    assert {tag for tag in tags if 1 <= len(tag) <= 64} <= set(kept)
    assert shorten("a" * 64, 64) == "a" * 64


def tree(**tracker: Any) -> dict[str, Any]:
    chosen = {"project": "p", "name": None, "group": None, "tags": ["mine"], "notes": None}
    return {"tracker": chosen | tracker, "clip": {"max_norm": 0.5}}


def test_fields_of_a_run_of_a_sweep_and_of_a_single_run(tmp_path):
    label, group = "clip.max_norm=0.5,seed=1", "/data/outputs/gpt/2030-01-01_12-00-00"
    recorded = {
        "overrides": ["model=gpt2", "clip.max_norm=0.5", "+extra.key=3", "seed=1"],
        "swept": ["clip.max_norm", "+extra.key", "seed"], "max_steps": 7,
        "data_fingerprint": {"a": 1}, "label": label, "group": group,
    }  # fmt: skip
    fields = run_fields(tmp_path, tree(), recorded)
    assert (fields.group, fields.name) == ("gpt/2030-01-01_12-00-00", label)
    assert fields.tags == ["mine", "clip.max_norm=0.5", "extra.key=3", "seed=1"]
    assert fields.config["clip"] == {"max_norm": 0.5}
    assert fields.config["run"]["max_steps"] == 7
    assert "data_fingerprint" not in fields.config["run"]
    chosen = run_fields(tmp_path, tree(group="g", name="n"), recorded)
    # With the label, else all points would share the name.
    assert (chosen.group, chosen.name) == ("g", f"n {label}")
    single = {"label": None, "group": None, "overrides": ["a=1", "b=2"]}
    fields = run_fields(tmp_path, tree(), single)
    assert (fields.group, fields.name, fields.tags) == (None, "a=1,b=2", ["mine"])
    assert run_fields(tmp_path, tree(), single | {"overrides": []}).name == tmp_path.name
    assert run_fields(tmp_path, tree(name="n"), {}).name == "n"
    # The run id stays when the folder moves.
    moved = tmp_path / "other"
    moved.mkdir()
    assert run_fields(moved, tree(), {}).run_id != fields.run_id
    write_position(moved, MirrorPosition(fields.run_id))
    assert run_fields(moved, tree(), {}).run_id == fields.run_id


ENV = {
    "WANDB_PROJECT": "theirs", "WANDB_ENTITY": "team", "WANDB_NAME": "a name",
    "WANDB_RUN_GROUP": "g", "WANDB_NOTES": "why", "WANDB_TAGS": "one, two,",
    "WANDB_MODE": "offline",
}  # fmt: skip
FILLED = {"project": "theirs", "entity": "team", "name": "a name", "group": "g", "notes": "why"}
EMPTY: dict[str, Any] = {"kind": "wandb", **dict.fromkeys(FILLED), "tags": [], "mode": "auto"}
MINE = {
    "kind": "wandb", "project": "p", "entity": "e", "name": "n", "group": "h", "notes": "x",
    "tags": ["t"], "mode": "online",
}  # fmt: skip


def test_the_environment_fills_in_and_the_config_goes_before_it_with_a_line(monkeypatch):
    filled, unused = with_environment(EMPTY, ENV)
    assert (filled, unused) == (EMPTY | FILLED | {"tags": ["one", "two"]}, [])
    assert with_environment(filled, ENV) == (filled, [])
    assert with_environment(EMPTY, {})[0]["project"] == "llmexp"
    kept, unused = with_environment(MINE, {**ENV, "WANDB_RESUME": "must"})
    assert kept == MINE
    assert [text.partition("=")[0].partition(" ")[0] for text in unused] == [*ENV, "WANDB_RESUME"]
    assert unused[0] == "WANDB_PROJECT=theirs is not used: tracker.project=p goes before it"
    kept, unused = with_environment(MINE, {**ENV, "WANDB_SWEEP_ID": "s"})
    assert (kept["project"], kept["entity"], kept["name"]) == ("theirs", "team", "n")
    agents = "tracker.project=p is not used: the run is wandb's agent's, of the project theirs"
    assert unused[0] == agents
    # wandb's mode may be set for all commands of a shell, and other trackers refuse one
    monkeypatch.setenv("WANDB_MODE", "offline")
    for kind, project in (("none", None), ("mlflow", "llmexp"), ("tensorboard", "llmexp")):
        section = {"kind": kind, **dict.fromkeys(FILLED), "tags": []}
        tree = {"tracker": dict(section)}
        assert (fill_tracker(tree), tree["tracker"]) == ([], section | {"project": project})


def test_whose_run_id_it_is(tmp_path):
    theirs = {"WANDB_RUN_ID": "Theirs_1"}
    agents = {**theirs, "WANDB_SWEEP_ID": "s"}
    assert given_run_id(tmp_path, "own", False, {}) == ("own", "")
    assert given_run_id(tmp_path, "own", False, theirs) == ("Theirs_1", "")
    assert "one of a sweep" in given_run_id(tmp_path, "own", True, theirs)[1]
    write_position(tmp_path, MirrorPosition("own", 3, 1))
    run_id, unused = given_run_id(tmp_path, "own", False, theirs)
    assert run_id == "own"
    assert "has the id own" in unused
    assert given_run_id(tmp_path, "own", False, agents) == ("Theirs_1", "")


@example("x" * 64)
@given(st.from_regex(SAFE_ID, fullmatch=True))
def test_the_next_run_id_is_another_safe_one(run_id: str):
    ids = [run_id]
    for _ in range(3):
        ids.append(next_id(ids[-1]))
    assert len(set(ids)) == 4
    assert all(SAFE_ID.fullmatch(one) for one in ids)
