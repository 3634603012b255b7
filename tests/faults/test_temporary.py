"""Nothing is left in the system's temporary folder, however a run ends."""

import getpass
import os
import signal

import pytest

from tests.conftest import HANG_S, TINY, start
from tests.tools import wait_for

RUN = [*TINY, "data=synthetic", "data.n_tokens=4000", "train.eval_tokens=100", "tracker=wandb",
       "tracker.mode=offline", "hydra.run.dir=run"]  # fmt: skip
RANKS = ["parallelism=ddp", "parallelism.nproc_per_node=2"]
CACHE = {f"torchinductor_{getpass.getuser()}"}  # torch's compiled kernels: one for all of a user


@pytest.mark.parametrize(
    ("how", "code", "more"),
    [
        (None, 0, [*RANKS, "train.max_steps=3"]),
        (signal.SIGINT, 75, RANKS),
        (signal.SIGKILL, -9, RANKS),
        # it imports wandb itself, which makes folders then
        pytest.param(signal.SIGKILL, -9, [], marks=pytest.mark.fresh),
    ],
)
def test_no_folder_is_left(how, code, more, tmp_path):
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    given = [*RUN, "train.max_steps=100_000", *more]
    process = start("train", *given, cwd=tmp_path, TMPDIR=str(temporary))
    if how is not None:
        wait_for(lambda: list(tmp_path.glob("run/wandb/offline-run-*")), process, 200)
        os.killpg(process.pid, how)
    out, err = process.communicate(timeout=HANG_S)
    assert process.returncode == code, err + out
    wait_for(lambda: not {*os.listdir(temporary)} - CACHE)  # ranks of a killed agent end later
    if how is not signal.SIGKILL:
        assert not list(tmp_path.glob("run/.wandb-temporary"))
