"""Refuse a config that would have Hydra run code, and one that holds a secret.

Hydra calls what a config names: callbacks, logging, sweeper, launcher. Under `hydra` a config may
choose a mode, folders, values to sweep over and one of our launchers with plain values; everything
that Hydra would call besides has to be what it is without any config. Variables of the environment
stay names in a config.
"""

from __future__ import annotations

import os
import pickle
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

from hydra._internal.config_repository import ConfigRepository
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import KeyValidationError
from omegaconf.resolvers import oc

from llmexp.compose.overrides import key_of, parsed, unresolved
from llmexp.config.sections import OPEN_SECTIONS
from llmexp.config.targets import RESERVED, inside_allowed, refuse_calls
from llmexp.config.tracking import with_environment
from llmexp.config.values import ConfigError, Plain, as_yaml, nested, refuse
from llmexp.config.variables import VARIABLE, is_secret
from llmexp.folders.door import config_text
from llmexp.system.redact import redacted, secrets

SWEEPER = "hydra._internal.core_plugins.basic_sweeper.BasicSweeper"
# Knobs of launchers: shell lines, options of sbatch and of Ray, the address of a cluster.
BY_HAND = ("setup", "additional_parameters", "init", "address")
# Overrides of them, and of nothing else.
KEPT_BACK = tuple(f"hydra.launcher.{key}" for key in BY_HAND)
NO_LOGGING = {"version": 1, "root": None, "disable_existing_loggers": False}
# Keys under `hydra` that have to stay as they are: the values that mean so, and what to do.
RUN_NO_CODE = "a config file must not run code; {}"
KEEP_ENVIRONMENT = "a config does not change the environment; export it in your shell"
FIXED: dict[str, tuple[tuple[Any, ...], str]] = {
    "callbacks": ((None, {}), RUN_NO_CODE.format("for your own functions use hooks=[...]")),
    "job.env_set": ((None, {}), KEEP_ENVIRONMENT),
    "job.env_copy": ((None, []), KEEP_ENVIRONMENT),
    "hydra_logging": ((None, NO_LOGGING), RUN_NO_CODE.format("leave it at none")),
    "job_logging": ((None, NO_LOGGING), RUN_NO_CODE.format("leave it at none")),
}
# Last parts of config keys; not tokenizer, max_tokens or eos_token.
SECRET_KEY = re.compile(
    r"(\w+_)?(api|access|private|secret)_?key(_id)?|(\w+_)?(secret|password|passwd|passphrase|credentials?)s?"
    r"|((hf|hub|huggingface|wandb|api|auth|access|bearer|refresh|session|github|gitlab|user)_?)?token",
    re.I,
)
# Keys that name a run and so are shown anyway.
NAMES = ("name", "tracker.project", "tracker.entity", "tracker.name", "tracker.group")


class Sized(ConfigRepository):
    """Read each file once, and none of the user's that is larger than a config.

    The aliases of a large one could make it endless. Hydra copies its repository, and the copy is
    one too.
    """

    def load_config(self, config_path: str) -> Any:
        source = next((one for one in self.sources if one.is_config(config_path)), None)
        if source is None or source.scheme() == "structured":
            return super().load_config(config_path)
        folder = files(source.path) if source.scheme() == "pkg" else Path(source.path)
        place = (source.scheme(), source.provider, source.path, config_path)
        with as_file(folder / f"{config_path.removesuffix('.yaml')}.yaml") as file:
            if source.provider not in ("main", "hydra", "schema"):
                config_text(file)
            now = file.stat()
            state = (now.st_ino, now.st_size, now.st_ctime_ns)
            if _READ.get(place, ())[:-1] != state:
                try:
                    _READ[place] = (*state, pickle.dumps(super().load_config(config_path)))
                except KeyValidationError as error:
                    text = f"{file}: the key {as_yaml(error.key)} is neither a name nor a number"
                    raise ConfigError("wrong_type", text) from None
        return pickle.loads(_READ[place][-1])  # a copy: Hydra changes what it gets


