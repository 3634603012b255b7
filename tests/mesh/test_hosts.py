"""Several hosts, whose ranks torchrun or Slurm starts: lost, cut off, missing, unlike each other.

Two network namespaces are two hosts for torchrun; Slurm is its variables."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import yaml

from llmexp.config.values import ConfigError
from llmexp.folders import rundir
from llmexp.mesh.ranks import place_of_this_host
from tests import forks
from tests.conftest import (
    ASSETS,
    HANG_S,
    PATHS,
    ROOT,
    TINY,
    Result,
    environment,
    free_port,
    llmexp,
    train,
)
from tests.tools import alive, amend, contents, exact, pids, wait_for, weights

# 50 sequences, 8 a step, 30 steps; rows at each, checkpoints every 5.
SETTINGS = [
    "data=tokens", "data.val_ratio=0.1", "batch.real_batch_size=8", "train.max_steps=30",
    "train.log_every=1", "train.eval_every=10", "checkpoint.every=5", "checkpoint.keep=null",
    "optimizer.lr=0.01", "parallelism=ddp", "train.data_digest=true",
    "--allow", "own", "hooks=[own.faults.act]",
]  # fmt: skip
TWO_HOSTS = ["parallelism.nnodes=2", "parallelism.nproc_per_node=1"]


@dataclass(frozen=True)
class Host:
    """A place to start torchrun in: this machine, or a namespace that `keeper` keeps alive."""

    endpoint: str
    keeper: int | None = None

    def command(self, *command: str) -> list[str]:
        enter = ["nsenter", f"--target={self.keeper}", "--net", "--uts", "--mount"]
        return [*(enter if self.keeper else ()), *command]

    def processes(self) -> list[int]:
        assert self.keeper is not None
        network = os.readlink(f"/proc/{self.keeper}/ns/net")
        return [p for p in pids() if p != self.keeper and link(f"/proc/{p}/ns/net") == network]

    def kill(self) -> None:
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):  # a rank ends with its agent
                os.kill(pid, signal.SIGKILL)


def link(path: str) -> str:
    with contextlib.suppress(OSError):
        return os.readlink(path)
    return ""


@contextlib.contextmanager
def namespaces(folder: Path) -> Iterator[tuple[Host, Host]]:
    """llxt1 and llxt2 with a cable between them, in namespaces without a name: they collide with no
    others, and vanish with the two processes that keep them, which end with this one."""
    names = folder / "hosts"
    names.write_text("127.0.0.1 localhost\n10.78.0.1 llxt1\n10.78.0.2 llxt2\n")
    inside = (
        'hostname "$0" && mount --bind "$1" /etc/hosts && ip link set lo up && echo up && read wait'
    )
    with contextlib.ExitStack() as stack:
        hosts = []
        for name in ("llxt1", "llxt2"):
            unshare = ["unshare", "--net", "--uts", "--mount", "sh", "-c", inside, name, str(names)]
            started = subprocess.Popen(unshare, text=True, stdin=-1, stdout=-1, stderr=-1)
            keeper = stack.enter_context(started)
            assert keeper.stdin
            assert keeper.stdout
            assert keeper.stderr
            stack.callback(keeper.stdin.close)  # before it is waited for
            if keeper.stdout.readline() != "up\n":
                pytest.skip(f"two hosts need root and namespaces: {keeper.stderr.read().strip()}")
            hosts.append(Host("llxt1:29400", keeper.pid))
        one, two = hosts
        stack.callback(one.kill)
        stack.callback(two.kill)
        cable = f"ip link add eth0 type veth peer name eth0 netns {two.keeper}"
        subprocess.run(one.command(*cable.split()), check=True, timeout=HANG_S)
        for number, host in enumerate(hosts, 1):
            for line in (f"ip addr add 10.78.0.{number}/24 dev eth0", "ip link set eth0 up"):
                subprocess.run(host.command(*line.split()), check=True, timeout=HANG_S)
        yield one, two


@pytest.fixture
def two_hosts(tmp_path) -> Iterator[tuple[Host, Host]]:
    missing = [tool for tool in ("ip", "unshare", "nsenter") if shutil.which(tool) is None]
    if os.geteuid() or missing:
        lacking = ", ".join(missing) or "root"
        pytest.skip(f"two hosts need root and iproute2 (missing here: {lacking})")
    with namespaces(tmp_path) as hosts:
        yield hosts


@pytest.fixture
def here() -> Host:
    return Host(f"localhost:{free_port()}")


@pytest.fixture(scope="module")
def work(tmp_path_factory, tokens) -> Path:
    """A folder with a queued run of two hosts, and one that was made alike and trained on one
    host."""
    folder = tmp_path_factory.mktemp("work")
    settings = [*TINY, *SETTINGS, f"data.train_files=[{tokens}]"]
    queue = ["train", "--create-only", *settings, *TWO_HOSTS, "hydra.run.dir=queued"]
    queued = llmexp(*queue, cwd=folder)
    assert queued.code == 0, queued.err
    assert "LLMEXP_RDZV_ENDPOINT=HOST1:29400" in queued.out
    train(folder, "whole", *settings[len(TINY) :], "parallelism.nproc_per_node=2")
    return folder


@pytest.fixture
def run(work, tmp_path) -> Result:
    """The queued run, untouched."""
    shutil.copytree(work / "queued", tmp_path / "run")
    return Result(0, "", "", tmp_path / "run")


def sleeping(seconds: float) -> str:
    return f"step_start-*:sleep {seconds}"


def variables(**more: str) -> dict[str, str]:
    ours = {"PYTHON": sys.executable, "PYTHONPATH": PATHS, "LLMEXP_ALLOW": "own"}
    return environment(**ours, FAULT_PLAN=sleeping(0.1)) | more


@contextlib.contextmanager
def begun(process: subprocess.Popen[str], run: Result) -> Iterator[subprocess.Popen[str]]:
    """A process that trains the run. What is left of it is killed at the end."""
    try:
        yield process
    finally:
        for pid in {*alive(run.folder), process.pid}:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.communicate(timeout=HANG_S)


PIPES = {"stdin": -3, "stdout": -1, "stderr": -1, "text": True}


def torchrun(
    host: Host, run: Result, work: Path, **env: str
) -> contextlib.AbstractContextManager[subprocess.Popen[str]]:
    """launchers/torchrun.sh on a host."""
    command = host.command(str(ROOT / "launchers" / "torchrun.sh"), str(run.folder))
    variables_there = variables(LLMEXP_RDZV_ENDPOINT=host.endpoint, **env)
    given = {"cwd": work, "env": variables_there, "start_new_session": True, **PIPES}
    return begun(subprocess.Popen(command, **given), run)


@contextlib.contextmanager
def nodes(
    run: Result, work: Path, *which: int, **env: str
) -> Iterator[list[subprocess.Popen[str]]]:
    """What Slurm starts on the nodes of a job, with its variables."""
    number = str(free_port() - 10_000)  # a port of its own
    job = {"SLURM_NNODES": "2", "SLURM_JOB_ID": number, "SLURM_STEP_ID": "0"} | env
    job["SLURM_LAUNCH_NODE_IPADDR"] = "127.0.0.1"
    with contextlib.ExitStack() as stack:
        started = []
        for node in which:
            there = {"cwd": work, "env": variables(SLURM_NODEID=str(node), **job), **PIPES}
            process = forks.start("llmexp.train", str(run.folder), **there)
            started.append(stack.enter_context(begun(process, run)))
        yield started


def ended(processes: list[subprocess.Popen[str]]) -> tuple[list[int], list[str]]:
    """Exit codes, and what was printed on standard error."""
    said = [process.communicate(timeout=HANG_S)[1] for process in processes]
    return [process.returncode for process in processes], said


def until_row(run: Result, step: int, *agents: subprocess.Popen[str]) -> None:
    def there() -> bool:
        for process in agents:
            assert process.poll() is None, process.communicate()
        metrics = run.folder / "metrics.jsonl"
        return metrics.exists() and metrics.read_bytes().count(b"\n") >= step

    wait_for(there)


def same(run: Result, work: Path) -> None:
    """The same rows, each once, and the same parameters as the run that stayed on one host, bit for
    bit."""
    whole = Result(0, "", "", work / "whole")
    assert exact(run) == exact(whole)
    ours, theirs = weights(run, 30), weights(whole, 30)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def status_of(pid: int) -> list[str]:
    """What Linux knows of a process behind its name: its state, its parent, ..."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def ranks_of(run: Result) -> dict[int, int]:
    """The process of each rank."""
    found = {}
    for pid in alive(run.folder):
        with contextlib.suppress(OSError):
            variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            found |= {int(v[5:]): pid for v in variables if v.startswith(b"RANK=")}
    return found


