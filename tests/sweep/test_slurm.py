"""Slurm for real: two virtual nodes on this machine. tests/slurm/setup.sh installs it; without it
the tests skip."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from llmexp.config.values import section_knobs
from llmexp.folders import ledger as ledgers
from llmexp.sweep import ray, slurm
from tests import forks
from tests.conftest import HANG_S, PATHS, ROOT, TINY, Result, environment, llmexp, start, train
from tests.tools import exact, wait_for

FRESH_PROCESSES = True  # they get limits, a control group and signals of their own

HERE = Path(__file__).parents[1] / "slurm"
PATH = os.environ["PATH"] + os.pathsep + "/usr/sbin"
MISSING = [
    p
    for p in ("munged", "slurmctld", "slurmd", "sbatch", "srun")
    if shutil.which(p, path=PATH) is None
]
MISSING += [] if os.geteuid() == 0 else ["root"]
needs_slurm = pytest.mark.skipif(
    bool(MISSING), reason=f"no {', '.join(MISSING)}; tests/slurm/setup.sh installs Slurm"
)

# 60 steps of 0.1 s each while there is no file `fast`: time to be preempted in.
SLOW = [
    *TINY, "data=synthetic", "data.n_tokens=4000", "train.max_steps=60", "train.log_every=1",
    "train.eval_every=20", "batch.real_batch_size=8", "checkpoint.every=1000",
    "hooks=[own.slurm.slow]", "--allow=own",
]  # fmt: skip
TWO_RANKS = ["parallelism=ddp", "parallelism.nproc_per_node=2"]


@pytest.fixture(scope="module")
def cluster() -> Iterator[dict[str, str]]:
    """The environment of a client of two idle nodes, n1 and n2; whatever happens, the daemons end
    with the tests."""
    where = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))
    port = 20200 + os.getpid() * 3 % 9000  # see `conftest.free_port`
    daemons = {**os.environ, "PATH": PATH, "SLURM_DIR": str(where), "BASE_PORT": str(port)}
    script = HERE / "slurm-local.sh"
    try:
        ran(script, "start", env=daemons)
        yield {"SLURM_CONF": str(where / "slurm.conf")}
    finally:
        subprocess.run([script, "stop"], env=daemons, timeout=HANG_S)
        shutil.rmtree(where, ignore_errors=True)


@pytest.fixture
def work(cluster: dict[str, str], tmp_path: Path) -> Iterator[Path]:
    """An empty folder; jobs that a test leaves behind are cancelled."""
    yield tmp_path
    client(cluster, "scancel", "--user=root")
    client(cluster, "scontrol", "update", "PartitionName=main", "GraceTime=10")
    wait_for(lambda: client(cluster, "squeue", "--noheader") == "")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    """The rows of the run that others are compared to, on two ranks of this machine without
    Slurm."""
    where = tmp_path_factory.mktemp("undisturbed")
    (where / "fast").touch()
    forks.ALLOWED = True
    rows = exact(train(where, "run", *SLOW, *TWO_RANKS))
    forks.ALLOWED = False
    return rows


def ran(*command: str | Path, env: dict[str, str], cwd: Path | None = None) -> tuple[str, str]:
    """What a command prints that succeeds."""
    more = {"capture_output": True, "text": True, "timeout": HANG_S}
    done = subprocess.run(command, env=env, cwd=cwd, **more)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, done.stderr


def client(cluster: dict[str, str], *command: str) -> str:
    """What one of Slurm's commands prints."""
    return ran(*command, env=environment(**cluster))[0].strip()


def facts(cluster: dict[str, str], job: str) -> dict[str, str]:
    """What Slurm knows of a job: JobState, ExitCode, Restarts, ..."""
    shown = client(cluster, "scontrol", "show", "job", "--oneliner", job)
    return dict(re.findall(r"(?<!\S)(\w+)=(\S*)", shown))


def job_of(run: Path) -> str:
    return json.loads((run / "slurm.json").read_text())["job_id"]


