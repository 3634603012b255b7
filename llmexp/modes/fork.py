"""Find the checkpoint that a fork goes on from, check that it fits, and tell how the data go on."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from llmexp.checkpoint import loading
from llmexp.checkpoint.folders import checkpoint_folder
from llmexp.checkpoint.slices import named_tensors
from llmexp.config.knobs import SEED, deciding_data, deciding_result, differing
from llmexp.config.labels import short_value
from llmexp.config.sections import Config, plain
from llmexp.config.values import ConfigError, flatten, refuse, typed
from llmexp.data.stream import Corpus
from llmexp.folders import rundir
from llmexp.folders.rows import LINEAGE, rows_up_to
from llmexp.folders.steps import STEPS_BIN, steps_up_to
from llmexp.hf.average import refuse_average
from llmexp.hf.sizes import CONVERTED
from llmexp.optim import precision
from llmexp.run import Parent
from llmexp.run.stages import recorded_stages, stage_at
from llmexp.system import fileio
from llmexp.system.redact import as_recorded
from llmexp.system.text import first_of
from llmexp.tracker.fields import run_fields


def run(config: Config, model: nn.Module) -> Callable[[Corpus], Parent]:
    """Return what tells the parent of a fork with this solved config, once its data are known.

    `model` may be without memory. Raises ConfigError for a run, a step or a checkpoint that the
    fork cannot go on from."""
    path, step = Path(str(config.fork.run)), config.fork.step
    refuse_average(path)
    recorded, tree = rundir.read_run(path), rundir.built_config(path)
    kept = rundir.saved_steps(path)
    if step is None or step not in kept:
        text = f"{path} keeps no checkpoint of this step; it keeps those of "
        near = min(kept, key=lambda s: abs(s - (step or 0)), default=None)
        raise refuse("no_checkpoint", "fork.step", step, text + _listed(kept), near)
    try:
        folder = checkpoint_folder(path / rundir.CHECKPOINTS, step)
        loaded = loading.read_checkpoint(folder, ("model",), hash_share=None)
    except loading.CheckpointError as error:
        raise refuse(error.kind, "fork.step", step, f"its checkpoint is damaged: {error}") from None
    _check_fit(config, tree, loaded, model)
    return functools.partial(parent_of, config, path, tree, recorded, loaded)


def record_lineage(path: Path, parent: Path, step: int) -> None:
    """Write the rows and the figures of the steps of a fork's parents into its folder."""
    fileio.write_whole(path / STEPS_BIN, steps_up_to(parent, step))
    lines = [json.dumps(row, separators=(",", ":")) + "\n" for row in rows_up_to(parent, step)]
    fileio.write_whole(path / LINEAGE, "".join(lines))


def parent_of(
    config: Config,
    path: Path,
    tree: Config,
    recorded: dict[str, Any],
    loaded: loading.Loaded,
    corpus: Corpus,
) -> Parent:
    """Return the parent of a fork, with where its data go on. Raises ConfigError."""
    step, before = loaded.step, recorded.get("parent") or {}
    try:
        length, first = recorded["sequence_length"], before.get("sequences", 0)
        done = stage_at(recorded_stages(recorded), step).sequences_at(step)
        done = min(done, recorded["total_sequences"])
    except KeyError as error:
        raise ConfigError(
            "damaged_file", f"{path / rundir.RUN}: has no {error} of the run"
        ) from None
    where, order = _place(plain(config), plain(tree), recorded, corpus, done)
    return Parent(
        folder=str(path),
        run_id=run_fields(path, plain(tree), recorded).run_id,
        step=step,
        sequences=where,
        tokens=before.get("tokens", 0) + (done - first) * length,
        tokens_seen=int(loaded.manifest["tokens_seen"]),
        order=order,
        digest=loaded.digest,
        setting=_setting(tree, before),
    )


