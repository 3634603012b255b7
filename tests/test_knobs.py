"""The effect of a knob stands in one place, and is true: a generated test of every knob of every
shipped option, with values of tests/knobs.yaml."""

import copy
import dataclasses
import functools
import hashlib
import inspect
import math
import types
import typing
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import yaml

from llmexp import mesh
from llmexp.config.convert import build, convert_value
from llmexp.config.knobs import (
    affects,
    dead,
    deciding_result,
    defaults,
    fields,
    is_record,
    may_change,
)
from llmexp.config.parts import COMMON, arguments
from llmexp.config.sections import OPEN_SECTIONS, Config, plain
from llmexp.config.targets import arguments_of, locate, resolve
from llmexp.config.values import NO_DEFAULT, ConfigError, Knob, field_key, flatten, section_knobs
from llmexp.config.values import as_yaml as written
from llmexp.folders.ledger import config_identity
from llmexp.optim.precision import settings_kept
from llmexp.tracker.stores import STORES
from llmexp.train.assembly.assemble import assemble
from llmexp.train.evaluation import validate
from llmexp.train.set_up import set_up
from llmexp.train.state import Progress
from llmexp.train.step import seed_step, train_step
from llmexp.train.windows import read_ahead
from tests.conftest import ROOT
from tests.tools import PACKAGE_OF, option

CONF = ROOT / "conf"
VALUES = yaml.safe_load((ROOT / "tests/knobs.yaml").read_text())
SECTIONS = typing.get_type_hints(Config)
GROUPS = ("model", "data", "optimizer", "schedule", "clip", "precision", "parallelism", "tracker")
USUAL = {"data": "synthetic", "precision": "fp64", "parallelism": "single", "tracker": "none"}
# They need a GPU, a compiler, several ranks, with which test_invariance compares, weights, or a
# package.
NOT_HERE = ("model.init_from", "batch.memory_gib", "tracker.also", "train.device", "train.compile",
            "parallelism.nproc_per_node", "parallelism.nnodes", "parallelism.tensor_parallel_size",
            "parallelism.replicate_size")  # fmt: skip
# Those of these sections cannot all be given at once.
ALONE = ("model", "data", "train")


@functools.cache
def shipped(path: str) -> dict[str, Any]:
    return yaml.safe_load((CONF / "config.yaml").read_text()) if path == "config" else option(path)


def test_what_conf_gives_outside_of_options_is_the_default_that_knobs_declare():
    given, declared = flatten(shipped("config")), defaults()
    both = given.keys() & declared.keys()
    assert len(both) > 20
    assert {key: given[key] for key in both} == {key: declared[key] for key in both}


@pytest.mark.parametrize("group", ["data", "tokenizer", "optimizer", "schedule"])
def test_what_an_option_gives_is_the_default_of_its_function(group):
    for name in names(group):
        values = shipped(f"{group}/{name}")
        parameters = inspect.signature(locate(f"{group}._target_", values["_target_"])).parameters
        for key, parameter in parameters.items():
            if parameter.default is not parameter.empty and key != "warmup_ratio":
                assert values.get(key, parameter.default) == parameter.default, (name, key)


def names(group: str) -> list[str]:
    return sorted(file.stem for file in (CONF / group).glob("*.yaml"))


@functools.cache
def options(group: str) -> list[str]:
    """Those that this machine computes, without a package of their own; of several that differ in
    sizes only, one."""
    # hf needs a folder: tests/hf; one rank trains alike under most layouts
    left_out = {"tf32", "hf", "ddp", "fsdp", "hsdp", "tp"}
    left_out |= {*STORES} if group == "tracker" else set()
    left_out |= {name for name, package in PACKAGE_OF.items() if find_spec(package) is None}
    found: dict[Any, str] = {}
    for name in names(group):
        if name not in left_out:
            tree = shipped(f"{group}/{name}")
            found.setdefault((tree.get("_target_", tree.get("kind")), *tree), name)
    return list(found.values())


