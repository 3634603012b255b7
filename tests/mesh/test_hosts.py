"""Several hosts: lost and brought back, cut off, missing, unlike each other. Two network namespaces
are two hosts."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import yaml

from llmexp.mesh.watch import rendezvous
from tests.conftest import ROOT, TINY, Result, environment, free_port, llmexp, train
from tests.tools import alive, exact, pids, weights

# 50 sequences, 8 a step, 30 steps; rows at each, checkpoints every 5.
SETTINGS = [
    "data=tokens", "data.val_ratio=0.1", "batch.real_batch_size=8", "train.max_steps=30",
    "train.log_every=1",
    "train.eval_every=10", "checkpoint.every=5", "checkpoint.keep=null", "optimizer.lr=0.01",
    "parallelism=ddp",
    "train.data_digest=true", "--allow", "slow", "hooks=[slow.wait]",
]  # fmt: skip
TWO_HOSTS = ["parallelism.nnodes=2", "parallelism.nproc_per_node=1"]
SLOW = """import os, time
def wait(event, context):
    time.sleep(float(os.environ.get("SLOW", 0)) if event == "step_start" else 0)
"""


@dataclass(frozen=True)
class Host:
    """A place to start agents in: this machine, or a namespace that `keeper` keeps alive."""

    endpoint: str
    keeper: int | None = None

    def command(self, *command: str) -> list[str]:
        enter = (
            ["nsenter", f"--target={self.keeper}", "--net", "--uts", "--mount"]
            if self.keeper
            else []
        )
        return [*enter, *command]

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


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


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
            keeper = stack.enter_context(
                subprocess.Popen(unshare, text=True, stdin=-1, stdout=-1, stderr=-1)
            )
            assert keeper.stdin
            assert keeper.stdout
            assert keeper.stderr
            stack.callback(keeper.stdin.close)  # before it is waited for
            if keeper.stdout.readline() != "up\n":
                pytest.skip(
                    f"two hosts need root, iproute2 and namespaces: {keeper.stderr.read().strip()}"
                )
            hosts.append(Host("llxt1:29400", keeper.pid))
        one, two = hosts
        stack.callback(one.kill)
        stack.callback(two.kill)
        cable = f"ip link add eth0 type veth peer name eth0 netns {two.keeper}"
        subprocess.run(one.command(*cable.split()), check=True, timeout=10)
        for number, host in enumerate(hosts, 1):
            for line in (f"ip addr add 10.78.0.{number}/24 dev eth0", "ip link set eth0 up"):
                subprocess.run(host.command(*line.split()), check=True, timeout=10)
        yield one, two


@pytest.fixture
def two_hosts(tmp_path) -> Iterator[tuple[Host, Host]]:
    missing = [tool for tool in ("ip", "unshare", "nsenter") if shutil.which(tool) is None]
    if os.geteuid() or missing:
        pytest.skip(
            f"two hosts need root and iproute2 (missing here: {', '.join(missing) or 'root'})"
        )
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
    (folder / "slow.py").write_text(SLOW)
    settings = [*SETTINGS, f"data.train_files=[{tokens}]"]
    queued = llmexp(
        "train", "--queue", *TINY, *settings, *TWO_HOSTS, "hydra.run.dir=queued", cwd=folder
    )
    assert queued.code == 0, queued.err
    assert "LLMEXP_RDZV_ENDPOINT=HOST1:29400" in queued.out
    train(folder, "whole", *settings, "parallelism.nproc_per_node=2")
    return folder


@pytest.fixture
def run(work, tmp_path) -> Result:
    """The queued run, untouched."""
    shutil.copytree(work / "queued", tmp_path / "run")
    return Result(0, "", "", tmp_path / "run")


def change(run: Result, **parallelism: object) -> None:
    """What `resume` would change: these keys change no results."""
    tree = yaml.safe_load((run.folder / "config.yaml").read_text())
    tree["parallelism"] |= parallelism
    (run.folder / "config.yaml").write_text(yaml.safe_dump(tree))


def variables(work: Path, **more: str) -> dict[str, str]:
    path = os.pathsep.join(map(str, (work, ROOT)))
    return (
        environment(PYTHON=sys.executable, PYTHONPATH=path, LLMEXP_ALLOW="slow", SLOW="0.1") | more
    )


@contextlib.contextmanager
def agent(host: Host, run: Result, work: Path, **env: str) -> Iterator[subprocess.Popen[str]]:
    """launchers/torchrun.sh on a host. What is left of it is killed at the end."""
    env = variables(work, LLMEXP_RDZV_ENDPOINT=host.endpoint, **env)
    command = host.command(str(ROOT / "launchers" / "torchrun.sh"), str(run.folder))
    process = subprocess.Popen(
        command,
        cwd=work,
        env=env,
        text=True,
        stdin=-3,
        stdout=-1,
        stderr=-1,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        for pid in alive(run.folder):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.communicate(timeout=10)


def until(condition: Callable[[], object], what: str, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"waited {seconds} s for {what}"
        time.sleep(0.05)


def until_row(run: Result, step: int, *agents: subprocess.Popen[str]) -> None:
    def there() -> bool:
        for process in agents:
            assert process.poll() is None, process.communicate()
        metrics = run.folder / "metrics.jsonl"
        return metrics.exists() and metrics.read_bytes().count(b"\n") >= step

    until(there, f"row {step}", 90)


def same(run: Result, work: Path) -> None:
    """The same rows, each once, and the same parameters as the run that stayed on one host, bit for
    bit."""
    whole = Result(0, "", "", work / "whole")
    assert exact(run) == exact(whole)
    ours, theirs = weights(run, 30), weights(whole, 30)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def failures(run: Result) -> list[str]:
    """What ranks reported, which is taken away: within 12 s it would count for the next loss."""
    reports = list(run.folder.glob("logs/failure-*.json"))
    texts = [json.loads(path.read_text())["text"] for path in reports]
    for path in (*reports, *run.folder.glob("logs/waiting/*")):
        path.unlink()
    return texts


def test_a_host_that_is_lost_and_comes_back(two_hosts, run, work):
    """First one that the others do not depend on, then the one where they meet."""
    one, two = two_hosts
    change(run, max_restarts=3)
    with agent(one, run, work) as first, agent(two, run, work) as second:
        until_row(run, 7, first, second)
        two.kill()
        with agent(two, run, work) as second_again:
            until_row(run, 14, first, second_again)
            told = failures(run)
            one.kill()
            with agent(one, run, work) as first_again:
                out, err = first_again.communicate(timeout=90)
                assert first_again.returncode == 0, err
                _, err = second_again.communicate(timeout=30)
                assert second_again.returncode == 0, err
    assert "resumed from step_000000" in out
    assert "lost llxt1:29400, where the hosts meet; waiting for it to come back" in err
    assert "all start again from the newest checkpoint" in err
    told += failures(run)
    assert told
    assert all(
        re.fullmatch(r"rank [01] was lost \(killed, or its host is down\)", text) for text in told
    ), told
    same(run, work)


def test_a_cut_between_hosts_ends_both(two_hosts, run, work):
    one, two = two_hosts
    change(run, timeout_s=5.0)
    with agent(one, run, work) as first, agent(two, run, work) as second:
        until_row(run, 7, first, second)
        subprocess.run(two.command("ip", "link", "set", "eth0", "down"), check=True, timeout=10)
        since = time.monotonic()
        said = [process.communicate(timeout=60)[1] for process in (first, second)]
        assert time.monotonic() - since < 5 + 30
    assert [first.returncode, second.returncode] == [3, 3]
    cut = (
        "all ranks waited 5 s for each other and none arrived; is the network between their hosts "
        "cut? llxt1 (rank 0), llxt2"
    )
    for err in [*said, run.json("status.json")["error"]]:
        # which host has which rank is chance
        assert cut in err.replace("llxt1 (rank 1)", "llxt1 (rank 0)")
        assert "Traceback" not in err


@pytest.mark.slow
def test_a_killed_agent_takes_its_rank_with_it(here, run, work):
    """And with it all others: they stop with a checkpoint."""
    with agent(here, run, work) as first, agent(here, run, work) as second:
        until_row(run, 7, first, second)
        (rank,) = (p for p in alive(run.folder) if parent(p) == second.pid)
        second.kill()
        until(lambda: rank not in alive(run.folder), "its rank to go", 10)
        _, err = first.communicate(timeout=40)
        assert alive(run.folder) == []
    assert first.returncode == 75, err
    status = run.json("status.json")
    assert status["state"] == "preempted"
    assert run.checkpoint(status["summary"]["steps"]).is_dir()


@pytest.mark.slow
def test_a_start_too_many_leaves_the_run_alone(here, run, work):
    """A third agent for two hosts, as after a forgotten terminal: it finds nobody, and the two
    train on."""
    change(run, start_timeout_s=12.0)
    with agent(here, run, work, SLOW="3") as first, agent(here, run, work, SLOW="3") as second:
        until_row(run, 1, first, second)
        with agent(here, run, work) as third:
            _, err = third.communicate(timeout=60)
            assert third.returncode == 2, err
            assert "by its records this run is running, and it was left untouched" in err
            status = run.json("status.json")
            assert (status["state"], status["error"]) == ("running", None)
            # longer than anybody would wait to end them
            until_row(run, len(run.rows()) + 4, first, second)


@pytest.mark.slow
def test_a_host_that_never_comes_is_missed(here, run, work, tmp_path):
    """By the host where they were to meet, and by one that waits for that host."""
    change(run, start_timeout_s=5.0)
    shutil.copytree(run.folder, tmp_path / "other")
    other, absent = Result(0, "", "", tmp_path / "other"), Host("host1.invalid:29400")
    since = time.monotonic()
    with agent(here, run, work) as first, agent(absent, other, work) as second:
        for process, host, result in ((first, here, run), (second, absent, other)):
            out, err = process.communicate(timeout=60)
            assert process.returncode == 3
            told = (
                f"1 of 2 hosts came to {host.endpoint} within 5 s: {socket.gethostname()}; "
                "missing: 1 more"
            )
            assert told in err
            assert "Traceback" not in out + err
            status = result.json("status.json")
            assert status["state"] == "failed"
            assert told in status["error"]
    assert time.monotonic() - since < 40


def test_an_agent_that_waits_for_a_host_can_be_stopped(here, run, work):
    with agent(here, run, work) as process:
        until(lambda: list(run.folder.glob("logs/hosts/*")), "the agent")
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=20)
    assert process.returncode == 130


@pytest.mark.parametrize("endpoint", [None, "host1", ":29400", "host1:http"])
def test_hosts_have_to_know_where_they_meet(monkeypatch, endpoint):
    for name in [n for n in os.environ if n.startswith(("LLMEXP_RDZV", "SLURM"))]:
        monkeypatch.delenv(name)
    if endpoint is not None:
        monkeypatch.setenv("LLMEXP_RDZV_ENDPOINT", endpoint)
    said = (
        f"LLMEXP_RDZV_ENDPOINT={endpoint}: HOST:PORT"
        if endpoint
        else "nothing says where .*LLMEXP_RDZV_ENDPOINT=host1"
    )
    with pytest.raises(ValueError, match=said):
        rendezvous(2, "run1")
    assert rendezvous(1, "run1")[0] == "localhost:0"


def torchrun(ranks: int, run: Result, work: Path) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        f"--nproc-per-node={ranks}",
        "-m",
        "llmexp.train",
    ]
    return subprocess.run(
        [*command, str(run.folder)],
        cwd=work,
        env=variables(work),
        capture_output=True,
        text=True,
        timeout=90,
    )


@pytest.mark.slow
def test_plain_torchrun_does_as_well(run, work):
    done = torchrun(2, run, work)
    assert done.returncode == 0, done.stderr
    same(run, work)


def ranks(number: int, run: Result, work: Path, here: Host, **last: str) -> list[str]:
    """Starts ranks as any launcher does, the last one with the variables of `last`, and waits for
    them to refuse; what each said."""
    address, _, port = here.endpoint.partition(":")
    started = []
    for rank in range(number):
        env = variables(
            work, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(number), RUN=str(run.folder)
        )
        env |= {"MASTER_ADDR": address, "MASTER_PORT": port} | (last if rank == number - 1 else {})
        command = [sys.executable, "-P", "-m", "llmexp.train", env["RUN"]]
        started.append(
            subprocess.Popen(command, cwd=work, env=env, text=True, stdin=-3, stdout=-1, stderr=-1)
        )
    said = [
        process.communicate(timeout=60)[1] for process in started
    ]  # a rank that waits, waits for 600 s
    assert [process.returncode for process in started] == [2] * number, said
    assert not (run.folder / "metrics.jsonl").exists()
    assert not (run.folder / "checkpoints").exists()
    return said


@pytest.mark.slow
def test_a_world_of_another_size_is_refused_on_every_rank(here, run, work):
    why = "parallelism.nproc_per_node=2 x 1: 3 ranks were started, but the run's parallelism has 2"
    assert all(why in err for err in ranks(3, run, work, here))
    done = torchrun(3, run, work)  # which ends the others as soon as one refuses
    assert done.returncode == 1
    assert why in done.stderr
    assert "exitcode  : 2 " in done.stderr


def test_ranks_with_another_source_are_refused(here, run, work, tmp_path):
    for folder in ("llmexp", "conf"):
        shutil.copytree(ROOT / folder, tmp_path / "source" / folder)
    with open(tmp_path / "source" / "llmexp" / "update" / "clip.py", "a") as f:
        f.write("# another comment\n")
    path = f"{work}{os.pathsep}{tmp_path / 'source'}"
    assert all(
        "rank 1 has another llmexp source than rank 0" in e
        for e in ranks(2, run, work, here, PYTHONPATH=path)
    )


def test_ranks_with_another_config_are_refused(here, run, work, tmp_path):
    shutil.copytree(run.folder, tmp_path / "copy")
    change(Result(0, "", "", tmp_path / "copy"), max_restarts=1)
    said = ranks(2, run, work, here, RUN=str(tmp_path / "copy"))
    assert all("rank 1 has another config than rank 0" in err for err in said)