@pytest.mark.slow
def test_torchrun_brings_back_a_host_that_was_lost(two_hosts, run, work):
    one, two = two_hosts
    amend(run.folder / "config.yaml", parallelism={"max_restarts": 2})
    with torchrun(one, run, work) as first, torchrun(two, run, work) as second:
        until_row(run, 7, first, second)
        two.kill()
        told = run.folder / "status.json"
        wait_for(lambda: "was lost (killed, or its host is down)" in told.read_text())
        with torchrun(two, run, work) as again:
            codes, said = ended([first, again])
    assert codes == [0, 0], said
    assert "resumed from step_000000" in (run.folder / "train.log").read_text()
    same(run, work)


def test_a_cut_between_hosts_ends_both(two_hosts, run, work):
    one, two = two_hosts
    amend(run.folder / "config.yaml", parallelism={"timeout_s": 5.0})
    with torchrun(one, run, work) as first, torchrun(two, run, work) as second:
        until_row(run, 7, first, second)
        subprocess.run(two.command("ip", "link", "set", "eth0", "down"), check=True, timeout=HANG_S)
        wait_for(lambda: not ranks_of(run))
        for process in (first, second):  # which may wait for the other's store for minutes
            process.send_signal(signal.SIGKILL)
        _, said = ended([first, second])
    cut = "all ranks waited 5 s for each other and none arrived; "
    for err in [*said, run.json("status.json")["error"]]:
        assert cut in err
        # which host has which rank is chance
        assert re.search(r"llxt1 \(rank [01]\), llxt2", err)
    assert run.json("status.json")["exit_code"] == 3


