"""What such a run took before is shown, and ranks that cannot fit into a host are refused."""

from argparse import Namespace

import pytest

from llmexp.__main__ import run
from llmexp.config.knobs import deciding_work
from llmexp.config.values import ConfigError
from llmexp.features.memory import assembly
from llmexp.folders.remembered import MEMORY, remember
from llmexp.train.assembly.assemble import Parts, assemble
from tests.conftest import TINY
from tests.tools import composed

SMALL = [*TINY, "data=synthetic", "data.n_tokens=5000"]


def parts_of(*overrides: str) -> Parts:
    return assemble(composed(*SMALL, "train.device=cpu", "precision=fp32", *overrides))


def test_ranks_that_cannot_fit_into_this_host_are_refused(monkeypatch):
    """At least parameters and gradients; with AdamW's moments and a checkpoint's copy a warning."""
    more = ["parallelism=fsdp", "parallelism.nproc_per_node=2", "checkpoint.async=true"]
    parts = parts_of(*more)
    size = 4 * parts.run.parameters

    def checked(there: float, of: Parts = parts) -> tuple[str, ...]:
        monkeypatch.setattr(assembly.hardware, "memory_bytes", lambda _: there)
        return assembly.admit(of).run.warnings

    assert checked(7.01 * size) == parts.run.warnings  # 4, and 3 of the copy
    assert "2 ranks may not fit" in checked(6.99 * size)[-1]
    assert len(checked(2.01 * size)) == len(parts.run.warnings) + 1
    with pytest.raises(ConfigError, match="parameters and gradients of 2 ranks take") as refused:
        checked(1.99 * size)
    assert refused.value.key == "train.check_memory"
    assert str(refused.value).endswith("; train.check_memory=false starts it all the same")
    off = parts_of(*more, "train.check_memory=false")
    assert checked(1, off) == off.run.warnings


def test_a_plan_shows_what_such_a_run_took_before(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("LLMEXP_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    parts = parts_of()
    remember(MEMORY, {"peak_bytes": 2**30}, deciding_work(parts.config, parts.run.device_name))
    assert run(["plan", *SMALL, "train.device=cpu", "precision=fp32"]) == 0
    assert "1 GiB a rank at its peak, measured before" in " ".join(capsys.readouterr().out.split())


def test_notes_that_cannot_be_read_stop_no_run(tmp_path, monkeypatch):
    config, here = composed(*SMALL), Namespace(device_name="cpu")
    monkeypatch.setenv("LLMEXP_CACHE_DIR", "~nobody-of-this-name/cache")  # RuntimeError
    remember(MEMORY, {"peak_bytes": 1}, deciding_work(config, "cpu"))
    assert assembly.known(config, here) == {}
    monkeypatch.setenv("LLMEXP_CACHE_DIR", str(tmp_path))
    remember(MEMORY, {"peak_bytes": 2**30}, deciding_work(config, "cpu"))
    assert assembly.known(config, here)["memory"].startswith("1 GiB a rank")
    for file in (path for path in tmp_path.rglob("*") if path.is_file()):
        file.unlink()
        file.mkdir()
    assert assembly.known(config, here) == {}
