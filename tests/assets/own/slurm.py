"""Hooks of runs that are jobs of Slurm: slow until there is a file `fast`, or failing."""

import json
import os
import time
from pathlib import Path


def slow(event, context):
    if event == "step_start" and not os.path.exists("fast"):
        time.sleep(0.1)
    first = event == "step_start" and context.step == 1 and os.environ.get("RANK", "0") == "0"
    if first and "SLURM_JOB_ID" in os.environ:
        file = Path(f"environment-{os.environ['SLURM_JOB_ID']}.json")
        file.write_text(json.dumps(dict(os.environ)))


def bad(event, context):
    if context.step == 3:
        raise ValueError("on purpose")
