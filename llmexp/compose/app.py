"""Compose a config with Hydra, and check it into plain dataclasses. Nothing here imports torch."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import yaml
from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_config_search_path
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import OverrideParseException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf import errors as omegaconf

from llmexp.compose import forking
from llmexp.compose.adopting import adopt
from llmexp.compose.command_line import refuse_unused
from llmexp.compose.loading import Loader
from llmexp.compose.overrides import (
    as_text,
    at,
    file_at,
    key_of,
    layers,
    loader,
    option,
    origin,
    parsed,
    set_by,
    typed_in,
    unresolved,
)
from llmexp.compose.security import (
    Sized,
    fill_names,
    fill_tracker,
    refuse_secrets,
    search_path,
    variables_kept,
)
from llmexp.config import sections
from llmexp.config.convert import build
from llmexp.config.kinds import Kind
from llmexp.config.knobs import dead, defaults
from llmexp.config.sections import FOLDER_NAME, OPEN_SECTIONS, Config, conf_dir
from llmexp.config.values import (
    NO_DEFAULT,
    NUMBER_OR_WORD,
    ConfigError,
    Plain,
    flatten,
    refuse,
)
from llmexp.config.variables import VARIABLE
from llmexp.folders import rundir
from llmexp.folders.ledger import is_sweep
from llmexp.run.budget import replace_budgets
from llmexp.system.child import handling

CONFIG_NAME = "config"


def _quiet(text: str) -> None:
    """Leave a note out."""


@contextmanager
def hydra_app(
    config_dir: str | None,
    overrides: Sequence[str] = (),
    run: Path | None = None,
    command: str = "train",
) -> Iterator[Hydra]:
    """Start Hydra over conf/ and the user's own folders of options.

    In the place of conf/config.yaml stands the config of `run`, where one is given. `command`: for
    a message that prints it with the overrides to paste. Raises ConfigError."""
    path = create_config_search_path(f"file://{conf_dir()}")
    asked = config_dir is not None or "hydra.searchpath" in map(key_of, overrides)
    for provider, folder in search_path(config_dir, overrides) if asked else ():
        first = provider == "command-line"
        path.prepend(provider, folder, None if first else "schema")
    with ExitStack() as stack:
        GlobalHydra.instance().clear()
        stack.callback(GlobalHydra.instance().clear)
        # At once: OmegaConf can lose an exception that comes out of nowhere. Workers die with their
        # parent.
        stack.enter_context(handling([signal.SIGINT], lambda number, _: os._exit(128 + number)))
        hydra = Hydra.create_main_hydra2(task_name="llmexp", config_search_path=path)
        file_at.cache_clear()
        there = loader()
        there.__class__, there.repository.__class__ = Loader, Sized
        there.command, there.typed, there.beneath = command, list(overrides), run
        there.files = {}
        yield hydra


def compose(
    hydra: Hydra, overrides: Sequence[str], multirun: bool = False
) -> tuple[DictConfig, bool]:
    """Return the composed config with its hydra section, and whether it is a sweep.

    A sweep is asked for by -m or by hydra.mode in a config; then the config is what all points
    share. Raises ConfigError in the user's words.
    """
    with user_errors():
        several = [o for o in parsed(overrides) if o.is_sweep_override()]
        cfg = hydra.compose_config(
            CONFIG_NAME, list(overrides), RunMode.RUN, validate_sweep_overrides=False
        )
        multirun = multirun or cfg.hydra.mode == RunMode.MULTIRUN
    for override in several:
        line = str(override.input_line)
        if not multirun:
            text = "several values are a sweep, which needs -m; a list is written key=[a,b]"
            raise ConfigError("unsupported", f"{line}: {text}", override.key_or_group)
        if override.is_hydra_override():
            raise ConfigError(
                "unsupported", f"{line}: holds for the whole sweep, so give one value"
            )
    HydraConfig.instance().set_config(cfg)
    return cfg, multirun


@contextmanager
def user_errors(cfg: DictConfig | None = None) -> Iterator[None]:
    """Turn what Hydra's grammar, OmegaConf and YAML refuse into ConfigError within the block.

    `cfg`: the config whose values are worked out there."""
    try:
        yield
    except (
        OverrideParseException, yaml.MarkedYAMLError, omegaconf.OmegaConfBaseException
    ) as error:  # fmt: skip
        raise _in_words(error, cfg) from None


def _in_words(error: Any, cfg: DictConfig | None) -> ConfigError:
    """Return the refusal of what Hydra's grammar, YAML or OmegaConf does not take."""
    if isinstance(error, OverrideParseException):
        text = "is not an override; one looks like train.max_steps=100"
        return ConfigError("wrong_type", f"{error.override}: {text}")
    if isinstance(error, yaml.MarkedYAMLError):
        mark: Any = error.problem_mark or error.context_mark
        return ConfigError("damaged_file", f"{mark.name}: line {mark.line + 1}: {error.problem}")
    key = re.sub(r"\[(\w+)\]", r".\1", error.full_key or "")
    value = NO_DEFAULT if cfg is None else at(unresolved(cfg), key)
    kind, why = _UNKNOWN.get(type(error), ("wrong_type", "cannot be worked out"))
    for name in VARIABLE.findall(str(value)):
        if name not in os.environ:
            kind = "missing_value"
            why = f"the environment variable {name} is not set; set it where the run starts, "
            why += f"such as with export {name}=..."
    shown = f"{key}: {why}" if value is NO_DEFAULT else str(refuse(kind, key, value, why))
    return ConfigError(kind, shown, key)


