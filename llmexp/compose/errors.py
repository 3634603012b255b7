"""Turn what Hydra, OmegaConf and YAML refuse into a ConfigError in the user's words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import yaml
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from llmexp.compose.hints import in_words
from llmexp.config import ConfigError


@contextmanager
def user_errors(loader: Any = None, overrides: Sequence[str] = ()) -> Iterator[None]:
    """Hydra's, OmegaConf's and YAML's refusals as ConfigError, with the nearest known key or
    option."""
    try:
        yield
    except ConfigError:
        raise
    except (HydraException, OmegaConfBaseException, yaml.YAMLError, ValueError) as error:
        raise ConfigError(in_words(error, loader, overrides)) from None
