"""How fast text becomes tokens: MB/s and peak memory of preparing 100 MB of Python source text.

    python tests/benchmarks/bench_prepare.py [megabytes] [tokenizer ...]

Each preparation is a process of its own, so that the peaks do not mix. gpt2 needs its files:
TIKTOKEN_CACHE_DIR.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import tempfile
import time
from itertools import cycle
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def make_text(path: Path, megabytes: int) -> None:
    """The standard library's sources, over and over, as one file."""
    library = Path(sysconfig.get_path("stdlib"))
    sources = [p.read_bytes() for p in sorted(library.glob("*.py"))]
    left = megabytes * 1_000_000
    with open(path, "wb") as file:
        for text in cycle(sources):
            if left <= 0:
                return
            cut = text[:left]
            while cut and cut[-1] & 0xC0 == 0x80:  # the file ends between characters
                cut = cut[:-1]
            file.write(cut)
            left -= len(text)


def measure(path: str, tokenizer: str, cache: str) -> None:
    """Prepares twice (the second time from the cache) and prints a line."""
    sys.path.insert(0, str(ROOT))
    from llmexp.data import sources, tokenizers

    encoding = tokenizers.byte_level() if tokenizer == "bytes" else tokenizers.pretrained(tokenizer)
    seconds = []
    for _ in range(2):
        started = time.perf_counter()
        corpus = sources.text(
            train_files=path,
            val_files=None,
            tokenizer=encoding,
            val_ratio=0.1,
            max_tokens=None,
            seed=0,
            cache_dir=cache,
        )
        seconds.append(time.perf_counter() - started)
    status = Path("/proc/self/status")
    peak = (
        next((line.split()[1] for line in status.open() if line.startswith("VmHWM")), None)
        if status.exists()
        else None
    )
    size = Path(path).stat().st_size / 1e6
    memory = f"peak memory {int(peak) / 1024:.0f} MiB" if peak else "peak memory unknown"
    print(
        f"{tokenizer:12} {size:6.0f} MB -> {len(corpus.train) + len(corpus.val or ''):>12,} tokens  "  # noqa: E501
        f"{seconds[0]:6.2f} s = {size / seconds[0]:6.1f} MB/s  again {seconds[1]:.3f} s  {memory}",
        flush=True,
    )


def main(megabytes: int = 100, *names: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "text.txt")
        make_text(path, megabytes)
        for name in names or ("bytes", "gpt2"):
            subprocess.run(
                [sys.executable, __file__, "--one", str(path), name, str(Path(folder, "cache"))],
                check=False,
            )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        measure(*sys.argv[2:5])
    else:
        main(*map(int, sys.argv[1:2]), *sys.argv[2:])