def until_state(cluster: dict[str, str], job: str, state: str) -> None:
    wait_for(lambda: facts(cluster, job)["JobState"] == state)


def until_rows(run: Path, cluster: dict[str, str], job: str, after: int = 0) -> None:
    """Until the run has gone past step `after`."""
    metrics = run / "metrics.jsonl"
    wait_for(lambda: metrics.exists() and len(metrics.read_text().splitlines()) > after)
    assert facts(cluster, job)["JobState"] == "RUNNING"


def start_again(cluster: dict[str, str], job: str) -> None:
    """Lets a job that was queued again start now. Slurm holds it for two minutes, from a moment
    after it is pending."""
    until_state(cluster, job, "PENDING")
    title = f"slurmstepd: [{facts(cluster, job)['JobId']}.".encode()
    wait_for(lambda: not any(title in command for command in command_lines()))
    time.sleep(2)  # the nodes revoke what it was allowed, by the second; a start within it fails
    command = ["scontrol", "update", f"JobId={job}", "StartTime=now"]
    for _ in range(6):  # an update more often than every second or two would put it off for ever
        subprocess.run(command, env=environment(**cluster), capture_output=True, timeout=HANG_S)
        for _ in range(10):
            if facts(cluster, job)["JobState"] in ("RUNNING", "COMPLETED"):
                return
            time.sleep(0.4)
    raise AssertionError(f"job {job} did not start again: {facts(cluster, job)}")


def command_lines() -> Iterator[bytes]:
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # ended meanwhile
            yield path.read_bytes()


def state_of(run: Path) -> str:
    return Result(0, "", "", run).json("status.json")["state"]


@needs_slurm
@pytest.mark.slow
def test_a_sweep_from_inside_a_job(cluster, work, undisturbed):
    """A job array for each number of nodes, submitted from a job, of whose variables the new jobs
    inherit none."""
    (work / "fast").touch()
    canary = "0123456789abcdef" * 2
    srun = ["srun", "--nodes=1", "--ntasks=1", "--hint=nomultithread", "--gpus-per-node=1"]
    sweep = ["-m", "hydra/launcher=slurm", *SLOW, "hydra.launcher.timeout_min=10",
             "hydra.sweep.dir=sweep"]  # fmt: skip
    points = ["parallelism=ddp", "parallelism.nnodes=1,2", "parallelism.nproc_per_node=2"]
    env = environment(**cluster, PYTHONPATH=PATHS, WANDB_API_KEY=canary, USER_SAYS="hello")
    command = [*srun, sys.executable, "-m", "llmexp", "train"]
    out, _ = ran(*command, *sweep, *points, cwd=work, env=env)
    runs = sorted((work / "sweep").glob("[0-9]-*"))
    assert [run.name for run in runs] == ["0-nnodes_1", "1-nnodes_2"]
    for i, run in enumerate(runs):
        for state in (r"running on n[\[12-]", "finished"):
            assert re.search(rf"{i} nnodes={i + 1} +{state}", out), out
        assert state_of(run) == "finished"
    one, two = (Result(0, "", "", run) for run in runs)
    assert exact(one) == undisturbed
    assert [row["step"] for row in two.rows()] == list(range(1, 61))
    # Four ranks add the same numbers in another order: float32, some thousand terms, 60 steps.
    assert two.rows()[-1]["train/loss"] == pytest.approx(undisturbed[-1]["train/loss"], rel=1e-4)

    seen = [json.loads(p.read_text()) for p in work.glob("environment-*.json")]
    assert len(seen) == 2
    for job in seen:
        names = ("SLURM_NTASKS", "SLURM_CPUS_PER_TASK", "USER_SAYS")
        assert [job[name] for name in names] == [job["SLURM_JOB_NUM_NODES"], "2", "hello"]
        inherited = {"SLURM_THREADS_PER_CORE", "SLURM_STEP_GPUS", "CUDA_VISIBLE_DEVICES"}
        assert not inherited & job.keys()
    for path in work.rglob("*"):
        kept = path.is_file() and not path.name.startswith("environment-")  # the hook's own
        assert not kept or canary.encode() not in path.read_bytes(), path


