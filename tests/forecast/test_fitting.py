"""The micro-batch size for `auto`: which sizes are tried, which is taken, what is remembered."""

import dataclasses
import json

import pytest
import yaml

from llmexp.compose.forking import recut
from llmexp.config.convert import build
from llmexp.config.knobs import deciding_work
from llmexp.config.sections import plain
from llmexp.config.values import ConfigError
from llmexp.folders import remembered
from llmexp.forecast import fitting, memory
from llmexp.forecast.fitting import Died, with_size
from llmexp.modes import micro_batch
from llmexp.modes.micro_batch import cut
from llmexp.sweep.check import answer
from llmexp.system.child import how_it_died
from llmexp.train.assembly.assemble import Cache, assemble
from tests.conftest import TINY, llmexp
from tests.tools import composed

GIB = 2**30
AUTO = ["batch.real_batch_size=8", "batch.micro_batch_size=auto", "batch.memory_gib=8"]
KILLED = how_it_died(-9, stopped=False)  # the text where the host has no memory left
SMALL = [*TINY, "data=synthetic", "data.n_tokens=5000"]


@pytest.fixture
def probed(tmp_path, monkeypatch):
    """Let sizes take what `probed.takes` says: GiB and seconds for a sequence, or how they die."""
    monkeypatch.setenv("LLMEXP_CACHE_DIR", str(tmp_path))

    class Probed:
        takes: dict[int, tuple[float, float] | str]
        tried: list[int]

    def measured(config):
        batch = config.batch
        size, accumulation = batch.micro_batch_size, batch.gradient_accumulation_steps
        assert size * accumulation == batch.real_batch_size == 8
        Probed.tried.append(size)
        if isinstance(found := Probed.takes[size], str):
            raise Died(found)
        return {"peak_bytes": found[0] * GIB, "step_s": 8 * found[1]}

    Probed.tried, Probed.first = [], fitting._first
    monkeypatch.setattr(fitting, "_first", lambda parts, room, sizes: sizes[0])
    monkeypatch.setattr(fitting, "measured", measured)
    return Probed


NONE_FITS = r"length=12: does not fit at micro_batch_size 1: killed"
FAULT = "steps fail, whatever the size: a fault of the model"


@pytest.mark.parametrize(
    ("takes", "tried", "chosen"),
    [
        ({8: (7.9, 1.0), 4: (4, 1.0)}, [8, 4], 8),
        ({8: (7.9, 1.0), 4: (4, 0.5), 2: (2, 0.495)}, [8, 4, 2], 4),
        ({8: "ended by signal 9", 4: (8.1, 1.0), 2: (2, 1.0), 1: (1, 2.0)}, [8, 4, 2, 1], 2),
        ({8: KILLED, 4: KILLED, 2: (2, 1.0), 1: (1, 2.0)}, [8, 4, 2, 1], 2),
        ({8: (9, 1), 4: (9, 1), 2: "no memory", 1: (1, 2.0)}, [8, 4, 2, 1], 1),
        ({8: "none for 8", 4: "none for 4", 2: (8.2, 1), 1: "killed"}, [8, 4, 2, 1], NONE_FITS),
        (dict.fromkeys((8, 4, 2, 1), "a fault of the model"), [8, 4], FAULT),
    ],
)
def test_the_largest_that_fits_or_a_faster_one(probed, capsys, takes, tried, chosen):
    probed.takes = takes
    if isinstance(chosen, str):
        with pytest.raises(ConfigError, match=chosen):
            with_size(composed(*SMALL, *AUTO))
        assert probed.tried == tried
        return
    batch = with_size(composed(*SMALL, *AUTO)).batch
    assert (batch.micro_batch_size, batch.real_batch_size) == (chosen, 8)
    assert probed.tried == tried
    said = capsys.readouterr().err
    for size, found in takes.items():
        if isinstance(found, str):
            assert f"batch.micro_batch_size=auto: {size} does not fit: {found}" in said
    # it is known now, for runs of the same kind
    other = composed(*SMALL, *AUTO, "train.seed=5", "train.max_steps=9", "optimizer.lr=1")
    assert with_size(other).batch.micro_batch_size == chosen
    assert probed.tried == tried
    with_size(composed(*SMALL, *AUTO, "batch.sequence_length=11"))
    assert probed.tried == 2 * tried


