"""Garbage in every file and on the command line is refused in words: no other exception, no
hang."""

import contextlib
import json
import os
import re
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hydra._internal.hydra import Hydra
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import nn

from llmexp.checkpoint import hashes, loading, saving
from llmexp.cli.running import function_of
from llmexp.compose import app, command_line
from llmexp.compose.overrides import key_of
from llmexp.config.convert import build
from llmexp.config.sections import plain
from llmexp.config.values import ConfigError
from llmexp.data.sources.tokens import tokens
from llmexp.folders.rows import read_rows
from tests.conftest import TINY

FIXED = [HealthCheck.function_scoped_fixture]
FUZZ = settings(max_examples=200, derandomize=True, suppress_health_check=FIXED)
FEWER = settings(FUZZ, max_examples=40)
HUGE = st.sampled_from([-1, 0, 2**31, 2**63, 2**64, 10**400])
NUMBERS = st.one_of(st.integers(), HUGE, st.floats(), st.booleans(), st.none())
BAD = st.sampled_from(["..", "/etc/passwd", "\0", "nan", "../x", "load", "1" * 5000])
TEXTS = st.text(max_size=20) | BAD
VALUES = st.recursive(
    NUMBERS | TEXTS,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3)
    ),
    max_leaves=6,
)
SIGNS = "abc.=,+~[]{}()'\"\\$:0123456789-"


@st.composite
def mutated(draw: st.DrawFn, tree: Any) -> Any:
    """A JSON value with something in it, or all of it, gone or replaced."""
    children = list(tree) if isinstance(tree, dict) else []
    if isinstance(tree, list):
        children = list(range(len(tree)))
    if not children or draw(st.integers(0, 9)) == 0:
        return draw(VALUES)
    copy, child = tree.copy(), draw(st.sampled_from(children))
    if draw(st.integers(0, 9)) == 0:
        del copy[child]
    else:
        copy[child] = draw(mutated(tree[child]))
    return copy


@st.composite
def damaged(draw: st.DrawFn, whole: bytes) -> bytes:
    """Bytes with some of them changed, cut off, or put in."""
    found = bytearray(whole)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, max(0, len(found) - 1)))
        match draw(st.sampled_from(["change", "cut", "insert"])):
            case "change" if found:
                found[at] = draw(st.integers(0, 255))
            case "cut":
                del found[at:]
            case _:
                found[at:at] = draw(st.binary(max_size=8))
    return bytes(found)


# The command line.


@given(st.text(max_size=60) | st.text(SIGNS + " \n@/#*", max_size=60))
@FUZZ
def test_overrides_parse_or_are_refused(text):
    with contextlib.suppress(ConfigError):
        command_line.check_overrides([text])


@pytest.fixture(scope="module")
def hydra() -> Iterator[Hydra]:
    with app.hydra_app(None) as found:
        yield found


VALID = """\
train.max_steps=20
model.n_layers=1
name=mine
tracker.tags=[a,'b c']
clip=none
clip.max_norm=0.5
+user.more={a: 1, b: [x, null]}
hydra.run.dir=outputs/x
~model.d_ff
optimizer.lr=1e-3
batch.ramp={0: 4, 200: 8}
train={seed: 7, tail: keep}
~clip
++metrics.picture=false
optimizer.reference.lr=0.1
hydra/launcher=local
tracker.notes=${train.seed}
optimizer=muon
hooks=[]""".splitlines()
PUT_IN = """\
~|+|++|@x|.|..|=|==|,|[|]|{|}|'|"|:|/|${|\\|null|1e3|,2|é|_target_|.x|{}|[]|0|#|%|$|(|)| |\n\
|=null|=[1]|={a:1}|=${x}|=1,2|=glob(*)"""
# Words of Hydra's, OmegaConf's and antlr's.
THEIRS = re.compile(
    r"OmegaConf|full_key|merging|Exception|No match|Interpolation|antlr|mismatched|struct\b"
)


@st.composite
def bent(draw: st.DrawFn) -> str:
    """A valid override in which signs are put in or cut out, or with another's key or value."""
    text = draw(st.sampled_from(VALID))
    for _ in range(draw(st.integers(1, 3))):
        at, end = sorted((draw(st.integers(0, len(text))), draw(st.integers(0, len(text)))))
        match draw(st.sampled_from(["put", "cut", "other value", "other key", "sign"])):
            case "put":
                text = text[:at] + draw(st.sampled_from(PUT_IN.split("|"))) + text[at:]
            case "cut":
                text = text[:at] + text[min(end, at + 3) :]
            case "other value":
                text = text.partition("=")[0] + "=" + draw(st.sampled_from(VALID)).partition("=")[2]
            case "other key":
                text = draw(st.sampled_from(VALID)).partition("=")[0] + "=" + text.partition("=")[2]
            case _:
                text = draw(st.sampled_from(["~", "+", "++"])) + text
    return text


