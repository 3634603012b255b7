"""What an error suggests can be pasted into a shell, and Hydra reads it as it was meant."""

import ast
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from hydra.errors import HydraException
from hypothesis import given, settings
from hypothesis import strategies as st

from llmexp.__main__ import run
from llmexp.config.knobs import fields
from llmexp.config.values import NO_DEFAULT, refuse, typed
from llmexp.hf.reading import WeightSource, check_weights
from tests.suggestions import PARSER, check, suggested

SOURCE = Path(__file__).parents[2] / "llmexp"
SLOT = "\0"


TEXT = st.text(st.characters(codec="ascii", exclude_characters="$\x00", exclude_categories=["Cc"]))
PLAIN = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXT
KEYS = st.from_regex(r"[a-z][a-z_]{0,8}", fullmatch=True).filter(
    lambda key: key not in ("true", "false", "null", "nan", "inf")
)
VALUES = st.recursive(
    PLAIN, lambda inner: st.lists(inner) | st.dictionaries(KEYS, inner), max_leaves=8
)


@settings(max_examples=50)
@given(VALUES)
def test_a_value_comes_back_from_a_shell_and_hydras_parser(value):
    (word,) = shlex.split(typed("model.x", value))
    assert PARSER.parse_override(word).value() == value


def test_the_example_of_each_knob_is_read():
    for key, known in fields().items():
        if known.example not in (NO_DEFAULT, None):
            text = str(refuse("wrong_type", key, "x", "no", known.example))
            _, found, example = text.partition("; for example ")
            assert found, key
            word, *_ = shlex.split(example)
            assert PARSER.parse_override(word).key_or_group == key


def messages() -> Iterator[tuple[str, str]]:
    """Give each text in the source but docstrings; what it fills in is a key or a 7."""
    for path in sorted(SOURCE.rglob("*.py")):
        tree = ast.parse(path.read_text())
        parts = {id(part) for node in ast.walk(tree) for part in getattr(node, "values", ())}
        docs = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if isinstance(node, ast.JoinedStr):
                pieces = [
                    one.value if isinstance(one, ast.Constant) else SLOT for one in node.values
                ]
            elif isinstance(node, ast.Constant) and id(node) not in parts | docs:
                pieces = [node.value]
            else:
                continue
            text = "".join(map(str, pieces))
            text = re.sub(rf"{SLOT}(?=(\.\w+)*=)", "user", text).replace(SLOT, "7")
            yield f"{path.name}:{node.lineno}", text


def test_the_suggestions_in_the_source_are_read():
    found = {(where, word) for where, text in messages() for word in suggested(text)}
    assert len(found) > 130
    for where, word in found:
        assert PARSER.parse_override(word), (where, word)


def test_a_suggestion_that_cannot_be_read_is_found():
    for wrong in ("model.rope_scaling={'factor': 8.0}", "'name=a:b c:{'"):
        check(f"llmexp: {wrong}: is refused; for example train.seed=1 (or name=a, or so).")
        with pytest.raises(HydraException):
            check(f"llmexp: model.n_layers=x: no; for example {wrong}; or so")


def test_a_folder_of_other_knobs_names_them_ready_to_paste(tmp_path):
    scaling = {"factor": 8.0, "original_max_position_embeddings": 4096, "rope_type": "llama3"}
    target = "llmexp.models.llama.Llama"
    knobs = {"n_layers": 1, "rope_scaling": scaling}
    source = WeightSource("folder", tmp_path, target, knobs, [], {}, lambda name: None)
    with pytest.raises(ValueError, match=r"^needs ") as refused:
        check_weights(source, {"_target_": target, "n_layers": 2}, None)
    layers, given_scaling = shlex.split(str(refused.value).partition("needs ")[2])
    assert layers == "model.n_layers=1"
    assert PARSER.parse_override(given_scaling).value() == scaling


@pytest.mark.parametrize(
    ("words", "key", "value"),
    [
        (["data=text", "data.train_files=my docs*"], "data.train_files", "my docs"),
        (["data=text", "data.train_files=my saved"], "data.sources.main.hf", "my saved"),
        (["data=corpus", "data.sources.a.files=my saved"], "data.sources.a.hf", "my saved"),
        (["data=corpus", "data.sources.a.hf=my docs"], "data.sources.a.files", "my docs/*.parquet"),
        (["data.files='my docs/a,b.txt'"], "data.train_files", "my docs/a,b.txt"),
        (["-m", "train.seed=1,2", "hydra.run.dir=my docs (1)"], "hydra.sweep.dir", "my docs (1)"),
    ],
)
def test_paths_with_spaces_come_back_from_a_shell(words, key, value, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for folder in ("my docs", "my saved"):
        (tmp_path / folder).mkdir()
    (tmp_path / "my saved" / "state.json").write_text("{}")
    words = [re.sub(r"=(my [^*]*)(\*?)$", r"='\1\2'", word) for word in words]
    more = ["data.val.v.share=0.1"] if "data=corpus" in words else []
    assert run(["plan", *words, *more]) == 2
    refusal = capsys.readouterr().err.splitlines()[-1]  # other tests' logging may stand above
    found = [PARSER.parse_override(word) for word in suggested(refusal)]
    assert (found[-1].key_or_group, found[-1].value()) == (key, value)
