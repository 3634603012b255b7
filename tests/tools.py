"""What tests of several rooms ask of a run: its exact rows, its state, a copy cut short, its
weights; and whether its processes are gone."""

import contextlib
import functools
import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from safetensors import safe_open
from safetensors.torch import load_file

from llmexp.__main__ import run
from llmexp.compose.app import compose, hydra_app, typed_config
from llmexp.config.sections import Config
from llmexp.metrics.keys import TIMINGS
from llmexp.models.loss import SummedLoss
from tests.conftest import HANG_S, ROOT, Result

# The start of a module of hooks: each rank's part of a checkpoint takes a second longer.
SLOW_WRITES = """
import time
from llmexp.checkpoint import saving

real = saving.write_pieces

def write(*arguments):
    time.sleep(1)
    real(*arguments)

saving.write_pieces = write
"""


def _has_cuda() -> bool:
    """Whether there is a CUDA device, asked past the driver: after that no fork could use one."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
        return torch.cuda.is_available()


HAS_CUDA = _has_cuda()
needs_cuda = pytest.mark.skipif(not HAS_CUDA, reason="needs a CUDA device")


def composed(*overrides: str) -> Config:
    """The config of a run with these overrides."""
    with hydra_app(None, overrides) as hydra:
        return typed_config(compose(hydra, overrides)[0])


def run_here(capfd: pytest.CaptureFixture[str], *arguments: str) -> Result:
    """`llmexp ARGUMENTS` in this process: most of a command that is refused is its start."""
    capfd.readouterr()
    code = run(list(arguments))
    return Result(code, *capfd.readouterr(), Path.cwd())


@functools.cache
def schema_of(command: str) -> Any:
    """The schema of what a command prints, checked once: that takes as long as a comparison."""
    import jsonschema  # here: machines with a GPU may lack it

    schema = json.loads((ROOT / "llmexp/schema-2.json").read_text()) | {
        "$ref": f"#/$defs/{command}"
    }
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


def printed(command: str, text: str) -> Any:
    """What `llmexp COMMAND --json` printed, held against its schema."""
    found = json.loads(text)
    schema_of(command).validate(found)
    return found


# Shipped optimizers that need a package of their own.
PACKAGE_OF = {"schedule_free": "schedulefree", "soap": "pytorch_optimizer", "adamw_8bit": "torchao"}


def option(path: str) -> dict[str, Any]:
    """What the file conf/PATH.yaml sets, with the files in conf/base that it begins with."""
    tree = yaml.safe_load((ROOT / "conf" / f"{path}.yaml").read_text())
    below: dict[str, Any] = {}
    for line in tree.pop("defaults", []):
        base = line.partition("@")[0]
        below |= option(base[1:] if base.startswith("/") else f"base/{base}")
    return below | tree


def amend(file: Path, **changes: Any) -> None:
    """Changes a file of JSON or YAML; keys of a mapping that is there are added to it."""
    is_yaml = file.suffix == ".yaml"
    tree = (yaml.safe_load if is_yaml else json.loads)(file.read_text())
    for key, value in changes.items():
        tree[key] = (tree.get(key) or {}) | value if isinstance(value, dict) else value
    file.write_text((yaml.safe_dump if is_yaml else json.dumps)(tree))


def exact(result: Result) -> list[dict]:
    return [{k: v for k, v in row.items() if k not in TIMINGS} for row in result.rows()]


def same_state(a: Path, b: Path) -> None:
    names = [[file.name for file in sorted(path.glob("*.safetensors"))] for path in (a, b)]
    assert names[0] == names[1]
    for name in names[0]:
        assert equal(load_file(a / name), load_file(b / name)), name
    states = [torch.load(path / "state.pt", weights_only=True) for path in (a, b)]
    assert equal(*states)


def equal(a: Any, b: Any) -> bool:
    """Whether all tensors and values within are the same, bit for bit."""
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(equal, a, b))
    return type(a) is type(b) and (a == b or (a != a and b != b))


def cut_after(result: Result, folder: Path, step: int) -> Path:
    """A copy of the run as it stood right after checkpoint `step`, with rows beyond it, as after a
    kill."""
    copy = folder / f"cut{step}"
    shutil.copytree(result.folder, copy, symlinks=True)
    cut(copy, step)
    return copy


def cut(run: Path, step: int) -> None:
    """Take from a run the checkpoints after a step, and the record of its end."""
    for path in (run / "checkpoints").iterdir():
        if int(path.name.removeprefix("step_")) > step:
            shutil.rmtree(path)
    (run / "status.json").write_text('{"state": "running"}')


def weights(result: Result, step: int, kind: str = "model") -> dict[str, torch.Tensor]:
    """Every parameter of a checkpoint, or every tensor of the kind, whole, put together from its
    files by their own account of where pieces lie."""
    found: dict[str, torch.Tensor] = {}
    for path in sorted(result.checkpoint(step).glob(f"{kind}*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118
                lies, piece = json.loads(file.metadata()["pieces"])[name], file.get_tensor(name)
                whole = found.setdefault(
                    name, torch.full(lies["shape"], torch.nan, dtype=torch.float64)
                )
                whole[
                    tuple(slice(o, o + n) for o, n in zip(lies["offset"], piece.shape, strict=True))
                ] = piece.double()
    assert not any(w.isnan().any() for w in found.values())
    return found


def wait_for(
    there: Callable[[], Any], process: subprocess.Popen | None = None, seconds: float = HANG_S
) -> Any:
    """What is `there` at last; the process has to be alive until then."""
    deadline = time.monotonic() + seconds
    while not (found := there()):
        assert process is None or process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, f"waited {seconds} s"
        time.sleep(0.02)
    return found


def session(leader: int) -> list[int]:
    """The living processes of a session."""
    listed = subprocess.run(["ps", "-eo", "pid=,sid=,stat="], capture_output=True, text=True).stdout
    rows = [line.split() for line in listed.splitlines()]
    return [int(pid) for pid, sid, stat in rows if int(sid) == leader and stat[0] != "Z"]


def pids() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal()]


def alive(folder: Path) -> list[int]:
    """Processes that work on a run folder."""
    found = []
    for pid in pids():
        with contextlib.suppress(OSError):
            if os.fsencode(folder) in re.split(
                rb"[\0 ]", Path(f"/proc/{pid}/cmdline").read_bytes()
            ):
                found.append(pid)
    return found


def by_kernel(model: Any, kernel: str) -> SummedLoss:
    """The loss of a model by the "chunked" or the "plain" kernel, whatever its vocabulary."""
    loss = SummedLoss(model)
    loss.chunked = kernel == "chunked"
    return loss


def contents(folder: Path) -> dict[Path, bytes]:
    """Return the files of a run but for its locks and its log."""
    files = (p for p in folder.rglob("*") if p.is_file() and p.name != "train.log")
    return {p: p.read_bytes() for p in files if not p.name.startswith(".lock")}


def agree(result: Result, want: Any, loss=1e-12, norm=1e-12, moved_by=1e-11) -> None:
    """Losses, norms, and the final parameters by how far all moved, as tests/reference.py says."""
    rows = result.rows()
    np.testing.assert_allclose([r["train/loss"] for r in rows], want.losses, rtol=loss)
    np.testing.assert_allclose([r["grad_norm"] for r in rows], want.norms, rtol=norm)
    start, end = weights(result, 0), weights(result, len(rows))
    assert end.keys() == want.weights.keys()
    error, moved = (
        sum(float((w[k].double() - want.weights[k]).square().sum()) for k in w)
        for w in (end, start)
    )
    assert (error / moved) ** 0.5 < moved_by
