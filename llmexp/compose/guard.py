"""What a config must not do on its way to a run: have Hydra call code, read the environment, or
hold a secret."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from omegaconf.resolvers import oc

from llmexp.assembly.targets import RESERVED, inside_allowed, locate, refuse_calls
from llmexp.config import OPEN_SECTIONS, VARIABLE, ConfigError, refuse
from llmexp.redact import redacted, secrets
from llmexp.tracker.fields import with_environment
from llmexp.values import SECRET

# Last parts of config keys; not tokenizer, max_tokens or eos_token.
SECRET_KEY = re.compile(
    r"(\w+_)?(api|access|private|secret)_?key(_id)?|(\w+_)?(secret|password|passwd|passphrase|credentials?)s?"
    r"|((hf|hub|huggingface|wandb|api|auth|access|bearer|refresh|session|github|gitlab|user)_?)?token",
    re.I,
)
# What names a run and so is shown anyway.
NAMES = ("name", "tracker.project", "tracker.entity", "tracker.name", "tracker.group")
SWEEPERS = (
    "hydra._internal.core_plugins.basic_sweeper.BasicSweeper",
    "hydra_plugins.hydra_optuna_sweeper.optuna_sweeper.OptunaSweeper",
    "hydra_plugins.hydra_nevergrad_sweeper.nevergrad_sweeper.NevergradSweeper",
    "hydra_plugins.hydra_ax_sweeper.ax_sweeper.AxSweeper",
)
# Of launchers: shell lines, options of sbatch and of Ray, and where a cluster is.
BY_HAND = ("setup", "additional_parameters", "init", "address")
STREAMS = ("ext://sys.stdout", "ext://sys.stderr")
COLORED = "colorlog.ColoredFormatter"
LOGGING = {
    "class": ("logging.StreamHandler", "logging.NullHandler", "logging.Formatter", COLORED),
    "()": (COLORED,),
}
MADE = ("sweeper", "launcher", "hydra_logging", "job_logging")  # what Hydra makes objects of


def guard(loader: Any) -> None:
    """Have each config that Hydra's loader composes looked at (`refuse_code`) before Hydra does
    anything with it."""
    load = loader.load_configuration

    def looked_at(
        config_name: str | None, overrides: list[str], *args: Any, **kwargs: Any
    ) -> DictConfig:
        cfg: DictConfig = load(config_name, overrides, *args, **kwargs)
        said: dict[str, list[str]] = {"task": [], "hydra": []}
        for override in overrides:
            said[
                "hydra" if override.lstrip("+~").startswith(("hydra.", "hydra/")) else "task"
            ].append(override)
        if OmegaConf.to_container(cfg.hydra, resolve=False)["overrides"] != said:  # type: ignore[index,call-overload]
            raise ConfigError(
                "hydra.overrides: is what a command line says; a config file must not set it"
            )
        refuse_code(cfg)
        return cfg

    loader.load_configuration = looked_at


def refuse_code(cfg: DictConfig) -> None:
    """Raise ConfigError for what would have Hydra run code, or read the environment, for a config
    file."""
    if OmegaConf.is_interpolation(cfg, "hydra"):
        raise _elsewhere(cfg, "hydra", "hydra")
    for key in cfg.hydra:
        if key in ("job", "callbacks", *MADE) and OmegaConf.is_interpolation(cfg.hydra, key):
            raise _elsewhere(cfg.hydra, key, f"hydra.{key}")
    own: Any = OmegaConf.to_container(cfg.hydra, resolve=False)
    job = own.get("job") or {}
    if own.get("callbacks"):
        raise ConfigError(
            "hydra.callbacks: a config file must not run code; for your own functions use "
            "hooks=[...]"
        )
    for key in ("env_set", "env_copy"):
        if job.get(key):
            raise ConfigError(
                f"hydra.job.{key}: a config does not change the environment; export it in your "
                "shell"
            )
    seen = {
        key: _resolved(cfg.hydra, key, f"hydra.{key}") for key in MADE if own.get(key) is not None
    }
    for key in ("hydra_logging", "job_logging"):
        if (found := _factory(seen.get(key))) is not None:
            raise ConfigError(
                f"hydra.{key}: {found} would be called; a config file must not run code"
            )
    _refuse_sweeper(seen.get("sweeper") or {})
    refuse_calls(
        "hydra.launcher", {k: v for k, v in (seen.get("launcher") or {}).items() if k != "_target_"}
    )
    if any((own.get("launcher") or {}).get(key) for key in BY_HAND):
        typed = _typed((own.get("overrides") or {}).get("hydra") or [])
        for key in BY_HAND:
            if (value := own["launcher"].get(key)) and (
                name := _not_typed(value, typed.get(key), key)
            ):
                raise ConfigError(
                    f"hydra.launcher.{name}: runs what it says elsewhere, so it is taken from a "
                    f"command line, not from a config file or a sweep.json: "
                    f"hydra.launcher.{name}=..."
                )


def _typed(overrides: Sequence[str]) -> dict[str, Any]:
    """Return what a command line says of the parts of `hydra.launcher` that come from there
    only."""
    whole = OmegaConf.create({"hydra": {"launcher": {}}})
    keys = tuple(f"hydra.launcher.{key}" for key in BY_HAND)
    said = [override for override in overrides if override.lstrip("+").startswith(keys)]
    for override in OverridesParser.create().parse_overrides(said):
        OmegaConf.update(whole, override.key_or_group, override.value(), merge=True, force_add=True)
    found: Any = OmegaConf.to_container(whole.hydra.launcher, resolve=False)
    return dict(found)


def _not_typed(value: Any, typed: Any, name: str) -> str | None:
    """Return the first key in `value` whose own value was not typed. That a section was named says
    nothing of what is in it: an override adds to what a file has put there."""
    if not isinstance(value, dict) or not value:
        return None if value == typed else name
    below = typed if isinstance(typed, dict) else {}
    found = (_not_typed(v, below.get(k), f"{name}.{k!s}") for k, v in value.items())
    return next((name for name in found if name is not None), None)


def _resolved(parent: Any, key: Any, name: str) -> Any:
    """Return the plain values that Hydra gets to see. Raises ConfigError for sections and lists
    that an interpolation brings from elsewhere, where nobody has looked at them, and for values
    that are not there yet."""
    try:
        value = "???" if OmegaConf.is_missing(parent, key) else parent[key]
    except OmegaConfBaseException as error:
        raise ConfigError(f"{name}: {str(error).splitlines()[0]}") from None
    plain = isinstance(value, (str, int, float)) or value is None
    if OmegaConf.is_interpolation(parent, key) and (key in RESERVED or not plain):
        raise _elsewhere(parent, key, name)
    if isinstance(value, DictConfig):
        return {k: _resolved(value, k, f"{name}.{k!s}") for k in value}
    if isinstance(value, ListConfig):
        return [_resolved(value, number, f"{name}.{number}") for number in range(len(value))]
    return value


def _elsewhere(parent: Any, key: Any, name: str) -> ConfigError:
    text = OmegaConf.to_container(parent, resolve=False)[key]  # type: ignore[index]
    return refuse(
        name,
        text,
        "may only bring a text or a number from elsewhere in the config; write it out here",
    )


def _refuse_sweeper(sweeper: dict[str, Any]) -> None:
    """Raise ConfigError for a sweeper that is not known, or would call something besides a sampler
    of optuna."""
    target = sweeper.get("_target_")
    if target not in (None, *SWEEPERS):
        if not inside_allowed(str(target)):
            raise ConfigError(
                f"hydra.sweeper._target_={target}: is no sweeper that runs here; known: "
                f"{', '.join(SWEEPERS)}"
            )
        locate("hydra.sweeper._target_", target)
    if (space := sweeper.get("custom_search_space")) is not None:
        locate("hydra.sweeper.custom_search_space", space)
    if (
        str(storage := sweeper.get("storage")).lower().startswith("redis")
    ):  # what comes from there is unpickled
        raise refuse(
            "hydra.sweeper.storage",
            storage,
            "must be a database of SQL, or null",
            "sqlite:///study.db",
        )
    rest = {name: value for name, value in sweeper.items() if name != "_target_"}
    if (sampler := rest.pop("sampler", None)) is not None:
        if not isinstance(sampler, dict):
            raise refuse(
                "hydra.sweeper.sampler",
                sampler,
                "must be a section, as hydra/sweeper/sampler=tpe gives it",
            )
        if re.fullmatch(r"optuna\.samplers\.\w+Sampler", str(sampler.get("_target_"))) is None:
            text = "must be a sampler of optuna"
            raise refuse(
                "hydra.sweeper.sampler._target_",
                sampler.get("_target_"),
                text,
                "optuna.samplers.TPESampler",
            )
        knobs = {
            k: v
            for k, v in sampler.items()
            if k != "_target_" and not (k == "_partial_" and v is True)
        }
        refuse_calls("hydra.sweeper.sampler", knobs)
    refuse_calls("hydra.sweeper", rest)


def _factory(node: Any) -> str | None:
    """Return the first thing in a logging config that logging would import or call and that only
    writes to the terminal."""
    if isinstance(node, Mapping):
        for key, value in node.items():
            external = isinstance(value, str) and value.startswith("ext://")
            if (key in LOGGING and value not in LOGGING[key]) or (
                external and value not in STREAMS
            ):
                return str(value)
            if (found := _factory(value)) is not None:
                return found
    if isinstance(node, list):
        return next((f for f in map(_factory, node) if f is not None), None)
    return None


def refuse_search_path(config_dir: str | None, overrides: Sequence[str]) -> None:
    """Raise ConfigError for folders of configs that Hydra would find by importing a package, unless
    it is allowed."""
    own = Path(config_dir or "", "config.yaml")
    if config_dir and own.exists():
        raise ConfigError(
            f"--config-dir {config_dir}: {own.name} there would take the place of ours; your own "
            "files are options of the groups: DIR/experiment/mine.yaml, then experiment=mine"
        )
    said = [
        override for override in overrides if override.lstrip("+~").startswith("hydra.searchpath")
    ]
    for override in OverridesParser.create().parse_overrides(said):
        paths = override.value()
        for path in paths if isinstance(paths, list) else ():
            scheme, _, package = str(path).partition("://")
            if scheme == "pkg" and not inside_allowed(package.replace("/", ".")):
                raise refuse(
                    "hydra.searchpath", path, "is imported; allow it with --allow", "file://conf"
                )


@contextmanager
def variables_kept() -> Iterator[None]:
    """Within it, oc.env gives its own text for a variable that is set, so that no value gets into
    what is saved."""

    def env(name: str, *default: Any) -> Any:
        if name in os.environ:
            return f"${{oc.env:{name}}}"
        return default[0] if default else oc.env(name)  # raises

    def decode(text: str | None, _parent_: Any, _node_: Any) -> Any:
        return (
            text
            if text is not None and VARIABLE.search(text)
            else oc.decode(text, _parent_, _node_)
        )

    try:
        OmegaConf.register_new_resolver("oc.env", env, replace=True)
        OmegaConf.register_new_resolver("oc.decode", decode, replace=True)
        yield
    finally:
        OmegaConf.register_new_resolver("oc.env", oc.env, replace=True)
        OmegaConf.register_new_resolver("oc.decode", oc.decode, replace=True)


def fill_names(tree: dict[str, Any], cfg: DictConfig) -> None:
    """Put the values of variables into what names the run, in the plain config and in the composed
    one's words."""
    for name in NAMES:
        *sections, key = name.split(".")
        node = tree.get(sections[0]) if sections else tree
        if isinstance(node, dict) and VARIABLE.search(str(node.get(key))):
            node[key] = OmegaConf.select(cfg, name)
            refuse_secrets(node[key], name)


