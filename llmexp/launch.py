"""The parent side: Hydra composes, a fresh worker trains. Nothing here imports torch.

command line + conf/ -> compose -> Config -> request -> `python -m llmexp.train -` -> exit code
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

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
from llmexp.config import Config, ConfigError, build, conf_dir, nearest
from llmexp.process import FAILED

CONFIG_NAME = "config"


@contextmanager
def hydra_app(config_dir: str | None) -> Iterator[Hydra]:
    """Hydra over conf/ and the user's --config-dir, with our launcher known to it."""
    from llmexp.sweep import register

    register()
    search_path = create_config_search_path(f"file://{conf_dir()}")
    if config_dir is not None:
        if not Path(config_dir).is_dir():
            raise ConfigError(f"--config-dir {config_dir}: there is no such folder")
        search_path.prepend("command-line", f"file://{Path(config_dir).resolve()}")
    GlobalHydra.instance().clear()
    try:
        yield Hydra.create_main_hydra2(task_name="llmexp", config_search_path=search_path)
    finally:
        GlobalHydra.instance().clear()


def compose(hydra: Hydra, overrides: Sequence[str], multirun: bool = False) -> tuple[DictConfig, bool]:
    """(composed config with its hydra section, whether it is a sweep). Raises ConfigError in the user's words.

    A sweep is asked for by -m or by hydra.mode in a config; then the config is what all points share.
    """
    with user_errors(hydra):
        multirun = multirun or hydra.get_mode(CONFIG_NAME, list(overrides)) == RunMode.MULTIRUN
        mode = RunMode.MULTIRUN if multirun else RunMode.RUN
        cfg = hydra.compose_config(CONFIG_NAME, list(overrides), run_mode=mode)
        from hydra.core.hydra_config import HydraConfig

        HydraConfig.instance().set_config(cfg)
        return cfg, multirun


@contextmanager
def user_errors(hydra: Hydra | None = None) -> Iterator[None]:
    """Hydra's and OmegaConf's refusals as ConfigError, with the nearest known key or option."""
    try:
        yield
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(explain(error, hydra)) from None


def explain(error: Exception, hydra: Hydra | None) -> str:
    text = str(error).strip()
    if error.__cause__ is not None and str(error.__cause__).strip() not in text:
        text += "\n" + str(error.__cause__).strip()
    if found := re.search(r"Ambiguous value for argument '([^']+)'", text):
        return f"{found.group(1)}: several values are a sweep, which needs -m; a list is written key=[a,b]"
    if found := re.search(r"Could not override '([^']+)'", text):
        key = found.group(1)
        known = known_keys(hydra) if hydra is not None else []
        section = key.rpartition(".")[0]
        siblings = [k for k in known if k.rpartition(".")[0] == section]
        return f"{key}: there is no such key or group.{nearest(key, siblings or known)} Known: {', '.join(siblings or known)}"
    if found := re.search(r"In '[^']+': Could not find '([^']+)'\s*Available options in '([^']+)':\s*(.*)", text, re.S):
        choice, group, options = found.group(1), found.group(2), found.group(3).split("Config search")[0].split()
        word = choice.removeprefix(group + "/")
        return f"{group}={word}: there is no such option.{nearest(word, options)} Known: {', '.join(options)}."
    return " ".join(line.strip() for line in text.splitlines() if line.strip() and "full_key" not in line)


def known_keys(hydra: Hydra) -> list[str]:
    """Every key of the default config, dotted, and every group."""
    tree = OmegaConf.to_container(hydra.compose_config(CONFIG_NAME, [], run_mode=RunMode.RUN), resolve=False)

    def walk(node: Any, prefix: str) -> Iterator[str]:
        for key, child in node.items():
            yield f"{prefix}{key}"
            if isinstance(child, dict) and key != "hydra":
                yield from walk(child, f"{prefix}{key}.")

    return [*walk(tree, ""), "experiment"]


