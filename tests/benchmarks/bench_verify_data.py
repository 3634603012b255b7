"""How fast `llmexp verify data` reads: MB/s of a warm token file, beside a bare loop with the same
sha256 and maximum.

    python tests/benchmarks/bench_verify_data.py [megabytes]

One process, one thread; the figures are per second of processor time, and of the wall beside it.
The limit is 500 MB/s for the whole of it (sha256, range, order), without the start of the
interpreter and the import of torch.
"""

from __future__ import annotations

import hashlib
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np

from llmexp.data.sources import tokens
from llmexp.verify import data as proof

VOCAB, LENGTH = 50257, 1024
LEAST_MB_PER_S = 500


def make_tokens(path: Path, megabytes: int) -> None:
    """Write random uint16 ids."""
    rng = np.random.default_rng(0)
    with open(path, "wb") as file:
        for _ in range(megabytes // 10):
            file.write(rng.integers(0, VOCAB, 5_000_000, dtype=np.uint16).data)


def bare(path: Path) -> None:
    """What cannot be left out: the digest and the largest id of each block."""
    ids, digest, block = np.asarray(np.memmap(path, np.uint16, "r")), hashlib.sha256(), 1 << 19
    for start in range(0, len(ids), block):
        digest.update(ids[start : start + block].data)
        ids[start : start + block].max()


def best(work: Callable[[], Any], size: float, label: str) -> float:
    """MB per second of processor time, best of five."""
    cpu, wall = [], []
    for _ in range(5):
        began = time.process_time(), time.perf_counter()
        work()
        cpu.append(time.process_time() - began[0])
        wall.append(time.perf_counter() - began[1])
    print(
        f"{label:<34} {size / min(cpu):7.0f} MB/s per core, {size / min(wall):7.0f} MB/s of wall",
        flush=True,
    )
    return size / min(cpu)


def main(megabytes: int = 400) -> int:
    shm = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shm if os.access(shm, os.W_OK) else None) as name:
        folder = Path(name)
        path = folder / "ids.bin"
        make_tokens(path, megabytes)
        size = path.stat().st_size / 1e6
        corpus = tokens(
            train_files=str(path), val_files=None, dtype="uint16", val_ratio=0.1, max_tokens=None,
            cache_dir=str(folder), vocab_size=VOCAB, sequence_length=LENGTH,
        )  # fmt: skip
        n = corpus.train.n_sequences(LENGTH)

        def scan() -> None:
            checks = [proof.scan(s, VOCAB) for s in corpus.shards()]
            assert all(c.first_bad is None for c in checks)

        def order() -> None:
            assert all(proof.covers(epoch, 0, n, True).passed for epoch in (0, 1))

        def whole() -> None:
            scan()
            order()

        least = best(lambda: bare(path), size, "bare sha256 and maximum")
        best(scan, size, "sha256 and range")
        best(order, size, "order of two epochs")
        figure = best(whole, size, "all of it")
        print(f"ratio to the bare loop {figure / least:.2f}; limit {LEAST_MB_PER_S} MB/s per core")
        return 0 if figure >= LEAST_MB_PER_S else 1


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
