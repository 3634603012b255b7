"""Data files that are cut, rewritten, replaced, touched or deleted while they are in use, and
between two runs."""

import base64
import os
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from llmexp.data import remote
from llmexp.data.files import cut_files
from llmexp.data.sources import tokens as token_source
from llmexp.data.stream import Corpus, DataChanged, TokenStream
from tests.conftest import TINY, Result, llmexp, train
from tests.tools import exact, same_state

from .common import all_ids, text_corpus, token_corpus

N = 5000
LONG_AGO = (10**18, 10**18)


def ids(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 60, N).astype(np.uint16)


@pytest.fixture(params=["train.npy", "train.bin"])
def path(request, tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("LLMEXP_CACHE_DIR", str(tmp_path / "cache"))
    path = tmp_path / request.param
    write(path, ids())
    os.utime(path, ns=LONG_AGO)  # as data are
    return path


def write(path: Path, array: np.ndarray) -> None:
    np.save(path, array) if path.suffix == ".npy" else array.tofile(path)


def corpus(path: Path) -> Corpus:
    return token_corpus(str(path), vocab_size=60)


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


WRITTEN = "was written to while it was in use"
CUT = r"this token file was truncated from 10,\d+ to 300 bytes"
WAYS = {
    # what happens to the file: (whether other ids may be read then, what is printed)
    # a new time of its inode is not one of its content
    "nothing": (lambda p: os.chmod(p, 0o600), None, ""),
    "rewrite": (rewrite, True, WRITTEN),
    "rewrite, as rsync --inplace -t": (rewrite_and_set_the_time_back, True, WRITTEN),
    "append": (append, True, rf"{WRITTEN}, and has [\d,]+ bytes"),
    "truncate": (lambda p: os.truncate(p, 300), True, CUT),
    "touch": (lambda p: os.utime(p), True, WRITTEN),  # a new time may be new ids
    "replace": (replace, False, "was replaced while it was in use"),
    "delete": (lambda p: p.unlink(), False, "was deleted"),
    "rename and truncate": (cut_after_a_rename, True, CUT),
}


@pytest.mark.parametrize(("way", "harmful", "told"), WAYS.values(), ids=WAYS)
def test_what_happened_to_a_file_is_printed(path, way, harmful, told):
    """A cut file is an error wherever it is read, not a bus error. A run that starts after it reads
    the same data where the content is the same, whatever the time says."""
    opened = corpus(path)
    assert opened.check_content() == []
    way(path)
    if harmful:
        with pytest.raises(DataChanged, match=f"^{re.escape(str(path))}: .*{told}"):
            opened.check_content()
    else:
        found = opened.check_content()
        assert len(found) == (harmful is False)
        assert all(text.startswith(f"{path}: ") and re.search(told, text) for text in found), found
        assert all_ids(opened.train) == ids()[: len(opened.train)].tolist()  # as it was
    cut = told == CUT
    for read in (lambda s: s.read(N - 700, 10), lambda s: list(s.blocks(64))) if cut else ():
        with pytest.raises(DataChanged, match=rf"{path.name}: {CUT}"):
            read(opened.train)
    if path.exists() and not cut:
        now = corpus(path)
        alike = all_ids(now.train) + all_ids(now.val) == ids().tolist()
        assert (now.fingerprint == opened.fingerprint) == alike


def test_a_change_during_the_first_scan_is_reported(path, monkeypatch):
    """The state is taken when the files are opened, not when they have been read through; and one
    that is cut meanwhile is no bus error."""
    check, blocks = token_source.check_ids, TokenStream.blocks
    with monkeypatch.context() as patch:
        patch.setattr(token_source, "check_ids", lambda *args: (check(*args), rewrite(path)))
        with pytest.raises(DataChanged, match="was written to"):
            corpus(path).check_content()
    write(path, np.zeros(3 << 20, np.uint16))  # which is looked at in three pieces

    def cut_meanwhile(stream, most):
        for found in blocks(stream, most):
            yield found
            os.truncate(path, 300)

    monkeypatch.setattr(TokenStream, "blocks", cut_meanwhile)
    with pytest.raises(DataChanged, match="this token file was truncated from"):
        corpus(path)


def test_parts_and_arrays_in_memory_and_files_without_a_name(path):
    """A part knows the file of its stream; what is in memory does not change; what has no name may
    be cut too."""
    mapped = np.load(path, mmap_mode="r") if path.suffix == ".npy" else np.memmap(path, "<u2", "r")
    part = TokenStream([mapped]).part(100, 200).part(10, 20)
    assert all_ids(part) == ids()[110:120].tolist()
    assert [shard.name for shard in part.shards] == [str(path)]
    with open(path, "r+b") as file:
        path.unlink()
        opened = Corpus(TokenStream([ids(), mapped]), TokenStream([ids(1)]), "")
        assert (len(opened.shards()), opened.check_content(), opened.states()) == (3, [], {})
        file.truncate(300)
    for read in (opened.check_content, lambda: opened.train.read(N + 4000, 10)):
        with pytest.raises(DataChanged, match=CUT):
            read()


def test_only_files_that_are_shorter_are_named_after_a_bus_error(tmp_path):
    many = {str(tmp_path / f"{i}.bin"): 10 for i in range(7)}
    for i, name in enumerate(many):
        Path(name).write_bytes(b"1234" if i < 5 else b"1234567890+")
    told = cut_files(many | {str(tmp_path / "gone.bin"): 10})
    assert told.startswith(f"{tmp_path}/0.bin: this token file was truncated from 10 to 4 bytes")
    assert told.endswith("; and 2 more")
    assert cut_files({}) == ""


def test_a_text_that_changes_while_it_is_hashed_poisons_no_cache(tmp_path, monkeypatch):
    """Between the hash and the encoding: else the new tokens would lie in the cache under the hash
    of the old text."""
    texts = {"a.txt": "abcdefghijklmnopqrst", "v.txt": "uvwxyz" * 3}
    sha256_of = remote.sha256_of

    def opened() -> list[str]:
        found = text_corpus(f"{tmp_path}/a.txt", f"{tmp_path}/v.txt", cache_dir=f"{tmp_path}/cache")
        return [bytes(all_ids(stream)).decode() for stream in (found.train, found.val)]

    def put() -> None:
        for file, text in texts.items():
            (tmp_path / file).write_text(text)
            os.utime(tmp_path / file, ns=LONG_AGO)

    def hashed_then_changed(paths: list[Path]) -> list[str]:
        digests = sha256_of(paths)
        if any(p.name == name for p in paths):
            (tmp_path / name).write_text(texts[name][::-1])  # as long as before
        return digests

    for name in texts:
        put()
        with monkeypatch.context() as patch:
            patch.setattr(remote, "sha256_of", hashed_then_changed)
            with pytest.raises(DataChanged, match=f"^{tmp_path / name}: this file changed while"):
                opened()
    put()
    assert opened() == list(texts.values())


# One window per reading, so that not all have been read when the file is cut.
HOOKS = """
import os
from pathlib import Path
import numpy as np
from llmexp.data import sampler
sampler._BLOCK_TOKENS = 1
def cut(event, context):
    if event == "step_end" and context.step == 8 and not Path("done").exists():
        Path("done").touch()
        os.truncate("train.npy", 1000)
def rewrite(event, context):
    if event == "step_end" and context.step == 7:
        ids = np.load("train.npy", mmap_mode="r+")
        ids[:] = 1
        ids.flush()
def replace(event, context):
    if event == "step_end" and context.step == 3:
        os.link("train.npy", "other.npy")
        os.replace("other.npy", "train.npy") or os.rename("new.npy", "train.npy")
def bus_error(event, context):
    if event == "step_end" and context.step == 7:
        ids = np.load("train.npy", mmap_mode="r")
        os.truncate("train.npy", 0)
        ids[-1]  # between the look at the size and the reading, which a test cannot meet
"""
RUN = [
    *TINY, "train.max_steps=20", "train.log_every=1", "checkpoint.every=5", "train.eval_every=null",
    "data=tokens", "data.train_files=train.npy", "data.val_ratio=0", "--allow", "hooks_here",
]  # fmt: skip


def test_a_token_file_that_changes_under_a_run(tmp_path):
    """A file that is cut fails the run, which goes on once the file is back. A new time stops it at
    its next checkpoint, which is not saved; another file of that name is a warning; a run that the
    kernel ends for a cut file names the file."""
    whole = np.random.default_rng(0).integers(0, 60, 12 * 160 + 1).astype(np.uint16)
    (tmp_path / "hooks_here.py").write_text(HOOKS)

    def hooked(name: str):
        np.save(tmp_path / "train.npy", whole)
        np.save(tmp_path / "new.npy", whole[::-1])
        words = [f"hooks=[hooks_here.{name}]", f"hydra.run.dir={name}"]
        return llmexp("train", *RUN, *words, cwd=tmp_path)

    def resumed(name: str):
        return llmexp("resume", name, "--allow", "hooks_here", cwd=tmp_path)

    np.save(tmp_path / "train.npy", whole)
    undisturbed = train(tmp_path, "whole", *RUN[len(TINY) :])
    failed = hooked("cut")
    assert failed.code == 3, failed.err
    for text in (failed.err, failed.json("status.json")["error"]):
        assert "train.npy: this token file was truncated from" in text
        assert "Traceback" not in text
    assert failed.json("status.json")["state"] == "failed"
    assert not failed.checkpoint(20).exists()
    refused = resumed("cut")
    assert (refused.code, "train.npy" in refused.err) == (2, True)
    np.save(tmp_path / "train.npy", whole)
    assert resumed("cut").code == 0
    assert exact(failed) == exact(undisturbed)
    same_state(failed.checkpoint(20), undisturbed.checkpoint(20))

    stopped = hooked("rewrite")
    assert stopped.code == 3
    for text in (stopped.err, stopped.json("status.json")["error"]):
        assert "train.npy: this token file was written to while it was in use" in text
        assert "the steps since step 5 may have seen other data, and step 10 is not saved" in text
    assert "llmexp resume rewrite --allow hooks_here" in stopped.err
    assert [row["step"] for row in stopped.rows()] == list(range(1, 11))
    assert not stopped.checkpoint(10).exists()
    assert resumed("rewrite").code == 2  # other data
    (tmp_path / "rewrite" / "run.json").unlink()
    for _ in range(2):  # the checkpoints know too, also after it was written anew
        refused = resumed("rewrite")
        assert refused.code == 2
        assert "step_00000005: the data changed since the run started" in refused.err

    warned = hooked("replace")
    assert warned.code == 0, warned.err
    assert warned.out.count("train.npy: this token file was replaced") == 1

    killed = hooked("bus_error")
    assert killed.code == 3
    for text in (killed.err, killed.json("status.json")["error"]):
        assert "signal 7 (SIGBUS)" in text
        assert "train.npy: this token file was truncated from" in text


def pieces(pair: bytes) -> bytes:
    """Return a vocabulary of tiktoken: the bytes, and a pair of them."""
    known = [*(bytes([n]) for n in range(256)), pair]
    return b"".join(b"%s %d\n" % (base64.b64encode(one), n) for n, one in enumerate(known))


WORDS = np.random.default_rng(0).integers(97, 123, 4000).astype(np.uint8).tobytes()
OTHERS = WORDS.replace(b"a", b"b")
JSON = [b'{"text": "' + words + b'"}' for words in (WORDS, OTHERS)]
REPLACED = {
    "file.txt": (WORDS, OTHERS, ["data=text", "data.train_files=file.txt"]),
    "file.jsonl": (*JSON, ["data=corpus", "data.sources.x.files=file.jsonl"]),
    "file.bin": (WORDS, OTHERS, ["data=tokens", "data.train_files=file.bin",
                 "model.vocab_size=65536"]),
    "file.tiktoken": (pieces(b"ab"), pieces(b"ac"), ["data=text", "data.train_files=words.txt",
                      "tokenizer=file", "tokenizer.path=file.tiktoken"]),
}  # fmt: skip


@pytest.mark.parametrize("name", REPLACED)
def test_a_file_is_replaced_by_one_of_the_same_size_and_time(tmp_path, name):
    """What was prepared of the old one is not used, and no run goes on with another one. The files
    are links to where the data are."""
    given, other, data = REPLACED[name]
    path = tmp_path / "disk" / name
    path.parent.mkdir()
    os.symlink(path, tmp_path / name)
    (tmp_path / "words.txt").write_bytes(WORDS)
    settings = [*TINY, *data, *(["data.val_ratio=0"] if "data=corpus" not in data else [])]

    def command(*words: str) -> Result:
        return llmexp(*words, cwd=tmp_path, LLMEXP_CACHE_DIR=str(tmp_path / "cache"))

    def replace_by(content: bytes) -> None:
        """Write in place, as cp -p and rsync --inplace, or another file, as rsync -t."""
        new = path.with_suffix(".new") if name in ("file.bin", "file.jsonl") else path
        new.write_bytes(content)
        os.replace(new, path)
        os.utime(path, ns=LONG_AGO)

    def there() -> np.ndarray:
        assert command("verify", "data", *settings, "hydra.run.dir=proof").code == 0
        sums = (tmp_path / "proof/sha256.txt").read_text().splitlines()
        shutil.rmtree(tmp_path / "proof")
        return np.concatenate([np.fromfile(line.split("  ")[1], np.uint16) for line in sums])

    replace_by(given)
    run = ["train.max_steps=2", "train.stop_step=1", "hydra.run.dir=run"]
    assert command("train", *settings, *run).code == 75
    before = there()
    replace_by(other)
    refused = command("resume", "run", "train.stop_step=null")
    assert refused.code == 2
    assert "the data changed since the run started" in refused.err
    changed = {"file.jsonl": "sources.x", "file.tiktoken": "tokenizer_sha256"}
    assert f"; other now: {changed.get(name, f'train_files.{name}')}" in refused.err
    assert not np.array_equal(there(), before)
    replace_by(given)
    assert np.array_equal(there(), before)
    resumed = command("resume", "run", "train.stop_step=null")
    assert resumed.code == 0, resumed.err
