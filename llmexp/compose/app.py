"""Compose a config with Hydra, and check it into plain dataclasses. Nothing here imports torch."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_config_search_path
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from llmexp.compose import forking
from llmexp.compose.adopting import follow_width, leave_open, take_sizes
from llmexp.compose.command_line import for_hydra
from llmexp.compose.environment import fill_names, fill_tracker, refuse_secrets, variables_kept
from llmexp.compose.errors import user_errors
from llmexp.compose.guard import guard, refuse_code
from llmexp.compose.origin import (
    CONFIG_NAME,
    layers,
    loader,
    refuse_dead,
    refuse_unplaced,
    refuse_unused,
)
from llmexp.compose.overrides import key_of, parsed, replace_ramp, typed_in
from llmexp.run.budget import replace_budgets
from llmexp.runs import rundir
from llmexp.runs.ledger import is_sweep
from llmexp.settings.config import FOLDER_NAME, Config, conf_dir
from llmexp.settings.convert import build
from llmexp.settings.values import NUMBER_OR_WORD, ConfigError, refuse
from llmexp.system.child import handling


@contextmanager
def hydra_app(
    config_dir: str | None,
    overrides: Sequence[str] = (),
    run: Path | None = None,
    command: str = "train",
) -> Iterator[Hydra]:
    """Start Hydra over conf/ and the user's --config-dir.

    In the place of conf/config.yaml stands the config of `run`, where one is given, or that of the
    parents of forks, which the overrides ask for. `command`: for a message that prints it to paste.
    Raises ConfigError."""
    search_path = create_config_search_path(f"file://{conf_dir()}")
    if config_dir is not None:
        if not Path(config_dir).is_dir():
            raise ConfigError("unknown_file", f"--config-dir {config_dir}: there is no such folder")
        search_path.prepend("command-line", f"file://{Path(config_dir).resolve()}")
    with ExitStack() as stack:
        if beneath := [run] if run else forking.parents_in(overrides):
            folder = stack.enter_context(forking.options(beneath, fork=run is None))
            search_path.prepend("parent", f"file://{folder}")
        GlobalHydra.instance().clear()
        stack.callback(GlobalHydra.instance().clear)
        # At once: OmegaConf can lose an exception that comes out of nowhere. Workers die with their
        # parent.
        stack.enter_context(handling([signal.SIGINT], lambda number, _: os._exit(128 + number)))
        hydra = Hydra.create_main_hydra2(task_name="llmexp", config_search_path=search_path)
        guard(hydra.config_loader)
        loader().command = command
        yield hydra


def compose(
    hydra: Hydra, overrides: Sequence[str], multirun: bool = False
) -> tuple[DictConfig, bool]:
    """Return the composed config with its hydra section, and whether it is a sweep.

    A sweep is asked for by -m or by hydra.mode in a config; then the config is what all points
    share. Raises ConfigError in the user's words.
    """
    with user_errors(overrides):
        try:
            cfg, multirun = _composed(hydra, overrides, multirun)
        # such as for clip=[{}]
        except (AttributeError, KeyError, TypeError, RecursionError) as error:
            text = f"Hydra cannot make a config of this ({error!r})"
            raise ConfigError("wrong_type", f"{' '.join(overrides)}: {text}") from None
        HydraConfig.instance().set_config(cfg)
    return cfg, multirun


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
    with user_errors():
        return OmegaConf.to_container(cfg[name], resolve=True, throw_on_missing=True)


def _composed(hydra: Hydra, overrides: Sequence[str], multirun: bool) -> tuple[DictConfig, bool]:
    """Return what `compose` does. A run is composed once."""
    compose = partial(hydra.compose_config, CONFIG_NAME, list(overrides))
    if not multirun:
        try:
            cfg = compose(run_mode=RunMode.RUN)
            if cfg.hydra.mode != RunMode.MULTIRUN:
                return cfg, False
        except Exception:
            swept = any(override.is_sweep_override() for override in parsed(overrides))
            # As a sweep the error says why: a run would blame the swept values.
            if not swept or compose(run_mode=RunMode.MULTIRUN).hydra.mode != RunMode.MULTIRUN:
                raise
    return compose(run_mode=RunMode.MULTIRUN), True


def composed_over(run: Path, overrides: Sequence[str], config_dir: str | None = None) -> Config:
    """Return the config of a run with overrides over it, which may choose options of groups.

    Raises ConfigError, also for several values."""
    with user_errors():
        several = next((o.input_line for o in parsed(overrides) if o.is_sweep_override()), None)
    if several is not None:
        raise ConfigError(
            "unsupported", f"{several}: several values are a sweep; one is needed here"
        )
    overrides = for_hydra(overrides)
    with hydra_app(config_dir, run=run) as hydra:
        cfg, multirun = compose(hydra, overrides)
        refuse_unused(overrides, multirun)
        return typed_config(cfg, run)


def typed_config(cfg: DictConfig, run: Path | None = None) -> Config:
    """Return plain, checked dataclasses from a composed config: OmegaConf stops here.

    `run` is the run whose config was composed over, to go on with it. Raises ConfigError."""
    refuse_code(cfg)
    # hydra's own has values that only a sweep fills; how a command works is no part of a run
    keys = [str(k) for k in cfg if k not in ("hydra", "sweep", "prepare", "plan")]
    with user_errors(), variables_kept():
        tree: dict[str, Any] = {key: cfg[key] for key in keys}
        for key, node in tree.items():
            if OmegaConf.is_config(node):
                tree[key] = OmegaConf.to_container(node, resolve=True, throw_on_missing=True)
    fill_tracker(tree)
    refuse_secrets(tree)
    fill_names(tree, cfg)
    refuse_unplaced(tree, cfg)
    given = typed_in(cfg)
    replace_budgets(tree, given)
    replace_ramp(tree, given)
    parent = None
    if run is None:
        parent = forking.settle(tree, given, lambda: chosen_folder(cfg, "hydra.run.dir"))
    if (beneath := run or parent) is None:
        follow_width(tree, cfg)
        take_sizes(tree, cfg)
    else:
        forking.follow(tree, given, beneath, fork=run is None)
    leave_open(tree, cfg, saved=beneath is not None)
    config = build({str(k): v for k, v in tree.items()})
    config = config if beneath is None else forking.recut(config, given)
    refuse_dead(cfg, config, chosen=beneath is None)
    if FOLDER_NAME.fullmatch(config.name) is None or len(os.fsencode(config.name)) > 240:
        text = "must be one folder name: 1 to 80 characters, in 240 bytes, no /, no dot or - at its"
        text += " start"
        way = "hydra.run.dir takes any path"
        raise refuse("wrong_type", "name", repr(config.name[:100]), f"{text}; {way}", "my_run")
    return config


def chosen_folder(cfg: DictConfig, key: str) -> Path:
    """Return the folder in `key`: hydra.run.dir, hydra.sweep.dir or hydra.sweep.subdir.

    Raises ConfigError."""
    with user_errors():
        value = OmegaConf.select(cfg, key, throw_on_missing=True)
    if not value or re.search(r"[\x00-\x1f\x7f]", str(value)):
        text = "a folder is needed, without control characters"
        raise refuse("wrong_type", key, repr(value), text, "outputs/try1")
    if NUMBER_OR_WORD.fullmatch(str(value)):
        given = [w.values[key] for w in layers(typed_in(cfg)) if key in w.values]
        if given and not isinstance(given[-1], str):
            text = "without quotes this is a number to YAML: put quotes around what you wrote"
            raise refuse("wrong_type", key, given[-1], text, "outputs/try1")
    refuse_secrets(str(value), key)
    return Path(str(value))


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
    config: Config, instead: str = "for several, --queue makes the run's folder and says how"
) -> None:
    """Raise ConfigError for a run on several hosts, which this command cannot start."""
    if (nodes := config.parallelism.nnodes) > 1:
        text = f"this command starts ranks on this host only; {instead}"
        raise refuse("unsupported", "parallelism.nnodes", nodes, text, 1)
