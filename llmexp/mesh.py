"""Process groups, wrapping and global sums. Besides checkpoints, the only file that touches torch.distributed."""

from __future__ import annotations

import contextlib
import datetime
import os
import signal
import sys
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


@dataclass(frozen=True)
class Mesh:
    """Who this process is. `dp_size` counts data-parallel replicas."""

    rank: int
    dp_rank: int
    dp_size: int
    device: torch.device

    @property
    def distributed(self) -> bool:
        return self.dp_size > 1


def join(device_type: str, dp_size: int, timeout_s: float) -> Mesh:
    """The mesh of this process; joins the process group that torchrun's environment describes when dp_size > 1.

    Raises ValueError when the launched world is not the configured one.
    """
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world != dp_size:
        raise ValueError(f"{world} processes were launched, but parallelism asks for {dp_size}")
    rank, local_rank = int(os.environ.get("RANK", "0")), int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device(device_type, local_rank) if device_type == "cuda" else torch.device(device_type)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if dp_size > 1:
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=datetime.timedelta(seconds=timeout_s))
    return Mesh(rank, rank, dp_size, device)


def wrap(mesh: Mesh, module: nn.Module) -> nn.Module:
    """The module to train: DDP over more than one replica. The wrapped module's parameters stay the same objects."""
    if not mesh.distributed:
        return module
    ids = [mesh.device.index] if mesh.device.type == "cuda" else None
    return nn.parallel.DistributedDataParallel(
        module, device_ids=ids, broadcast_buffers=False, gradient_as_bucket_view=True
    )


def no_sync(mesh: Mesh, module: nn.Module, last: bool) -> contextlib.AbstractContextManager[Any]:
    """Around forward *and* backward of every micro-batch but the last: the reduction happens once per step.

    Around the backward alone it does nothing, silently: DDP decides in the forward pass.
    """
    return contextlib.nullcontext() if last or not mesh.distributed else module.no_sync()  # type: ignore[operator]


def total(mesh: Mesh, value: Tensor) -> Tensor:
    """Sum over replicas, in place."""
    if mesh.distributed:
        dist.all_reduce(value)
    return value


def any_rank(mesh: Mesh, flag: bool) -> bool:
    """Whether the flag is set on any rank; the same answer everywhere."""
    if not mesh.distributed:
        return flag
    value = torch.tensor(int(flag))  # on the CPU: its group is gloo, no device has to wait
    dist.all_reduce(value, dist.ReduceOp.MAX)
    return bool(value)


def ranks_where(mesh: Mesh, flag: bool) -> list[int]:
    """The data-parallel ranks on which the flag is set; the same answer everywhere."""
    flags = torch.zeros(mesh.dp_size, dtype=torch.int64)
    flags[mesh.dp_rank] = int(flag)
    return total(mesh, flags).nonzero().flatten().tolist()


def barrier(mesh: Mesh) -> None:
    """Waits for all ranks."""
    any_rank(mesh, False)


def leave(mesh: Mesh) -> None:
    """Leaves the group. Free the wrapped module and the optimizer first, or gloo may abort at exit."""
    if mesh.distributed and dist.is_initialized():
        dist.destroy_process_group()


def launch_ranks(run_dir: str, ranks: int, threads: int) -> None:
    """Starts `python -m llmexp.train run_dir` once a rank under torch's elastic agent and waits for all of them.

    Rank 0 writes to the console; every rank's output is in run_dir/logs. Raises when a rank fails.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    def forward(number: int, frame: object) -> None:
        for task in Path("/proc/self/task").glob("*/children"):  # elastic's own way kills the ranks after 30 s
            for pid in task.read_text().split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), number)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2):
        signal.signal(number, forward)
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGQUIT"
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # a restarted group would read the old group's keys
    launch = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",  # a free port each time
        run_id=uuid.uuid4().hex,
        max_restarts=0,
        monitor_interval=0.1,
        logs_specs=DefaultLogsSpecs(log_dir=os.path.join(run_dir, "logs"), redirects=Std.ALL, tee={0: Std.ALL}),
    )
    if hasattr(launch, "signals_to_handle"):
        launch.signals_to_handle = "SIGQUIT"
    elastic_launch(launch, sys.executable)("-P", "-u", "-m", "llmexp.train", run_dir)
