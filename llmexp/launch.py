"""The parent side: Hydra composes, a fresh worker trains. Nothing here imports torch.

command line + conf/ -> compose -> Config -> request -> `python -m llmexp.train -` -> exit code
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import yaml
from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_config_search_path, get_args_parser
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from llmexp import folder
from llmexp.config import FOLDER_NAME, Config, ConfigError, build, conf_dir, plain, refuse
from llmexp.guard import (
    fill_names,
    fill_tracker,
    guard,
    refuse_code,
    refuse_search_path,
    refuse_secrets,
    variables_kept,
)
from llmexp.hints import CONFIG_NAME, in_words
from llmexp.origin import refuse_dead, refuse_unplaced, refuse_unused
from llmexp.process import DONE, FAILED, PASSED_ON, REFUSED, handling, how_it_died, start_worker
from llmexp.run import replace_budgets

REFUSED_FLAGS = ("config_name", "config_path", "experimental_rerun")  # of Hydra's
ALLOW_HELP = "--allow PACKAGE allows the run's own parts from your package."


@contextmanager
def hydra_app(config_dir: str | None) -> Iterator[Hydra]:
    """Hydra over conf/ and the user's --config-dir, with our launcher known to it."""
    from llmexp.sweep.launchers import register

    register()
    search_path = create_config_search_path(f"file://{conf_dir()}")
    if config_dir is not None:
        if not Path(config_dir).is_dir():
            raise ConfigError(f"--config-dir {config_dir}: there is no such folder")
        search_path.prepend("command-line", f"file://{Path(config_dir).resolve()}")
    GlobalHydra.instance().clear()
    # At once: OmegaConf can lose an exception that comes out of nowhere. Workers die with their parent.
    old = signal.signal(signal.SIGINT, lambda number, frame: os._exit(128 + number))
    try:
        hydra = Hydra.create_main_hydra2(task_name="llmexp", config_search_path=search_path)
        guard(hydra.config_loader)
        yield hydra
    finally:
        signal.signal(signal.SIGINT, old)
        GlobalHydra.instance().clear()


def compose(hydra: Hydra, overrides: Sequence[str], multirun: bool = False) -> tuple[DictConfig, bool]:
    """(composed config with its hydra section, whether it is a sweep). Raises ConfigError in the user's words.

    A sweep is asked for by -m or by hydra.mode in a config; then the config is what all points share.
    """
    with user_errors(hydra.config_loader, overrides):
        wanted = RunMode.MULTIRUN if multirun else hydra.get_mode(CONFIG_NAME, list(overrides))
        if wanted is None:  # it does not compose: as a sweep it says why, where a run would blame the swept values
            with suppress(AttributeError, KeyError, TypeError, RecursionError):  # told below
                hydra.compose_config(CONFIG_NAME, list(overrides), run_mode=RunMode.MULTIRUN)
        multirun = wanted == RunMode.MULTIRUN
        mode = RunMode.MULTIRUN if multirun else RunMode.RUN
        try:
            cfg = hydra.compose_config(CONFIG_NAME, list(overrides), run_mode=mode)
        except (AttributeError, KeyError, TypeError, RecursionError) as error:  # such as for clip=[{}]
            raise ConfigError(f"{' '.join(overrides)}: Hydra cannot make a config of this ({error!r})") from None
        from hydra.core.hydra_config import HydraConfig

        HydraConfig.instance().set_config(cfg)
    return cfg, multirun


@contextmanager
def user_errors(loader: Any = None, overrides: Sequence[str] = ()) -> Iterator[None]:
    """Hydra's, OmegaConf's and YAML's refusals as ConfigError, with the nearest known key or option."""
    try:
        yield
    except ConfigError:
        raise
    except (HydraException, OmegaConfBaseException, yaml.YAMLError, ValueError) as error:
        raise ConfigError(in_words(error, loader, overrides)) from None


def typed(cfg: DictConfig) -> Config:
    """Plain, checked dataclasses from a composed config: OmegaConf stops here."""
    refuse_code(cfg)
    # hydra's own section has values that only a sweep fills; how a sweep is run is no part of a run
    keys = [str(k) for k in cfg if k not in ("hydra", "sweep")]
    with user_errors(), variables_kept():
        tree: dict[str, Any] = {key: cfg[key] for key in keys}
        for key, node in tree.items():
            if OmegaConf.is_config(node):
                tree[key] = OmegaConf.to_container(node, resolve=True, throw_on_missing=True)
    fill_tracker(tree)
    refuse_secrets(tree)
    fill_names(tree, cfg)
    refuse_unplaced(tree, cfg)
    replace_budgets(tree, OmegaConf.select(cfg, "hydra.overrides.task") or [])
    config = build({str(k): v for k, v in tree.items()})
    refuse_dead(cfg, config)
    if FOLDER_NAME.fullmatch(config.name) is None:
        raise refuse(
            "name",
            repr(config.name[:100]),
            "must be one folder name: 1 to 80 characters, no /, no dot or - at its start; hydra.run.dir takes any path",
            "my_run",
        )
    return config