# What the files of this process hold, by their place: what tells their state, and the content.
_READ: dict[tuple[str, ...], tuple[Any, ...]] = {}


def refuse_files(cfg: DictConfig, choices: Sequence[Override]) -> None:
    """Raise ConfigError for what a command line alone may say, in a config without it.

    `choices`: the options in it that a command line has chosen."""
    own, named = unresolved(cfg.hydra), {"hydra": list[Any](), "task": list[Any]()}
    for choice in choices:
        named["hydra" if choice.is_hydra_override() else "task"].append(choice.input_line)
    if own["overrides"] != named:
        text = "can be set on the command line only, not in a config file"
        raise ConfigError("not_allowed", f"hydra.overrides: {text}")
    for key in BY_HAND:
        if _below(own, f"launcher.{key}"):
            text = "runs what it says elsewhere, so it is taken from a command line, not from a "
            text += f"config file or a sweep.json; set it by hydra.launcher.{key}=..."
            raise ConfigError("not_allowed", f"hydra.launcher.{key}: {text}")


def refuse_code(cfg: DictConfig) -> None:
    """Raise ConfigError for what would have Hydra run code, or change the environment."""
    own = unresolved(cfg)["hydra"]
    for key, (harmless, why) in FIXED.items():
        if _below(own, key) not in harmless:
            raise ConfigError("not_allowed", f"hydra.{key}: {why}")
    for name in ("sweeper", "launcher"):
        section = {} if own.get(name) is None else _resolved(cfg.hydra, name, f"hydra.{name}")
        if not isinstance(section, dict):
            raise refuse("wrong_type", f"hydra.{name}", section, "a section is needed here")
        target = section.pop("_target_", None)
        if name == "sweeper" and target not in (None, SWEEPER):
            text = "is not used; a grid needs none, and a search is sweep.search.trials=30"
            raise ConfigError("not_allowed", f"hydra.sweeper._target_={target}: {text}")
        refuse_calls(f"hydra.{name}", section)
        for key, value in section.items():
            if name == "launcher" and key not in BY_HAND and isinstance(value, (dict, list)):
                raise refuse(
                    "wrong_type", f"hydra.launcher.{key}", value, "a plain value is needed"
                )


def _below(own: Any, key: str) -> Any:
    """Return the value at a dotted key; of what an interpolation brings, its text."""
    for name in key.split("."):
        if not isinstance(own, dict):
            return own
        own = own.get(name)
    return own


def _resolved(parent: Any, key: Any, name: str) -> Any:
    """Return the plain values that Hydra gets to see.

    Raises ConfigError for sections and lists that an interpolation brings from elsewhere, where
    nothing has checked them, and OmegaConf's errors for values that are not there yet."""
    value = "???" if OmegaConf.is_missing(parent, key) else parent[key]
    if OmegaConf.is_interpolation(parent, key) and (
        key in RESERVED or OmegaConf.is_config(value) or isinstance(value, (dict, list))
    ):
        text = "may only insert a text or a number of the config; write the value here"
        raise refuse("not_allowed", name, unresolved(parent)[key], text)
    if OmegaConf.is_config(value):
        names = value.keys() if isinstance(value, DictConfig) else range(len(value))
        found = {k: _resolved(value, k, f"{name}.{k!s}") for k in names}
        return found if isinstance(value, DictConfig) else list(found.values())
    return value


def search_path(config_dir: str | None, overrides: Sequence[str]) -> list[tuple[str, str]]:
    """Return the user's own folders of options, each with who named it.

    Raises ConfigError for one that is not there, and for one that Hydra would find by importing a
    package which is not allowed."""
    found = []
    if config_dir is not None:
        if not Path(config_dir).is_dir():
            raise ConfigError("unknown_file", f"--config-dir {config_dir}: there is no such folder")
        if (own := Path(config_dir, "config.yaml")).exists():
            text = f"{own.name} there would take the place of ours; your own files are options of "
            text += "the groups: DIR/experiment/mine.yaml, then experiment=mine"
            raise ConfigError("not_allowed", f"--config-dir {config_dir}: {text}")
        found.append(("command-line", f"file://{Path(config_dir).resolve()}"))
    key = "hydra.searchpath"
    for override in parsed(o for o in overrides if key_of(o) == key):
        paths = override.value()
        if not isinstance(paths, list) or not all(isinstance(path, str) for path in paths):
            raise refuse("wrong_type", key, paths, "a list of folders is needed", "[file://conf]")
        for path in paths:
            scheme, _, package = path.partition("://")
            if scheme == "pkg" and not inside_allowed(package.replace("/", ".")):
                text = "is imported; allow it with --allow"
                raise refuse("not_allowed", key, path, text, "file://conf")
            found.append((key, path))
    return found


