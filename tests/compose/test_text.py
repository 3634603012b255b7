"""A knob of text gets the characters that were typed, whatever Hydra or YAML makes of them."""

import dataclasses
import json
import tempfile
import typing
import unicodedata
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from llmexp.__main__ import run
from llmexp.cli.preparing import Prepare
from llmexp.cli.running import function_of
from llmexp.compose.command_line import parse
from llmexp.compose.overrides import as_text, parsed
from llmexp.config.knobs import takes_text
from llmexp.config.parts import arguments
from llmexp.config.sections import Config, conf_dir
from llmexp.config.targets import arguments_of, locate
from llmexp.config.values import override_value
from llmexp.folders.door import config_yaml, read_yaml
from llmexp.forecast.section import PlanKnobs
from llmexp.sweep.points import as_name, point_label
from llmexp.sweep.section import Sweep
from tests.conftest import TINY, llmexp
from tests.tools import option, run_here

# What Hydra, YAML or OmegaConf takes for something else, or is near to that.
ODD = ["695e0514", "2e3", "4e1", "1_000", "007", "0x10", "0o17", "true", "FALSE", "off", "no",
       "nan", "-inf", "1e400", ".5", "5.", "+3", "1:30", "2024-01-02", "null?", "nulls", "1.2.3",
       "12e", "0", "-0", "1e-3", "e5"]  # fmt: skip
PLAIN = st.text("0123456789eE_+-.xnaifltrue@/%?", min_size=1, max_size=8)
WORDS = (st.sampled_from(ODD) | PLAIN).filter(lambda w: w.lower() != "null" and w != "???")
SCRIPTS = st.text(st.characters(categories=["L", "Nd"]), min_size=1, max_size=8)
ANY = st.text(
    st.characters(codec="utf-8", exclude_characters="$", exclude_categories=["C", "Zl", "Zp"]),
    min_size=1,
    max_size=12,
).filter(lambda text: text != "???")
TEXTS = ["name", "tracker.project", "tracker.notes", "model.init_from", "data.train_files",
         "tokenizer.path", "tokenizer.end_of_text", "train.tasks_folder", "data.cache_dir",
         "hydra.run.dir", "hydra.sweep.dir"]  # fmt: skip
LISTS = ["tracker.tags", "train.tasks", "data.val_files", "hooks"]
CHOSEN = ["data=text", "tokenizer=file", "train.tasks=[x]"]


def declared() -> dict[str, tuple[Any, Any]]:
    """Each knob of the sections, of the commands and of all shipped parts: its type and knob."""
    found: dict[str, tuple[Any, Any]] = dict(arguments())
    sections = typing.get_type_hints(Config) | {"sweep": Sweep, "prepare": Prepare}
    for name, section in (sections | {"plan": PlanKnobs}).items():
        for field in dataclasses.fields(section) if dataclasses.is_dataclass(section) else ():
            if knob := field.metadata.get("knob"):
                kind = typing.get_type_hints(section)[field.name]
                found[f"{name}.{field.name.removesuffix('_')}"] = kind, knob
    for name in ("model", "data", "tokenizer", "optimizer", "schedule"):
        for file in (conf_dir() / name).glob("*.yaml"):
            part = locate(f"{name}._target_", option(f"{name}/{file.stem}")["_target_"])
            found |= {f"{name}.{k}": one for k, one in arguments_of(part).items()}
    return found


def test_each_knob_of_text_is_known_to_be_one():
    for key, (kind, knob) in declared().items():
        of = set(typing.get_args(kind) or [kind]) - {type(None)}
        if of == {str} and key != "batch.ramp" and not knob.choices:
            assert takes_text(key), key
        elif of & {int, float, bool} or knob.auto:
            assert not takes_text(key), key
    for section in ("model", "data", "tokenizer", "optimizer", "user"):
        assert not takes_text(f"{section}.mine")  # of one's own function: it may be a number


def config_of(capfd: pytest.CaptureFixture[str], *words: str) -> Any:
    """What `llmexp train --cfg all` prints, as a file that Hydra reads."""
    result = run_here(capfd, "train", "--cfg", "all", *CHOSEN, *words)
    assert result.code == 0, result.err
    return OmegaConf.create(result.out)


HERE = settings(
    max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True
)


@HERE
@given(
    typed=st.lists(WORDS, min_size=len(TEXTS), max_size=len(TEXTS)), typed_entries=st.lists(WORDS),
    quoted=st.lists(ANY, min_size=len(TEXTS), max_size=len(TEXTS)), quoted_entries=st.lists(ANY),
)  # fmt: skip
def test_characters_arrive_as_typed_or_in_the_quotes_that_messages_print(
    typed, typed_entries, quoted, quoted_entries, capfd
):
    for texts, entries, written in (
        (typed, typed_entries, lambda v: f"[{','.join(v)}]" if isinstance(v, list) else v),
        (quoted, quoted_entries, override_value),
    ):
        given = dict(zip(TEXTS, texts, strict=True)) | dict.fromkeys(LISTS, entries)
        cfg = config_of(capfd, *(f"{key}={written(value)}" for key, value in given.items()))
        assert {key: OmegaConf.select(cfg, key) for key in given} == given


