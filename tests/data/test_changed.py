"""Data files that are cut, rewritten, replaced, touched or deleted while they are in use, and
between two runs."""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from llmexp.data import remote, sources, tokenizers
from llmexp.data.files import cut_files
from llmexp.data.stream import Corpus, DataChanged, TokenStream
from tests.conftest import HANG_S, TINY, llmexp, train
from tests.tools import exact, same_state

N = 5000


def ids(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 60, N).astype(np.uint16)


@pytest.fixture(params=["train.npy", "train.bin"])
def path(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LLMEXP_CACHE_DIR", str(tmp_path / "cache"))
    path = tmp_path / request.param
    write(path, ids())
    os.utime(path, ns=(10**18, 10**18))  # long ago, as data are
    return path


def write(path: Path, array: np.ndarray) -> None:
    np.save(path, array) if path.suffix == ".npy" else array.tofile(path)


def corpus(path: Path) -> Corpus:
    return sources.tokens(
        train_files=str(path), val_files=None, dtype=None, val_ratio=0.1, max_tokens=None,
        cache_dir=None,
        vocab_size=60, sequence_length=4,
    )  # fmt: skip


def rewrite(path: Path) -> None:
    with open(path, "r+b") as file:
        file.seek(-2, 2)
        file.write(b"\0\0")


def rewrite_and_set_the_time_back(path: Path) -> None:
    before = path.stat().st_mtime_ns
    rewrite(path)
    os.utime(path, ns=(before, before))


def append(path: Path) -> None:
    with open(path, "ab") as file:
        file.write(b"\0\0")


def replace(path: Path) -> None:
    other = path.with_name(f"other{path.suffix}")
    write(other, ids(1))
    os.replace(other, path)


def cut_after_a_rename(path: Path) -> None:
    os.replace(path, path.with_suffix(".old"))
    os.truncate(path.with_suffix(".old"), 300)


def nothing(path: Path) -> None:
    path.read_bytes()
    os.chmod(path, 0o600)  # a new time of its inode, not of its content


WRITTEN = "was written to while it was in use"
WAYS = {
    # what happens to the file: (whether other ids may be read then, what is printed)
    "nothing": (nothing, None, ""),
    "rewrite": (rewrite, True, WRITTEN),
    "rewrite, as rsync --inplace -t": (rewrite_and_set_the_time_back, True, WRITTEN),
    "append": (append, True, rf"{WRITTEN}, and has [\d,]+ bytes"),
    "truncate": (lambda p: os.truncate(p, 300), True, r"was cut from 10,\d+ to 300 bytes"),
    "touch": (lambda p: os.utime(p), True, WRITTEN),  # a new time may be new ids
    "replace": (replace, False, "was replaced while it was in use"),
    "delete": (lambda p: p.unlink(), False, "was deleted"),
    "rename and truncate": (cut_after_a_rename, True, "was cut from"),
}


@pytest.mark.parametrize(("way", "harmful", "told"), WAYS.values(), ids=WAYS)
def test_what_happened_to_a_file_is_printed(
    path: Path, way: Callable[[Path], object], harmful: bool | None, told: str
) -> None:
    opened = corpus(path)
    assert opened.check_content() == []
    way(path)
    if harmful:
        with pytest.raises(DataChanged, match=f"^{re.escape(str(path))}: .*{told}"):
            opened.check_content()
        return
    found = opened.check_content()
    assert len(found) == (harmful is False)
    assert all(text.startswith(f"{path}: ") and re.search(told, text) for text in found), found


def test_a_change_during_the_first_scan_is_reported(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The state is taken when the files are opened, not when they have been read through."""
    check = sources.check_ids
    monkeypatch.setattr(sources, "check_ids", lambda *args: (check(*args), rewrite(path)))
    with pytest.raises(DataChanged, match="was written to"):
        corpus(path).check_content()


def test_a_replaced_file_is_read_as_it_was(path: Path) -> None:
    opened = corpus(path)
    replace(path)
    assert opened.train.read(0, len(opened.train)).tolist() == ids()[: len(opened.train)].tolist()


@pytest.mark.parametrize(
    "read", [lambda s: s.read(N - 700, 10), lambda s: list(s.blocks(64))], ids=["read", "blocks"]
)
def test_a_cut_file_is_an_error_not_a_bus_error(
    path: Path, read: Callable[[TokenStream], object]
) -> None:
    opened = corpus(path)
    os.truncate(path, 300)
    with pytest.raises(
        DataChanged, match=rf"{path.name}: this token file was cut from 10,\d+ to 300 bytes"
    ) as caught:
        read(opened.train)
    # as such a run ends with it: no traceback, no second attempt
    assert isinstance(caught.value, OSError)
    assert isinstance(caught.value, ValueError)  # as such it is refused before a run


def test_a_file_that_is_cut_while_it_is_checked_is_an_error_not_a_bus_error(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(path, np.zeros(3 << 20, np.uint16))  # which is looked at in three pieces
    blocks = TokenStream.blocks

    def cut_meanwhile(stream: TokenStream, most: int) -> Iterator[tuple[int, np.ndarray]]:
        for found in blocks(stream, most):
            yield found
            os.truncate(path, 300)

    monkeypatch.setattr(TokenStream, "blocks", cut_meanwhile)
    with pytest.raises(DataChanged, match="this token file was cut from"):
        corpus(path)


def test_a_part_knows_the_file_of_its_stream(path: Path) -> None:
    stream = TokenStream(
        [np.load(path, mmap_mode="r")] if path.suffix == ".npy" else [np.memmap(path, "<u2", "r")]
    )
    part = stream.part(100, 200).part(10, 20)
    assert part.read(0, 10).tolist() == ids()[110:120].tolist()
    assert [s.name for s in part.shards] == [str(path)]


def test_arrays_in_memory_and_files_without_a_name_do_not_change(path: Path) -> None:
    mapped = np.memmap(path, "<u2", "r")
    path.unlink()
    opened = Corpus(TokenStream([ids(), mapped]), TokenStream([ids(1)]), "")
    assert len(opened.shards()) == 3
    assert opened.check_content() == []
    assert opened.states() == {}


def test_a_file_without_a_name_may_be_cut_too(tmp_path: Path) -> None:
    with open(tmp_path / "x.bin", "w+b") as file:
        file.write(ids().tobytes())
        file.flush()
        mapped = np.memmap(tmp_path / "x.bin", "<u2", "r")
        (tmp_path / "x.bin").unlink()
        opened = Corpus(TokenStream([mapped]), None, "")
        file.truncate(300)
    with pytest.raises(DataChanged, match=r"was cut from 10,000 to 300 bytes"):
        opened.check_content()
    with pytest.raises(DataChanged):
        opened.train.read(4000, 10)


def test_the_fingerprint_is_of_the_content_not_of_the_time(path: Path) -> None:
    before = corpus(path).fingerprint
    os.utime(path)
    assert corpus(path).fingerprint == before
    size = path.stat().st_size
    rewrite(path)
    os.utime(path, ns=(10**18, 10**18))
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (size, 10**18)
    assert corpus(path).fingerprint != before


@pytest.mark.parametrize("name", ["a.txt", "v.txt"])
def test_a_text_that_changes_while_it_is_hashed_poisons_no_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Between the hash and the encoding: else the new tokens would lie in the cache under the hash
    of the old text."""
    texts = {"a.txt": "abcdefghijklmnopqrst", "v.txt": "uvwxyz" * 3}

    def opened() -> list[list[int]]:
        found = sources.text(
            train_files=str(tmp_path / "a.txt"), val_files=str(tmp_path / "v.txt"),
            tokenizer=tokenizers.byte_level(),
            val_ratio=0.1, max_tokens=None, seed=0, cache_dir=str(tmp_path / "cache"),
        )  # fmt: skip
        assert found.val is not None
        return [s.read(0, len(s)).tolist() for s in (found.train, found.val)]

    def put() -> None:
        for file, text in texts.items():
            (tmp_path / file).write_text(text)
            os.utime(tmp_path / file, ns=(10**18, 10**18))

    put()
    sha256_of = remote.sha256_of

    def hashed_then_changed(paths: list[Path]) -> list[str]:
        digests = sha256_of(paths)
        if any(p.name == name for p in paths):
            (tmp_path / name).write_text(texts[name][::-1])  # as long as before
        return digests

    with monkeypatch.context() as patch:
        patch.setattr(remote, "sha256_of", hashed_then_changed)
        with pytest.raises(
            DataChanged,
            match=rf"^{tmp_path / name}: this file changed while it was prepared",
        ):
            opened()
    put()
    assert [bytes(ids).decode() for ids in opened()] == list(texts.values())


def test_who_was_cut_is_known_after_a_bus_error(path: Path) -> None:
    """The one race that is left: a file is cut between the look at its size and the reading of a
    page."""
    program = f"""
import sys, os, json
sys.path.insert(0, {str(Path(__file__).resolve().parents[2])!r})
import numpy as np
from llmexp.data.stream import Corpus, Shard, TokenStream
corpus = Corpus(TokenStream([np.memmap({str(path)!r}, np.uint16, "r")]), None, "")
print(json.dumps(corpus.states()), flush=True)
Shard.check_size = lambda shard: os.truncate({str(path)!r}, 300)
corpus.train.read(4500, 100)
"""
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=HANG_S
    )
    assert ended.returncode == -signal.SIGBUS
    states = json.loads(ended.stdout)
    told = cut_files(states)
    assert told.startswith(f"{path}: this token file was cut from 10,")
    assert "to 300 bytes" in told


def test_files_that_are_not_shorter_are_not_named(path: Path) -> None:
    states = corpus(path).states()
    append(path)
    assert cut_files(states) == ""
    path.unlink()
    assert cut_files(states) == ""
    assert cut_files({}) == ""
    many = {str(path.with_name(f"{i}.bin")): 10 for i in range(5)}
    for name in many:
        Path(name).write_bytes(b"1234")
    assert cut_files(many).endswith("; and 2 more")


RUN = [
    *TINY, "train.max_steps=20", "train.log_every=5", "checkpoint.every=5", "train.eval_every=null",
    "data=tokens", "data.train_files=train.npy", "data.val_files=val.npy",
]  # fmt: skip
# One window per reading, so that not all have been read when the file is cut.
HOOK = """
import os
from pathlib import Path
from llmexp.data import sampler
sampler._BLOCK_TOKENS = 1
def cut(event, context):
    if event == "step_end" and context.step == 8 and not Path("done").exists():
        Path("done").touch()
        os.truncate("train.npy", 1000)
"""


def test_a_token_file_cut_under_a_run(tmp_path: Path) -> None:
    whole = np.random.default_rng(0).integers(0, 60, 12 * 160 + 1).astype(np.uint16)
    np.save(tmp_path / "train.npy", whole)
    np.save(tmp_path / "val.npy", whole[:400])
    (tmp_path / "cutting.py").write_text(HOOK)
    undisturbed = train(tmp_path, "whole", *RUN)

    failed = llmexp(
        "train",
        *RUN,
        "--allow",
        "cutting",
        "hooks=[cutting.cut]",
        "hydra.run.dir=cut",
        cwd=tmp_path,
    )
    assert failed.code == 3, failed.err
    for text in (failed.err, failed.json("status.json")["error"]):
        assert "train.npy: this token file was cut from" in text
        assert "Traceback" not in text
    assert failed.json("status.json")["state"] == "failed"
    assert "the last checkpoint is step_" in failed.err
    assert not failed.checkpoint(20).exists()

    refused = llmexp("resume", "cut", "--allow", "cutting", cwd=tmp_path)
    assert refused.code == 2
    assert "train.npy" in refused.err
    assert "Traceback" not in refused.err

    np.save(tmp_path / "train.npy", whole)
    resumed = llmexp("resume", "cut", "--allow", "cutting", cwd=tmp_path)
    assert resumed.code == 0, resumed.err
    assert exact(failed) == exact(undisturbed)
    same_state(failed.checkpoint(20), undisturbed.checkpoint(20))


WRITING = """
import os, signal
import numpy as np
def rewrite(event, context):
    if event == "step_end" and context.step == 7:
        ids = np.load("train.npy", mmap_mode="r+")
        ids[:] = 1
        ids.flush()
def replace(event, context):
    if event == "step_end" and context.step == 3:
        os.link("train.npy", "other.npy")
        os.replace("other.npy", "train.npy") or os.rename("new.npy", "train.npy")
def cut(event, context):
    if event == "step_end" and context.step == 7:
        os.truncate("train.npy", 1000)
        os.kill(os.getpid(), signal.SIGBUS)  # as reading there would
"""
SHORT = [
    *TINY, "train.max_steps=12", "checkpoint.every=5", "train.log_every=1", "train.eval_every=null",
    "data=tokens",
    "data.train_files=train.npy", "data.val_ratio=0", "--allow", "writing",
]  # fmt: skip


def test_a_token_file_written_to_under_a_run(tmp_path: Path) -> None:
    """A new time stops the run at its next checkpoint, which is not saved; another file of that
    name is a warning; a run that the kernel ends for a cut file names the file."""
    (tmp_path / "writing.py").write_text(WRITING)
    ids = np.random.default_rng(0).integers(0, 60, 8000).astype(np.uint16)
    np.save(tmp_path / "train.npy", ids)
    np.save(tmp_path / "new.npy", ids[::-1])

    stopped = llmexp("train", *SHORT, "hooks=[writing.rewrite]", "hydra.run.dir=a", cwd=tmp_path)
    assert stopped.code == 3
    for text in (stopped.err, stopped.json("status.json")["error"]):
        assert "train.npy: this token file was written to while it was in use" in text
        assert "the steps since step 5 may have seen other data, and step 10 is not saved" in text
    assert (
        "the last checkpoint is step_00000005; to go on: llmexp resume a --allow writing"
        in stopped.err
    )
    assert [row["step"] for row in stopped.rows()] == list(range(1, 11))
    assert not stopped.checkpoint(10).exists()
    assert llmexp("resume", "a", "--allow", "writing", cwd=tmp_path).code == 2  # other data
    (
        tmp_path / "a" / "run.json"
    ).unlink()  # the checkpoints know too, also after it was written anew
    for _ in range(2):
        refused = llmexp("resume", "a", "--allow", "writing", cwd=tmp_path)
        assert refused.code == 2
        assert "step_00000005: the data changed since the run started" in refused.err

    np.save(tmp_path / "train.npy", ids)
    warned = llmexp("train", *SHORT, "hooks=[writing.replace]", "hydra.run.dir=b", cwd=tmp_path)
    assert warned.code == 0, warned.err
    assert warned.out.count("train.npy: this token file was replaced") == 1

    np.save(tmp_path / "train.npy", ids)
    killed = llmexp("train", *SHORT, "hooks=[writing.cut]", "hydra.run.dir=c", cwd=tmp_path)
    assert killed.code == 3
    for text in (killed.err, killed.json("status.json")["error"]):
        assert "signal 7 (SIGBUS)" in text
        assert "train.npy: this token file was cut from" in text


def in_place(path: Path, content: bytes) -> None:
    path.write_bytes(content)  # as cp -p does, and rsync --inplace


def by_another_file(path: Path, content: bytes) -> None:
    other = path.with_suffix(".new")
    other.write_bytes(content)
    os.replace(other, path)  # as rsync -t and archives do


@pytest.mark.parametrize("put", [in_place, by_another_file])
@pytest.mark.parametrize("kind", ["text", "corpus", "tokens", "tokenizer"])
def test_a_file_is_replaced_by_one_of_the_same_size_and_time(
    tmp_path: Path, put: Callable[[Path, bytes], None], kind: str
) -> None:
    """What was prepared of the old one is not used, and no run goes on with another one. The files
    are links to where the data are."""
    words = np.random.default_rng(0).integers(97, 123, 4000).astype(np.uint8).tobytes()
    given = {"corpus": b'{"text": "' + words + b'"}', "tokens": words}.get(kind, words)
    other = given.replace(b"a", b"b")
    ending = "bin" if kind == "tokens" else "txt"
    path, data = tmp_path / f"disk/file.{ending}", ["data=text", "data.train_files=file.txt"]
    if kind == "corpus":
        data = ["data=corpus", "data.sources.x.files=file.txt"]
    elif kind == "tokens":
        data = ["data=tokens", "data.train_files=file.bin", "model.vocab_size=65536"]
    elif kind == "tokenizer":
        ranks = [f"{base64.b64encode(bytes([n])).decode()} {n}" for n in range(256)]
        ranks += [f"{base64.b64encode(b).decode()} {256 + n}" for n, b in enumerate((b"ab", b"cd"))]
        given = "\n".join(ranks).encode()
        other = given.replace(b"YWI=", b"YWM=")
        path = tmp_path / "disk/file.tiktoken"
        (tmp_path / "file.txt").write_bytes(words)
        data += ["tokenizer=file", "tokenizer.path=file.tiktoken"]
    path.parent.mkdir()
    os.symlink(path, tmp_path / path.name)
    cache = {"LLMEXP_CACHE_DIR": str(tmp_path / "cache")}

    def replace_by(content: bytes) -> None:
        put(path, content)
        os.utime(path, ns=(10**18, 10**18))

    def ids() -> np.ndarray:
        ended = llmexp("verify", "data", *TINY, *data, "hydra.run.dir=proof", cwd=tmp_path, **cache)
        assert ended.code == 0, ended.err
        sums = (tmp_path / "proof/sha256.txt").read_text().splitlines()
        names = [line.split("  ")[1] for line in sums]
        shutil.rmtree(tmp_path / "proof")
        return np.concatenate([np.fromfile(name, np.uint16) for name in names])

    replace_by(given)
    run = [*TINY, *data, "data.val_ratio=0"] if kind != "corpus" else [*TINY, *data]
    run += ["train.max_steps=2", "train.stop_step=1", "hydra.run.dir=run"]
    assert llmexp("train", *run, cwd=tmp_path, **cache).code == 75
    before = ids()
    replace_by(other)
    refused = llmexp("resume", "run", "train.stop_step=null", cwd=tmp_path, **cache)
    assert refused.code == 2
    assert "the data changed since the run started" in refused.err
    assert not np.array_equal(ids(), before)
    replace_by(given)
    assert np.array_equal(ids(), before)
    resumed = llmexp("resume", "run", "train.stop_step=null", cwd=tmp_path, **cache)
    assert resumed.code == 0, resumed.err