def _setting(there: Config, before: Mapping[str, Any]) -> str:
    """Return a digest of what a parent's config decides, less its seed; `before`: its own parent.

    Parents that differ in the seed alone, and whose own parents do, have the same one."""
    flat = deciding_result(flatten(plain(there)))
    flat |= {SEED: None, "fork.run": before.get("setting") or flat.get("fork.run")}
    return fileio.text_sha256(json.dumps(flat, sort_keys=True, default=str))[:16]


def _listed(steps: list[int]) -> str:
    """Return steps as text, the first and the last of many."""
    if len(steps) > 12:
        return f"{', '.join(map(str, steps[:4]))}, ... {', '.join(map(str, steps[-4:]))}"
    return ", ".join(map(str, steps)) or "no step yet"


def _check_fit(config: Config, there: Config, loaded: loading.Loaded, model: nn.Module) -> None:
    """Raise ConfigError where the parent's weights or moments are not those of this config."""
    run, step, begin = config.fork.run, config.fork.step, config.model.get("init_from")
    if begin != there.model.get("init_from"):
        text = "a fork begins with the weights of its parent; leave it out, or leave fork.run out"
        raise refuse("conflict", "model.init_from", begin, text)
    try:
        loading.refuse_other_model(loaded, named_tensors(model))
    except loading.CheckpointError as error:
        old = flatten({"model": there.model})
        new = flatten({"model": config.model})
        changed = differing(old, new)
        keys = [key for key in new if key in changed]
        given = first_of([f"{key}={short_value(new[key])}" for key in keys])
        has = f", and {run} has {short_value(old.get(keys[0]))}" if len(keys) == 1 else ""
        why = f"a fork has the model of its parent{has}" if keys else f"{run}: {error}"
        begin = typed("model.init_from", f"{run}@{step}")
        way = f"leave it out, or begin a new run with what fits: {begin}"
        raise ConfigError("wrong_weights", f"{given or 'model'}: {why}; {way}") from None
    for key in CONVERTED:
        now, before = ({"parametrization": "standard"} | c.model for c in (config, there))
        if now.get(key) != before.get(key):
            text = f"the parent's weights are of {before.get(key)}; leave it out, or convert them"
            way = f"for a new run: {typed('model.init_from', f'{run}@{step}')}"
            raise refuse("wrong_weights", f"model.{key}", now.get(key), f"{text} {way}")
    if config.fork.reset_optimizer:
        return
    kinds = [o.get("name", o["_target_"]) for o in (config.optimizer, there.optimizer)]
    types = [precision.parameter_dtype(c.precision.kind) for c in (config, there)]
    if kinds[0] != kinds[1]:
        text = f"the optimizer state of the parent is of {kinds[1]}, and this run has {kinds[0]}"
        raise refuse("conflict", "fork.reset_optimizer", False, text, True)
    if types[0] != types[1]:
        text = f"the optimizer state of the parent is {types[1]}, and this run's {types[0]}"
        raise refuse("conflict", "fork.reset_optimizer", False, text, True)


def _place(
    config: dict[str, Any], there: dict[str, Any], recorded: dict[str, Any], corpus: Corpus, at: int
) -> tuple[int, str]:
    """Return where in its order of sequences a fork begins, and that in words.

    That is where the parent was, unless the k-th sequence is another one now. Data that the parent
    did not record are taken for the same, as at a resume."""
    causes = differing(deciding_data(there), deciding_data(config))
    now, before = (
        {key: value for key, value in (found or {}).items() if key not in ("val_files", "val_sets")}
        for found in (as_recorded(corpus.fingerprint), recorded.get("data_fingerprint"))
    )
    if not causes and now and before and before != now:
        causes = ["the content of the data"]
    if not causes:
        return at, f"continue at sequence {at:,}, where the parent was"
    differ = "differ" if len(causes) > 1 else "differs"
    return 0, (
        f"start again at sequence 0: {', '.join(causes)} {differ} from the parent's, which was at "
        f"sequence {at:,}"
    )
