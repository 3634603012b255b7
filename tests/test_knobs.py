"""The effect of a knob stands in one place, and is true: a generated test of every knob of every
shipped option."""

import copy
import dataclasses
import functools
import hashlib
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
from llmexp.config.knobs import affects, dead, deciding_result, fields, is_record, may_change
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
GROUPS = ("model", "data", "optimizer", "schedule", "clip", "precision", "parallelism", "tracker")
# Three windows are the whole run, so that the end of a schedule is among them. As overrides of the
# shipped values.
TINY: dict[str, Any] = {
    "model.n_layers": 1, "model.n_heads": 2, "model.n_kv_heads": 1, "model.d_model": 16,
    "model.d_ff": 16,
    "model.max_position_embeddings": 32, "model.vocab_size": 320, "batch.micro_batch_size": 2,
    "batch.gradient_accumulation_steps": 2, "batch.real_batch_size": 4, "batch.sequence_length": 12,
    "train.max_steps": 3, "train.eval_tokens": 48, "train.device": "cpu", "data.max_tokens": 2000,
    "data.n_tokens": 2000, "optimizer.lr": 0.01, "train.log_every": 1, "optimizer.name": "RAdam",
}  # fmt: skip
USUAL = {"data": "synthetic", "precision": "fp64", "parallelism": "single", "tracker": "none"}
# Another value of a knob, with what has to change beside it; else it is derived from the value that
# there is.
WORDS = [{"files": f"words{number}.txt"} for number in (1, 2, 3, 4)]
SOURCES = {"a": {"files": "short.jsonl"}, "b": WORDS[1]}
STAGE = {"from_tokens": 12, "weights": {"a": 0, "b": 1}}
OTHER: dict[str, dict[str, Any]] = {
    "data.sources": {
        "data.sources": {"a": WORDS[0] | {"weight": 1}, "b": WORDS[1] | {"weight": 9}}
    },
    "data.val": {"data.val": {"d": WORDS[3]}},
    "data.val_main": {"data.val_main": "d"},
    "data.stages": {"data.stages": [STAGE]},
    "data.max_epochs": {"data.max_epochs": 99.0},
    "data.on_bad_record": {"data.on_bad_record": "skip"},
    # beside sizes that are given they do nothing: tests/train/test_shape.py leaves these open
    "model.size": {"model.size": "2k"},
    "model.depth": {"model.depth": 2},
    "model.shape_rule": {"model.shape_rule": {"aspect": 8}, "model.depth": 2},
    "model.parametrization": {"model.parametrization": "mup", "model.base_width": 8},
    "model.base_width": {"model.parametrization": "mup", "model.base_width": 4},
    "model.n_heads": {"model.n_heads": 4},
    "model.dropout": {"model.dropout": 0.3},
    "model.vocab_size": {"model.vocab_size": 384},
    "model.d_model": {"model.d_model": 24},
    "model.head_dim": {"model.head_dim": 4},
    "model.biases": {"model.biases": "qkv"},
    "model.gelu": {"model.gelu": "exact"},
    "model.residual": {"model.residual": "autocast"},
    "model.qk_norm": {"model.qk_norm": "head"},
    "model.norm": {"model.norm": "post"},
    "model.rope_scaling": {
        "model.rope_scaling": {
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8,
        }
    },
    "model.sliding_window": {"model.sliding_window": 4},
    "model.n_experts": {"model.n_experts": 4},
    "model.d_expert": {"model.d_expert": 8},
    "model.balance_rate": {"model.balance_rate": 0.5},
    "data.val_files": {"data.val_files": "more.txt"},
    "data.ignore_id": {"data.ignore_id": 32},
    "data.train_labels": {"data.train_labels": "ids.npy"},
    "data.val_labels": {"data.val_labels": "more.npy"},
    "data.pattern": {"data.pattern": "copy"},
    "data.dtype": {"data.dtype": "uint32"},
    "data.seed": {"data.seed": 5},
    "data.cache_dir": {"data.cache_dir": "elsewhere"},
    # beside a rate that is given they do nothing: tests/train/test_rules.py leaves it open
    "optimizer.rule": {"optimizer.rule": "sqrt", "optimizer.reference": {"lr": 1, "B": 8}},
    "optimizer.reference": {"optimizer.rule": "sqrt", "optimizer.reference": {"lr": 1, "B": 8}},
    "optimizer.exponents": {
        "optimizer.rule": "reference",
        "optimizer.reference": {"lr": 1, "B": 8},
        "optimizer.exponents": {"lr": {"B": 1}},
    },
    "optimizer.groups": {"optimizer.groups": [{"match": "*.mlp.*", "lr": 0.5}]},
    "optimizer.adamw_lr": {"optimizer.adamw_lr": 0.1},
    "optimizer.adjust_lr": {"optimizer.adjust_lr": "original"},
    "optimizer.ns_coefficients": {"optimizer.ns_coefficients": "polar_express"},
    "optimizer.weight_decay": {"optimizer.weight_decay": 0.4},
    "optimizer.eps": {"optimizer.eps": 0.1},
    "optimizer.max_update": {"optimizer.max_update": 2.0},
    "optimizer.max_precondition_dim": {"optimizer.max_precondition_dim": 8},
    "optimizer.name": {"optimizer.name": "RMSprop"},
    "train.tasks": {"train.tasks": ["tiny_facts"]},
    "train.stop_step": {"train.stop_step": 3},
    "train.profile_start": {"train.profile_start": 3},
    "schedule.warmup_steps": {"schedule.warmup_steps": 2},
    "schedule.warmup_ratio": {"schedule.warmup_ratio": 0.7},
    "schedule.decay_ratio": {"schedule.decay_ratio": 0.9},
    "schedule.decay_start": {"schedule.decay_start": 1},
    "schedule.decay_steps": {"schedule.decay_steps": 2},
    "schedule.end_ratio": {"schedule.end_ratio": 0.6},
    "schedule.power_start": {"schedule.power_start": 2},
    "clip.max_norm": {"clip.max_norm": 0.01},
    "clip.max_value": {"clip.max_value": 1e-4},
    "clip.warmup_steps": {"clip.warmup_steps": 2},
    "clip.window": {"clip.window": 2},
    "clip.z": {"clip.z": 0.3},
    "clip.quantile": {"clip.quantile": 0.6},
    "clip.limits": {"clip.limits": [{"match": "*", "max_norm": 0.01}]},
    "clip.threshold": {"clip.threshold": 0.1},
    "clip.qk_limit": {"clip.qk_limit": 1e-6},
    "precision.init_scale": {"precision.init_scale": 1e30},
    "precision.growth_interval": {"precision.growth_interval": 1},
    "batch.micro_batch_size": {"batch.micro_batch_size": 4, "batch.gradient_accumulation_steps": 1},
    "batch.gradient_accumulation_steps": {
        "batch.micro_batch_size": 1,
        "batch.gradient_accumulation_steps": 4,
    },
    "batch.real_batch_size": {"batch.real_batch_size": 8, "batch.micro_batch_size": 4},
    "batch.ramp": {"batch.ramp": "{0: 2, 24: 4}"},
    "batch.tokens_per_step": {
        "batch.tokens_per_step": 96,
        "batch.real_batch_size": None,
        "batch.micro_batch_size": 4,
    },
    "train.max_flops": {"train.max_flops": 1e7, "train.max_steps": None},
    "train.tokens_per_parameter": {"train.tokens_per_parameter": 0.01, "train.max_steps": None},
    "train.max_epochs": {"train.max_epochs": 0.05, "train.max_steps": None},
    "train.max_tokens": {"train.max_tokens": 100, "train.max_steps": None},
    "metrics.outlier_sigma": {"metrics.outlier_sigma": 1e6},
}
# Values beside which a knob of a section that is no group can act within a few windows.
LONG = {"train.max_steps": 14, "metrics.outlier_sigma": 0.5, "metrics.outlier_window": 8}
CLIPPING = {"train.max_steps": 14, "clip.z": 0.1, "clip.quantile": 0.1}
FOLLOWING = CLIPPING | {"clip.warmup_steps": 2}
SKIPPING = {**LONG, "metrics.skip_outliers": True}
MIXED = {"model.n_experts": 4}
WITH: dict[str, dict[str, Any]] = {
    "model.residual": {"precision.kind": "bf16"},
    "data.val_labels": {"data.val_files": "more.bin"},
    "data.plain": {"data.train_files": "short.jsonl"},
    "train.tail": {"train.max_steps": None, "train.max_tokens": 120},
    "clip.warmup_steps": CLIPPING,
    **dict.fromkeys(("clip.z", "clip.decay", "clip.quantile", "clip.window"), FOLLOWING),
    "metrics.outlier_sigma": SKIPPING,
    "metrics.outlier_window": SKIPPING,
    "metrics.skip_outliers": LONG,
    "schedule.decay_shape": {"schedule.decay_ratio": 0.9},
    **dict.fromkeys(
        (
            *("model.experts_per_token", "model.d_expert", "model.n_shared_experts"),
            *("model.router", "model.norm_topk", "model.router_bias", "model.router_z_loss"),
            *("model.balance", "model.balance_rate"),
        ),
        MIXED,
    ),
    "model.first_dense_layers": {"model.n_experts": 4, "model.n_layers": 2},
    "model.balance_loss": {"model.n_experts": 4, "model.balance": "sequence"},
    "optimizer.precondition_frequency": {"train.max_steps": 14},
}
# They need a GPU, a compiler, several ranks, with which test_invariance compares, weights, or a
# package.
NOT_HERE = ("model.init_from", "batch.memory_gib", "tracker.also", "train.device", "train.compile",
            "parallelism.nproc_per_node",
            "parallelism.nnodes", "parallelism.tensor_parallel_size",
            "parallelism.replicate_size")  # fmt: skip