_UNKNOWN: dict[type, tuple[Kind, str]] = {
    omegaconf.MissingMandatoryValue: ("missing_value", "has no value yet; give it one"),
    omegaconf.InterpolationKeyError: ("unknown_key", "names a key that does not exist"),
    omegaconf.InterpolationToMissingValueError: (
        "missing_value",
        "names a value that is not known here",
    ),
    omegaconf.UnsupportedInterpolationType: (
        "unknown_key",
        "names a function that does not exist; oc.env is one",
    ),
}


@contextmanager
def composed(args: Any, one: str = "") -> Iterator[tuple[DictConfig, bool]]:
    """Yield the config of a parsed command line, and whether it is a sweep, while Hydra runs.

    `one` names a command that takes one config: a sweep is refused then. Raises ConfigError.
    """
    with hydra_app(args.config_dir, args.overrides, command=args.command) as hydra:
        cfg, multirun = compose(hydra, args.overrides, args.multirun)
        if multirun and one:
            raise ConfigError("unsupported", f"{one}: takes one config, not a sweep; leave out -m")
        yield cfg, multirun


def section(cfg: DictConfig, name: str) -> Any:
    """Return a section on how a command works, as plain values. Raises ConfigError."""
    with user_errors(cfg):
        return OmegaConf.to_container(cfg[name], resolve=True, throw_on_missing=True)


def composed_over(
    run: Path,
    overrides: Sequence[str],
    config_dir: str | None = None,
    note: Callable[[str], Any] = _quiet,
) -> Config:
    """Return the config of a run with overrides over it, which may choose options of groups.

    `note`: see `typed_config`. Raises ConfigError, also for several values."""
    overrides = list(map(as_text, overrides))
    for override in parsed(overrides):
        if override.is_sweep_override():
            text = "several values are a sweep; one is needed here"
            raise ConfigError(
                "unsupported", f"{override.input_line}: {text}", override.key_or_group
            )
    with hydra_app(config_dir, overrides, run=run) as hydra:
        cfg, multirun = compose(hydra, overrides)
        refuse_unused(overrides, multirun)
        return typed_config(cfg, run, note)


def typed_config(
    cfg: DictConfig, run: Path | None = None, note: Callable[[str], Any] = _quiet
) -> Config:
    """Return plain, checked dataclasses from a composed config: OmegaConf stops here.

    `run` is the run whose config was composed over, to go on with it. `note` gets a line for each
    of wandb's variables that is set and not used. Raises ConfigError."""
    # hydra's own has values that only a sweep fills; how a command works is no part of a run
    beside = ("hydra", "sweep", "prepare", "plan")
    with user_errors(cfg), variables_kept():
        tree: Plain = {str(key): cfg[key] for key in cfg if key not in beside}
        for key, node in tree.items():
            if OmegaConf.is_config(node):
                tree[key] = OmegaConf.to_container(node, resolve=True, throw_on_missing=True)
    for line in fill_tracker(tree):
        note(line)
    refuse_secrets(tree)
    fill_names(tree, cfg)
    if "experiment" in tree:
        raise _unplaced(cfg)
    given = typed_in(cfg)
    budgets = replace_budgets(tree, given)
    # these, and an option of a group, may ask for another cut of the batch
    recuts = any(
        "." not in key or key.startswith(("batch.", "parallelism.")) for key in map(key_of, given)
    )
    beneath, is_fork = run, run is None and at(tree, "fork.run") not in (None, NO_DEFAULT)
    if is_fork or run is not None:
        beneath = run or forking.settle(tree, given, lambda: chosen_folder(cfg, "hydra.run.dir"))
        if is_fork or budgets or recuts:
            forking.follow(tree, given, beneath, fork=is_fork)
    adopt(tree, cfg, given, saved=beneath is not None)
    config = build(tree)
    if beneath is not None and recuts:
        config = forking.recut(config, given)
    refuse_dead(cfg, config, given, chosen=beneath is None)
    if FOLDER_NAME.fullmatch(config.name) is None or len(os.fsencode(config.name)) > 240:
        raise _no_name(config.name)
    return config


def _no_name(name: str) -> ConfigError:
    text = (
        "must be one folder name: 1 to 80 characters, in 240 bytes, no /, no dot or - at its "
        "start; hydra.run.dir takes any path"
    )
    return refuse("wrong_type", "name", repr(name[:100]), text, "my_run")


