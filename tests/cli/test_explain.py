"""`llmexp explain`: where a value comes from, what it replaced, what it changes, what uses it; on
one screen."""

import dataclasses
import json
import shlex

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from llmexp.__main__ import run
from llmexp.cli import explain
from llmexp.cli.explain import DERIVED
from llmexp.compose import app
from llmexp.compose.overrides import layers
from llmexp.config.knobs import fields
from llmexp.config.sections import OPEN_SECTIONS, plain
from llmexp.config.values import flatten
from llmexp.run import Run
from llmexp.run.layout import Layout
from tests.conftest import TINY
from tests.tools import printed

SYNTHETIC = [*TINY, "data=synthetic", "data.n_tokens=5000"]
# Whose values come from several places; by its short name, in a group, of a sweep, in a section;
# what a number is derived from, under a rule, beside a budget that was replaced; figures of rows.
SCREENS = """\
clip --config-dir own experiment=mine clip.max_norm=0.5
optimizer --config-dir own experiment=mine
clip.max_norm -m clip.max_norm=0.5,2
clip.max_norm experiment=clip_sweep clip.max_norm=0.5,2
clip.max_norm experiment=clip_sweep clip.max_norm=3
clip.max_norm experiment=clip_sweep optimizer=sgd
clip.max_norm clip.max_norm=0.5 hydra.job.config_name=null
clip.max_norm -m optimizer.lr=range(1,3)
data.sources.a.weight -m data=corpus data.sources.a.files=x data.sources.a.weight=1,2
data.sources data=corpus
data.sources data=corpus 'data.sources={a: {files: [x.txt], weight: 2}}'
batch.real_batch_size SYNTHETIC batch.gradient_accumulation_steps=4
real_batch_size SYNTHETIC batch.gradient_accumulation_steps=4
warmup_updates SYNTHETIC schedule.warmup_steps=7
real_batch_size SYNTHETIC batch.micro_batch_size=10000
optimizer.lr SYNTHETIC optimizer=sgd optimizer.rule=linear '+optimizer.reference={lr: 0.01, B: 48}'
optimizer.rule SYNTHETIC
train.max_steps SYNTHETIC experiment=clip_sweep train.max_tokens=960
train.max_consecutive_skips
precision.kind SYNTHETIC
initial data=synthetic
checkpoint
fork
sweep
user
val/loss
val/code/ppl
step_time""".splitlines()


def test_the_screens_of_explain(capsys, tmp_path, monkeypatch, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own" / "experiment").mkdir(parents=True)
    mine = "# @package _global_\ndefaults:\n  - override /optimizer: muon\nclip:\n  max_norm: 0.7\n"
    (tmp_path / "own" / "experiment" / "mine.yaml").write_text(mine)
    assert run(["explain"]) == 2
    words.only("cli/explain", [f"explain {screen}" for screen in SCREENS])
    for screen in SCREENS:
        capsys.readouterr()
        given = shlex.split(screen.replace("SYNTHETIC", shlex.join(SYNTHETIC)))
        assert run(["explain", *given]) == 0
        words("cli/explain", capsys.readouterr().out, f"explain {screen}")
        if screen.startswith(("clip.max_norm -m clip", "real_batch_size", "warmup_updates")):
            assert run(["explain", *given, "--json"]) == 0
            found = printed("explain", capsys.readouterr().out)
            assert ("swept" in found) == screen.startswith("clip.max_norm")


def test_every_knob_is_explained_on_one_screen(monkeypatch):
    """Without the time that assembling a run takes; the files are read once for all knobs."""
    with app.hydra_app(None) as hydra:
        cfg, _ = app.compose(hydra, SYNTHETIC)
        config, found = app.typed_config(cfg), layers(cfg)
        monkeypatch.setattr(explain, "solved", lambda config, key: {"value": None})
        monkeypatch.setattr(explain, "layers", lambda cfg: found)
        known = flatten(plain(config))
        keys = [k for k in known if not k.endswith("._target_") and not k.startswith("user")]
        for key in [*keys, "sweep.halving", "prepare.part", "model", "data", *DERIVED]:
            told = explain.explained(cfg, config, key)
            lines = explain.screen_lines(told)
            assert len(lines) <= 24, key
            assert max(map(len, lines)) <= 80, key
            assert told.get("meaning") or "options" in told, key
            assert "affects" in told or key in (*DERIVED, "model", "data"), key
            json.dumps(told)


def test_every_number_of_a_run_is_derived_from_what_there_is():
    numbers = {f.name for cls in (Run, Layout) for f in dataclasses.fields(cls)} - {"layout"}
    assert numbers | {"dp_size", "world_size"} == set(DERIVED)
    for name, derived in DERIVED.items():
        for source in derived.sources:
            known = source in DERIVED or source in fields()
            assert known or source.partition(".")[0] in OPEN_SECTIONS, (name, source)


@pytest.mark.parametrize("value", [1234567, -3, True, 0.5, None, [1, 2]])
def test_a_value_is_printed_as_it_can_be_pasted(value):
    override = OverridesParser.create().parse_override(f"train.seed={explain.value_text(value)}")
    assert not override.is_sweep_override()
    assert override.value() == value