def test_slurm_starts_the_ranks_of_each_node(run, work):
    """A stop saves and ends both with 75; started again, both go on to the end."""
    with nodes(run, work, 0, 1) as both:
        until_row(run, 7, *both)
        for process in both:
            process.send_signal(signal.SIGUSR2)
        codes, said = ended(both)
    assert codes == [75, 75], said
    assert run.json("status.json")["state"] == "preempted"
    assert not list(run.folder.glob("logs/meeting-*"))
    with nodes(run, work, 0, 1, FAULT_PLAN="") as both:
        codes, said = ended(both)
    assert codes == [0, 0], said
    same(run, work)


@pytest.mark.parametrize("lost", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_rank_lost_on_one_node_ends_the_other_which_names_it(run, work, lost):
    with nodes(run, work, 0, 1) as both:
        until_row(run, 7, *both)
        os.kill(ranks_of(run)[lost], signal.SIGKILL)
        codes, said = ended(both)
        assert alive(run.folder) == []
    assert codes == [3, 3]
    for err in [*said, run.json("status.json")["error"]]:
        assert f"rank {lost} was ended by signal 9 (SIGKILL" in err
        assert "Traceback" not in err
    assert any("start it on each of the 2 hosts again" in err for err in said)


def test_a_node_that_is_lost_as_a_whole_ends_the_other(run, work):
    with nodes(run, work, 0, 1) as (first, second):
        until_row(run, 7, first, second)
        rank = ranks_of(run)[1]
        starter = second.pid
        os.kill(starter, signal.SIGSTOP)  # it must not report for its rank
        wait_for(lambda: status_of(starter)[0] == "T")
        os.kill(rank, signal.SIGKILL)
        os.kill(starter, signal.SIGKILL)
        codes, (err,) = ended([first])
    assert codes == [3]
    for text in (err, run.json("status.json")["error"]):
        assert "rank 1 was lost (killed, or its host is down)" in text


@pytest.mark.slow
def test_a_killed_starter_takes_its_rank_with_it(run, work):
    """And with it all others: they stop with a checkpoint."""
    with nodes(run, work, 0, 1) as (first, second):
        until_row(run, 7, first, second)
        rank = ranks_of(run)[1]
        os.kill(second.pid, signal.SIGKILL)
        wait_for(lambda: rank not in alive(run.folder))
        codes, said = ended([first])
        assert alive(run.folder) == []
    assert codes == [75], said
    status = run.json("status.json")
    assert status["state"] == "preempted"
    assert run.checkpoint(status["summary"]["steps"]).is_dir()


@pytest.mark.slow
def test_a_start_too_many_leaves_the_run_alone(run, work):
    """A second job for the same run is refused on all its nodes."""
    with nodes(run, work, 0, 1, FAULT_PLAN=sleeping(3)) as both:
        until_row(run, 1, *both)
        with nodes(run, work, 0, 1) as others:
            codes, said = ended(others)
            assert codes == [2, 2], said
            assert all("another process is training in this folder" in err for err in said)
            status = run.json("status.json")
            assert (status["state"], status["error"]) == ("running", None)
            until_row(run, len(run.rows()) + 2, *both)


def missed(run: Result, work: Path, node: int, missing: int) -> None:
    """Start one of two nodes, for which the other never comes."""
    amend(run.folder / "config.yaml", parallelism={"start_timeout_s": 3.0})
    with nodes(run, work, node) as one:
        codes, (err,) = ended(one)
    assert codes == [3]
    for text in (err, run.json("status.json")["error"]):
        assert f"rank {missing} did not arrive within 3 s (hung, stopped or cut off)" in text
        assert "Traceback" not in text
        assert "on purpose" not in text


@pytest.mark.parametrize("failed", [pytest.param(True, marks=pytest.mark.slow), False])
def test_a_node_that_never_comes_is_missed_whatever_an_earlier_start_left(run, work, failed):
    """Rank 1 failed in the first start, or waited in vain for rank 0; then it does not come."""
    if failed:
        amend(run.folder / "config.yaml", parallelism={"start_timeout_s": 60.0})
        with nodes(run, work, 0, 1, FAULT_PLAN="step_start-*@1:raise") as first:
            ended(first)
    else:
        missed(run, work, 1, missing=0)
    assert (run.folder / "logs" / "rank-1.json").exists()
    missed(run, work, 0, missing=1)


# rank 1's host has no room for more than two sequences; four are a rank's share of a step
AUTO = {"micro_batch_size": "auto", "gradient_accumulation_steps": None, "memory_gib": 8.0}


def with_auto(run: Result) -> None:
    """Queue the run as with batch.micro_batch_size=auto, and the hook own.faults.no_room."""
    hooks = ["own.faults.act", "own.faults.no_room"]
    amend(run.folder / "config.yaml", batch=AUTO, hooks=hooks)


def batch_of(run: Result) -> tuple[int, int, int]:
    batch = yaml.safe_load((run.folder / "config.yaml").read_text())["batch"]
    keys = ("micro_batch_size", "gradient_accumulation_steps", "real_batch_size")
    one, two, three = (batch[key] for key in keys)
    return one, two, three


@pytest.mark.slow
@pytest.mark.parametrize("stopped", [True, False])
def test_ranks_of_all_nodes_find_the_size_that_fits_on_each(run, work, stopped):
    with_auto(run)
    with nodes(run, work, 0, 1, FAULT_PLAN=sleeping(0.02 if stopped else 0)) as both:
        if stopped:
            until_row(run, 7, *both)
            for process in both:
                process.send_signal(signal.SIGUSR2)
        codes, said = ended(both)
    assert codes == ([75, 75] if stopped else [0, 0]), said
    micro, accumulation, real = batch_of(run)
    assert (micro in (1, 2), micro * accumulation, real) == (True, 4, 8)
    for text in ("4 does not fit: rank 1 was ended by signal 9 (SIGKILL", "2 fits", "1 fits"):
        assert f"auto: {text}" in said[0]
    assert "auto:" not in said[1]
    assert not list(run.folder.glob("logs/trial-*"))
    if stopped:
        with nodes(run, work, 0, 1, FAULT_PLAN="") as both:
            codes, said = ended(both)
        assert codes == [0, 0], said
        assert "auto:" not in "".join(said)
        assert batch_of(run) == (micro, accumulation, real)
    rows = [row["data_digest"] for row in run.rows()]
    assert rows == [row["data_digest"] for row in Result(0, "", "", work / "whole").rows()]


@pytest.mark.slow
def test_torchrun_finds_the_size_that_fits_on_each_host(two_hosts, run, work):
    with_auto(run)
    with contextlib.ExitStack() as stack:
        both = [stack.enter_context(torchrun(host, run, work, FAULT_PLAN="")) for host in two_hosts]
        codes, said = ended(both)
    assert codes == [0, 0], said
    assert "auto: 4 does not fit: rank 1 was ended by signal 9 (SIGKILL" in "".join(said)
    assert batch_of(run)[0] in (1, 2)
    assert run.rows()[-1]["step"] == 30


@pytest.mark.slow
def test_a_rank_that_is_lost_while_sizes_are_tried_is_named(run, work):
    with_auto(run)
    with nodes(run, work, 0, 1, FAULT_PLAN=sleeping(1)) as both:
        wait_for(lambda: list(run.folder.glob("logs/trial-0/metrics.jsonl")))
        os.kill(ranks_of(run)[1], signal.SIGKILL)
        codes, said = ended(both)
        assert alive(run.folder) == []
    assert codes == [3, 3], said
    assert "rank 1 was ended by signal 9 (SIGKILL" in said[1]
    assert re.search("rank 1 was (lost|ended)", said[0])
    assert batch_of(run)[0] == "auto"


def test_a_node_that_waits_for_another_can_be_stopped(run, work):
    with nodes(run, work, 0) as (process,):
        wait_for(lambda: list(run.folder.glob("logs/rank-*.json")))
        time.sleep(1)  # it soon waits where no handler of Python's runs
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=HANG_S)
        assert alive(run.folder) == []
    assert process.returncode == 130