def _unplaced(cfg: DictConfig) -> ConfigError:
    """Return the refusal of an experiment whose settings are under `experiment`."""
    choice = cfg.hydra.runtime.choices.get("experiment")
    source, *_ = file_at(f"experiment/{choice}")
    text = "without it the file only sets keys below `experiment`, which nothing reads"
    line = "must begin with the line `# @package _global_`"
    return ConfigError("idle_knob", f"experiment={choice}: {source} {line}; {text}", "experiment")


def refuse_dead(cfg: DictConfig, config: Config, typed: Sequence[str], chosen: bool) -> None:
    """Raise ConfigError for a knob that does nothing where it is set.

    That is on the command line, `typed` to any value but null, and in a file to a value of its own.
    What was not `chosen` now, but is the config of an earlier run, is let be."""
    flat = flatten(sections.plain(config))
    given = {key for override in parsed(typed) for key in set_by(override)}
    for key, (why, instead) in dead(flat).items():
        set_now = key in given or (chosen and not _is_default(cfg, key, flat))
        if flat[key] is not None and set_now:
            file = None if key in given else origin(cfg, key)
            out = f"it is set in {file}: take it out with ~{key}" if file else "leave it out"
            raise refuse("idle_knob", key, flat[key], f"{why}; {out}, or {instead}")


def _is_default(cfg: DictConfig, key: str, flat: Plain) -> bool:
    """Return whether the value of a knob that does nothing was not chosen.

    It is then the default, or that of the chosen option."""
    value, (group, _, name) = flat[key], key.partition(".")
    if value is None or value == defaults().get(key, NO_DEFAULT):
        return True
    choice = cfg.hydra.runtime.choices.get(group)
    if choice is None:
        return False
    chosen = flatten({group: option(f"{group}/{choice}")})
    if chosen.get(key, NO_DEFAULT) == value and key not in dead(chosen):
        return True
    shipped = (conf_dir() / group).glob("*.yaml") if group in OPEN_SECTIONS else ()
    return any(option(f"{group}/{file.stem}").get(name) == value for file in shipped)


def chosen_folder(cfg: DictConfig, key: str) -> Path:
    """Return the folder in `key`: hydra.run.dir, hydra.sweep.dir or hydra.sweep.subdir.

    Raises ConfigError."""
    with user_errors(cfg):
        value = OmegaConf.select(cfg, key, throw_on_missing=True)
    folder = str(value)
    if not value or re.search(r"[\x00-\x1f\x7f]", folder):
        text = "a folder is needed, without control characters"
        raise refuse("wrong_type", key, repr(value), text, "outputs/try1")
    if NUMBER_OR_WORD.fullmatch(folder):
        _refuse_number(cfg, key)
    refuse_secrets(folder, key)
    return Path(folder)


def _refuse_number(cfg: DictConfig, key: str) -> None:
    given = [layer.values[key] for layer in layers(cfg) if key in layer.values]
    if given and not isinstance(given[-1], str):
        text = "without quotes this is a number to YAML: put quotes around what you wrote"
        raise refuse("wrong_type", key, given[-1], text, "outputs/try1")


def where_options_are(args: Any) -> list[str]:
    """Return the words of a parsed command line that say where options of groups are."""
    given = ["--config-dir", args.config_dir] if args.config_dir else []
    return [*given, *(o for o in args.overrides if key_of(o) == "hydra.searchpath")]


def fixed_folder(overrides: Sequence[str], key: str) -> bool:
    """Return whether the user chose the folder by an override of `key`."""
    return any(key_of(o) == key and "=" in o for o in overrides)


def run_folder(cfg: DictConfig, overrides: Sequence[str]) -> tuple[Path, bool]:
    """Return the folder of a run, and whether the user chose it.

    Raises ConfigError where none can be made, and for a chosen one that holds a sweep.
    """
    wanted, fixed = chosen_folder(cfg, "hydra.run.dir"), fixed_folder(overrides, "hydra.run.dir")
    rundir.check_writable(wanted)
    if fixed and is_sweep(wanted):
        text = "holds a sweep; a run needs a folder of its own"
        raise refuse("exists", "hydra.run.dir", wanted, text, f"{wanted}-run")
    return wanted, fixed


def visible(overrides: Sequence[str]) -> list[str]:
    """Return the overrides that say something about the run itself, for names and records."""
    hidden = ("hydra.", "hydra/", "tracker", "checkpoint.resume", "name=", "sweep.")
    return [o for o in overrides if not o.lstrip("+").startswith(hidden)]


def refuse_hosts(
    config: Config, instead: str = "for several, --create-only makes the run's folder and says how"
) -> None:
    """Raise ConfigError for a run on several hosts, which this command cannot start."""
    if (nodes := config.parallelism.nnodes) > 1:
        text = f"this command starts ranks on this host only; {instead}"
        raise refuse("unsupported", "parallelism.nnodes", nodes, text, 1)