def chosen_folder(cfg: DictConfig, key: str) -> Path:
    """The folder in `key` (hydra.run.dir, hydra.sweep.dir or hydra.sweep.subdir). Raises ConfigError."""
    with user_errors():
        value = OmegaConf.select(cfg, key, throw_on_missing=True)
    if not value or re.search(r"[\x00-\x1f\x7f]", str(value)):
        raise refuse(key, repr(value), "a folder is needed, without control characters", "outputs/try1")
    refuse_secrets(str(value), key)
    return Path(str(value))


def fixed_folder(overrides: Sequence[str], key: str) -> bool:
    """Whether the user chose the folder by an override of `key`."""
    return any(o.lstrip("+~").startswith(key + "=") for o in overrides)


def quoted(text: str) -> str:
    """`text` as the value of an override: in quotes where Hydra's grammar needs them."""
    if re.fullmatch(r"[A-Za-z0-9_./-]+", text):
        return text
    return "'" + text.replace("\\'", "\\\\'").replace("'", "\\'") + "'"


def visible(overrides: Sequence[str]) -> list[str]:
    """The overrides that say something about the run itself, for names and records."""
    hidden = ("hydra.", "hydra/", "tracker", "checkpoint.resume", "name=", "sweep.")
    return [o for o in overrides if not o.lstrip("+").startswith(hidden)]


class Worker:
    """A worker process that is already importing torch while the parent still composes."""

    def __init__(self) -> None:
        self.stopped = False  # whether a signal was passed on to it
        self._report, self._child_end = os.pipe()
        self._process = start_worker(
            "-",
            stdin=subprocess.PIPE,
            pass_fds=(self._child_end,),
            process_group=0,  # Ctrl-C reaches the parent, which passes it on once
            text=True,
        )
        os.close(self._child_end)

    def discard(self) -> None:
        """Ends a worker that got nothing to do."""
        self._process.kill()
        self._process.wait()
        assert self._process.stdin is not None
        self._process.stdin.close()
        os.close(self._report)

    def run(self, request: dict[str, Any]) -> tuple[int, Path | None]:
        """Sends the request and waits; (exit code, run folder if one was made). Signals are passed on."""
        assert self._process.stdin is not None
        with handling(PASSED_ON, self._forward, stay=lambda: self.stopped):
            with suppress(BrokenPipeError), self._process.stdin as pipe:  # a dead worker's exit code says why
                json.dump({**request, "report_fd": self._child_end}, pipe)
            code = self._process.wait()
        with os.fdopen(self._report, encoding="utf-8", errors="surrogateescape") as report:
            text = report.read()
        path = Path(text) if text else None
        running = path is not None and folder.read_status(path).get("state") == "running"
        if code < 0 or (code not in (DONE, REFUSED) and running):
            return self._died(code, path), path
        return code, path

    def _forward(self, number: int, frame: FrameType | None) -> None:
        self.stopped = True
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM if number == signal.SIGHUP else number)

    def _died(self, code: int, path: Path | None) -> int:
        """Says and records a death that the worker could not record itself."""
        text = how_it_died(code, self.stopped)
        if path is None:
            print(f"llmexp: {text} before the run started", file=sys.stderr)
            return FAILED
        if folder.read_status(path).get("state") == "finished":  # it was only about to say so
            return DONE
        text += folder.bus_error(path, code)
        with suppress(OSError):  # the disk may be what failed
            folder.write_status(path, "failed", error=text, exit_code=FAILED, ended=time.time())
        print(f"llmexp: training failed: {text}; {folder.what_is_left(path)}", file=sys.stderr)
        return FAILED


def say(text: str) -> None:
    """Prints at once; a standard output that is gone (`llmexp ... | head`) stops nothing."""
    try:
        print(text, flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def say_tracker(cfg: DictConfig, points: bool = False) -> None:
    """Print which of wandb's variables are set and not used. Raises ConfigError for an id for all points."""
    if points and cfg.tracker.kind != "none" and (run_id := os.environ.get("WANDB_RUN_ID")):
        text = "is the id of one run, and each point of a sweep is a run; unset it (wandb agent: its command has no -m)"
        raise refuse("WANDB_RUN_ID", run_id, text)
    for line in fill_tracker({"tracker": OmegaConf.to_container(cfg.tracker)}):
        say(line)


def allow(packages: Sequence[str]) -> None:
    """Allows `_target_` in the user's packages, found in the current folder too, here and in the workers."""
    os.environ["LLMEXP_ALLOW"] = ",".join(filter(None, packages))
    sys.path.insert(0, os.getcwd())
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [os.getcwd(), os.environ.get("PYTHONPATH")]))


