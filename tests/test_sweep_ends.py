"""How a sweep's points end, what they are called, and what it says where it cannot write."""

from __future__ import annotations

import subprocess

import pytest

from llmexp import folder
from llmexp.config import ConfigError
from llmexp.sweep.local import settle
from llmexp.sweep.points import as_given
from llmexp.sweep.show import flat
from tests.conftest import TINY, llmexp

RUN = [
    *TINY, "data=synthetic", "data.n_tokens=5000", "train.max_steps=2", "train.eval_every=null",
    "train.eval_tokens=500", "checkpoint.every=null",
]  # fmt: skip


@pytest.mark.parametrize(
    ("state", "code", "stopped", "after", "said"),
    [
        ("running", 0, False, "failed", "the process ended with exit code 0 before its last step"),
        ("running", 75, False, "failed", "the process ended with exit code 75 before its last step"),
        ("running", 75, True, "preempted", "stopped before it could save"),
        ("running", 143, True, "preempted", "stopped before it could save"),
        ("running", -9, False, "failed", "SIGKILL"),
        ("preempted", 75, False, "preempted", "a signal that was not for the whole sweep stopped it"),
        ("preempted", 75, True, "preempted", None),
        ("finished", 0, False, "finished", None),
    ],
)
def test_a_point_that_ends_before_its_last_step_has_a_reason(tmp_path, state, code, stopped, after, said):
    (tmp_path / "config.yaml").write_text("train: {stop_step: null}")
    folder.write_status(tmp_path, state, summary={"steps": 7})
    assert settle(tmp_path, code, "", stopped=stopped) == (after == "failed")
    status = folder.read_status(tmp_path)
    assert status["state"] == after
    assert said is None or said in status["error"]
    assert said is not None or "error" not in status


def test_a_point_that_stops_at_its_rung_needs_no_reason(tmp_path):
    (tmp_path / "config.yaml").write_text("train: {stop_step: 7}")
    folder.write_status(tmp_path, "preempted", summary={"steps": 7})
    assert not settle(tmp_path, 75, "", stopped=False)
    assert "error" not in folder.read_status(tmp_path)


def test_what_a_sweeper_repeats_is_as_it_was_given():
    given = ["metrics.picture=false", "checkpoint.every=null", "optimizer.lr=1e-3", "name='a b'", "+x.y=[1,2]",
             "model.d_model=choice(16,32)", "~hooks"]  # fmt: skip
    repeated = ["metrics.picture=False", "checkpoint.every=None", "optimizer.lr=0.001", "name=a b", "+x.y=[1, 2]"]
    assert as_given([*repeated, "model.d_model=16", "clip.max_norm=0.5"], given) == [
        *given[:5], "model.d_model=16", "clip.max_norm=0.5",
    ]  # fmt: skip


def test_an_error_is_one_line():
    assert flat(repr(ValueError("a\nb\n c"))) == "ValueError('a b c')"


def test_a_folder_that_cannot_be_written_is_named_by_its_key(tmp_path):
    sweep = ["-m", *RUN, "clip.max_norm=0.5,1.0"]
    done = llmexp("train", *sweep, "hydra.sweep.dir=d/s", cwd=tmp_path)
    assert done.code == 0, done.err
    bound = subprocess.run(["mount", "--bind", "-o", "ro", "d", "d"], cwd=tmp_path, capture_output=True, text=True)
    if bound.returncode:
        pytest.skip(f"no read-only mount here: {bound.stderr.strip()}")
    try:
        refused = [llmexp(command, *sweep, "hydra.sweep.dir=d/new", cwd=tmp_path).err for command in ("train", "plan")]
        again = llmexp("resume", "d/s", cwd=tmp_path)
    finally:
        subprocess.run(["umount", "-l", "d"], cwd=tmp_path, check=True)
    for err in refused:
        assert err.splitlines() == [
            "llmexp: hydra.sweep.dir=d/new: d cannot be written; for example hydra.sweep.dir=/tmp/try1"
        ]
    assert (again.code, "Traceback" in again.err) == (2, False)
    assert again.err.splitlines()[-1].startswith("llmexp: sweep.resume=d/s: this folder cannot be written")


def test_a_sweeps_folder_that_is_a_file(tmp_path):
    (tmp_path / "f").touch()
    with pytest.raises(ConfigError, match=r"hydra\.sweep\.dir=.*is not a folder"):
        folder.claim(tmp_path / "f" / "s", True, "hydra.sweep.dir")