def test_hosts_have_to_know_which_they_are(monkeypatch):
    for name in [n for n in os.environ if n.startswith("SLURM")]:
        monkeypatch.delenv(name)
    with pytest.raises(ConfigError, match="torchrun or Slurm starts the ranks of several hosts"):
        place_of_this_host(2, 4)
    for name, value in {"NNODES": "1", "NODEID": "0", "JOB_ID": "7"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    monkeypatch.setenv("SLURM_LAUNCH_NODE_IPADDR", "10.0.0.1")
    with pytest.raises(ConfigError, match=r"the Slurm job has 1 nodes; .* sbatch --nodes=2"):
        place_of_this_host(2, 4)
    monkeypatch.setenv("SLURM_NNODES", "2")
    monkeypatch.setenv("SLURM_NODEID", "1")
    meeting = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "20007"}
    assert place_of_this_host(2, 4) == (4, meeting)


@pytest.mark.parametrize("endpoint", ["", "host1", ":29400", "host1:http"])
def test_torchrun_has_to_know_where_hosts_meet(run, work, endpoint):
    with torchrun(Host(endpoint), run, work) as process:
        codes, (err,) = ended([process])
    assert codes == [2]
    assert "HOST:PORT" in err


def plain_torchrun(ranks: int, run: Result, work: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}"]
    return subprocess.run(
        [*command, "-m", "llmexp.train", str(run.folder)], cwd=work, env=variables(),
        capture_output=True, text=True, timeout=HANG_S,
    )  # fmt: skip


