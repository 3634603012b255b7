"""`llmexp verify` as an engine of the tests: killed, cut or repeated runs compute the same.

tests/verify plants faults that it has to find.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.conftest import llmexp
from tests.tiny import TINY


def proves(cwd: Path, proof: str, *overrides: str, **env: str) -> dict[str, dict[str, Any]]:
    """Run a proof on a tiny run, which has to pass; return its checks by name.

    "resume": killed again and again, it ends bit-equal to an unbroken run. "geometry": all
    micro-batch sizes, accumulation steps and ranks agree with float64. "determinism": twice the
    same bits.
    """
    done = llmexp("verify", proof, *TINY, *overrides, "hydra.run.dir=proof", cwd=cwd, **env)
    found: dict[str, Any] = done.json("verify.json") if done.code in (0, 1) else {}
    failed = [check for check in found.get("checks", []) if not check["passed"]]
    assert done.code == 0, (failed, done.out + done.err)
    return {check["what"]: check for check in found["checks"]}
