"""Make or find the folder of the run that this process trains, compare it, and write it."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from pathlib import Path
from typing import Any

from llmexp import features
from llmexp.checkpoint import loading
from llmexp.config.knobs import differing, may_change
from llmexp.config.sections import plain
from llmexp.config.targets import better_of
from llmexp.config.values import ConfigError, Plain, flatten
from llmexp.config.variables import VARIABLE, is_secret
from llmexp.folders import rundir
from llmexp.folders.door import RUN_FORMAT, config_yaml
from llmexp.folders.rows import LINEAGE
from llmexp.folders.rundir import refuse_folder
from llmexp.folders.steps import STEPS_BIN
from llmexp.run import Parent
from llmexp.run.budget import EXTENDING
from llmexp.system import fileio
from llmexp.system.child import BEGAN, REFUSED
from llmexp.system.redact import as_recorded, concealed
from llmexp.system.text import first_of
from llmexp.train.assembly.assemble import Parts


def is_finished(path: Path, max_steps: int | None = None) -> bool:
    """Return whether the folder's run is finished, and print it.

    One that is extended to `max_steps` is not."""
    if rundir.read_status(path).get("state") != "finished":
        return False
    if max_steps is not None and rundir.read_run(path).get("max_steps", max_steps) < max_steps:
        return False
    print(f"{path}: this run is finished; nothing to do")
    return True


def recorded_parent(path: Path) -> Parent | None:
    """Return the recorded parent of the fork in the folder, None where there is none.

    Raises ConfigError."""
    recorded = rundir.read_run(path).get("parent")
    return Parent(**recorded) if recorded else None


def known_of(request: Plain) -> Plain:
    """Return what `assemble` needs to know of the folder of a request.

    That is whether its run has begun before (there is a checkpoint, or it is repeated), and the
    parent of a fork there. Raises ConfigError."""
    path = Path(request["folder"])
    if not request["fixed"]:
        return {}
    tried = rundir.newest_step(path) is not None or (path / rundir.ASKED).exists()
    return {"tried": tried, "parent": recorded_parent(path)}


def open_folder(parts: Parts, request: Plain) -> tuple[Path, bool]:
    """Return the run's folder, made now or found with a run to go on with, and whether it is new.

    Raises ConfigError."""
    wanted = Path(request["folder"])
    there = request["fixed"] and rundir.is_run(wanted)
    if there:
        rundir.check_plain(wanted)
    if (wanted / rundir.AVERAGE).exists():
        from llmexp.hf.average import refuse_average

        refuse_average(wanted)
    refuse_folder(wanted, there, parts.config.checkpoint.resume)
    if there:
        refuse_other_run(wanted, parts)
    else:
        wanted = rundir.claim(wanted, request["fixed"])
    answer_command(request, path=str(wanted))
    return wanted, not there


def forget_run(path: Path) -> None:
    """Make the folder of a run that was refused no run folder again, for the next try.

    What another process has begun there meanwhile is kept."""
    if rundir.read_status(path).get("exit_code") != REFUSED:
        return
    # the next one may be no fork, or of another
    for file in (*describing(path), path / LINEAGE, path / STEPS_BIN):
        file.unlink(missing_ok=True)


def describing(path: Path) -> list[Path]:
    """Return the files of a folder that say what is trained there and how far it came."""
    return [path / rundir.CONFIG, path / rundir.RUN, path / rundir.STATUS]


def answer_command(request: Plain, **found: Any) -> bool:
    """Answer the command that waits, once; return whether there is one."""
    if "report_fd" not in request:
        return False
    with os.fdopen(request.pop("report_fd"), "w", encoding="utf-8") as answer:
        json.dump(found, answer)
    return True


def refuse_other_run(path: Path, parts: Parts) -> None:
    """Raise ConfigError when the run in the folder differs from `parts` in what changes results.

    A run is known by its newest checkpoint, since config.yaml could have been edited; without one,
    by config.yaml and run.json. Nothing is written. Raises CheckpointError where all are damaged.
    """
    # kinds=(): only manifest and state.pt are read here; `start_loop` looks at all, and warns
    loaded = loading.newest_whole(path / rundir.CHECKPOINTS, lambda text: None, kinds=())
    there, recorded = loaded.manifest if loaded else {}, rundir.read_run(path)
    known, here = there.get("config"), fixed_facts(parts)
    old = known if isinstance(known, dict) else fixed_part(rundir.read_config(path))
    keys = differing(old, here["config"])
    where = loaded.path if loaded else path
    if fixed := [key for key in keys if key not in EXTENDING]:
        again = rundir.command_on(path, "train", ("fork.run", path), "...")
        raise ConfigError(
            "other_run",
            f"{where}: is another run; differing keys, which change results and so are fixed: "
            f"{_shown(fixed, old, here['config'])}; to fork it with "
            f"other values: {again}",
        )
    if keys and loaded is not None:  # else nothing is trained yet
        from llmexp.modes import extending

        extending.run(path, old, parts, loaded)
    if not recorded:
        print(f"llmexp: {path / rundir.RUN}: is missing and is rebuilt", file=sys.stderr)
    before, now = recorded.get("environment"), environment(parts)
    if before is not None and (changed := [k for k in before | now if before.get(k) != now.get(k)]):
        text = f"the environment has another value of {', '.join(sorted(changed))} now"
        raise ConfigError("other_run", f"{path}: is another run; {text}")
    for other in features.offered("assembly", "other", parts.config):
        if text := other(there, here):
            raise ConfigError("other_run", f"{where}: {text}")
    now = as_recorded(parts.corpus.fingerprint)
    changed = differing(flatten(recorded.get("data_fingerprint") or now), flatten(now))
    if there.get("data") not in (None, here["data"]) or changed:
        text = f"the data changed since the run started ({parts.run.data})"
        text += f"; other now: {first_of(changed)}" * bool(changed)
        way = "if no file did, continue with the version of llmexp that began the run"
        raise ConfigError("other_run", f"{where}: {text}; {way}")


def _shown(keys: list[str], old: Plain, now: Plain) -> str:
    """Return keys with both values; of a section with another function that alone."""
    other = {key.partition(".")[0] for key in keys if key.endswith("._target_")}
    named = [k for k in keys if k.endswith("._target_") or k.partition(".")[0] not in other]
    return ", ".join(f"{k} ({old.get(k)} there, {now.get(k)} here)" for k in named)


def fixed_part(config: Plain) -> Plain:
    """Return what of a plain config changes results, with dotted keys."""
    return {key: value for key, value in flatten(config).items() if not may_change(key)}


def fixed_facts(parts: Parts) -> Plain:
    """Return what a checkpoint's manifest holds of the run.

    That is what of the config changes results, the sha256 of the data's fingerprint, and what
    features have prepared."""
    fingerprint = json.dumps(concealed(parts.corpus.fingerprint), sort_keys=True)
    return {
        "config": json.loads(json.dumps(fixed_part(plain(parts.config)))),
        "data": fileio.text_sha256(fingerprint),
        **features.merged("assembly", "fixed", parts.prepared, config=parts.config),
    }


def environment(parts: Parts) -> dict[str, str]:
    """Return a mark of the value of each variable that changes results, by which a change is seen.

    Secrets, which are renewed, have none. A mark has four hex digits: too few to find the value by.
    """
    names = VARIABLE.findall(str(list(fixed_part(plain(parts.config)).values())))
    return {
        name: fileio.text_sha256(os.environ.get(name, ""))[:4]
        for name in names
        if not is_secret(name)
    }


def record_run(path: Path, parts: Parts, request: Plain, state: str = "running") -> None:
    """Write config.yaml with every derived value, run.json, what features record, the status."""
    fileio.write_whole(path / rundir.CONFIG, config_yaml(plain(parts.config)))
    derived = parts.run.as_dict()
    if parts.config.batch.gradient_accumulation_steps is None:  # `auto`, found where it starts
        del derived["micro_batch_size"], derived["gradient_accumulation_steps"]
    run = {
        "format": RUN_FORMAT,
        **derived,
        **{key: request.get(key) for key in rundir.RECORDED},
        "environment": environment(parts),
        "data_fingerprint": parts.corpus.fingerprint,
        "data_files": parts.corpus.states(),
    }
    if better := {k: v for _, hook in parts.hooks for k, v in better_of(hook).items()}:
        run["better"] = better
    if parts.corpus.val_texts:
        run["val_texts"] = parts.corpus.val_texts
    fileio.write_json(path / rundir.RUN, concealed(run))
    if (parent := parts.run.parent) is not None and not (path / LINEAGE).exists():
        from llmexp.modes import fork

        fork.record_lineage(path, Path(parent.folder), parent.step)
    for record in features.offered("folders", "record"):
        record(path, (path / rundir.METRICS).exists())
    rundir.write_status(
        path,
        state,
        started=float(os.environ.get(BEGAN) or time.time()),
        pid=os.getpid(),
        host=socket.gethostname(),
        **rundir.NO_END,
    )