@pytest.mark.slow
def test_plain_torchrun_does_as_well(run, work):
    done = plain_torchrun(2, run, work)
    assert done.returncode == 0, done.stderr
    same(run, work)


def ranks(number: int, run: Result, work: Path, here: Host, **last: str) -> list[str]:
    """Starts ranks as any launcher does, the last one with the variables of `last`, and waits for
    them to refuse; what each said."""
    address, _, port = here.endpoint.partition(":")
    started = []
    for rank in range(number):
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(number)}
        env = variables(**place, RUN=str(run.folder))
        env |= {"MASTER_ADDR": address, "MASTER_PORT": port} | (last if rank == number - 1 else {})
        started.append(forks.start("llmexp.train", env["RUN"], cwd=work, env=env, **PIPES))
    # a rank that waits, waits for 600 s
    said = [process.communicate(timeout=HANG_S)[1] for process in started]
    assert [process.returncode for process in started] == [2] * number, said
    assert not (run.folder / "metrics.jsonl").exists()
    assert not (run.folder / "checkpoints").exists()
    return said


@pytest.mark.slow
def test_a_world_of_another_size_is_refused_on_every_rank(here, run, work):
    why = "parallelism.nproc_per_node=2 x 1: 3 ranks were started, but the run's parallelism has 2"
    assert all(why in err for err in ranks(3, run, work, here))
    done = plain_torchrun(3, run, work)  # which ends the others as soon as one refuses
    assert done.returncode == 1
    assert why in done.stderr
    assert "exitcode  : 2 " in done.stderr