def made(choice: dict[str, str], changes: dict[str, Any]) -> Config:
    """A config of the shipped files, with other values by dotted keys."""
    tree = copy.deepcopy(shipped("config"))
    defaults = {group: name for line in tree.pop("defaults")[1:11] for group, name in line.items()}
    chosen = defaults | USUAL | choice
    for command in ("hydra", "sweep", "prepare", "plan"):
        del tree[command]
    for group in (*GROUPS, "tokenizer"):
        tree[group] = copy.deepcopy(shipped(f"{group}/{chosen[group]}"))
    tree["data"] |= copy.deepcopy(VALUES["files"].get(chosen["data"], {}))
    for key, value in (VALUES["tiny"] | changes).items():
        section, _, name = key.partition(".")
        if key in changes or name in tree[section]:
            tree[section][name] = value
    return build(tree)


@settings_kept()
def trained(config: Config) -> tuple[str, list[float]]:
    """(digest of windows, losses, norms, updates and the evaluation, its figures) of a whole run in
    this process."""
    parts = assemble(config)
    s = set_up(parts, mesh.join("cpu", "single", 1, 1, 1))
    s.model.train()
    digest, figures, updates = hashlib.sha256(), [], 0
    console = SimpleNamespace(line=lambda text: None)
    known = {"parts": parts, "run": parts.run, "main": False, "console": console}
    loop = SimpleNamespace(progress=Progress(), **known)
    for feature in s.features:
        feature.loop = loop
    for number, window in enumerate(read_ahead(parts, s.mesh, 0)):
        seed_step(config.train.seed, number, 0)
        step = train_step(s, window, lambda: updates)  # noqa: B023 (it is asked at once)
        seen = step.read()
        updates += not seen.skipped
        loop.progress.step = number + 1
        for feature in s.features:
            feature.finished(seen)
        for tokens, targets in window.micro_batches:
            digest.update(tokens.numpy().tobytes() + targets.numpy().tobytes())
        figures += [seen.loss, seen.grad_norm, seen.grad_norm_post_clip, step.lr, seen.code]
        figures += [seen.loss_scale] if s.scaler.enabled else []
    for p in s.parameters:
        figures += [float(p.detach().double().sum()), float(p.detach().double().square().sum())]
    figures += validate(parts, s).values()
    digest.update(np.array(figures).tobytes())
    return digest.hexdigest(), figures


@functools.cache
def baseline(
    choice: tuple[tuple[str, str], ...], changes: tuple[tuple[str, Any], ...]
) -> tuple[str, list[float]]:
    return trained(made(dict(choice), dict(changes)))


def another(key: str, value: Any) -> Any:
    """Another valid value of a knob."""
    knob = fields().get(key)
    if knob is not None and knob.choices:
        return next(c for c in knob.choices if c not in (value, "nccl"))
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float)) and value:
        return value * 2 if isinstance(value, int) or value > 1 else value / 2
    assert knob is not None, f"{key}={value}: name another value in tests/knobs.yaml"
    return [*knob.example, "more"] if isinstance(value, list) else knob.example


Case = tuple[str, str, str]


def cases() -> Iterator[Case]:
    """(group, option, key) of each knob of each option; the sections that are no group have the
    option config."""
    for group in GROUPS:
        known = [] if group in OPEN_SECTIONS else [k for k in fields() if k.startswith(f"{group}.")]
        for name in options(group):
            for key in known or [f"{group}.{knob}" for knob in shipped(f"{group}/{name}")]:
                if not key.endswith(("._target_", ".kind", "_files")) or key == "data.val_files":
                    yield group, name, key
    for section in ("batch", "train", "metrics", "checkpoint"):
        yield from ((section, "config", f"{section}.{name}") for name in shipped("config")[section])


def changed(case: Case) -> tuple[dict[str, str], dict[str, Any], dict[str, Any]]:
    """The option of a knob, what stands beside it, and another value of it."""
    group, chosen, key = case
    choice = {} if chosen == "config" else {group: chosen}
    if key == "batch.document_mask":
        choice = {"data": "corpus"}  # synthetic data have no documents
    beside = VALUES["beside"].get(key, {})
    other = VALUES["other"].get(key)
    value = other or another(key, flatten(plain(made(choice, beside)))[key])
    if (chosen, key) == ("tokens", "data.val_files"):
        value = "more.bin"
    return choice, beside, VALUES["also"].get(key, {}) | {key: value}


