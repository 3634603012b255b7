"""What the tests of trackers share: made rows and runs, commands with a login, and the worker."""

import json
import os
import pty
import random
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from llmexp.system import fileio
from llmexp.tracker.fields import shorten
from tests import forks
from tests.conftest import HANG_S, PATHS, TINY, Result
from tests.conftest import llmexp as run_llmexp
from tests.tracker.fake_wandb import FakeWandb

KEY = "0123456789abcdef0123456789abcdef01234567"
# A short run, and how long it waits for wandb on a busy machine.
QUICK = [
    *(o for o in TINY if not o.startswith("tracker")), "data=synthetic", "train.max_steps=3",
    "train.log_every=1", "tracker.start_timeout_s=60", "tracker.finish_timeout_s=60",
]  # fmt: skip
TRACKER: dict[str, Any] = {
    "kind": "wandb", "project": "a-project", "entity": None, "name": "lr=3e-4",
    "group": "a-sweep", "tags": ["gpt", shorten("t" * 80, 64)], "notes": "some notes",
    "mode": "auto", "start_timeout_s": 20, "finish_timeout_s": 60,
}  # fmt: skip


def make_rows(first: int, last: int) -> list[dict[str, Any]]:
    generator = random.Random(0)
    rows = []
    for step in range(1, last + 1):
        row = {"step": step, "tokens_seen": step * 524_288, "epoch": step / 7}
        row["train/loss"] = generator.gauss(3, 1)
        row["lr"] = generator.random() * 10.0 ** -generator.randrange(3, 12)
        row |= {"skipped": step % 3 == 0, "amp": 1}
        rows.append(row | ({"val/loss": generator.expovariate(1)} if step % 5 == 0 else {}))
    return rows[first - 1 :]


def write_rows(file: Path, rows: list[dict[str, Any]]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def make_run(
    path: Path, steps: int, state: str = "finished", code: int | None = 0, **status: Any
) -> Path:
    """The records of a run, as training leaves them."""
    path.mkdir(parents=True)
    tracker = {"kind": "wandb", "project": "proj", "tags": ["mine"]}
    tracker |= dict.fromkeys(("name", "group", "notes"))
    config = {"tracker": tracker, "clip": {"max_norm": 0.5}}
    (path / "config.yaml").write_text(yaml.safe_dump(config))
    label = f"seed={path.name[0]}"
    recorded = {"label": label, "group": str(path.parent), "overrides": ["model=gpt2", label]}
    fileio.write_json(path / "run.json", recorded | {"swept": ["seed"], "max_steps": steps})
    fileio.write_json(path / "status.json", {"state": state, "exit_code": code} | status)
    write_rows(path / "metrics.jsonl", make_rows(1, steps))
    return path


def bare(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows without what wandb adds to them."""
    return [{k: v for k, v in item.items() if not k.startswith("_")} for item in items]


def login(server: str | None) -> dict[str, str]:
    return {"WANDB_BASE_URL": server, "WANDB_API_KEY": KEY} if server else {}


def llmexp(cwd: Path, server: FakeWandb | None, *arguments: Any, **env: str) -> Result:
    """`llmexp ARGUMENTS` with a login to the server, and no settings of whoever runs the tests."""
    env = {"HOME": str(cwd), "WANDB_MODE": "online"} | login(server and server.url) | env
    return run_llmexp(*map(str, arguments), cwd=cwd, **env)


@dataclass(frozen=True)
class Outcome:
    said: list[str]
    costs: dict[str, Any]  # empty if the process died
    code: int
    stderr: str
    exit_s: float  # from the end of finish to the end of the process
    slow: float  # how many processes waited for each core, at least one


def run_worker(
    run_dir: Path,
    rows: list[dict[str, Any]],
    server: str | None = None,
    *,
    env: dict[str, str] | None = None,
    terminal: bool = False,
    plan: dict[str, Any] | None = None,
    **tracker: Any,
) -> Outcome:
    """Write `rows` as a run would, after those that its folder has up to there; `server`: the URL
    of one, to which there is a login; `plan`: what else the worker does, as worker.py says."""
    run_dir.mkdir(exist_ok=True)
    spec = {"pause": 0.0, "kill_core_at": None, "die_at": None, "exit_code": 0} | (plan or {})
    spec |= {"run_dir": str(run_dir), "rows": rows, "tracker": TRACKER | tracker}
    home = run_dir.parent / "home"
    home.mkdir(exist_ok=True)
    clean = {k: v for k, v in os.environ.items() if not k.startswith("WANDB_") and k != "NETRC"}
    clean |= {"HOME": str(home), "PYTHONPATH": PATHS, "OMP_NUM_THREADS": "1"} | login(server)
    ends = pty.openpty() if terminal else ()
    process = forks.start(
        "tests.tracker.worker", json.dumps(spec), cwd=run_dir.parent, env=clean | (env or {}),
        stdin=ends[1] if ends else subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    out, err = process.communicate(timeout=HANG_S)
    ended = time.time()
    for end in ends:
        os.close(end)
    lines = [json.loads(line) for line in out.splitlines()]  # anything else would be an error here
    said = [line["said"] for line in lines if "said" in line]
    costs = next((line for line in lines if "said" not in line), {})
    slow = max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
    return Outcome(said, costs, process.returncode, err, ended - costs.get("at", ended), slow)