@HERE
@given(words=st.lists(WORDS | SCRIPTS, min_size=1, max_size=4, unique=True))
def test_sweeps_and_sections_have_texts_too(words):
    swept = parsed([as_text(f"name={','.join(words)}")])[0]
    if len(words) > 1:
        assert [parsed([f"name={v}"])[0].value() for v in swept.sweep_string_iterator()] == words
    else:
        assert swept.value() == words[0]
    for key in ("fork.run", "data.train_files", "experiment"):
        assert parsed([as_text(f"{key}=[{','.join(words)}]")])[0].value() == words


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("data.sources={a: {files: 1e5, weight: 1e3}}", {"a": {"files": "1e5", "weight": 1e3}}),
        ("tracker={project: 1e3, tags: [2e3, null]}", {"project": "1e3", "tags": ["2e3", None]}),
        ("hooks=[{_target_: 1e3, every: 10}]", [{"_target_": "1e3", "every": 10}]),
        ("batch.ramp={0: 1e2}", {0: 100.0}),
        ("train.max_steps=1e3", 1000.0),
        ("user.mine=1e3", 1000.0),
        ("name=null", None),
    ],
)
def test_a_number_stays_one_where_a_number_is_taken(override, value):
    assert parsed([as_text(override)])[0].value() == value


def test_texts_that_look_like_numbers_come_through_runs_and_sweeps(tmp_path):
    words = ["name=1e3", "tracker.tags=[007,off]", "train.max_steps=4", "train.stop_step=2"]
    where = "hydra.run.dir=695e0514"
    assert llmexp("train", *TINY, *words, "data=synthetic", where, cwd=tmp_path).code == 75
    assert [p.name for p in tmp_path.iterdir()] == ["695e0514"]
    assert llmexp("resume", "695e0514", cwd=tmp_path).code == 0
    fork = ["fork.run=695e0514", "train.max_steps=5", "hydra.run.dir=1_000"]
    forked = llmexp("train", *fork, cwd=tmp_path)
    assert forked.code == 0, forked.err
    config = yaml.safe_load((tmp_path / "1_000" / "config.yaml").read_text())
    assert (config["name"], config["fork"]["run"]) == ("1e3", "695e0514")
    assert config["tracker"]["tags"] == ["007", "off"]
    for name in ("1e5", "2e5"):
        (tmp_path / name).write_text("To be, or not to be, that is the question. " * 20)
    texts = ["data=text", "data.val_files=1e5", "data.cache_dir=9e9", "train.max_steps=2"]
    files = ["data.train_files=1e5,2e5,日本.txt", "sweep.on_infeasible=skip", "hydra.sweep.dir=4e1"]
    sweep = llmexp("train", "-m", *TINY, *texts, *files, cwd=tmp_path)
    points = {p.name for p in (tmp_path / "4e1").iterdir() if p.is_dir()}
    assert points == {"0-train_files_1e5", "1-train_files_2e5"}, sweep.err
    assert (tmp_path / "9e9").is_dir()
    refused = json.loads((tmp_path / "4e1" / "sweep.json").read_text())["points"][2]
    assert refused["label"] == "train_files_日本.txt"
    assert "resuming 2 runs: 2 finished" in llmexp("resume", "4e1", cwd=tmp_path).out


@given(st.dictionaries(st.text("abc", min_size=1), WORDS | st.floats(allow_nan=False, width=16)))
def test_texts_and_numbers_come_back_from_a_saved_config(tree):
    """Also those such as 1e-3, which YAML 1.1 takes for a text where it has no point."""
    file = Path(tempfile.mkdtemp()) / "config.yaml"
    file.write_text(config_yaml({"a": 0.001} | tree) + "lr: 1e-3\n")
    assert read_yaml(file) == {"a": 0.001} | tree | {"lr": 0.001}


def test_a_text_of_a_part_or_of_a_variable_is_one(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FOLDER", "695e0514")
    own = [*TINY, "data=synthetic", "--allow=own", "model._target_=own.texts.Mine"]
    for words, code, says in (
        ([*own, "+model.corpus=1e5"], 2, "model.corpus=100000.0: a text is needed"),
        ([*own, "+model.corpus='1e5'"], 0, ""),
        (
            ["model=hf", "model.path=${oc.env:FOLDER}", "tracker=none"],
            2,
            "a folder with config.json",
        ),
    ):
        result = run_here(capfd, "plan", *words)
        assert (result.code, says in result.err) == (code, True), result.err
    assert "inf" not in result.err


@example("é" * 100)
@given(st.text(max_size=200) | SCRIPTS)
def test_names_keep_letters_of_all_scripts_and_fit_a_disk(text):
    name = as_name(text)
    assert len(name.encode()) <= 120
    assert as_name(name) == name == unicodedata.normalize("NFC", name)
    assert all(c in "._+-" or unicodedata.category(c)[0] in "LMN" for c in name)
    if text.isalnum() and len(unicodedata.normalize("NFC", text).encode()) <= 120:
        assert name == unicodedata.normalize("NFC", text)


def test_points_and_flags_are_named_by_their_text(tmp_path):
    assert point_label(["name='1e3'", "data.train_files=\\ a"], ["name"]) == "name_1e3"
    assert point_label(["user.x='हिन्दी, ß'"], ["user.x"]) == "x_हिन्दी_ß"
    args = parse("plan", function_of("plan"), ["--config-dir", "1e3", "name=2e3"])
    assert (args.config_dir, args.overrides) == ("1e3", ["name='2e3'"])
    assert run(["resume", str(tmp_path / "4e1")]) == 2