@needs_slurm
def test_a_failure_a_time_limit_an_interrupt_and_a_cancelled_job(cluster, work):
    """A failed run shows as FAILED in Slurm. A job warned of its time limit comes back. The waiting
    command may go and come again. What scancel ended stays out, and the command ends too, without a
    database of ended jobs. What jobs run is in folders that were made for them, not in one that
    was there before."""
    (work / "sweep" / "slurm").mkdir(parents=True)
    hooks = "hooks=[own.slurm.slow],[own.slurm.bad]"
    sweep = ["-m", "hydra/launcher=slurm", *SLOW, hooks, "train.max_steps=2000"]
    waiting = start("train", *sweep, "hydra.sweep.dir=sweep", cwd=work, **cluster)
    names = ("0-hooks__own.slurm.slow", "1-hooks__own.slurm.bad")
    good, bad = (work / "sweep" / name for name in names)
    wait_for((bad / "slurm.json").exists)
    job, failing = job_of(good), job_of(bad)
    until_rows(good, cluster, job)
    client(cluster, "scancel", "--signal=USR2", job)  # what Slurm sends before the time limit
    until_state(cluster, failing, "FAILED")
    ended = facts(cluster, failing)
    assert (ended["ExitCode"], ended["Restarts"]) == ("3:0", "0")
    start_again(cluster, job)
    wait_for(lambda: state_of(good) == "running")
    waiting.send_signal(signal.SIGINT)
    out, err = waiting.communicate(timeout=HANG_S)
    assert waiting.returncode == 75, out + err
    assert re.search(r"1 hooks=\S+ +failed: .* at step_start of step 3", out), out
    assert re.search(r"0 hooks=\S+ +pending", out.partition("running")[2])
    assert f"scancel {job.partition('_')[0]}\n" in out
    assert out.splitlines()[-1].endswith("llmexp resume sweep --allow own")
    ledger = ledgers.read_ledger(work / "sweep")
    assert ledger.state == "preempted"
    assert [p.state for p in ledger.points] == ["running", "failed"]

    waiting = start("resume", "sweep", "--allow", "own", cwd=work, **cluster)
    wait_for(lambda: job_of(bad) != failing)
    assert job_of(good) == job
    client(cluster, "scancel", job)
    out, err = waiting.communicate(timeout=HANG_S)
    assert waiting.returncode == 1, out + err
    assert "1 job submitted before is still there" in out
    assert "sweep/slurm-3\n" in out
    ledger = ledgers.read_ledger(work / "sweep")
    assert [p.state for p in ledger.points] == ["preempted", "failed"]
    assert re.search(r"0 hooks=\S+ +preempted; the job ended as CANCELLED", out)
    assert [state_of(run) for run in (good, bad)] == ["preempted", "failed"]
    ended = facts(cluster, job)
    assert (ended["JobState"], ended["Restarts"]) == ("CANCELLED", "1")
    assert list((work / "sweep" / "slurm").iterdir()) == []
    for name in ("slurm-2", "slurm-3"):
        assert any((work / "sweep" / name).glob("*.out"))