@pytest.mark.fresh
def test_ranks_with_another_source_are_refused(here, run, work, tmp_path):
    for folder in ("llmexp", "conf"):
        shutil.copytree(ROOT / folder, tmp_path / "source" / folder)
    with open(tmp_path / "source" / "llmexp" / "optim" / "clip.py", "a") as f:
        f.write("# another comment\n")
    path = f"{tmp_path / 'source'}{os.pathsep}{ASSETS}"
    said = ranks(2, run, work, here, PYTHONPATH=path)
    assert all("rank 0 has another llmexp source than rank 1" in err for err in said)


def test_ranks_with_another_config_are_refused(here, run, work, tmp_path):
    shutil.copytree(run.folder, tmp_path / "copy")
    amend(tmp_path / "copy/config.yaml", parallelism={"max_restarts": 1})
    said = ranks(2, run, work, here, RUN=str(tmp_path / "copy"))
    assert all("rank 0 has another config than rank 1" in err for err in said)


@pytest.mark.parametrize("hosts", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("by", ["rows", "config"])
def test_a_refused_resume_leaves_all_but_its_logs_and_its_status(work, tmp_path, hosts, by):
    """By torchrun on one host, or on two nodes of Slurm: the status alone tells why there."""
    run = Result(0, "", "", shutil.copytree(work / "whole", tmp_path / "run"))
    two = {"nnodes": hosts, "nproc_per_node": 2 // hosts}
    amend(run.folder / "config.yaml", parallelism=two)
    rundir.write_status(run.folder, "preempted")
    if by == "rows":
        (run.folder / "layers.jsonl").write_text("no row\n")
    else:
        amend(run.folder / "config.yaml", optimizer={"lr": 1.0})
    before = contents(run.folder)
    if hosts == 1:
        assert plain_torchrun(2, run, work).returncode == 1
    else:
        with nodes(run, work, 0, 1) as started:
            assert 2 in ended(started)[0]
    after = contents(run.folder)
    changed = {p for p in before | after if before.get(p) != after.get(p)}
    status = run.folder / "status.json"
    assert {p for p in changed if p.parent.name != "logs"} == {status}
    found = run.json("status.json")
    assert (found["state"], found["exit_code"]) == ("failed", 2)
    assert ("is not a row" if by == "rows" else "is another run") in found["error"]