def fill_tracker(tree: dict[str, Any]) -> list[str]:
    """Put what wandb's variables add into the section `tracker`; return a line for each one that is
    set and not used.

    Raises ConfigError for a value that wandb would not take.
    """
    if not isinstance(tree.get("tracker"), dict):  # refused later, by its key
        return []
    try:
        tree["tracker"], unused = with_environment(tree["tracker"], os.environ)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    return [f"wandb: {redacted(text)}" for text in unused]


def refuse_secrets(node: Any, key: str = "") -> None:
    """Raise ConfigError for a secret, known by its value or by its key: a config is saved as plain
    text."""
    known = secrets()
    for name, value in _leaves(node, key):
        text = "" if value is None else str(value)
        for source, secret in known.items():
            if secret in text or secret in name:
                told = f"holds the value of {source}; secrets do not belong into a saved config"
                raise ConfigError(f"{redacted(name)}: {told}")
        shown = [v for v in VARIABLE.findall(text) if SECRET.search(v)]
        if shown and isinstance(node, dict) and name.partition(".")[0] not in OPEN_SECTIONS:
            raise ConfigError(
                f"{name}: {shown[0]} is a secret by its name, and what is here is shown"
            )
        last = name.rpartition(".")[2]
        if (
            SECRET_KEY.fullmatch(last)
            and text
            and not isinstance(value, bool)
            and not VARIABLE.fullmatch(text)
        ):
            raise ConfigError(
                f"{name}: is a secret by its name, and a config is saved as plain text; set it in "
                f"the environment and name it: '{name}=${{oc.env:{last.upper()}}}'"
            )


def _leaves(node: Any, key: str) -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) of all that is in `node`, where the entries of a list have its key;
    of a section or list itself the value is None."""
    if not isinstance(node, (Mapping, list, tuple)):
        yield key, node
        return
    yield key, None
    for name, child in (
        node.items() if isinstance(node, Mapping) else (("", child) for child in node)
    ):
        yield from _leaves(child, ".".join(filter(None, (key, str(name)))))
