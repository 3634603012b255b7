"""How a sweep's points end, what they are called, and what it says where it cannot write."""

from __future__ import annotations

import json
import socket
import subprocess
from types import SimpleNamespace

import pytest

from llmexp import rundir
from llmexp.config import ConfigError
from llmexp.sweep import launchers, local, show, slurm
from llmexp.sweep.ledger import Entry, Ledger
from llmexp.sweep.local import Job, Stopped, run_all, settle
from llmexp.sweep.main import conclude
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
        (
            "running",
            75,
            False,
            "failed",
            "the process ended with exit code 75 before its last step",
        ),
        ("running", 75, True, "preempted", "stopped before it could save"),
        ("running", 143, True, "preempted", "stopped before it could save"),
        ("running", -9, False, "failed", "SIGKILL"),
        (
            "preempted",
            75,
            False,
            "preempted",
            "a signal that was not for the whole sweep stopped it",
        ),
        ("preempted", 75, True, "preempted", None),
        ("finished", 0, False, "finished", None),
    ],
)
def test_a_point_that_ends_before_its_last_step_has_a_reason(
    tmp_path, state, code, stopped, after, said
):
    (tmp_path / "config.yaml").write_text("train: {stop_step: null}")
    rundir.write_status(tmp_path, state, summary={"steps": 7})
    assert settle(tmp_path, code, "", stopped=stopped) == (after == "failed")
    status = rundir.read_status(tmp_path)
    assert status["state"] == after
    assert said is None or said in status["error"]
    assert said is not None or "error" not in status


def test_a_run_that_another_command_trains_is_left_as_it_is(tmp_path):
    rundir.write_status(tmp_path, "running", host=socket.gethostname())
    before = rundir.read_status(tmp_path)
    with rundir.locked(tmp_path):
        assert not settle(tmp_path, 2, "", stopped=False)
    assert rundir.read_status(tmp_path) == before
    # nobody trains there: it was refused for a reason of its own
    assert settle(tmp_path, 2, "", stopped=False)


@pytest.mark.parametrize(("ends", "state"), [("finished", "finished"), ("preempted", "queued")])
def test_a_job_that_begins_while_the_others_are_cancelled_keeps_its_end(
    tmp_path, monkeypatch, ends, state
):
    """Of two jobs of Slurm one fails; by its status the other is still queued, but it has begun."""
    paths = [tmp_path / name for name in ("0-a", "1-b")]
    for path in paths:
        path.mkdir()
        (path / "config.yaml").write_text("{}")
        rundir.write_status(path, "queued", started=1.0)
    ledger = Ledger(tmp_path, "n", "g", "slurm", [], [])
    ledger.points = [Entry(i, p.name, p.name, None, []) for i, p in enumerate(paths)]

    def wait(jobs, changed, say, tick):
        rundir.write_status(paths[0], "failed", error="of its own", exit_code=3)
        changed(paths[0], "1", "failed", True)
        if ends == "finished":
            rundir.write_status(paths[1], "running", started=2.0)
            rundir.write_status(paths[1], "finished", exit_code=0)
        else:
            rundir.write_status(paths[1], "failed", error="the job is gone", exit_code=3)
        changed(paths[1], "2", "", True)

    for name, stand_in in (
        ("submit", lambda jobs, *_, **__: {p: str(i + 1) for i, p in enumerate(jobs)}),
        ("wait", wait), ("cancel_pending", lambda jobs: None), ("fixed_here", lambda *_: ""),
    ):  # fmt: skip
        monkeypatch.setattr(slurm, name, stand_in)
    monkeypatch.setattr(launchers, "slurm_settings", lambda cfg: None)
    current = SimpleNamespace(
        launcher="slurm", knobs={p.name: {"ranks": 1, "devices": 0} for p in paths}, cfg=None,
        stop=Stopped(),
        settings=SimpleNamespace(stop_on_failure=True), reasons=set(),
    )  # fmt: skip
    queued = [
        (SimpleNamespace(path=p, config=None), e) for p, e in zip(paths, ledger.points, strict=True)
    ]
    display = SimpleNamespace(line=lambda text: None, tick=lambda: None)
    launchers.execute(current, ledger, queued, {}, display)
    assert [e.state for e in ledger.points] == ["failed", state]
    assert rundir.read_status(paths[1])["state"] == state


