"""`llmexp explain`: where a value comes from, what it replaced, what it changes, what uses it; on
one screen."""

import dataclasses
import json

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from llmexp.__main__ import run
from llmexp.cli import explain
from llmexp.cli.explain import DERIVED
from llmexp.cli.running import function_of, read_line
from llmexp.compose import app
from llmexp.compose.overrides import Layer, layers
from llmexp.config.knobs import fields
from llmexp.config.sections import OPEN_SECTIONS, plain
from llmexp.config.values import flatten
from llmexp.run import Run
from llmexp.run.layout import Layout
from tests.conftest import TINY

SYNTHETIC = [*TINY, "data=synthetic", "data.n_tokens=5000"]


def told(overrides: list[str], *keys: str, config_dir: str | None = None) -> list[dict]:
    """What is said of the keys, each composed with the same overrides."""
    with app.hydra_app(config_dir) as hydra:
        cfg, _ = app.compose(hydra, overrides)
        config = app.typed_config(cfg)
        found = [explain.explained(cfg, config, key) for key in keys]
    return json.loads(json.dumps(found, default=str))


def test_who_set_a_value_and_what_it_replaced(capsys, tmp_path, monkeypatch, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own" / "experiment").mkdir(parents=True)
    mine = "# @package _global_\ndefaults:\n  - override /optimizer: muon\nclip:\n  max_norm: 0.7\n"
    (tmp_path / "own" / "experiment" / "mine.yaml").write_text(mine)
    given = ["experiment=mine", "clip.max_norm=0.5"]
    found, group = told(given, "clip.max_norm", "optimizer", config_dir="own")
    assert [tuple(one.values()) for one in found["history"]] == [
        (1.0, "conf/clip/norm.yaml"),
        (0.7, "own/experiment/mine.yaml"),
        (0.5, "the command line"),
    ]
    assert (group["value"], group["chosen_by"]) == ("muon", "own/experiment/mine.yaml")
    assert {knob["key"] for knob in group["knobs"]} >= {"optimizer.ns_steps", "optimizer.lr"}
    screens = ["clip --config-dir own experiment=mine clip.max_norm=0.5", "checkpoint",
               "initial data=synthetic", "data.sources.a.weight -m data=corpus "
               "data.sources.a.files=x data.sources.a.weight=1,2"]  # fmt: skip
    assert run(["explain"]) == 2
    for screen in screens:  # with the short name of tables; a section; a run without such a key
        assert run(["explain", *screen.split()]) == 0
        words("cli/explain", capsys.readouterr().out, f"explain {screen}")


@pytest.mark.parametrize(
    ("given", "value", "swept"),
    [
        (["-m", "clip.max_norm=0.5,2"], 1.0, "0.5,2"),
        (["experiment=clip_sweep", "clip.max_norm=0.5,2"], 1.0, "0.5,2"),
        (["experiment=clip_sweep", "clip.max_norm=3"], 3.0, None),
        (["experiment=clip_sweep", "optimizer=sgd"], 1.0, "0.25,0.5,1.0,2.0,null"),
        (["-m", "optimizer.lr=range(1,3)"], 1.0, None),
    ],
    ids=str,
)
def test_values_of_a_sweep_are_no_value(given, value, swept, capsys):
    assert run(["explain", "clip.max_norm", "--json", *given]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["value"], found["history"][-1]["value"]) == (value, value)
    assert found.get("swept") == swept


def test_what_derived_a_number():
    given = [*SYNTHETIC, "batch.gradient_accumulation_steps=4", "schedule.warmup_steps=7"]
    keys = ("batch.real_batch_size", "real_batch_size", "warmup_updates", "precision.kind")
    found, number, warmup, precision = told([*given, "optimizer=sgd"], *keys)
    assert (found["value"], found["derived"]) == (None, 32)
    equation = "micro_batch_size 8 x gradient_accumulation_steps 4 x dp_size 1 = real_batch_size 32"
    assert found["formula"] == equation
    assert "tokens_per_step" in found["used_by"]
    assert (number["value"], number["formula"]) == (32, equation)
    assert warmup["value"] == 7
    assert {"precision.init_scale", "model.residual"} <= set(precision["used_by"])
    (too_much,) = told([*SYNTHETIC, "batch.micro_batch_size=10000"], "real_batch_size")
    assert too_much["unsolved"].startswith("batch.micro_batch_size=10000: ")


def test_a_rate_under_a_rule_and_a_budget_that_was_replaced():
    scaled = ["optimizer.rule=linear", "+optimizer.reference={lr: 0.01, B: 48}"]
    replaced = ["optimizer=sgd", "experiment=clip_sweep", "train.max_tokens=960"]
    keys = ("optimizer.lr", "optimizer.rule", "train.max_steps", "optimizer")
    rate, rule, budget, group = told([*SYNTHETIC, *scaled, *replaced], *keys)
    assert (rate["value"], rate["derived"]) == (None, 0.02)
    assert "batch.real_batch_size" in rate["from"]
    assert rate["formula"].endswith("B 96: lr = 0.01 x (B / 48) = 0.02")
    assert rule["rules"]["step_law"].startswith("B = 0.58 x D^0.571; lr = 1.79 x N^-0.713 x D^0.3")
    assert [h["value"] for h in rate["history"]][-1] == 0.1
    assert "???" not in (h["value"] for h in rate["history"])  # a file that leaves it to others
    replaced = {"value": None, "from": "the command line, by train.max_tokens=960"}
    assert budget["history"][-1] == replaced
    assert budget["history"][-2]["value"] == 200
    assert budget["derived"] == 10
    assert group["chosen_by"] == "the command line"


@pytest.fixture
def unsolved(monkeypatch):
    """Without the time that assembling a run takes; the files are read once for all knobs."""
    monkeypatch.setattr(explain, "solved", lambda config, key: {"value": None})
    found: list[Layer] = []
    monkeypatch.setattr(explain, "layers", lambda cfg: found or found.extend(layers(cfg)) or found)


def test_every_knob_is_explained_on_one_screen(unsolved):
    with app.hydra_app(None) as hydra:
        cfg, _ = app.compose(hydra, SYNTHETIC)
        config = app.typed_config(cfg)
        known = flatten(plain(config))
        keys = [k for k in known if not k.endswith("._target_") and not k.startswith("user")]
        for key in [*keys, "sweep.halving", "prepare.part", "model", "data", *DERIVED]:
            found = explain.explained(cfg, config, key)
            lines = explain.screen_lines(found)
            assert len(lines) <= 24, key
            assert max(map(len, lines)) <= 80, key
            assert found.get("meaning") or "options" in found, key
            assert "affects" in found or key in (*DERIVED, "model", "data"), key
    json.dumps(found)


def test_every_number_of_a_run_is_derived_from_what_there_is():
    numbers = {f.name for cls in (Run, Layout) for f in dataclasses.fields(cls)} - {"layout"}
    numbers |= {"dp_size", "world_size"}
    assert numbers == set(DERIVED)
    for name, d in DERIVED.items():
        for source in d.sources:
            known = source in DERIVED or source in fields()
            assert known or source.partition(".")[0] in OPEN_SECTIONS, (name, source)


def test_sections_figures_of_rows_and_keys_that_end_a_run():
    """A section lists its knobs, a key of the rows has its meaning, a mapping without entries is a
    knob."""
    sections = ["sweep", "train", "checkpoint", "fork", "user"]
    figures = ["val/loss", "val/code/ppl", "step_time"]
    found = dict(zip([*sections, *figures], told([], *sections, *figures), strict=True))
    for section in ("train", "checkpoint", "fork"):
        keys = {knob["key"] for knob in found[section]["knobs"]}
        assert keys == {key for key in fields() if key.startswith(f"{section}.")}
    assert {"sweep.twins", "sweep.halving"} < {knob["key"] for knob in found["sweep"]["knobs"]}
    assert found["user"]["value"] == {}
    assert found["val/loss"]["meaning"].startswith("mean loss per target token of the validation")
    assert "of the set code" in found["val/code/ppl"]["meaning"]
    assert found["step_time"]["meaning"].endswith("(s)")
    ends, sources = told(["data=corpus"], "train.max_consecutive_skips", "data.sources")
    assert ends["affects"].startswith("when a run stops before its end")
    assert (sources["value"], sources["history"][0]["from"]) == ({}, "conf/data/corpus.yaml")
    given = "data.sources={a: {files: [x.txt], weight: 2}}"
    (section,) = told(
        read_line("plan", function_of("plan"), ["data=corpus", given]).overrides, "data.sources"
    )
    found = {k["key"]: k["value"] for k in section["knobs"]}
    assert found == {"data.sources.a.files": ["x.txt"], "data.sources.a.weight": 2}


@pytest.mark.parametrize("value", [1234567, -3, True, 0.5, None, [1, 2]])
def test_a_value_is_printed_as_it_can_be_pasted(value):
    override = OverridesParser.create().parse_override(f"train.seed={explain.value_text(value)}")
    assert not override.is_sweep_override()
    assert override.value() == value