def test_nothing_is_tried_that_is_far_too_much(probed, monkeypatch):
    monkeypatch.setattr(fitting, "_first", probed.first)
    monkeypatch.setattr(memory, "process_bytes", lambda threads: 0)
    long = ["batch.sequence_length=512", "model.max_position_embeddings=512"]
    small = ["batch.memory_gib=0.0012", "batch.real_batch_size=2"]
    with pytest.raises(ConfigError, match=r"length=512: does not fit at .* 1: one sequence takes"):
        with_size(composed(*SMALL, *AUTO, *long, *small))
    assert probed.tried == []


def test_a_run_on_several_hosts_is_queued_without_a_size(probed, tmp_path):
    """Its ranks find the size where they start; no figure in its folder claims one before."""
    config = plain(composed(*SMALL, *AUTO, "parallelism=ddp", "parallelism.nnodes=2"))
    request = {"config": config, "folder": str(tmp_path / "run"), "fixed": True}
    answer("queue", request, Cache(), {})
    batch = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["batch"]
    keys = ("micro_batch_size", "gradient_accumulation_steps", "real_batch_size")
    assert [batch[key] for key in keys] == ["auto", None, 8]
    assert not {*keys[:2]} & json.loads((tmp_path / "run" / "run.json").read_text()).keys()
    assert probed.tried == []


def test_points_of_a_sweep_are_probed_once_and_keep_their_size(probed, tmp_path):
    probed.takes = {8: (1, 1.0), 4: (1, 1.0)}
    for seed in (1, 2):
        config = plain(composed(*SMALL, *AUTO, f"train.seed={seed}"))
        request = {"config": config, "folder": str(tmp_path / str(seed)), "fixed": True}
        answer("check", request, None, {})
    assert probed.tried == [8, 4]
    (tmp_path / "1").mkdir()
    there = plain(with_size(build(config)))
    there["batch"]["micro_batch_size"] = 2
    (tmp_path / "1" / "config.yaml").write_text(yaml.safe_dump(there))
    parts = micro_batch.run(build(config), assemble, tmp_path / "1", None)
    assert parts.config.batch.micro_batch_size == 2
    parts = micro_batch.run(cut(build(config), 4), assemble, tmp_path / "1")
    assert parts.config.batch.micro_batch_size == 4  # which was asked for


def test_what_decides_memory_is_kept_apart(tmp_path, monkeypatch):
    monkeypatch.setenv("LLMEXP_CACHE_DIR", str(tmp_path))
    kind = deciding_work(composed(*SMALL), "cpu")
    remembered.remember("what", {"it": 1}, kind)
    free = ["optimizer.lr=1", "optimizer.weight_decay=0", "optimizer.beta1=0", "clip.max_norm=9"]
    same = composed(*SMALL, *free)
    assert remembered.remembered("what", deciding_work(same, "cpu")) == {"it": 1}
    for more in (
        "optimizer.eps=1", "clip.qk_limit=9", "+user.layers=2",
        "hooks=[{_target_: llmexp.hooks.some}]",
    ):  # fmt: skip
        other = deciding_work(composed(*SMALL, more), "cpu")
        assert remembered.remembered("what", other) is None
    # the user's functions and files may be other ones in the next process
    folder = {"_target_": "llmexp.models.hf.pretrained", "path": "folder"}
    hooks = {"hooks": [{"_target_": "mine.hook"}]}
    for own in ({"model": {"_target_": "mine.model"}}, {"model": folder}, hooks):
        own = kind | own
        remembered.remember("what", {"it": 2}, own)
        assert remembered.remembered("what", own) == {"it": 2}
        remembered._own.clear()
        assert remembered.remembered("what", own) is None


def test_a_fork_may_have_its_size_found():
    config = composed(*SMALL, *AUTO)
    batch = dataclasses.replace(config.batch, gradient_accumulation_steps=2)  # its parent's
    fork = dataclasses.replace(config.fork, run="there")
    assert recut(dataclasses.replace(config, fork=fork, batch=batch), []).batch == config.batch


def test_a_run_finds_its_size(tmp_path):
    auto = ["batch.real_batch_size=1", "batch.micro_batch_size=auto", "train.max_steps=6"]
    cache = {"LLMEXP_CACHE_DIR": str(tmp_path / "cache")}
    (tmp_path / "config.yaml").write_text("batch: {micro_batch_size: 7}")  # another run's
    ran = llmexp("train", *SMALL, *auto, cwd=tmp_path, **cache)
    assert ran.code == 0, ran.err
    assert "batch.micro_batch_size=auto: 1 fits: " in ran.err
    assert "measured before this run" in ran.out
    (folder,) = (tmp_path / "outputs").glob("*/*")
    batch = yaml.safe_load((folder / "config.yaml").read_text())["batch"]
    assert batch["micro_batch_size"] == 1
    assert not list(tmp_path.glob("**/llmexp-steps-*"))
