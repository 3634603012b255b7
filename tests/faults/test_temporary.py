"""Nothing is left in the system's temporary folder, however a run ends."""

import getpass
import os
import signal

import pytest

from tests.conftest import HANG_S, TINY, start
from tests.tools import wait_for

RUN = [*TINY, "data=synthetic", "data.n_tokens=4000", "train.eval_tokens=100", "tracker=wandb",
       "tracker.mode=offline", "parallelism=ddp", "parallelism.nproc_per_node=2",
       "hydra.run.dir=run"]  # fmt: skip
CACHE = {f"torchinductor_{getpass.getuser()}"}


ALONE = ["parallelism=single", "parallelism.nproc_per_node=1"]


@pytest.mark.parametrize(
    ("how", "more"),
    [
        (None, []),
        (signal.SIGINT, []),
        (signal.SIGKILL, []),
        pytest.param(signal.SIGKILL, ALONE, marks=pytest.mark.fresh),
    ],
)
def test_no_folder_is_left(how, more, tmp_path):
    """The fresh one imports wandb itself, which makes folders then."""
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    steps = 3 if how is None else 100_000
    given = [*RUN, *more, f"train.max_steps={steps}"]
    process = start("train", *given, cwd=tmp_path, TMPDIR=str(temporary))
    if how is not None:
        wait_for(lambda: list(tmp_path.glob("run/wandb/offline-run-*")), process, 200)
        os.killpg(process.pid, how)
    out, err = process.communicate(timeout=HANG_S)
    assert process.returncode == {None: 0, signal.SIGKILL: -9, signal.SIGINT: 75}[how], err + out
    # ranks of a killed agent end by themselves; torch's cache of compiled kernels is one folder for
    # all runs of a user
    wait_for(lambda: not {*os.listdir(temporary)} - CACHE)
    if how is not signal.SIGKILL:
        assert not list(tmp_path.glob("run/.wandb-temporary"))