def typed(cfg: DictConfig) -> Config:
    """Plain, checked dataclasses from a composed config: OmegaConf stops here."""
    with user_errors():
        keys = [str(k) for k in cfg if k != "hydra"]  # hydra's own section has values that only a sweep fills
        plain = OmegaConf.to_container(OmegaConf.masked_copy(cfg, keys), resolve=True, throw_on_missing=True)
    assert isinstance(plain, dict)
    refuse_secrets(plain)
    return build({str(k): v for k, v in plain.items()})


def refuse_secrets(node: Any, key: str = "") -> None:
    """Raises ConfigError when a value is that of a secret in the environment: a config is saved as plain text."""
    if isinstance(node, dict):
        for name, child in node.items():
            refuse_secrets(child, f"{key}.{name}" if key else str(name))
    elif isinstance(node, list):
        for child in node:
            refuse_secrets(child, key)
    elif isinstance(node, str) and len(node) >= 8:
        for name, value in os.environ.items():
            if re.search(r"KEY|TOKEN|SECRET|PASSWORD", name, re.I) and value and value in node:
                raise ConfigError(f"{key}: holds the value of ${name}; secrets do not belong into a saved config")


def fixed_folder(overrides: Sequence[str], key: str) -> bool:
    """Whether the user chose the folder by an override of `key`."""
    return any(o.lstrip("+~").startswith(key + "=") for o in overrides)


def visible(overrides: Sequence[str]) -> list[str]:
    """The overrides that say something about the run itself, for names and records."""
    hidden = ("hydra.", "hydra/", "tracker", "checkpoint.resume", "name=")
    return [o for o in overrides if not o.lstrip("+").startswith(hidden)]


class Worker:
    """A worker process that is already importing torch while the parent still composes."""

    def __init__(self) -> None:
        self._report, child_end = os.pipe()
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "llmexp.train", "-"],
            stdin=subprocess.PIPE,
            pass_fds=(child_end,),
            process_group=0,  # Ctrl-C reaches the parent, which passes it on once
            text=True,
        )
        os.close(child_end)
        self._child_end = child_end

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
        old = {
            n: signal.signal(n, self._forward) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2, signal.SIGHUP)
        }
        try:
            with self._process.stdin as pipe:
                json.dump({**request, "report_fd": self._child_end}, pipe)
        except BrokenPipeError:
            pass  # the worker has died; its exit code says why
        code = self._process.wait()
        for number, handler in old.items():
            signal.signal(number, handler)
        with os.fdopen(self._report) as report:
            text = report.read()
        path = Path(text) if text else None
        if code < 0:
            return self._killed(-code, path), path
        return code, path

    def _forward(self, number: int, frame: FrameType | None) -> None:
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM if number == signal.SIGHUP else number)

    def _killed(self, number: int, path: Path | None) -> int:
        """Records a death that the worker could not record itself."""
        name = signal.Signals(number).name
        hint = "; out of memory?" if number == signal.SIGKILL else ""
        if path is None:
            print(f"llmexp: the worker was ended by {name}{hint} before the run started", file=sys.stderr)
        else:
            text = f"the worker was ended by signal {number} ({name}{hint})"
            folder.write_status(path, "failed", error=text, exit_code=FAILED, ended=time.time())
            print(f"llmexp: training failed: {text}; to go on: llmexp resume {path}", file=sys.stderr)
        return FAILED


def allow(packages: str) -> None:
    """Allows `_target_` in the user's packages, found in the current folder too, here and in the workers."""
    os.environ["LLMEXP_ALLOW"] = ",".join(filter(None, [os.environ.get("LLMEXP_ALLOW"), packages]))
    sys.path.insert(0, os.getcwd())
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [os.getcwd(), os.environ.get("PYTHONPATH")]))