@needs_slurm
@pytest.mark.parametrize("graces", [(10,), pytest.param((10, 0), marks=pytest.mark.slow)])
def test_a_preempted_job_comes_back_and_ends_with_the_same_rows(cluster, work, undisturbed, graces):
    """launchers/slurm.sbatch on two nodes, which another partition takes, with a grace time and
    without: rows and tracker go on in the same folder."""
    tracked = [o for o in SLOW if o != "tracker=none"]
    two = ["parallelism=ddp", "parallelism.nnodes=2", "parallelism.nproc_per_node=1"]
    queued = ["--create-only", *tracked, *two, "hydra.run.dir=run"]
    result = llmexp("train", *queued, cwd=work, **cluster)
    assert result.code == 0, result.err
    assert state_of(result.folder) == "queued"
    (line,) = re.findall(r"^with Slurm +(.*)$", result.out, re.M)
    env = environment(**cluster, PYTHONPATH=PATHS)
    submit = line.replace(" sbatch ", " sbatch --parsable --exclusive ")
    out, _ = ran("bash", "-c", submit, cwd=work, env=env)
    job, reached = out.strip(), 0
    for number, grace_s in enumerate(graces, 1):
        client(cluster, "scontrol", "update", "PartitionName=main", f"GraceTime={grace_s}")
        until_rows(result.folder, cluster, job, after=reached)
        urgent = "--partition=urgent --nodes=2 --exclusive --output=/dev/null --wrap=true"
        other = client(cluster, "sbatch", "--parsable", *urgent.split())
        until_state(cluster, other, "COMPLETED")
        assert state_of(result.folder) == "preempted", (work / f"slurm-{job}.out").read_text()
        assert reached < len(result.rows()) < 60
        reached = len(result.rows())
        if number == len(graces):
            (work / "fast").touch()
        start_again(cluster, job)
    until_state(cluster, job, "COMPLETED")
    assert facts(cluster, job)["Restarts"] == str(len(graces))
    assert state_of(result.folder) == "finished"
    assert exact(result) == undisturbed
    log = (result.folder / "train.log").read_text()
    assert f"step {reached} of 60" in log.rpartition("resumed from")[2]
    wandb = [re.sub(r".*-", "", p.name) for p in result.folder.glob("wandb/offline-run-*")]
    # What is killed without grace may go before its tracker came.
    assert 1 + graces.count(10) <= len(wandb) <= 1 + len(graces), wandb
    assert len(set(wandb)) == 1, wandb  # one run's id


@needs_slurm
def test_ranks_meet_on_the_first_node_and_find_their_size_there(cluster, work):
    """Not where srun was typed, an address that nothing answers here."""
    forks.ALLOWED = True  # the nodes' processes too: nothing here ends or limits them
    auto = ["batch.micro_batch_size=auto", "batch.memory_gib=8", "train.max_steps=3",
            "batch.real_batch_size=4"]  # fmt: skip
    two = ["parallelism=ddp", "parallelism.nnodes=2", "parallelism.nproc_per_node=1"]
    (work / "fast").touch()
    options = [*SLOW, *two, *auto, "parallelism.start_timeout_s=30", "hydra.run.dir=run"]
    result = llmexp("train", "--create-only", *options, cwd=work, **cluster)
    assert result.code == 0, result.err
    env = environment(**cluster, PYTHONPATH=PATHS, LLMEXP_ALLOW="own")
    srun = ["srun", "--nodes=2", "--ntasks-per-node=1", "env", "SLURM_LAUNCH_NODE_IPADDR=192.0.2.1"]
    job = [sys.executable, "-P", "-m", "llmexp.sweep.slurm_job", "run"]
    _, err = ran(*srun, *job, cwd=work, env=env)
    assert len(re.findall(r"auto: 2 fits", err)) == 1  # of four, two a rank
    assert state_of(result.folder) == "finished"
    batch = yaml.safe_load((result.folder / "config.yaml").read_text())["batch"]
    # both sizes fit; which of them is faster is for the machine to say
    assert batch["micro_batch_size"] * batch["gradient_accumulation_steps"] == 2


@pytest.mark.parametrize(("name", "knobs"), [("slurm", slurm.Knobs), ("ray", ray.Knobs)])
def test_every_knob_of_a_launcher_is_in_its_yaml(name, knobs):
    tree = yaml.safe_load((ROOT / f"conf/hydra/launcher/{name}.yaml").read_text())
    assert tree.keys() == section_knobs(knobs).keys() | {"_target_"}
