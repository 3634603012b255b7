"""A stranger's checkpoint and run folder: nothing in them is run, followed, or believed."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from llmexp import checkpoint, folder, saving
from llmexp.__main__ import run
from llmexp.compare.comparing import compare
from llmexp.compare.picture import write_png
from llmexp.compare.throughput import heat_maps
from llmexp.config import ConfigError, plain
from llmexp.metrics.console import Console
from llmexp.metrics.plot import plot_losses
from llmexp.metrics.tracker.local import Position, write_position
from llmexp.sweep import show
from llmexp.sweep.ledger import Entry, Ledger
from llmexp.sync import upload_command
from llmexp.train import worker
from llmexp.train.loop import export_trace
from tests.conftest import TINY, Result, llmexp
from tests.test_security import composed, home

__all__ = ["home"]  # a fixture


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(6.0).reshape(3, 2))


@pytest.fixture
def saved(tmp_path) -> Path:
    root = tmp_path / "run" / "checkpoints"
    root.mkdir(parents=True)
    pieces = saving.snapshot(Plain(), [], 0, 1, False)
    saving.write(root, 100, pieces)
    saving.commit(root, 100, pieces, {"note": [1, "two"]}, {}, 3)
    assert checkpoint.load(root / "step_00000100").step == 100
    return root / "step_00000100"


def rewrite(path: Path, **changes: object) -> None:
    """The manifest again, with the right hashes: whoever makes a bad checkpoint can hash."""
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["files"] = {n: checkpoint.fingerprint(path / n) for n in manifest["files"]}
    (path / "manifest.json").write_text(json.dumps(manifest | changes))


def bad_pieces(path: Path, **changes: object) -> None:
    """The header's account of the one tensor, changed."""
    file = path / "model.safetensors"
    with checkpoint.safe_open(file, framework="pt") as opened:
        metadata = opened.metadata()
    pieces = json.loads(metadata["pieces"])
    pieces["weight"] |= changes
    save_file(load_file(file), file, metadata=metadata | {"pieces": json.dumps(pieces)})
    rewrite(path)


def long_header(path: Path) -> None:
    (path / "model.safetensors").write_bytes((2**62).to_bytes(8, "little") + b"{}")
    rewrite(path)


