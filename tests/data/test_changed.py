"""Data files that are cut, rewritten, replaced, touched or deleted while they are in use, and
between two runs."""

import base64
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from llmexp.data import remote
from llmexp.data.files import cut_files
from llmexp.data.sources import tokens as token_source
from llmexp.data.sources.text import text as text_source
from llmexp.data.stream import Corpus, DataChanged, TokenStream
from llmexp.data.tokenizers.bytes import byte_level
from tests.conftest import HANG_S, ROOT, TINY, llmexp, train
from tests.tools import exact, same_state

from .common import all_ids, built

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
    return token_source.tokens(
        train_files=str(path), val_files=None, dtype=None, val_ratio=0.1, max_tokens=None,
        cache_dir=None, vocab_size=60, sequence_length=4,
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


WRITTEN = "was written to while it was in use"
WAYS = {
    # what happens to the file: (whether other ids may be read then, what is printed)
    # a new time of its inode is not one of its content
    "nothing": (lambda p: os.chmod(p, 0o600), None, ""),
    "rewrite": (rewrite, True, WRITTEN),
    "rewrite, as rsync --inplace -t": (rewrite_and_set_the_time_back, True, WRITTEN),
    "append": (append, True, rf"{WRITTEN}, and has [\d,]+ bytes"),
    "truncate": (lambda p: os.truncate(p, 300), True, r"was truncated from 10,\d+ to 300 bytes"),
    "touch": (lambda p: os.utime(p), True, WRITTEN),  # a new time may be new ids
    "replace": (replace, False, "was replaced while it was in use"),
    "delete": (lambda p: p.unlink(), False, "was deleted"),
    "rename and truncate": (cut_after_a_rename, True, "was truncated from"),
}


@pytest.mark.parametrize(("way", "harmful", "told"), WAYS.values(), ids=WAYS)
def test_what_happened_to_a_file_is_printed(path, way, harmful, told):
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


def test_the_fingerprint_is_of_the_content_not_of_the_time(path):
    before = corpus(path).fingerprint
    os.utime(path)
    assert corpus(path).fingerprint == before
    rewrite(path)
    os.utime(path, ns=LONG_AGO)
    assert corpus(path).fingerprint != before


def test_a_change_during_the_first_scan_is_reported(path, monkeypatch):
    """The state is taken when the files are opened, not when they have been read through."""
    check = token_source.check_ids
    monkeypatch.setattr(token_source, "check_ids", lambda *args: (check(*args), rewrite(path)))
    with pytest.raises(DataChanged, match="was written to"):
        corpus(path).check_content()


@pytest.mark.parametrize("read", [lambda s: s.read(N - 700, 10), lambda s: list(s.blocks(64))])
def test_a_cut_file_is_an_error_not_a_bus_error(path, read):
    opened = corpus(path)
    os.truncate(path, 300)
    message = rf"{path.name}: this token file was truncated from 10,\d+ to 300 bytes"
    with pytest.raises(DataChanged, match=message) as caught:
        read(opened.train)
    # as such a run ends with it: no traceback, no second attempt
    assert isinstance(caught.value, OSError)
    assert isinstance(caught.value, ValueError)  # as such it is refused before a run


def test_a_file_that_is_cut_while_it_is_checked_is_an_error_not_a_bus_error(path, monkeypatch):
    write(path, np.zeros(3 << 20, np.uint16))  # which is looked at in three pieces
    blocks = TokenStream.blocks

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
    with pytest.raises(DataChanged, match=r"was truncated from 10,\d+ to 300 bytes"):
        opened.check_content()
    with pytest.raises(DataChanged):
        opened.train.read(N + 4000, 10)


@pytest.mark.parametrize("name", ["a.txt", "v.txt"])
def test_a_text_that_changes_while_it_is_hashed_poisons_no_cache(tmp_path, monkeypatch, name):
    """Between the hash and the encoding: else the new tokens would lie in the cache under the hash
    of the old text."""
    texts = {"a.txt": "abcdefghijklmnopqrst", "v.txt": "uvwxyz" * 3}

    def opened() -> list[str]:
        found = built(
            text_source, train_files=str(tmp_path / "a.txt"), val_files=str(tmp_path / "v.txt"),
            tokenizer=byte_level(), val_ratio=0.1, max_tokens=None, seed=0,
            cache_dir=str(tmp_path / "cache"),
        )  # fmt: skip
        return [bytes(all_ids(stream)).decode() for stream in (found.train, found.val)]

    def put() -> None:
        for file, text in texts.items():
            (tmp_path / file).write_text(text)
            os.utime(tmp_path / file, ns=LONG_AGO)

    put()
    sha256_of = remote.sha256_of

    def hashed_then_changed(paths: list[Path]) -> list[str]:
        digests = sha256_of(paths)
        if any(p.name == name for p in paths):
            (tmp_path / name).write_text(texts[name][::-1])  # as long as before
        return digests

    with monkeypatch.context() as patch:
        patch.setattr(remote, "sha256_of", hashed_then_changed)
        with pytest.raises(DataChanged, match=f"^{tmp_path / name}: this file changed while it"):
            opened()
    put()
    assert opened() == list(texts.values())


def test_who_was_cut_is_known_after_a_bus_error(path):
    """The one race that is left: a file is cut between the look at its size and the reading of a
    page. No other file is named."""
    program = f"""
import os, json
import numpy as np
from llmexp.data.stream import Corpus, Shard, TokenStream
corpus = Corpus(TokenStream([np.memmap({str(path)!r}, np.uint16, "r")]), None, "")
print(json.dumps(corpus.states()), flush=True)
Shard.check_size = lambda shard: os.truncate({str(path)!r}, 300)
corpus.train.read(4500, 100)
"""
    command, env = [sys.executable, "-c", program], {**os.environ, "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S, env=env)
    assert ended.returncode == -signal.SIGBUS
    states = json.loads(ended.stdout)
    told = cut_files(states)
    assert told.startswith(f"{path}: this token file was truncated from 10,")
    assert "to 300 bytes" in told
    write(path, np.append(ids(), 1))
    assert cut_files(states) == ""
    path.unlink()
    assert cut_files(states) == cut_files({}) == ""
    many = {str(path.with_name(f"{i}.bin")): 10 for i in range(5)}
    for name in many:
        Path(name).write_bytes(b"1234")
    assert cut_files(many).endswith("; and 2 more")


# One window per reading, so that not all have been read when the file is cut.
HOOKS = """
import os, signal
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
        os.truncate("train.npy", 1000)
        os.kill(os.getpid(), signal.SIGBUS)  # as reading there would
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


def pieces() -> bytes:
    """Return a vocabulary of tiktoken: the bytes, "ab" and "cd"."""
    known = [*(bytes([n]) for n in range(256)), b"ab", b"cd"]
    return b"".join(b"%s %d\n" % (base64.b64encode(one), n) for n, one in enumerate(known))


@pytest.mark.parametrize(
    ("kind", "in_place"),
    [("text", True), ("corpus", False), ("tokens", False), ("tokenizer", True)],
)
def test_a_file_is_replaced_by_one_of_the_same_size_and_time(tmp_path, in_place, kind):
    """What was prepared of the old one is not used, and no run goes on with another one. The files
    are links to where the data are."""
    words = np.random.default_rng(0).integers(97, 123, 4000).astype(np.uint8).tobytes()
    name, given, data = {
        "text": ("file.txt", words, ["data=text", "data.train_files=file.txt"]),
        "corpus": ("file.txt", b'{"text": "' + words + b'"}',
                   ["data=corpus", "data.sources.x.files=file.txt"]),
        "tokens": ("file.bin", words,
                   ["data=tokens", "data.train_files=file.bin", "model.vocab_size=65536"]),
        "tokenizer": ("file.tiktoken", pieces(),
                      ["data=text", "data.train_files=file.txt", "tokenizer=file",
                       "tokenizer.path=file.tiktoken"]),
    }[kind]  # fmt: skip
    other = given.replace(b"YWI=", b"YWM=") if kind == "tokenizer" else given.replace(b"a", b"b")
    path = tmp_path / "disk" / name
    path.parent.mkdir()
    (tmp_path / "file.txt").write_bytes(words)
    (tmp_path / name).unlink(missing_ok=True)
    os.symlink(path, tmp_path / name)
    cache = {"LLMEXP_CACHE_DIR": str(tmp_path / "cache")}

    def replace_by(content: bytes) -> None:
        """Write in place, as cp -p and rsync --inplace, or another file, as rsync -t."""
        new = path if in_place else path.with_suffix(".new")
        new.write_bytes(content)
        os.replace(new, path)
        os.utime(path, ns=LONG_AGO)

    def there() -> np.ndarray:
        ended = llmexp("verify", "data", *TINY, *data, "hydra.run.dir=proof", cwd=tmp_path, **cache)
        assert ended.code == 0, ended.err
        sums = (tmp_path / "proof/sha256.txt").read_text().splitlines()
        shutil.rmtree(tmp_path / "proof")
        return np.concatenate([np.fromfile(line.split("  ")[1], np.uint16) for line in sums])

    replace_by(given)
    run = [*data, "train.max_steps=2", "train.stop_step=1", "hydra.run.dir=run"]
    run += ["data.val_ratio=0"] if kind != "corpus" else []
    assert llmexp("train", *TINY, *run, cwd=tmp_path, **cache).code == 75
    before = there()
    replace_by(other)
    refused = llmexp("resume", "run", "train.stop_step=null", cwd=tmp_path, **cache)
    assert refused.code == 2
    assert "the data changed since the run started" in refused.err
    assert not np.array_equal(there(), before)
    replace_by(given)
    assert np.array_equal(there(), before)
    resumed = llmexp("resume", "run", "train.stop_step=null", cwd=tmp_path, **cache)
    assert resumed.code == 0, resumed.err