OPTIONS_OF = {
    group: sorted(file.stem for file in (CONF / group).glob("*.yaml"))
    for group in ("model", "data", "tokenizer", "optimizer", "schedule")
}


@functools.cache
def shipped(path: str) -> dict[str, Any]:
    return yaml.safe_load((CONF / "config.yaml").read_text()) if path == "config" else option(path)


@functools.cache
def options(group: str) -> list[str]:
    """Those that this machine computes, without a package of their own; of several that differ in
    sizes only, one."""
    found: dict[Any, str] = {}
    for file in sorted((CONF / group).glob("*.yaml")):
        tree = shipped(f"{group}/{file.stem}")
        sizes = (tree.get("_target_", tree.get("kind")), *tree)
        # hf needs a folder: tests/exchange; one rank trains alike under most layouts
        left_out = ("tf32", "hf", "ddp", "fsdp", "hsdp", "tp")
        left_out += tuple(STORES) if group == "tracker" else ()
        left_out += tuple(
            name for name, package in PACKAGE_OF.items() if find_spec(package) is None
        )
        if file.stem not in left_out:
            found.setdefault(sizes, file.stem)
    return list(found.values())


def made(choice: dict[str, str], changes: dict[str, Any]) -> Config:
    """A config of the shipped files, with other values by dotted keys."""
    main = copy.deepcopy(shipped("config"))
    chosen = (
        {next(iter(line)): next(iter(line.values())) for line in main.pop("defaults")[1:11]}
        | USUAL
        | choice
    )
    tree = {
        key: value
        for key, value in main.items()
        if key not in ("hydra", "sweep", "prepare", "plan")
    }
    tree |= {
        group: copy.deepcopy(shipped(f"{group}/{chosen[group]}"))
        for group in (*GROUPS, "tokenizer")
    }
    tree["data"] |= {
        "text": {"train_files": "words*.txt"},
        "tokens": {"train_files": "ids.bin"},
        "corpus": {"sources": SOURCES, "val": {"c": WORDS[2], "d": WORDS[3]}},
    }.get(chosen["data"], {})
    for key, value in (TINY | changes).items():
        section, _, name = key.partition(".")
        if key in changes or name in tree[section]:
            tree[section][name] = value
    return build(tree)


