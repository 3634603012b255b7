"""What a config must not do on its way to a run: have Hydra call code, read the environment, or hold a secret."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.resolvers import oc

from llmexp.config import OPEN_SECTIONS, SECRET, VARIABLE, ConfigError, flatten, refuse
from llmexp.environment import secrets
from llmexp.targets import inside_allowed, refuse_calls

# Last parts of config keys; not tokenizer, max_tokens or eos_token.
SECRET_KEY = re.compile(
    r"(\w+_)?(api|access|private|secret)_?key(_id)?|(\w+_)?(secret|password|passwd|passphrase|credentials?)s?"
    r"|((hf|hub|huggingface|wandb|api|auth|access|bearer|refresh|session|github|gitlab|user)_?)?token",
    re.I,
)
# What names a run and so is shown anyway.
NAMES = ("name", "tracker.project", "tracker.name", "tracker.group")
SWEEPERS = (
    "hydra._internal.core_plugins.basic_sweeper.BasicSweeper",
    "hydra_plugins.hydra_optuna_sweeper.optuna_sweeper.OptunaSweeper",
    "hydra_plugins.hydra_nevergrad_sweeper.nevergrad_sweeper.NevergradSweeper",
    "hydra_plugins.hydra_ax_sweeper.ax_sweeper.AxSweeper",
)
STREAMS = ("ext://sys.stdout", "ext://sys.stderr")


def refuse_code(cfg: DictConfig) -> None:
    """Raises ConfigError for what would have Hydra run code, or read the environment, for a config file."""
    own: Any = OmegaConf.to_container(cfg.hydra, resolve=False)
    job, sweeper = own.get("job") or {}, own.get("sweeper") or {}
    if own.get("callbacks"):
        raise ConfigError("hydra.callbacks: a config file must not run code; for your own functions use hooks=[...]")
    for key in ("env_set", "env_copy"):
        if job.get(key):
            raise ConfigError(f"hydra.job.{key}: a config does not change the environment; export it in your shell")
    for key in ("hydra_logging", "job_logging"):
        if (found := _factory(own.get(key))) is not None:
            raise ConfigError(f"hydra.{key}: {found} would be called; a config file must not run code")
    target = sweeper.get("_target_")
    if target not in (None, *SWEEPERS) and not inside_allowed(str(target)):
        raise ConfigError(
            f"hydra.sweeper._target_={target}: is no sweeper that runs here; known: {', '.join(SWEEPERS)}"
        )
    if (space := sweeper.get("custom_search_space")) is not None and not inside_allowed(str(space).rpartition(".")[0]):
        raise refuse(
            "hydra.sweeper.custom_search_space", space, "is outside the allowed packages; use --allow mypackage"
        )
    rest = {name: value for name, value in sweeper.items() if name != "_target_"}
    if isinstance(sampler := rest.get("sampler"), dict) and "_target_" in sampler:
        if re.fullmatch(r"optuna\.samplers\.\w+Sampler", str(sampler["_target_"])) is None:
            text = "must be a sampler of optuna"
            raise refuse("hydra.sweeper.sampler._target_", sampler["_target_"], text, "optuna.samplers.TPESampler")
        rest["sampler"] = {name: value for name, value in sampler.items() if name != "_target_"}
    refuse_calls("hydra.sweeper", rest)
    refuse_calls("hydra.launcher", {k: v for k, v in (own.get("launcher") or {}).items() if k != "_target_"})


def _factory(node: Any) -> Any:
    """The first thing in a logging config that logging would import or call and that is not its own."""
    if isinstance(node, Mapping):
        for key, value in node.items():
            own = str(value).startswith(("logging.", "colorlog."))
            external = isinstance(value, str) and value.startswith("ext://")
            if key == "()" or (key == "class" and not own) or (external and value not in STREAMS):
                return value
            if (found := _factory(value)) is not None:
                return found
    if isinstance(node, list):
        return next((f for f in map(_factory, node) if f is not None), None)
    return None


def refuse_search_path(config_dir: str | None, overrides: Sequence[str]) -> None:
    """Raises ConfigError for folders of configs that Hydra would find by importing a package, unless it is allowed."""
    own = Path(config_dir or "", "config.yaml")
    if config_dir and own.exists():
        raise ConfigError(
            f"--config-dir {config_dir}: {own.name} there would take the place of ours; your own files are "
            "options of the groups: DIR/experiment/mine.yaml, then experiment=mine"
        )
    for override in overrides:
        if override.lstrip("+~").startswith("hydra.searchpath"):
            for package in re.findall(r"pkg://([\w.]*)", override):
                if not inside_allowed(package):
                    raise refuse(
                        "hydra.searchpath", f"pkg://{package}", "is imported; allow it with --allow", "file://conf"
                    )


@contextmanager
def variables_kept() -> Iterator[None]:
    """Within it, oc.env gives its own text for a variable that is set, so that no value gets into what is saved."""

    def env(name: str, *default: Any) -> Any:
        if name in os.environ:
            return f"${{oc.env:{name}}}"
        return default[0] if default else oc.env(name)  # raises

    def decode(text: str | None, _parent_: Any, _node_: Any) -> Any:
        return text if text is not None and VARIABLE.search(text) else oc.decode(text, _parent_, _node_)

    try:
        OmegaConf.register_new_resolver("oc.env", env, replace=True)
        OmegaConf.register_new_resolver("oc.decode", decode, replace=True)
        yield
    finally:
        OmegaConf.register_new_resolver("oc.env", oc.env, replace=True)
        OmegaConf.register_new_resolver("oc.decode", oc.decode, replace=True)


def fill_names(tree: dict[str, Any], cfg: DictConfig) -> None:
    """Puts the values of variables into what names the run, in the plain config and in the composed one's words."""
    for name in NAMES:
        *sections, key = name.split(".")
        node = tree.get(sections[0]) if sections else tree
        if isinstance(node, dict) and VARIABLE.search(str(node.get(key))):
            node[key] = OmegaConf.select(cfg, name)
            refuse_secrets(node[key], name)


def refuse_secrets(node: Any, key: str = "") -> None:
    """Raises ConfigError for a secret, known by its value or by its key: a config is saved as plain text."""
    known = secrets()
    texts = flatten(node, f"{key}." if key else "") if isinstance(node, dict) else {key: node}
    for name, value in texts.items():
        text = value if isinstance(value, str) else json.dumps(value, default=str)
        for source, secret in known.items():
            if secret in text:
                raise ConfigError(f"{name}: holds the value of {source}; secrets do not belong into a saved config")
        shown = [v for v in VARIABLE.findall(text) if SECRET.search(v)]
        if shown and isinstance(node, dict) and name.partition(".")[0] not in OPEN_SECTIONS:
            raise ConfigError(f"{name}: {shown[0]} is a secret by its name, and what is here is shown")
        last = name.rpartition(".")[2]
        if SECRET_KEY.fullmatch(last) and isinstance(value, str) and value and not VARIABLE.fullmatch(value):
            raise ConfigError(
                f"{name}: is a secret by its name, and a config is saved as plain text; set it in the environment and "
                f"name it: '{name}=${{oc.env:{last.upper()}}}'"
            )