def parse(arguments: list[str]) -> Any:
    """Hydra's own flags and the overrides, after --allow was taken out. Raises ConfigError."""
    rest, given = [], iter(arguments)
    for argument in given:
        if argument == "--allow":
            package = next(given, None)
            if package is None:
                raise ConfigError("--allow: the name of a package is needed; for example --allow mypackage")
            allow(package)
        elif argument.startswith("--allow="):
            allow(argument.removeprefix("--allow="))
        else:
            rest.append(argument)
    parser = get_args_parser()
    parser.prog = "llmexp train"
    return parser.parse_args(rest)


def check_overrides(overrides: Sequence[str]) -> None:
    """Raises ConfigError naming an override that cannot be parsed."""
    parser = OverridesParser.create()
    for override in overrides:
        try:
            parser.parse_override(override)
        except HydraException:
            raise ConfigError(
                f"{override}: is not an override; for example train.max_steps=100 (quote special characters: "
                "'tracker.notes=\"a, b\"')"
            ) from None


def train(arguments: list[str]) -> int:
    """`llmexp train`: one run, a sweep (-m), or one of Hydra's flags. Returns the exit code."""
    args = parse(arguments)
    if args.cfg or args.info is not None or args.hydra_help or args.shell_completion:
        return pass_to_hydra(args)
    worker = None if args.multirun else Worker()
    try:
        check_overrides(args.overrides)
        with hydra_app(args.config_dir) as hydra:
            cfg, multirun = compose(hydra, args.overrides, args.multirun)
            if multirun:
                from llmexp.sweep import sweep

                return sweep(hydra, cfg, args.overrides)
            config = typed(cfg)
            wanted = Path(cfg.hydra.run.dir)
        request = {
            "config": dataclasses.asdict(config),
            "folder": str(wanted),
            "fixed": fixed_folder(args.overrides, "hydra.run.dir"),
            "overrides": visible(args.overrides),
        }
        folder.check_writable(wanted)
        assert worker is not None
        running, worker = worker, None
        return running.run(request)[0]
    finally:
        if worker is not None:
            worker.discard()


def resume(arguments: list[str]) -> int:
    """`llmexp resume RUN_DIR [key=value ...]`: goes on with a run in its folder."""
    paths = [a for a in arguments if "=" not in a and not a.startswith("-")]
    args = parse([a for a in arguments if a not in paths])
    if len(paths) != 1:
        raise ConfigError("llmexp resume: one run folder is needed; for example llmexp resume outputs/default/RUN")
    path = Path(paths[0])
    tree = folder.read_config(path)
    if folder.read_status(path).get("state") == "finished":
        print(f"{path}: this run is finished; nothing to do")
        return 0
    for override in args.overrides:
        key, _, value = override.partition("=")
        *parents, name = key.split(".")
        node: Any = tree
        for parent in parents:
            node = node.get(parent) if isinstance(node, dict) else None
        if not isinstance(node, dict) or name not in node:
            raise ConfigError(f"{key}: there is no such key in {path / folder.CONFIG}")
        node[name] = yaml.safe_load(value)
    tree["checkpoint"]["resume"] = "must"
    config = build(tree)
    recorded = folder.read_json(path / folder.RUN)
    request = {"config": dataclasses.asdict(config), "folder": str(path), "fixed": True}
    return Worker().run(request | {k: recorded.get(k) for k in ("overrides", "label", "group")})[0]


def pass_to_hydra(args: Any) -> int:
    """--cfg, --info, --hydra-help, --shell-completion: Hydra's own answers."""
    with hydra_app(args.config_dir) as hydra, user_errors(hydra):
        if args.cfg:
            hydra.show_cfg(CONFIG_NAME, args.overrides, args.cfg, args.package, args.resolve)
        elif args.info is not None:
            hydra.show_info(args.info, CONFIG_NAME, args.overrides)
        elif args.hydra_help:
            hydra.hydra_help(CONFIG_NAME, get_args_parser(), args)
        else:
            hydra.shell_completion(CONFIG_NAME, args.overrides)
    return 0
