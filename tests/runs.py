"""Runs that tests only look at, each trained once for all tests; copies that they may change."""

import fcntl
import hashlib
import json
import shutil
from pathlib import Path

from tests.conftest import Result, llmexp
from tests.tiny import TINY
from tests.tools import cut


class Runs:
    """The fixture `runs`: `runs(*overrides)` is a tiny run, `runs.copy(folder, *overrides)` a copy.

    All processes of the tests share them. The same overrides, variables and files are one run.
    """

    def __init__(self, root: Path) -> None:
        self.root = root

    def __call__(
        self,
        *overrides: str,
        command: str = "train",
        files: dict[str, str] | None = None,
        **env: str,
    ) -> Result:
        """Return the run, with `-m` or `--screen` the sweep; `files` lie in its working folder."""
        asked = json.dumps([command, overrides, files, sorted(env.items())])
        cwd = self.root / hashlib.sha256(asked.encode()).hexdigest()[:12]
        cwd.mkdir(parents=True, exist_ok=True)
        done = cwd / "done.json"
        with (cwd / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not done.exists():
                for name, text in (files or {}).items():
                    (cwd / name).parent.mkdir(parents=True, exist_ok=True)
                    (cwd / name).write_text(text)
                sweep = {"-m", "--screen"}.intersection(overrides)
                where = "hydra.sweep.dir=run" if sweep else "hydra.run.dir=run"
                shutil.rmtree(cwd / "run", ignore_errors=True)
                result = llmexp(command, *TINY, *overrides, where, cwd=cwd, **env)
                assert result.code == 0, result.err + result.out
                done.write_text(json.dumps([result.out, result.err]))
        out, err = json.loads(done.read_text())
        return Result(0, out, err, cwd / "run")

    def copy(self, to: Path, *overrides: str, step: int | None = None, **more: object) -> Result:
        """Copy the run to a folder; with `step`, as a kill after its checkpoint leaves it."""
        made = self(*overrides, **more)  # type: ignore[arg-type]
        shutil.copytree(made.folder, to, symlinks=True)
        if step is not None:
            cut(to, step)
        return Result(0, made.out, made.err, to)
