"""A run with a tracker, but for the training: `python -m tests.tracker.worker SPEC`. Print JSON
lines: what was said, and what things cost."""

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
from llmexp.tracker.stores import STORES

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


def arrivals(kind: str) -> list[dict]:
    """Return the rows that a store gets from now on."""
    arrived: list[dict] = []

    class Counted(STORES[kind]):  # type: ignore[misc]
        def rows(self, rows: list[dict]) -> None:
            super().rows(rows)
            arrived.extend(rows)

    STORES[kind] = Counted
    return arrived


def main(spec: dict) -> None:
    run_dir, kind, given = Path(spec["run_dir"]), spec["tracker"]["kind"], spec["rows"]
    rows = Rows(run_dir / "metrics.jsonl", given[0]["step"] - 1).open()
    fields = {key: spec["tracker"][key] for key in NAMES}
    arrived = [] if kind == "wandb" else arrivals(kind)
    start = time.perf_counter()
    mirror = Mirror(
        kind, Tracker(**spec["tracker"]), run_dir,
        Fields(**fields, config={"optimizer": {"lr": 3e-4}}, run_id="run-1"), say,
    )  # fmt: skip
    opened = time.perf_counter() - start
    for number, row in enumerate([*given, None]):
        if number in (spec["kill_core_at"], spec["die_at"]):
            if kind == "wandb":
                core = wait_for_core(run_dir, number, given[number - 1])
            else:
                while len(arrived) < number:
                    time.sleep(0.05)
                time.sleep(1)  # until it is on the disk
            os.kill(os.getpid() if number == spec["die_at"] else core, signal.SIGKILL)
        if row is not None:
            rows.add(row)
            rows.flush()
            time.sleep(spec["pause"])
    start = time.perf_counter()
    mirror.finish({"final/loss": 1.25}, spec["exit_code"])
    finish = time.perf_counter() - start
    print(json.dumps({"open": opened, "finish": finish, "at": time.time()}), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
