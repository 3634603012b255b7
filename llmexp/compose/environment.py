"""Keep variables of the environment as names in a config, and refuse secrets."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.resolvers import oc

from llmexp.settings.config import OPEN_SECTIONS
from llmexp.settings.tracking import with_environment
from llmexp.settings.values import ConfigError, nested
from llmexp.settings.variables import VARIABLE, is_secret
from llmexp.system.redact import redacted, secrets

# Last parts of config keys; not tokenizer, max_tokens or eos_token.
SECRET_KEY = re.compile(
    r"(\w+_)?(api|access|private|secret)_?key(_id)?|(\w+_)?(secret|password|passwd|passphrase|credentials?)s?"
    r"|((hf|hub|huggingface|wandb|api|auth|access|bearer|refresh|session|github|gitlab|user)_?)?token",
    re.I,
)
# Keys that name a run and so are shown anyway.
NAMES = ("name", "tracker.project", "tracker.entity", "tracker.name", "tracker.group")


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


def fill_names(tree: dict[str, Any], cfg: DictConfig) -> None:
    """Put the values of variables into what names the run, such as `name`.

    The plain config is changed; the values are those of the composed one."""
    for name in NAMES:
        *sections, key = name.split(".")
        node = tree.get(sections[0]) if sections else tree
        if isinstance(node, dict) and VARIABLE.search(str(node.get(key))):
            node[key] = OmegaConf.select(cfg, name)
            refuse_secrets(node[key], name)


def fill_tracker(tree: dict[str, Any]) -> list[str]:
    """Put what wandb's variables add into the section `tracker`.

    Return a line for each one that is set and not used. Raises ConfigError for a value that wandb
    would not take.
    """
    if not isinstance(tree.get("tracker"), dict):  # refused later, by its key
        return []
    tree["tracker"], unused = with_environment(tree["tracker"], os.environ)
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