def test_a_signal_after_the_last_point_changes_nothing(tmp_path):
    """A grid whose points have all finished is done; a search would have asked for more."""
    for grid, state in ((True, "finished"), (False, "preempted")):
        ledger = Ledger(tmp_path, "n", "g", "local", [], [])
        ledger.points = [Entry(0, "a", "0-a", None, [], state="finished")]
        stop = Stopped()
        stop.requested = True
        conclude(
            SimpleNamespace(ledger=ledger, stop=stop, grid=grid, reasons=set()), lambda text: None
        )
        assert ledger.state == state


def test_a_point_that_cannot_be_started_is_one_that_failed(tmp_path):
    """A folder is in the place of what its processes print."""
    (tmp_path / "run" / local.STDERR).mkdir(parents=True)
    over = []
    run_all(
        [Job(tmp_path / "run", 1)], [], Stopped(), max_parallel=None, devices_per_run=None,
        stop_on_failure=False,
        silence_s=None, begun=lambda job: None, ended=over.append, tick=lambda: None, say=print,
    )  # fmt: skip
    status = rundir.read_status(tmp_path / "run")
    assert (len(over), status["state"], status["exit_code"]) == (1, "failed", 2)
    assert "Is a directory" in status["error"]


FACTS = ["{", "[1]", "[" * 200_000, '{"max_steps": "x"}', '{"max_steps": true}', "{}"]
WRONG = ['"x"', "[1]", "{}", "NaN", "Infinity", "1e309", "true", "null", "-1e308", "9" * 400]


@pytest.mark.parametrize("wrong", WRONG, ids=[w[:9] for w in WRONG])
def test_damaged_figures_of_a_point_do_not_end_its_sweep(tmp_path, capsys, wrong):
    """Nor does the live table of a terminal, which shows what failed in an earlier command too."""
    states = ("queued", "running", "finished", "failed", "preempted", "infeasible")
    entries = [
        Entry(n, "x", f"{n}-x", None, [], state=s)
        for n, s in enumerate([*states, *states, "finished"])
    ]
    ledger = Ledger(tmp_path, "s", "g", "local", [], [], points=entries)
    figures = ("final val/loss", "final train/loss", "latest val/loss", "mean tokens_per_sec")
    for n, entry in enumerate(entries):
        path = tmp_path / entry.folder
        path.mkdir()
        (path / "config.yaml").write_text("name: x\n")
        (path / "run.json").write_text(FACTS[n % len(FACTS)])
        summary = (
            wrong if n % 2 else "{" + ", ".join(f'"{name}": {wrong}' for name in figures) + "}"
        )
        more = (
            f'"summary": {summary}, "started": {wrong}, "ended": {wrong}, "exit_code": '
            f"{wrong}, "
            f'"error": {wrong}'
        )
        (path / "status.json").write_text(
            f'{{"state": "{entry.state}", {more}}}' if n < 12 else "[" * 200_000
        )
        row = f'{{"step": 3, "train/loss": {wrong}, "tokens_per_sec": {wrong}, "eta": {wrong}}}'
        (path / "metrics.jsonl").write_text((row if n % 3 else "[" * 9_000) + "\n")
    display = show.Display(ledger)
    ledger.save()
    for look in (False, True):
        for entry in entries:
            if look:
                ledger.look(entry, alive=True)
            assert show.told(entry, ledger).startswith(f"{entry.number} ")
        assert "\n1 " in str(display._table())
        assert "\n1 " in show.results_table(ledger)
    display.tick()
    json.loads((tmp_path / "sweep.json").read_text(), parse_constant=pytest.fail)


def test_a_point_on_the_cpu_takes_no_device(tmp_path, monkeypatch):
    """Four ranks on a CPU beside two devices, which a run on four could never have."""
    monkeypatch.setattr(local, "start", lambda job, devices, slots: subprocess.Popen(["true"]))
    monkeypatch.setattr(local, "settle", lambda *_, **__: False)
    taken = []
    run_all(
        [Job(tmp_path, 4), Job(tmp_path, 2, cuda=True)], ["0", "1"], Stopped(), max_parallel=None,
        devices_per_run=None,
        stop_on_failure=False, silence_s=None, begun=taken.append, ended=lambda job: None,
        tick=lambda: None, say=print,
    )  # fmt: skip
    assert [job.ranks for job in taken] == [4, 2]


