"""What an error suggests can be pasted into a shell, and Hydra reads it as it was meant."""

from __future__ import annotations

import ast
import re
import shlex
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import given, settings
from hypothesis import strategies as st

from llmexp.__main__ import run
from llmexp.exchange.reading import WeightSource, check_weights
from llmexp.settings.knobs import fields
from llmexp.settings.values import NO_DEFAULT, refuse, typed

PARSER = OverridesParser.create()
SOURCE = Path(__file__).parents[2] / "llmexp"


def read(text: str) -> object:
    """The value of the one override in a line of a shell."""
    (word,) = shlex.split(text)
    return PARSER.parse_override(word).value()


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
    assert read(typed("model.x", value)) == value


def test_the_example_of_each_knob_is_read():
    for key, known in fields().items():
        if known.example not in (NO_DEFAULT, None):
            _, found, example = str(refuse(key, "x", "no", known.example)).partition(
                "; for example "
            )
            assert found, key
            word, *_ = shlex.split(example)
            assert PARSER.parse_override(word).key_or_group == key


def literals() -> list[tuple[str, str]]:
    """The suggestions that stand in the source, a 7 in the place of each value."""
    found = []
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            parts = node.values if isinstance(node, ast.JoinedStr) else [node]
            texts = [p.value if isinstance(p, ast.Constant) else "x7" for p in parts]
            if not all(isinstance(text, str) for text in texts) or not isinstance(
                node, ast.JoinedStr | ast.Constant
            ):
                continue
            pattern = r"for example ((?:llmexp \w+ )?(?:-m )?[\w.+]+=.*?)(?:;|$|\n|, | or )"
            found += [
                (f"{path.name}:{node.lineno}", m) for m in re.findall(pattern, "".join(texts))
            ]
    return found


def test_the_suggestions_in_the_source_are_read():
    found = literals()
    assert len(found) > 20
    for where, text in found:
        for word in shlex.split(text):
            if "=" in word and not word.isupper() and "LLMEXP_" not in word:
                assert PARSER.parse_override(word), (where, word)


def test_a_folder_of_other_knobs_names_them_ready_to_paste(tmp_path):
    scaling = {"factor": 8.0, "original_max_position_embeddings": 4096, "rope_type": "llama3"}
    target = "llmexp.models.llama.Llama"
    knobs = {"n_layers": 1, "rope_scaling": scaling}
    source = WeightSource("folder", tmp_path, target, knobs, [], {}, lambda name: None)
    with pytest.raises(ValueError, match="folder needs ") as refused:
        check_weights(source, {"_target_": target, "n_layers": 2}, None)
    layers, given_scaling = shlex.split(str(refused.value).partition("needs ")[2])
    assert layers == "model.n_layers=1"
    assert PARSER.parse_override(given_scaling).value() == scaling


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["data.files=x.txt"], "Did you mean data=text data.train_files=x.txt?"),
        (["data.train_files=[a", "b.txt]"], "quote the whole: 'data.train_files=[a b.txt]'"),
        (["train.seed=1,2,"], "ends in a comma; leave it out: train.seed=1,2"),
        (["train.seed=range(1,4)"], "train.seed=range(1,4): several values are a sweep, which"),
        (["name=a:b c:{"], "special characters need quotes: \"name='a:b c:{'\""),
    ],
)
def test_advice_leads_on(words, said, capsys):
    assert run(["plan", *words]) == 2
    assert said in capsys.readouterr().err
