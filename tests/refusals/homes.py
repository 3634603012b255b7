"""Working folders in which commands are refused: each function fills an empty one."""

import json
import os
import tarfile
from pathlib import Path

import numpy as np

from llmexp.__main__ import run as command
from llmexp.data.tokenizers.training import train_bpe
from tests.data.common import json_lines, llm_c, megatron, texts_of, wordpieces
from tests.runs import Runs
from tests.sweep.running import PAIR

FOUR_STEPS = ["data=synthetic", "data.n_tokens=5000", "train.max_steps=4", "checkpoint.every=2"]


def empty(work: Path, runs: Runs) -> None:
    """Nothing lies there."""


def files(work: Path, runs: Runs) -> None:
    """Data of every bad kind, broken and sound files of options."""
    (work / "empty.txt").touch()
    (work / "short.txt").write_text("hi")
    (work / "latin.txt").write_bytes(b"x" * 60 + b"\xff" + b"x" * 300)
    (work / "good.txt").write_text("hello world, how are you? " * 50)
    (work / "odd.bin").write_bytes(bytes(101))
    np.array([1] * 400, np.uint16).tofile(work / "a.bin")
    np.array([1] * 100 + [5000], np.uint16).tofile(work / "b.bin")
    np.save(work / "floats.npy", np.zeros(50))
    (work / "some.zst").write_bytes(b"\x28\xb5\x2f\xfd" + bytes(100))
    os.mkfifo(work / "pipe.txt")
    (work / "bad" / "model").mkdir(parents=True)
    (work / "bad" / "model" / "mine.yaml").write_text("a: [1\nb")
    own = work / "own" / "experiment"
    own.mkdir(parents=True)
    clipped = "# @package _global_\ndefaults:\n  - override /clip: none\nclip:\n  max_norm: 0.5\n"
    (own / "clipped.yaml").write_text(clipped)
    (own / "nowhere.yaml").write_text("train:\n  max_steps: 5\n")


def run(work: Path, runs: Runs) -> None:
    """A finished run of four steps in the folder `run`."""
    runs.copy(work / "run", *FOUR_STEPS)


def exported(work: Path, runs: Runs) -> None:
    """The finished run, and its export for Hugging Face in the folder `hf`."""
    run(work, runs)
    assert command(["export", str(work / "run"), "--to", "hf", str(work / "hf"), "--no-check"]) == 0


def tasks(work: Path, runs: Runs) -> None:
    """The finished run, and the task `mine`."""
    run(work, runs)
    item = '{"id": 1, "context": "a", "choices": ["b", "c"], "answer": 1}\n'
    (work / "mine.jsonl").write_text(item)


def data(work: Path, runs: Runs) -> None:
    """Texts, documents, token files and labels, sound ones and bad ones, beside the run."""
    run(work, runs)
    for name in ("web.jsonl", "copy.jsonl", "val.jsonl"):
        json_lines(work / name, texts_of("web" if name < "d" else name, 40))
    os.link(work / "web.jsonl", work / "hard.jsonl")
    for name in ("void", "hidden/.git", "saved", "docs", "loop/more"):
        (work / name).mkdir(parents=True)
    (work / "hidden/.git/.x").touch()
    (work / "saved/state.json").write_text("{}")
    os.symlink("nowhere", work / "dangling.txt")
    os.symlink("..", work / "loop/more/home")
    documents = {
        "latin": b'{"text": ""}\n{"text": "gr\xfc\xdfe"}\n', "utf16": b"\xff\xfet\0",
        "own.json": b'{\n  "name": "x"\n}\n', "cut.gz": b"\x1f\x8b\x08\x00",
        "half16": b"t\0e\0x\0t\0",
        "zip": b"PK\x03\x04....", "numpy": b"\x93NUMPY.....", "cut.parquet": b"PAR1 and no more",
    }  # fmt: skip
    for name, content in documents.items():
        (work / "docs" / name).write_bytes(content)
    for form in ("gz", ""):
        with tarfile.open(work / f"docs/tar{form}", f"w:{form}") as archive:
            archive.add(work / "void")
    megatron(work / "pair.bin", [[7, 8, 9, 100], [5], [], [3] * 20])
    ids = np.arange(200, dtype=np.uint16)
    tokens = {
        "few.bin": bytes(8), "said.bin": llm_c(50, 49), "version.bin": llm_c(50, 50, version=2),
        "sound.bin": llm_c(200, 200), "torn.npy": b"\x93NUMPY\x01\x00", "odd.npy": bytes(101),
        "wide.bin": ids.astype("<u4").tobytes(), "empty.bin": b"",
    }  # fmt: skip
    for name, content in tokens.items():
        (work / name).write_bytes(content)
    labels = ids.astype(np.int16)
    arrays = {
        "square.npy": np.zeros((3, 3), int), "none.npy": ids[:0], "ids.npy": ids,
        "labels.npy": np.where(ids % 3, labels, -100), "shifted.npy": np.roll(labels, -1),
        "short.npy": labels[:90], "large.npy": ids * 7,
    }  # fmt: skip
    for name, array in arrays.items():
        np.save(work / name, array)