def test_a_point_that_stops_at_its_rung_needs_no_reason(tmp_path):
    (tmp_path / "config.yaml").write_text("train: {stop_step: 7}")
    rundir.write_status(tmp_path, "preempted", summary={"steps": 7})
    assert not settle(tmp_path, 75, "", stopped=False)
    assert "error" not in rundir.read_status(tmp_path)


def test_what_a_sweeper_repeats_is_as_it_was_given():
    given = ["metrics.picture=false", "checkpoint.every=null", "optimizer.lr=1e-3", "name='a b'",
    "+x.y=[1,2]",
             "model.d_model=choice(16,32)", "~hooks"]  # fmt: skip
    repeated = [
        "metrics.picture=False",
        "checkpoint.every=None",
        "optimizer.lr=0.001",
        "name=a b",
        "+x.y=[1, 2]",
    ]
    assert as_given([*repeated, "model.d_model=16", "clip.max_norm=0.5"], given) == [
        *given[:5], "model.d_model=16", "clip.max_norm=0.5",
    ]  # fmt: skip


def test_an_error_is_one_line():
    assert flat(repr(ValueError("a\nb\n c"))) == "ValueError('a b c')"


def test_a_folder_that_cannot_be_written_is_named_by_its_key(tmp_path):
    sweep = ["-m", *RUN, "clip.max_norm=0.5,1.0"]
    done = llmexp("train", *sweep, "hydra.sweep.dir=d/s", cwd=tmp_path)
    assert done.code == 0, done.err
    bound = subprocess.run(
        ["mount", "--bind", "-o", "ro", "d", "d"], cwd=tmp_path, capture_output=True, text=True
    )
    if bound.returncode:
        pytest.skip(f"no read-only mount here: {bound.stderr.strip()}")
    try:
        refused = [
            llmexp(command, *sweep, "hydra.sweep.dir=d/new", cwd=tmp_path).err
            for command in ("train", "plan")
        ]
        again = llmexp("resume", "d/s", cwd=tmp_path)
    finally:
        subprocess.run(["umount", "-l", "d"], cwd=tmp_path, check=True)
    for err in refused:
        assert err.splitlines() == [
            "llmexp: hydra.sweep.dir=d/new: d cannot be written; for example "
            "hydra.sweep.dir=/tmp/try1"
        ]
    assert (again.code, "Traceback" in again.err) == (2, False)
    assert again.err.splitlines()[-1].startswith(
        "llmexp: sweep.resume=d/s: this folder cannot be written"
    )


def test_a_sweeps_folder_that_is_a_file(tmp_path):
    (tmp_path / "f").touch()
    with pytest.raises(ConfigError, match=r"hydra\.sweep\.dir=.*is not a folder"):
        rundir.claim(tmp_path / "f" / "s", True, "hydra.sweep.dir")


def test_a_reason_is_told_once_and_shortly_at_the_end(tmp_path):
    (tmp_path / "long.py").write_text(
        "def hook(event, context):\n    if context.optimizers[0].param_groups[0]['lr'] == 0.5:\n"
        "        raise RuntimeError('first ' + 'many words ' * 12 + 'the last one')\n"
    )
    command = [
        "-m",
        *RUN,
        "--allow",
        "long",
        "hooks=[long.hook]",
        "optimizer.lr=0.5",
        "hydra.sweep.dir=s",
    ]
    done = llmexp("train", *command, cwd=tmp_path)
    assert done.code == 1
    assert done.out.count("the last one") == 1
    at_once, after = (line for line in done.out.splitlines() if "the hook long.hook failed" in line)
    assert at_once.startswith("0 point  failed: the hook long.hook failed at step_start")
    assert after.startswith("0 point failed: the hook long.hook failed at step_start")
    assert after.endswith(" ...")
    assert len(after) < 80


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (
            ["sweep.halving_keep=0.25"],
            "sweep.halving_keep=0.25: does nothing without sweep.halving",
        ),
        (["sweep.twins=1", "sweep.report=throughput"], "sweep.twins=1: measures losses"),
    ],
)
def test_a_knob_of_a_sweep_that_does_nothing_is_refused(tmp_path, given, says):
    refused = llmexp(
        "train", "-m", *TINY, "train.seed=1,2", "hydra.sweep.dir=s", *given, cwd=tmp_path
    )
    assert refused.code == 2
    assert says in refused.err
    assert not (tmp_path / "s").exists()
