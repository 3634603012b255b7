"""A plugin of pytest that writes each test that has ended, with its outcome, to a file."""

from __future__ import annotations

import json
import os
from typing import Any


def pytest_runtest_logreport(report: Any) -> None:
    if report.when == "teardown" or report.failed:
        with open(os.environ["MUTANTS_TOLD"], "a", encoding="utf-8") as file:
            file.write(json.dumps([report.nodeid, report.outcome]) + "\n")


def pytest_collectreport(report: Any) -> None:
    if report.failed:
        with open(os.environ["MUTANTS_TOLD"], "a", encoding="utf-8") as file:
            file.write(json.dumps([report.nodeid, "failed"]) + "\n")
