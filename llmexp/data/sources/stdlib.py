"""data=stdlib: the source text of Python's standard library."""

from __future__ import annotations

import os
import sysconfig
from dataclasses import dataclass, replace
from pathlib import Path

from llmexp.config.values import ConfigError
from llmexp.data.remote import RemoteCache
from llmexp.data.sources.text import OneSource
from llmexp.data.work import Source


@dataclass(frozen=True, kw_only=True)
class stdlib(OneSource):
    """The source text of Python's standard library, without its tests.

    That is real text on every machine.
    """

    about = "Python's standard library, "

    def documents(self, remote: RemoteCache) -> list[Source]:
        """Return its one source. Raises ConfigError for a Python without source files."""
        return [replace(self.source("data", stdlib_files()), plain=True)]


def stdlib_files() -> list[Path]:
    """Return the source files of Python's standard library without its tests."""
    root = Path(sysconfig.get_path("stdlib"))
    skipped = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
    paths = []
    for folder, folders, names in os.walk(root):
        folders[:] = [f for f in folders if f not in skipped and not f.startswith("config-")]
        paths += [Path(folder, name) for name in names if name.endswith(".py")]
    paths = [path for path in paths if os.access(path, os.R_OK)]
    if len(paths) < 50:
        text = f"this Python has no readable source files in {root} ({len(paths)} found)"
        way = "use text files of your own: data=text data.train_files=corpus/*.txt"
        raise ConfigError("unknown_file", f"data=stdlib: {text}; {way}")
    return sorted(paths, key=lambda path: path.relative_to(root).parts)