def packed(path: Path) -> None:
    with zipfile.ZipFile(path / "state.pt", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", bytes(50_000_000))
    rewrite(path)


def linked(path: Path, name: str) -> None:
    moved = path.parent.parent / f"moved-{Path(name).name}"
    os.replace(path / name, moved)
    (path / name).symlink_to(moved)


DAMAGE = {
    "a link for a file": (lambda p: linked(p, "model.safetensors"), "is missing"),
    "a link for the manifest": (lambda p: linked(p, "manifest.json"), "reached by a link"),
    "a manifest of 20 MB": (lambda p: rewrite(p, more="x" * 20_000_000), "larger than"),
    "a manifest that nests": (lambda p: (p / "manifest.json").write_text("[" * 200_000), "unreadable"),
    "a file outside": (lambda p: rewrite(p, files={"/etc/passwd": {}}), "no file of a checkpoint"),
    "a file above": (lambda p: rewrite(p, files={"../../state.pt": {}}), "no file of a checkpoint"),
    "a header longer than the file": (long_header, "a header of"),
    "a packed state": (packed, "is packed"),
    "a shape of terabytes": (lambda p: bad_pieces(p, shape=[2**40, 2**40]), "do not add up"),
    "a shape that overflows": (lambda p: bad_pieces(p, shape=[2**62, 2**62]), "do not add up"),
    "a negative shape": (lambda p: bad_pieces(p, shape=[-3, -2]), "is no shape"),
    "an offset outside": (lambda p: bad_pieces(p, offset=[1, 0]), "do not add up"),
    "a dtype that is a function": (lambda p: bad_pieces(p, dtype="load"), "is no dtype"),
    "a shape that is text": (lambda p: bad_pieces(p, shape="32"), "is no shape"),
    "a step that is text": (lambda p: rewrite(p, step="100"), "no step or files"),
    "a version that is text": (lambda p: rewrite(p, format_version="2"), "no version"),
    "files that are a list": (lambda p: rewrite(p, files=["state.pt"]), "no step or files"),
    "a manifest that is a text": (lambda p: (p / "manifest.json").write_text('"x"'), "unreadable"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_bad_checkpoint_is_refused(saved, damage):
    make, says = DAMAGE[damage]
    make(saved)
    with pytest.raises(checkpoint.CheckpointError, match=says):
        checkpoint.load(saved)


def test_links_to_checkpoints_are_not_followed(saved, tmp_path):
    root = tmp_path / "other" / "checkpoints"
    root.mkdir(parents=True)
    (root / "step_00000200").symlink_to(saved)
    with pytest.raises(checkpoint.CheckpointError, match="all 1 checkpoints are damaged"):
        checkpoint.latest(root, print)
    whole = tmp_path / "third"
    whole.symlink_to(saved.parent)
    with pytest.raises(checkpoint.CheckpointError, match="is a link"):
        checkpoint.latest(whole, print)


def test_no_checkpoint_is_written_through_a_link(saved, tmp_path):
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "model.safetensors").write_text("precious")
    pieces = saving.snapshot(Plain(), [], 0, 1, False)
    link = saved.parent / ".step_00000200.tmp"
    link.symlink_to(victim)
    with pytest.raises(OSError, match="leads elsewhere by a link"):
        saving.write(saved.parent, 200, pieces)
    saving.clean(saved.parent)
    assert not link.is_symlink()
    assert (victim / "model.safetensors").read_text() == "precious"
    root = tmp_path / "whole"
    root.symlink_to(victim)
    (victim / ".step_00000001.tmp").mkdir()
    saving.clean(root)
    assert (victim / ".step_00000001.tmp").is_dir()
    with pytest.raises(OSError, match="leads elsewhere by a link"):
        saving.write(root, 200, pieces)


def test_damage_that_another_rank_has_found_is_named_here_too(saved):
    said: list[str] = []
    with pytest.raises(checkpoint.CheckpointError, match="all 1 checkpoints are damaged"):
        checkpoint.latest(saved.parent, said.append, lambda bad: True)
    assert said == ["checkpoint step_00000100 is damaged, as another rank found, and not used"]


def test_a_pipe_in_the_place_of_a_file_holds_nobody_up(tmp_path):
    for name in (".lock", "train.log"):
        os.mkfifo(tmp_path / name)
    assert not folder.is_locked(tmp_path)
    with pytest.raises(ConfigError, match="is a link or a pipe"):
        folder.opened(tmp_path / "train.log", "a")
    stream = io.StringIO()
    Console(tmp_path / "train.log", 3, stream=stream).line("a line")
    assert "cannot be written (it is a pipe); the run goes on\na line" in stream.getvalue()


@pytest.mark.parametrize("more", [{"step": 200, "files": {}}, {}, {"step": "x", "files": ["a"], "pages": 3}])
def test_a_newer_format_is_never_passed_over(saved, more):
    """Whatever else its manifest has, or has not."""
    newer = saved.with_name("step_00000200")
    newer.mkdir()
    version = checkpoint.FORMAT_VERSION
    (newer / "manifest.json").write_text(json.dumps({"format_version": version + 1, **more}))
    with pytest.raises(checkpoint.NewerFormat, match=f"version {version + 1}, this program reads version {version}"):
        checkpoint.latest(saved.parent, print)
    assert issubclass(checkpoint.NewerFormat, checkpoint.CheckpointError)


def test_pieces_may_not_overlap():
    def stored(offset: tuple[int, ...], size: tuple[int, ...]) -> checkpoint.Stored:
        return checkpoint.Stored(Path("x"), (8, 8), offset, size, torch.float32)

    rows, columns = [stored((i, 0), (1, 8)) for i in range(8)], [stored((0, i), (8, 1)) for i in range(8)]
    blocks = [stored((i, j), (4, 2)) for i in (0, 4) for j in (0, 2, 4, 6)]
    for pieces in (rows, columns, blocks):
        assert not checkpoint._overlapping(pieces)
        for i in range(len(pieces)):
            assert checkpoint._overlapping([*pieces[:i], *pieces[i + 1 :], pieces[(i + 3) % len(pieces)]])


@pytest.fixture
def victim(tmp_path) -> Path:
    (tmp_path / "victim").write_text("mine")
    return tmp_path / "victim"


@pytest.mark.parametrize("there", [True, False])
def test_nothing_is_written_through_a_link(victim, tmp_path, there):
    path = tmp_path / "strange"
    path.mkdir()
    if not there:
        victim.unlink()
    for name in (folder.LOG, folder.METRICS, folder.STATUS, ".lock", ".lock-ranks", "other.log"):
        (path / name).symlink_to(victim)
    for name in (".lock", ".lock-ranks"):
        with pytest.raises(ConfigError, match=f"{name}: is a link"), folder.locked(path, name):
            pass
    with pytest.raises(ConfigError, match=r"status.json: is a link"):
        folder._overwrite(path / folder.STATUS, "x" * 9)
    with contextlib.suppress(ConfigError):  # a link to rows is put out of the way by a file of the run's own
        folder.Rows(path / folder.METRICS, 3).append({"step": 3})
    stream = io.StringIO()
    console = Console(path / "other.log", 3, stream=stream)
    console.line("a line")
    console.close()
    assert (
        stream.getvalue()
        == f"WARNING: {path / 'other.log'} cannot be written (it is a link); the run goes on\na line\n"
    )
    worker.fail(path, 3, "text")
    assert victim.read_text() == "mine" if there else not victim.exists()


def test_what_is_put_in_place_goes_through_no_link(victim, tmp_path):
    """Neither the file nor what it is called while it is written, which a stranger may know."""
    path = tmp_path / "strange"
    path.mkdir()
    names = ("tracker.json", "loss.png", "throughput.png", "compare.png", "trace_step_00000001.json")
    for name in names:
        made = (f".{name}.tmp", f"{name}.tmp", f".{name}.tmp.png", f".{name}.{os.getpid()}.tmp")
        for link in (name, *made):
            (path / link).symlink_to(victim)
    write_position(path, Position("id", 3, 1))
    plot_losses([{"tokens_seen": n, "train/loss": 3.0 - n} for n in range(3)], path / "loss.png", "a run")
    heat_maps([{"tokens/s": 1.0, "micro-batch": 1, "accumulation": 1}], path / "throughput.png")
    write_png(compare([]), path / "compare.png")
    with torch.profiler.profile() as done:
        torch.ones(2).sum()
    export_trace(done, path / "trace_step_00000001.json")
    assert victim.read_text() == "mine"
    for name in names:
        assert (path / name).stat().st_size > 10, name
        assert not (path / name).is_symlink(), name
        assert not [p for p in path.iterdir() if p.name not in names and not p.is_symlink()]


@pytest.fixture(scope="module")
def stopped(tmp_path_factory, tokens) -> Result:
    """A run that may be resumed, with a checkpoint of step 2."""
    result = llmexp(
        "train", *TINY, "data=tokens", f"data.train_files={tokens}", "train.max_steps=3", "train.stop_step=2",
        "train.log_every=1", "hydra.run.dir=run", cwd=tmp_path_factory.mktemp("stopped"),
    )  # fmt: skip
    assert result.code == 75, result.err
    return result


STATES = {
    "no scaler": lambda state: state.pop("scaler"),
    "no meter": lambda state: state.pop("meter"),
    "an unknown count": lambda state: state["progress"].update(evil=1),
    "another step": lambda state: state["progress"].update(step="2"),
    "no optimizers": lambda state: state.update(optimizers=[1]),
    "norms of text": lambda state: state.update(norms="x"),
}


def test_a_strange_state_is_refused_without_a_trace(stopped, tmp_path):
    """Each as the newest checkpoint of a copy; the ranks' part is done in this process, as a worker does it."""
    from llmexp.assemble import assemble
    from llmexp.config import build
    from llmexp.mesh import join
    from llmexp.train.loop import resume
    from llmexp.train.step import set_up

    parts = assemble(build(folder.read_config(stopped.folder)), write=False)
    joined = join("cpu", "single", 1, 1, 1, once=False, backend=None, timeout_s=60.0)
    for what, change in STATES.items():
        path = shutil.copytree(stopped.checkpoint(2), tmp_path / what / "step_00000002")
        state = torch.load(path / "state.pt", weights_only=True)
        change(state)
        torch.save(state, path / "state.pt")
        rewrite(path)
        with pytest.raises(checkpoint.CheckpointError, match=r"state\.pt is not the state of this run"):
            resume(set_up(parts, joined), checkpoint.load(path))


def test_a_strangers_links_and_state_from_the_command_line(stopped, victim, tmp_path):
    path = shutil.copytree(stopped.folder, tmp_path / "run")
    (path / ".lock").unlink()
    (path / ".lock").symlink_to(victim)
    (path / folder.LOG).unlink()
    (path / folder.LOG).symlink_to(victim)
    refused = llmexp("resume", "run", cwd=tmp_path)
    assert refused.code == 2
    assert ".lock: is a link or a pipe, which is not written to" in refused.err
    (path / ".lock").unlink()
    newest = path / "checkpoints" / "step_00000002"
    state = torch.load(newest / "state.pt", weights_only=True)
    del state["scaler"]
    torch.save(state, newest / "state.pt")
    rewrite(newest)
    refused = llmexp("resume", "run", cwd=tmp_path)
    assert refused.code == 2
    assert "state.pt is not the state of this run: KeyError('scaler')" in refused.err
    assert "train.log cannot be written (it is a link); the run goes on" in refused.out
    assert "Traceback" not in refused.err
    assert victim.read_text() == "mine"


PLAIN = ["metrics.jsonl", "status.json", "run.json", "config.yaml", "tracker.json", "sweep.json"]


@pytest.mark.parametrize("name", [*PLAIN, "manifest.json", "state.pt"])
def test_a_file_without_an_end_holds_no_command_up(saved, tmp_path, capsys, name):
    path = saved.parent.parent
    config = plain(composed(*TINY, "data=synthetic", "data.n_tokens=5000"))
    whole = {"config.yaml": config, "run.json": {}, "status.json": {"state": "finished"}, "metrics.jsonl": {"step": 1}}
    for other, value in whole.items():
        (path / other).write_text(json.dumps(value) + "\n")
    if name == "state.pt":  # which the manifest may leave out
        rewrite(saved, files={n: checkpoint.fingerprint(saved / n) for n in os.listdir(saved) if n.endswith("tensors")})
        with pytest.raises(checkpoint.CheckpointError, match=r"state\.pt is missing"):
            checkpoint.load(saved)
    for pipe in (True, False):
        file = path / name if name in PLAIN else saved / name
        file.unlink(missing_ok=True)
        if pipe:
            os.mkfifo(file)
        else:
            file.symlink_to("/dev/zero")
        for command in (
            ["runs", str(path)],
            ["runs", "--remove-checkpoints", str(path)],
            ["compare", str(path)],
            ["sample", str(path)],
            ["sync", "--dry-run", str(path)],
            ["resume", str(path)] if name == "sweep.json" else ["runs"],
        ):
            assert run(command) in (0, 1, 2)
            assert "Traceback" not in capsys.readouterr().err
        if name in ("tracker.json", "config.yaml"):  # the end of a sweep
            assert upload_command(path.parent) is None


FACTS = ["{", "[1]", "[" * 200_000, '{"max_steps": "x"}', '{"max_steps": true}', "{}"]
WRONG = ['"x"', "[1]", "{}", "NaN", "Infinity", "1e309", "true", "null", "-1e308", "9" * 400]


@pytest.mark.parametrize("wrong", WRONG, ids=[w[:9] for w in WRONG])
def test_damaged_figures_of_a_point_do_not_end_its_sweep(tmp_path, capsys, wrong):
    """Nor does the live table of a terminal, which shows what failed in an earlier command too."""
    states = ("queued", "running", "finished", "failed", "preempted", "infeasible")
    entries = [Entry(n, "x", f"{n}-x", None, [], state=s) for n, s in enumerate([*states, *states, "finished"])]
    ledger = Ledger(tmp_path, "s", "g", "local", [], [], points=entries)
    figures = ("final val/loss", "final train/loss", "latest val/loss", "mean tokens_per_sec")
    for n, entry in enumerate(entries):
        path = tmp_path / entry.folder
        path.mkdir()
        (path / "config.yaml").write_text("name: x\n")
        (path / "run.json").write_text(FACTS[n % len(FACTS)])
        summary = wrong if n % 2 else "{" + ", ".join(f'"{name}": {wrong}' for name in figures) + "}"
        more = f'"summary": {summary}, "started": {wrong}, "ended": {wrong}, "exit_code": {wrong}, "error": {wrong}'
        (path / "status.json").write_text(f'{{"state": "{entry.state}", {more}}}' if n < 12 else "[" * 200_000)
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


LAUGHS = "\n".join(["a: &a [x, x, x, x, x, x, x, x, x]"] + [
    f"{n}: &{n} [*{p}, *{p}, *{p}, *{p}, *{p}, *{p}, *{p}, *{p}, *{p}]"
    for p, n in zip("abcdefghijkl", "bcdefghijklm", strict=True)
])  # fmt: skip
CONFIGS = {
    "python tags": ("x: !!python/object/apply:os.system ['touch canary']", "cannot be read"),
    "laughs": (LAUGHS, "more than 10,000 values"),
    "not yaml": ("a: [", "cannot be read"),
    "a list": ("- 1", "holds no config"),
    "binary": ("\x00\x01", "cannot be read"),
}


@pytest.mark.parametrize("what", CONFIGS)
def test_a_strangers_config_runs_nothing_and_takes_no_time(home, capsys, what):
    (home / "run").mkdir()
    text, says = CONFIGS[what]
    (home / "run" / "config.yaml").write_text(text)
    for command in (["sample", "run"], ["resume", "run"], ["compare", "run"], ["runs", "run"]):
        (home / "run" / "run.json").write_text("{}")
        code = run(command)
        out, err = capsys.readouterr()
        assert code == 2 or command[0] in ("compare", "runs"), out
        assert "Traceback" not in err
        assert says in err or command[0] in ("compare", "runs"), err
        assert not (home / "canary").exists()


def test_a_strangers_parts_are_not_called(home, capsys, saved):
    config = plain(composed(*TINY, "data=synthetic", "data.n_tokens=5000"))
    other = saved.parent.parent
    evil = {
        "model": {"_target_": "os.system", "command": "touch canary"},
        "tokenizer": {"_target_": "llmexp.data.tokenizers.os.system", "command": "touch canary"},
    }
    (other / "run.json").write_text(json.dumps({"sequence_length": 12}))
    for section, values in evil.items():
        (other / "config.yaml").write_text(json.dumps(config | {section: values}))
        assert run(["sample", str(other)]) == 2
        assert f"{section}._target_=" in capsys.readouterr().err
    assert not list(home.rglob("canary"))