def tokenizers(work: Path, runs: Runs) -> None:
    """Text, a sound tokenizer in both forms, and one that has no end of text."""
    (work / "good.txt").write_text("the cat sat on the mat. " * 99)
    (work / "good").mkdir()
    found = train_bpe([(work / "good.txt").read_text()], 300, "gpt2")
    (work / "good/tokenizer.json").write_text(found.tokenizer_json)
    (work / "good/mine.tiktoken").write_bytes(found.tiktoken)
    wordpieces(work, ["the cat sat on the mat"], "[SEP]").rename(work / "words.json")


def strange(work: Path, runs: Runs) -> None:
    """The ledger of another's sweep that failed; rows give it the arguments it goes on with."""
    ledger = {"format": 1, "name": "strange", "group": "g", "launcher": "slurm", "created": 0.0}
    ledger |= {"swept": ["train.seed"], "arguments": [], "state": "failed", "points": []}
    (work / "strange").mkdir()
    (work / "strange" / "sweep.json").write_text(json.dumps(ledger))


def laws(work: Path, runs: Runs) -> None:
    """CSV files for `fit`: a sound one, and one of each bad kind."""
    planted = [
        (n, d, 1.7 + n**-0.3 + d**-0.3) for n in (1e6, 2e6, 4e6) for d in (1e8, 2e8, 4e8, 8e8)
    ]
    texts = {
        "good": "\n".join(f"{n},{d},{loss}" for n, d, loss in planted),
        "flat": "\n".join(f"{n},{d},3" for n, d, _ in planted),
        "bad": "\n1e6,x,3", "comma": "1e6,1e8,2,9", "head": "", "inf": "1e6,2e7,inf",
        "few": "1e6,1e7,3\n2e6,1e7,3\n1e6,2e7,2.9", "one": "1e6,1e7,3",
    }  # fmt: skip
    for name, text in texts.items():
        (work / f"{name}.csv").write_text(f"N,D,loss\n{text}\n")
    halves = (f"{n},{d},{loss},{'am'[i % 2]}" for i, (n, d, loss) in enumerate(planted))
    (work / "split.csv").write_text("N,D,loss,kind\n" + "\n".join(halves))
    (work / "unnamed.csv").write_text("N,D,train_loss,test_loss\n1e6,1e7,3,4\n")
    (work / "thin.csv").write_text("N,loss\n1e6,3\n")
    (work / "twice.csv").write_text("N,D,loss,Loss\n1e6,1e7,3,4\n")
    (work / "bytes.csv").write_bytes(b"N,D,loss\n\xff\xfe")
    (work / "empty").mkdir()


def compared(work: Path, runs: Runs) -> None:
    """Two runs in the folder `sweep`, none in `empty`."""
    from tests.compare.synthetic import make_run

    for i in (1, 2):
        make_run(work / "sweep" / str(i), max_norm=float(i), steps=20, val_every=10)
    (work / "empty").mkdir()


def cut_run(work: Path, runs: Runs) -> None:
    """The same, killed after step 2."""
    runs.copy(work / "run", *FOUR_STEPS, step=2)


def sweep(work: Path, runs: Runs) -> None:
    """A finished sweep of two points of two steps in the folder `s`."""
    runs.copy(work / "s", "-m", *PAIR)