def take_allowed(arguments: Sequence[str]) -> list[str]:
    """The arguments without --allow PACKAGE, which takes effect. Raises ConfigError."""
    rest: list[str] = []
    named: list[str] = []
    given = iter(arguments)
    for argument in given:
        flag, equals, package = argument.partition("=")
        if flag != "--allow":
            rest.append(argument)
            continue
        package = package if equals else next(given, "")
        if not all(name.isidentifier() for part in package.split(",") for name in part.strip().split(".")):
            raise ConfigError(f"--allow {package}: the name of a package is needed; for example --allow mypackage")
        named += [part.strip() for part in package.split(",")]
    packages = [os.environ.get("LLMEXP_ALLOW", ""), *named]
    if any(packages):
        allow(packages)
    for package in named:
        if not _is_there(package):
            raise ConfigError(
                f"--allow {package}: there is no such module on the path (looked in {os.getcwd()} too); for "
                f"{package.replace('.', '/')}.py or a folder of this name elsewhere, set PYTHONPATH"
            )
    return rest


def _is_there(package: str) -> bool:
    """Return whether a module can be found, without importing anything."""
    name, *below = package.split(".")
    try:
        spec = sys.modules[name].__spec__ if name in sys.modules else importlib.util.find_spec(name)
        for part in below:
            if spec is None or spec.submodule_search_locations is None:
                return False
            spec = importlib.machinery.PathFinder.find_spec(f"{spec.name}.{part}", spec.submodule_search_locations)
    except (ImportError, ValueError):
        return False
    return spec is not None


def parse(command: str, arguments: Sequence[str]) -> Any:
    """Hydra's own flags and the overrides, after --allow was taken out. Raises ConfigError."""
    parser = get_args_parser()
    parser.prog = f"llmexp {command}"

    def unknown(message: str) -> NoReturn:
        raise ConfigError(f"{message}; settings are written train.max_steps=100; see llmexp {command} --help")

    parser.error = unknown  # type: ignore[method-assign]
    if command == "train":
        parser.add_argument("--queue", action="store_true", help="make the run folder and start nothing")
    if command == "verify":
        parser.add_argument("--steps", type=int, help="optimizer steps of each run")
        parser.add_argument("--shrink", action="store_true", help="fewer layers, shorter sequences, smaller batches")
    args = parser.parse_intermixed_args(take_allowed(arguments))  # flags may stand between overrides
    for flag in REFUSED_FLAGS:
        if getattr(args, flag, None) is not None:
            raise ConfigError(
                f"--{flag.replace('_', '-')} {getattr(args, flag)}: has no meaning here; your own files are options of "
                "the groups: --config-dir DIR with DIR/experiment/mine.yaml, then experiment=mine"
            )
    check_overrides(args.overrides)
    refuse_search_path(args.config_dir, args.overrides)
    return args


def check_overrides(overrides: Sequence[str]) -> None:
    """Raises ConfigError naming an override that cannot be parsed."""
    parser = OverridesParser.create()
    for override in overrides:
        key = ""
        with suppress(HydraException):
            key = parser.parse_override(override).key_or_group
        if not key:
            name, equals, value = override.partition("=")
            quoted = f"""; special characters need quotes: '{name}="{value}"'""" if name and equals and value else ""
            raise ConfigError(f"{override}: is not an override; one looks like train.max_steps=100{quoted}")


def train(arguments: list[str]) -> int:
    """`llmexp train`: one run, a sweep (-m), or one of Hydra's flags. Returns the exit code."""
    args = parse("train", arguments)
    from llmexp import flags

    if flags.asked(args):
        return flags.answer(args)
    worker = None if args.multirun else Worker()
    try:
        from llmexp.sweep.main import sweep
        from llmexp.sweep.points import refuse_hosts

        with hydra_app(args.config_dir) as hydra:
            cfg, multirun = compose(hydra, args.overrides, args.multirun)
            refuse_unused(args.overrides, multirun)
            if multirun:
                if args.queue:
                    raise ConfigError("--queue: makes the folder of one run; for a sweep use hydra/launcher=slurm")
                if worker is not None:  # hydra.mode in a config asks for the sweep
                    worker.discard()
                    worker = None
                say_tracker(cfg, points=True)
                return sweep(hydra, cfg, args.overrides, arguments)
            config = typed(cfg)
            wanted = chosen_folder(cfg, "hydra.run.dir")
        refuse_secrets(args.overrides, "the command line")
        say_tracker(cfg)
        if not args.queue:
            refuse_hosts(config)
        request = {
            "config": plain(config),
            "folder": str(wanted),
            "fixed": fixed_folder(args.overrides, "hydra.run.dir"),
            "overrides": visible(args.overrides),
        }
        folder.check_writable(wanted)
        assert worker is not None
        running, worker = worker, None
        code, path = running.run(request | {"queue": args.queue})
        if args.queue and code == 0 and path is not None:
            from llmexp.slurm import how_to_start

            say(how_to_start(path, config))
        return code
    finally:
        if worker is not None:
            worker.discard()