def by_option() -> dict[tuple[str, ...], list[Case]]:
    """The knobs of each option; apart those that it shares with others of the group, from the same
    declaration, and on which nothing of the option's own acts."""
    found: dict[tuple[str, ...], list[Case]] = {}
    for case in cases():
        group, chosen, key = case
        common = group in ("data", "optimizer") and key.partition(".")[2] in COMMON[group]
        shared = ["shared"] if common and chosen != options(group)[0] else []
        if key not in NOT_HERE:
            found.setdefault((group, chosen, *shared), []).append(case)
    return found


KNOBS_OF = by_option()


@pytest.fixture(scope="module")
def work(tmp_path_factory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("knobs")
    for name in ("words1.txt", "words2.txt", "words3.txt", "words4.txt", "more.txt"):
        (folder / name).write_text(f"{name[5:]} has so many words, so little time. " * 40)
    (folder / "short.jsonl").write_text('{"text": "so few"}\n' * 90 + '{"text": "words"}\n' * 90)
    for name in ("ids", "more"):
        generator = np.random.default_rng(len(f"{name}.bin"))
        ids = generator.integers(0, 50, 6000).astype(np.uint16)
        ids.tofile(folder / f"{name}.bin")
        np.save(folder / f"{name}.npy", np.where(ids % 3, ids.astype(np.int32), -100))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("LLMEXP_CACHE_DIR", str(folder / "cache"))
        yield folder


@pytest.mark.parametrize(
    "of",
    [
        pytest.param(of, marks=pytest.mark.slow if "shared" in of else [], id="-".join(of))
        for of in KNOBS_OF
    ],
)
def test_each_knob_of_an_option_changes_what_it_says(work, of):
    """Two values of it: other windows, norms or updates, or the same to rounding where it says so.
    Those that do not act beside the option, and those that only name or record something, change
    nothing."""
    idle = []
    for case in KNOBS_OF[of]:
        key, (choice, beside, changes) = case[2], changed(case)
        flat = flatten(plain(made(choice, beside))) | changes
        if key in dead(flat) or key not in deciding_result(flat):
            idle.append((choice, beside, changes))
            continue
        old, old_figures = baseline(tuple(choice.items()), tuple(beside.items()))
        try:
            new, figures = trained(made(choice, beside | changes))
        except ConfigError:  # it reads token files as of another type
            assert key == "data.dtype"
            continue
        if affects(key) == "result":
            assert new != old, f"{key} does nothing: a dead knob"
        else:
            assert figures == pytest.approx(old_figures, rel=1e-8, abs=1e-10), key
    for group in [[one] for one in idle] if of[0] in ALONE else [idle]:
        choice, beside, changes = (dict[str, Any](), dict[str, Any](), dict[str, Any]())
        for knob in group:
            for known, more in zip((choice, beside, changes), knob, strict=True):
                known.update(more)
        old, _ = baseline(tuple(choice.items()), tuple(beside.items()))
        assert trained(made(choice, beside | changes))[0] == old, [*changes]


def knobs_of(section: str, chosen: str = "") -> dict[str, tuple[Any, Knob]]:
    """Type and declaration of each knob of a closed section, or of an option of an open one."""
    if chosen:
        target = locate(f"{section}._target_", shipped(f"{section}/{chosen}")["_target_"])
        common = {k: arguments()[f"{section}.{k}"] for k in COMMON.get(section, ())}
        return common | arguments_of(target)
    kind = SECTIONS[section]
    types_of, knobs = typing.get_type_hints(kind), section_knobs(kind)
    return {field_key(f): (types_of[f.name], knobs[field_key(f)]) for f in dataclasses.fields(kind)}


def declared() -> Iterator[tuple[str, str, dict[str, tuple[Any, Knob]]]]:
    """(section, option, its knobs) of all; what several options share comes once."""
    seen = set()
    for section in SECTIONS:
        if dataclasses.is_dataclass(SECTIONS[section]):
            yield section, "", knobs_of(section)
        for chosen in names(section) if section in OPEN_SECTIONS else ():
            known = knobs_of(section, chosen)
            new = {k: v for k, v in known.items() if (section, k, str(v)) not in seen}
            seen |= {(section, k, str(v)) for k, v in new.items()}
            yield section, chosen, new


def wrong(kind: Any, knob: Knob) -> Iterator[Any]:
    """Values that do not fit what a knob is declared as."""
    kinds = typing.get_args(kind) if isinstance(kind, types.UnionType) else (kind,)
    if type(None) not in kinds and kind is not Any:
        yield None
    if bool in kinds:
        yield from (1, 0.5, "text")
    elif int in kinds or float in kinds:
        yield from (True, "1e-3x", math.nan, math.inf, [1])
        yield from [2.5] if int in kinds else []
        yield from [knob.at_least - 1] if knob.at_least is not None else []
        yield from [knob.at_most * 2] if knob.at_most is not None else []
        yield from (limit for limit in (knob.above, knob.below) if limit is not None)
    elif str in kinds:
        yield from (5, True, *(["nonsense"] if knob.choices else []))
    elif list in map(typing.get_origin, kinds):
        yield from (3, "text", [1])


def given(section: str, chosen: str, knobs: dict[str, Any]) -> None:
    """Check a section with these knobs as a run does."""
    if chosen:
        resolve(section, shipped(f"{section}/{chosen}") | knobs, ())
    else:
        tree = plain(made({}, {}))
        build(tree | {section: tree[section] | knobs})


@pytest.mark.parametrize("case", [*declared()], ids=lambda c: f"{c[0]}-{c[1]}".rstrip("-"))
def test_every_knob_is_declared_and_a_value_that_does_not_fit_is_refused(case):
    """By key and value, with an example that fits. A knob of a file without a declaration would
    have no comment, no range and no type."""
    section, chosen, knobs = case
    if chosen:
        assert {*shipped(f"{section}/{chosen}")} <= {"_target_", *knobs_of(section, chosen)}
    for name, (kind, knob) in knobs.items():
        key = f"{section}.{name}"
        for value in wrong(kind, knob):
            with pytest.raises(ConfigError) as refused:
                given(section, chosen, {name: value})
            assert str(refused.value).startswith(f"{key}={written(value)}: "), (key, value)
        if knob.example is not None:
            convert_value(kind, knob.example, key, knob)
        assert not knob.doc.endswith("."), key


def ends(knob: Knob) -> Iterator[float]:
    """The ends of what a knob takes; those that are left out, a little inside of them."""
    yield from (end for end in (knob.at_least, knob.at_most) if end is not None)
    yield from [knob.above + 1e-6] if knob.above is not None else []
    yield from [knob.below - 1e-6] if knob.below is not None else []


def test_a_run_trains_at_the_ends_of_each_range(work):
    """A value that a knob takes makes weights and figures that are finite, also where gradients
    are 0: the text has few of the tokens and of the positions."""
    usual, refused = {"precision": "fp32", "data": "text"}, []
    for group in ("clip", "optimizer", "schedule"):
        for chosen in options(group):
            tree = shipped(f"{group}/{chosen}")
            known = knobs_of(group, chosen if "_target_" in tree else "")
            for name in sorted(known.keys() & tree.keys()):
                key = f"{group}.{name}"
                for value in ends(known[name][1]):
                    try:
                        figures = trained(made(usual | {group: chosen}, {key: value}))[1]
                    except ConfigError as error:  # two that exclude each other
                        refused += [] if key in str(error) else [(key, str(error))]
                    else:
                        assert np.isfinite(figures).all(), (chosen, key, value)
    assert not refused


def test_what_resuming_telling_apart_and_comparing_ask_of_the_declarations():
    assert {affects(key) for key in fields()} == {"result", "rounding", "nothing"}
    said = {"train.seed": "result", "batch.micro_batch_size": "rounding", "tracker.name": "nothing",
            "data.cache_dir": "nothing", "model.d_model": "result",
            "of.nobody": "result"}  # fmt: skip
    assert {key: affects(key) for key in said} == said
    for key in (*fields(), *said):
        assert not is_record(key) or may_change(key), key
    allowed = {"hooks": True, "optimizer.lr": False, "train.twin": False}
    assert {key: may_change(key) for key in allowed} == allowed
    # an older config.yaml has all keys, with any values where they do nothing: no other run
    kept, new = (plain(made({"clip": "none"}, more)) for more in ({"clip.max_norm": 0.1}, {}))
    assert (kept["clip"]["max_norm"], new["clip"]["max_norm"]) == (0.1, None)
    assert flatten(kept).keys() == flatten(new).keys()
    assert config_identity(kept) == config_identity(new)
    for key in dead(flatten(new)):
        is_open = key.partition(".")[0] in OPEN_SECTIONS
        assert is_open or fields()[key].default is not NO_DEFAULT, key