@given(bent())
# each takes a while, and shrinking many of them
@settings(FEWER, max_examples=int(os.environ.get("LLMEXP_BENT", "25")), phases=[Phase.generate])
def test_a_bent_override_is_a_config_or_one_refusal_that_names_it(hydra, text):
    """No other exception, and no word of Hydra's or OmegaConf's."""
    refused = None
    try:
        (override,) = command_line.parse("train", function_of("train"), ["--", text]).overrides
        cfg, multirun = app.compose(hydra, [*TINY, "data=synthetic", override])
        config = None if multirun else app.typed_config(cfg)
    except ConfigError as error:
        refused, config = error, None
    if refused is not None:
        message, key = str(refused), key_of(text)
        assert text in message or key in message or key.startswith(refused.key or "-"), message
        assert not THEIRS.search(message.replace(text, "")), message
    assert config is None or build(plain(config)) == config


# Data.


def npy() -> bytes:
    file = BytesIO()
    np.save(file, (np.arange(100) % 60).astype(np.uint16))
    return file.getvalue()


HEAD = np.array([20240520, 1, 100, *[0] * 253], "<i4").tobytes()
LLM_C = HEAD + (np.arange(100) % 60).astype("<u2").tobytes()
BYTES = st.binary(max_size=300)
HEADED = st.binary(max_size=40).map(lambda b: b"\x93NUMPY\x01\x00" + b)


@pytest.mark.parametrize(
    ("name", "contents"),
    [("x.npy", st.one_of(damaged(npy()), HEADED, BYTES)), ("x.bin", damaged(LLM_C) | BYTES)],
)
@given(data=st.data())
@FUZZ
def test_token_files(tmp_path, name, contents, data):
    path, corpus = tmp_path / name, None
    path.write_bytes(data.draw(contents))
    with contextlib.suppress(ValueError):
        knobs = {"val_files": None, "dtype": None, "val_ratio": 0.1, "max_tokens": None}
        knobs |= {"vocab_size": 60, "sequence_length": 4, "cache_dir": str(tmp_path / "cache")}
        corpus = tokens(train_files=str(path), **knobs)
    if corpus is not None:
        ids = corpus.train.read(0, len(corpus.train))
        assert 4 < len(ids) <= path.stat().st_size
        assert 0 <= ids.min() <= ids.max() < 60


# Checkpoints.


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(6.0).reshape(3, 2))
        self.scale = nn.Parameter(torch.tensor(2.0))


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("saved")
    pieces = saving.snapshot(Plain(), [], 0, 1, False)
    saving.write_pieces(root, 100, pieces)
    saving.commit_checkpoint(root, 100, pieces, {"note": [1, "two"]}, {}, 3)
    return root / "step_00000100"


@pytest.mark.parametrize("name", ["manifest.json", "state.pt"])
@given(data=st.data())
@FUZZ
def test_checkpoints(saved, name, data):
    """What loads restores a model whose numbers are of the right shapes; the rest is refused."""
    manifest = saved / "manifest.json"
    whole = {file: file.read_bytes() for file in (saved / name, manifest)}
    tree, damage = json.loads(whole[manifest]), damaged(whole[saved / name])
    if name == "manifest.json":  # or a value in it is gone or another
        damage |= mutated(tree).map(lambda tree: json.dumps(tree).encode())
    try:
        (saved / name).write_bytes(data.draw(damage))
        if name != "manifest.json":
            tree["files"][name] = hashes.fingerprint(saved / name)
            manifest.write_text(json.dumps(tree))
        model = Plain()
        with contextlib.suppress(ConfigError):
            loading.restore_model(loading.read_checkpoint(saved), model)
        assert (model.weight.shape, model.scale.shape) == ((3, 2), ())
    finally:
        for file, content in whole.items():
            file.write_bytes(content)


# Records.

ROW = {"step": 1, "tokens_seen": 96, "epoch": 0.1, "train/loss": 3.5, "lr": 0.1, "grad_norm": 1.0,
       "val/loss": 3.4}  # fmt: skip
LINES = b"".join(
    json.dumps(ROW | {"step": n, "tokens_seen": 96 * n}).encode() + b"\n" for n in (1, 2, 3)
)
LINE = mutated(ROW).map(lambda row: json.dumps(row).encode() + b"\n")


@given(st.one_of(damaged(LINES), LINE, st.binary(max_size=80)))
@FUZZ
def test_rows(tmp_path, content):
    file = tmp_path / "metrics.jsonl"
    file.write_bytes(content)
    with contextlib.suppress(ConfigError):
        assert len(read_rows(file)) <= content.count(b"\n")