# Variables of the environment, and secrets.


@contextmanager
def variables_kept() -> Iterator[None]:
    """Have oc.env give its own text for a variable that is set.

    So no value of a variable gets into what is saved."""

    def env(name: str, *default: Any) -> Any:
        if name in os.environ:
            return f"${{oc.env:{name}}}"
        return default[0] if default else oc.env(name)  # raises

    def decode(text: str | None, _parent_: Any, _node_: Any) -> Any:
        if text is not None and VARIABLE.search(text):
            return text
        return oc.decode(text, _parent_, _node_)

    try:
        OmegaConf.register_new_resolver("oc.env", env, replace=True)
        OmegaConf.register_new_resolver("oc.decode", decode, replace=True)
        yield
    finally:
        OmegaConf.register_new_resolver("oc.env", oc.env, replace=True)
        OmegaConf.register_new_resolver("oc.decode", oc.decode, replace=True)


def fill_names(tree: Plain, cfg: DictConfig) -> None:
    """Put the values of variables into what names the run, such as `name`.

    The plain config is changed; the values are those of the composed one."""
    for name in NAMES:
        section, _, key = name.rpartition(".")
        node = tree.get(section) if section else tree
        if isinstance(node, dict) and VARIABLE.search(str(node.get(key))):
            node[key] = OmegaConf.select(cfg, name)
            refuse_secrets(node[key], name)


def fill_tracker(tree: Plain) -> list[str]:
    """Put what wandb's variables add into the section `tracker`.

    Return a line for each one that is set and not used. Raises ConfigError for a value that wandb
    would not take.
    """
    given = tree.get("tracker")
    if not isinstance(given, dict) or given.get("kind") == "none":  # refused later, by its key
        return []
    tree["tracker"], unused = with_environment(given, os.environ)
    return [f"wandb: {redacted(text)}" for text in unused]


def refuse_secrets(node: Any, key: str = "") -> None:
    """Raise ConfigError for a secret in what is saved as plain text.

    It is known by its value or by its key."""
    known = secrets()
    for name, value in _leaves(node, key):
        text = "" if value is None else str(value)
        for source, secret in known.items():
            if secret in text or secret in name:
                text = f"holds the value of {source}; a saved config must not hold a secret"
                raise ConfigError("secret", f"{redacted(name)}: {text}")
        shown = [v for v in VARIABLE.findall(text) if is_secret(v)]
        if shown and isinstance(node, dict) and name.partition(".")[0] not in OPEN_SECTIONS:
            text = f"{shown[0]} is a secret by its name, and what is here is shown"
            raise ConfigError("secret", f"{name}: {text}")
        last, given = name.rpartition(".")[2], text and not isinstance(value, bool)
        if given and SECRET_KEY.fullmatch(last) and not VARIABLE.fullmatch(text):
            text = "is a secret by its name, and a config is saved as plain text"
            way = f"set it in the environment and name it: '{name}=${{oc.env:{last.upper()}}}'"
            raise ConfigError("secret", f"{name}: {text}; {way}")


def _leaves(node: Any, key: str) -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) of all that is in `node`.

    The entries of a list have its key; of a section or list itself the value is None."""
    if not isinstance(node, (Mapping, list, tuple)):
        yield key, node
        return
    yield key, None
    for name, child in nested(node):
        name = name if isinstance(node, Mapping) else ""
        yield from _leaves(child, ".".join(filter(None, (key, str(name)))))
