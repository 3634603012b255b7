"""Read the command line: Hydra's flags, the overrides, and --allow."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from hydra._internal.utils import get_args_parser
from hydra.errors import HydraException

from llmexp.compose.overrides import as_text, key_of, parsed
from llmexp.compose.putting import nearest_keys
from llmexp.compose.security import KEPT_BACK
from llmexp.config.arguments import add_arguments, annotated, kind_of_argparse, near_flags
from llmexp.config.knobs import fields
from llmexp.config.values import (
    ConfigError,
    did_you_mean,
    override_value,
    pasteable,
    refuse,
    typed,
)
from llmexp.folders import rundir

REFUSED_FLAGS = ("config_name", "config_path", "experimental_rerun")  # of Hydra's


def allow(packages: Sequence[str]) -> None:
    """Allow `_target_` in the user's packages, here and in the workers.

    They are found in the current folder too."""
    os.environ["LLMEXP_ALLOW"] = ",".join(filter(None, packages))
    sys.path.insert(0, os.getcwd())
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [os.getcwd(), before]))


def take_allowed(arguments: Sequence[str]) -> list[str]:
    """Return the arguments without --allow PACKAGE, which takes effect. Raises ConfigError."""
    rest: list[str] = []
    named: list[str] = []
    given = iter(arguments)
    for argument in given:
        flag, equals, package = argument.partition("=")
        if flag != "--allow":
            rest.append(argument)
            continue
        package = package if equals else next(given, "")
        parts = [part.strip() for part in package.split(",")]
        if not all(name.isidentifier() for part in parts for name in part.split(".")):
            text = "the name of a package is needed; for example --allow mypackage"
            raise ConfigError("wrong_type", f"--allow {package}: {text}")
        named += parts
    packages = [os.environ.get("LLMEXP_ALLOW", ""), *named]
    if any(packages):
        allow(packages)
    for package in named:
        if not _is_there(package):
            text = f"there is no such module on the path (looked in {os.getcwd()} too)"
            file = f"{package.replace('.', '/')}.py"
            way = f"for {file} or a folder of this name elsewhere, set PYTHONPATH"
            raise ConfigError("missing_package", f"--allow {package}: {text}; {way}")
    return rest


def _is_there(package: str) -> bool:
    """Return whether a module can be found, without importing anything."""
    name, *below = package.split(".")
    try:
        spec = sys.modules[name].__spec__ if name in sys.modules else importlib.util.find_spec(name)
        for part in below:
            if spec is None or spec.submodule_search_locations is None:
                return False
            name, places = f"{spec.name}.{part}", spec.submodule_search_locations
            spec = importlib.machinery.PathFinder.find_spec(name, places)
    except (ImportError, ValueError):
        return False
    return spec is not None


def parse(command: str, function: Callable[..., Any], words: Sequence[str]) -> Namespace:
    """Return Hydra's flags, the overrides and the function's own arguments.

    A word of the function is the first that is no override. `line` has all of it. Raises
    ConfigError."""
    parser = get_args_parser()
    parser.prog = f"llmexp {command}"
    parser.set_defaults(command="plan" if command == "plan" else "train")  # to print again

    def unknown(message: str) -> NoReturn:
        way = f"settings are written train.max_steps=100; see llmexp {command} --help"
        near = near_flags(parser, message)
        if not near and message.startswith("unrecognized"):
            near = _meant(message, words)
        raise ConfigError(kind_of_argparse(message), f"{message}; {way}.{near}".rstrip("."))

    parser.error = unknown  # type: ignore[method-assign]
    add_arguments(parser, function, words=False)
    # flags may stand between overrides
    args = parser.parse_intermixed_args(words)
    args.line, args.words = args, [word for word in words if word != "--json"]
    own = list[str]()
    for parameter, *_ in annotated(function):
        if parameter.kind is not parameter.KEYWORD_ONLY and parameter.name != "line":
            bare = [word for word in args.overrides if "=" not in word.rstrip("=")]
            if not any(bare[:1]):
                unknown(f"the following arguments are required: {parameter.name.upper()}")
            args.overrides.remove(bare[0])
            own.append(bare[0].rstrip("=").lstrip("+~"))
            setattr(args, parameter.name, own[-1])
    for run in filter(rundir.is_run, map(Path, filter(os.path.isdir, args.overrides))):
        raise _is_a_run(run, command, own)
    for flag in REFUSED_FLAGS:
        if (given := getattr(args, flag, None)) is not None:
            name = f"--{flag.replace('_', '-')} {given}"
            way = "put your file into DIR/experiment/, then --config-dir DIR experiment=NAME"
            raise ConfigError("unsupported", f"{name}: is not supported; {way}")
    args.command += " --measure" * getattr(args, "measure", False)
    args.overrides = list(map(as_text, args.overrides))
    if getattr(args, "screen", False):
        args.multirun = True
        if not any(key_of(override) == "sweep.screen" for override in args.overrides):
            args.overrides.append("sweep.screen=auto")
    check_overrides(args.overrides)
    return args


def _meant(message: str, words: Sequence[str]) -> str:
    """Return a hint for a setting that is written as a flag: --batch_size 8; or ''."""
    flag = next(word for word in words if word.startswith("-") and word in message.split())
    name, equals, value = flag.lstrip("-").partition("=")
    if not equals:
        value = next(iter(words[words.index(flag) + 1 :]), "")
    if not value or value.startswith("-") or (not equals and "=" in value):
        value = "..."
    keys = nearest_keys(name.replace("-", "_"), list(fields()))
    return did_you_mean([pasteable(f"{key}={value}") for key in keys])


def _is_a_run(run: Path, command: str, own: Sequence[str]) -> ConfigError:
    """Return the refusal of the folder of a run in the place of what it was made of."""
    made_of = rundir.read_run(run).get("overrides") or ()
    given = (text for text in made_of if not text.startswith("hydra."))
    again = rundir.command_on(run, command, *own, *given)
    text = f"{command} takes what a run was made of, not its folder; of this one: {again}"
    return ConfigError("unsupported", f"{run}: {text}")


def check_overrides(overrides: Sequence[str]) -> None:
    """Raise ConfigError naming an override that cannot be parsed."""
    for override in overrides:
        key = ""
        with suppress(HydraException):
            key = parsed([override])[0].key_or_group
        if not key:
            raise ConfigError("wrong_type", f"{override}: {_no_override(override, overrides)}")


def _parses(name: str, value: str) -> bool:
    try:
        return bool(parsed([f"{name}={value}"]))
    except HydraException:
        return False


def _no_override(override: str, overrides: Sequence[str]) -> str:
    """Return why a word of the command line is no override, and what may have been meant."""
    name, _, value = override.partition("=")
    later = overrides[list(overrides).index(override) + 1 :]
    closing = {"[": "]", "{": "}"}.get(value[:1], " ")
    ends = [n for n, word in enumerate(later) if word.endswith(closing)]
    if ends and "=" not in "".join(later[: ends[0] + 1]):
        whole = pasteable(" ".join([override, *later[: ends[0] + 1]]))
        return f"the shell has split it at a space; quote all of it: {whole}"
    if value.endswith(",") and value.strip(","):
        return f"ends in a comma; leave it out: {name}={value.rstrip(',')}"
    text = "is not an override; one looks like train.max_steps=100"
    if name and value:
        text += f"; special characters need quotes: {typed(name, value)}"
        parts = value.split(",")
        if len(parts) > 1 and not set(value) & set("[]{}()\"'"):
            quoted = (one if _parses(name, one) else override_value(one) for one in parts)
            several = pasteable(f"{name}={','.join(quoted)}")
            text += f", or if it is {len(parts)} values of a sweep: {several}"
    return text


# Keys that act in a sweep only, and keys that act in a single run only, with what to do instead.
SWEEP_ONLY = (
    "sweep.", "hydra/launcher", "hydra/sweeper", "hydra.launcher.", "hydra.sweeper.",
    "hydra.sweep.",
)  # fmt: skip
RUN_ONLY = {
    "hydra.run.dir": (
        "names the folder of a single run; that of a sweep is",
        "hydra.sweep.dir",
    ),
    "train.stop_step": (
        "does nothing in a sweep, whose runs train to their end; leave it out, or for shorter "
        "runs give",
        "train.max_steps",
    ),
}


def refuse_unused(overrides: Sequence[str], multirun: bool, command: str = "") -> None:
    """Raise ConfigError for an override that acts in a sweep, a run or a `command` only."""
    if multirun and "sweep.resume" in map(key_of, overrides):
        return  # its command was accepted when it began
    for override in overrides:
        key, _, value = override.lstrip("+~").partition("=")
        section = key.partition(".")[0]
        if section in ("plan", "prepare") and section not in (key, command):
            raise refuse(
                "idle_knob", key, value, f"does nothing but in llmexp {section}; leave it out"
            )
        if not multirun and key.startswith(SWEEP_ONLY):
            text = "does nothing without -m, which makes the command a sweep"
            raise refuse("idle_knob", key, value, f"{text}; add -m, or leave it out")
        if multirun and key in RUN_ONLY and value != "null":
            text, instead = RUN_ONLY[key]
            word = pasteable(f"{instead}={value.partition(',')[0]}")
            raise refuse("idle_knob", key, value, f"{text} {word}")


def recordable(arguments: Sequence[str]) -> list[str]:
    """Return the arguments that may be stored in sweep.json and replayed by resume."""
    rest, given = [], iter(arguments)
    for argument in given:
        if argument == "--allow":
            next(given, None)
        elif not argument.lstrip("+~").startswith(("--allow=", "sweep.resume=", *KEPT_BACK)):
            rest.append(argument)
    return rest


def kept_back(arguments: Sequence[str]) -> list[str]:
    """Return the arguments besides --allow that are to be typed again."""
    return [argument for argument in arguments if argument.lstrip("+").startswith(KEPT_BACK)]
