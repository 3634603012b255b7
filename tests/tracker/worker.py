"""A run with wandb, but for the training: `python -m tests.tracker.worker SPEC`. Print JSON lines:
what was said, and what things cost."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from llmexp.config.execution import Tracker
from llmexp.folders.rows import Rows
from llmexp.tracker.fields import Fields
from llmexp.tracker.mirror import Mirror

NAMES = ("project", "entity", "name", "group", "tags", "notes")


def say(text: str) -> None:
    print(json.dumps({"said": text}), flush=True)


def wait_for_core(run_dir: Path, number: int, row: dict) -> int:
    """Return the process of wandb-core, once it has written what it got."""
    position = run_dir / "tracker.json"
    while not (position.exists() and json.loads(position.read_text())["step"] == number):
        time.sleep(0.05)
    newest, until = f"{row['tokens_seen']}".encode(), time.monotonic() + 20
    while not any(newest in p.read_bytes() for p in run_dir.glob("wandb/offline-run-*/*.wandb")):
        assert time.monotonic() < until
        time.sleep(0.05)
    command = ["pgrep", "-P", str(os.getpid()), "wandb-core"]
    (core,) = subprocess.run(command, capture_output=True, text=True).stdout.split()
    return int(core)


def main(spec: dict) -> None:
    run_dir = Path(spec["run_dir"])
    rows = Rows(run_dir / "metrics.jsonl", spec["rows"][0]["step"] - 1).open()
    fields = {key: spec["tracker"][key] for key in NAMES}
    start = time.perf_counter()
    mirror = Mirror(
        "wandb", Tracker(**spec["tracker"]), run_dir,
        Fields(**fields, config=spec["config"], run_id="run-1"), say,
    )  # fmt: skip
    opened = time.perf_counter() - start
    for number, row in enumerate(spec["rows"]):
        if number in (spec["kill_core_at"], spec["die_at"]):
            core = wait_for_core(run_dir, number, spec["rows"][number - 1])
            os.kill(os.getpid() if number == spec["die_at"] else core, signal.SIGKILL)
        rows.add(row)
        rows.flush()
        time.sleep(spec["pause"])
    start = time.perf_counter()
    mirror.finish({"final/loss": 1.25}, spec["exit_code"])
    finish = time.perf_counter() - start
    print(json.dumps({"open": opened, "finish": finish, "at": time.time()}), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