def trained(config: Config) -> tuple[str, list[float]]:
    """(digest of windows, losses, norms, updates and the evaluation, its figures) of a whole run in
    this process."""
    with settings_kept():
        return _trained(config)


def _trained(config: Config) -> tuple[str, list[float]]:
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
    assert knob is not None, f"{key}={value}: name another value in OTHER"
    return [*knob.example, "more"] if isinstance(value, list) else knob.example


def cases() -> Iterator[tuple[str, str, str]]:
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


@pytest.fixture(scope="module")
def work(tmp_path_factory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("knobs")
    for name in ("words1.txt", "words2.txt", "words3.txt", "words4.txt", "more.txt"):
        (folder / name).write_text(f"{name[5:]} has so many words, so little time. " * 40)
    (folder / "short.jsonl").write_text('{"text": "so few"}\n' * 90 + '{"text": "words"}\n' * 90)
    for name in ("ids.bin", "more.bin"):
        np.random.default_rng(len(name)).integers(0, 50, 6000).astype(np.uint16).tofile(
            folder / name
        )
    for name in ("ids", "more"):
        ids = np.fromfile(folder / f"{name}.bin", np.uint16).astype(np.int32)
        np.save(folder / f"{name}.npy", np.where(ids % 3, ids, -100))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("LLMEXP_CACHE_DIR", str(folder / "cache"))
        yield folder


def changed(case: tuple[str, str, str]) -> tuple[dict[str, str], dict[str, Any], dict[str, Any]]:
    """The option of a knob, what stands beside it, and another value of it."""
    group, chosen, key = case
    choice, beside = ({} if chosen == "config" else {group: chosen}), WITH.get(key, {})
    if key == "batch.document_mask":
        choice = {"data": "corpus"}  # synthetic data have no documents
    changes = OTHER.get(key) or {key: another(key, flatten(plain(made(choice, beside)))[key])}
    if chosen == "tokens" and key == "data.val_files":
        changes = {key: "more.bin"}
    return choice, beside, changes


CASES = [case for case in cases() if case[2] not in NOT_HERE]


def again(case: tuple[str, str, str]) -> bool:
    """Whether another option of the group has the same knob from the same declaration, and what
    acts on it asks no option: all sources and optimizers share a few."""
    group, chosen, key = case
    common = key.partition(".")[2] in COMMON.get(group, ())
    return group in ("data", "optimizer") and common and chosen != options(group)[0]


KNOBS_OF: dict[tuple[str, ...], list[tuple[str, str, str]]] = {}
for one in CASES:
    KNOBS_OF.setdefault((*one[:2], *(["shared"] if again(one) else [])), []).append(one)
# Those of these sections cannot all be given at once.
ALONE = ("model", "data", "train")


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


def declared_knobs() -> Iterator[tuple[str, str, dict[str, tuple[Any, Knob]]]]:
    """(section, option, type and knob by name) of each part and each closed section; what several
    options share comes once."""
    hints, seen = typing.get_type_hints(Config), set()
    for section, kind in hints.items():
        if dataclasses.is_dataclass(kind):
            types_of = typing.get_type_hints(kind)
            both = {f.name: (types_of[f.name], section_knobs(kind)[field_key(f)]) for f in
                    dataclasses.fields(kind)}  # fmt: skip
            yield section, "", {name.removesuffix("_"): one for name, one in both.items()}
            continue
        for name in OPTIONS_OF.get(section, ()):
            target = locate(f"{section}._target_", shipped(f"{section}/{name}")["_target_"])
            common = {k: arguments()[f"{section}.{k}"] for k in COMMON.get(section, ())}
            new = {k: v for k, v in (common | arguments_of(target)).items()
                   if (section, k, str(v)) not in seen}  # fmt: skip
            seen |= {(section, k, str(v)) for k, v in new.items()}
            if new:
                yield section, name, new


def given(section: str, chosen: str, knobs: dict[str, Any]) -> None:
    """Check a section with these knobs as a run does."""
    if chosen:
        resolve(section, shipped(f"{section}/{chosen}") | knobs, ())
    else:
        tree = plain(made({}, {}))
        build(tree | {section: tree[section] | knobs})


@pytest.mark.parametrize("case", [*declared_knobs()], ids=lambda c: f"{c[0]}-{c[1]}".rstrip("-"))
def test_a_value_that_does_not_fit_its_declaration_is_refused(case):
    """By key and value, with an example that fits."""
    section, chosen, knobs = case
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


def numbers() -> Iterator[tuple[str, str, str, float]]:
    """(group, option, key, value) of each end of a range of a part that computes."""
    for group in ("optimizer", "schedule", "clip"):
        for chosen in options(group):
            tree = shipped(f"{group}/{chosen}")
            known = {k.partition(".")[2]: k for k in fields() if k.startswith(f"{group}.")}
            found = {name: fields()[key] for name, key in known.items()}
            if "_target_" in tree:
                target = locate(f"{group}._target_", tree["_target_"])
                common = {k: arguments()[f"{group}.{k}"] for k in COMMON.get(group, ())}
                found = {k: one[1] for k, one in (common | arguments_of(target)).items()}
            for name in found.keys() & tree.keys():
                yield from ((group, chosen, f"{group}.{name}", end) for end in ends(found[name]))


def test_a_run_trains_at_the_ends_of_each_range(work):
    """A value that a knob takes makes weights and figures that are finite, also where gradients
    are 0: the text has few of the tokens and of the positions."""
    usual, told = {"precision": "fp32", "data": "text"}, []
    for group, chosen, key, value in sorted(numbers()):
        try:
            figures = trained(made(usual | {group: chosen}, {key: value}))[1]
        except ConfigError as refused:  # two that exclude each other
            told.append((key, str(refused)))
            continue
        assert np.isfinite(figures).all(), (chosen, key, value)
    assert all(key in text for key, text in told), told


def test_every_knob_of_a_part_is_declared():
    """Else it has no comment, no range and no type."""
    for section, names in OPTIONS_OF.items():
        for name in names:
            tree = shipped(f"{section}/{name}")
            target = locate(f"{section}._target_", tree["_target_"])
            known = {"_target_", *COMMON.get(section, ()), *arguments_of(target)}
            assert set(tree) <= known, f"{section}={name}"


def test_the_lists_of_keys_come_from_one_place():
    """Resuming, telling points apart and comparing ask the same question of the same
    declarations."""
    assert {affects(key) for key in fields()} == {"result", "rounding", "nothing"}
    said = {"train.seed": "result", "batch.micro_batch_size": "rounding", "tracker.name": "nothing",
            "data.cache_dir": "nothing", "model.d_model": "result",
            "of.nobody": "result"}  # fmt: skip
    assert {key: affects(key) for key in said} == said
    for key in (*fields(), *said):
        assert not is_record(key) or may_change(key), key
    assert may_change("hooks")
    assert not may_change("optimizer.lr")
    assert not may_change("train.twin")


def test_a_config_of_before_still_builds_and_dead_knobs_tell_no_runs_apart():
    """Its config.yaml has all keys, with any values where they do nothing."""
    old = flatten(
        plain(made({"clip": "none"}, {"clip.max_norm": 0.1, "parallelism.timeout_s": 5.0}))
    )
    new = flatten(plain(made({"clip": "none"}, {})))
    assert old["clip.max_norm"] == 0.1
    assert new["clip.max_norm"] is None
    assert old.keys() == new.keys()
    assert config_identity(
        plain(made({"clip": "none"}, {"clip.max_norm": 0.1}))
    ) == config_identity(plain(made({"clip": "none"}, {})))
    assert all(
        key.partition(".")[0] in OPEN_SECTIONS or fields()[key].default is not NO_DEFAULT
        for key in dead(new)
    )
