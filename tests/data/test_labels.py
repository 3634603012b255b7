"""Labels beside token files: what is no target by them, in every window and evaluation."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmexp.data.sampler import RankSlice, Sampler, TargetMask, eval_batches, read_windows
from llmexp.data.stream import DataChanged
from llmexp.models.operands import IGNORE_INDEX
from tests.conftest import TINY, llmexp, train

from .common import token_corpus

LENGTH, IDS = 6, 50


def write(folder: Path, name: str, count: int, kind: str = "int16") -> None:
    rng = np.random.default_rng(count)
    ids = rng.integers(0, IDS, count).astype(np.uint16)
    np.save(folder / f"{name}.npy", ids)
    labels = np.where(rng.random(count) < 0.3, -100, ids.astype(int))
    np.save(folder / f"{name}-labels.npy", labels.astype(kind))


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    for name, count, kind in (("a", 90, "int16"), ("b", 61, "int64"), ("v", 70, "int32")):
        write(tmp_path, name, count, kind)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def tokens(**changes: Any):
    knobs = {"cache_dir": "cache", "vocab_size": IDS, "sequence_length": LENGTH, "val": "v.npy"}
    labels = {"train_labels": ["a-labels.npy", "b-labels.npy"], "val_labels": "v-labels.npy"}
    return token_corpus(["a.npy", "b.npy"], **knobs | labels | changes)


def test_a_rank_without_rows_in_the_tail_window_has_no_targets(folder):
    order, slices = Sampler(tokens().train, LENGTH, 4, 25, 0), [(0, 1), *((r, 4) for r in range(4))]
    windows = [read_windows(order, RankSlice(1, rank, of), 0, 7) for rank, of in slices]
    whole, *ranks = ([w.target_count for w in each] for each in windows)
    assert [sum(counts) for counts in zip(*ranks, strict=True)] == whole
    assert [counts[-1] for counts in ranks[1:]] == [0, 0, 0]


def test_what_a_label_hides_is_no_target_and_stays_an_input(folder):
    found = tokens()
    names = [[f"{name}{end}.npy" for name in "ab"] for end in ("", "-labels")]
    ids, labels = (np.concatenate([np.load(n).astype(int) for n in some]) for some in names)
    assert ((ids[1:150] == 7) & (labels[1:150] != -100)).any()
    mask = TargetMask(ignore_id=7, document_end=3)
    order = Sampler(found.train, LENGTH, 4, 25, 0, shuffle=False, mask=mask)
    at = 0
    for window in read_windows(order, RankSlice(2), 0, 6):
        count = 0
        for inputs, targets in window.micro_batches:
            for row, wanted in zip(inputs.tolist(), targets.tolist(), strict=True):
                after, next_ids = ids[at : at + LENGTH] == 3, ids[at + 1 : at + 1 + LENGTH]
                assert row == ids[at : at + LENGTH].tolist()
                hidden = after | (labels[at + 1 : at + 1 + LENGTH] == -100) | (next_ids == 7)
                expected = np.where(hidden, IGNORE_INDEX, next_ids)
                assert wanted == expected.tolist()
                count += int((~hidden).sum())
                at += LENGTH
        assert window.target_count == count
    held = tokens(val=None, val_labels=None, val_ratio=0.3)  # cut from both alike
    start = len(held.train)
    for corpus, there, first in ((found, np.load("v-labels.npy"), 0), (held, labels, start)):
        knobs = {"sequence_length": LENGTH, "max_sequences": 99, "mask": TargetMask()}
        seen = [
            (int(start), targets)
            for starts, _, batch in eval_batches(corpus.val, RankSlice(2), **knobs)
            for start, targets in zip(starts, batch.tolist(), strict=True)
        ]
        for begin, targets in seen[: corpus.val.n_sequences(LENGTH)]:
            wanted = there[first + begin + 1 : first + begin + 1 + LENGTH]
            assert targets == np.where(wanted == -100, IGNORE_INDEX, wanted).tolist()


def test_other_labels_are_other_data(folder):
    before = tokens()
    assert before.fingerprint["train_labels"].keys() == {"a-labels.npy", "b-labels.npy"}
    labels = np.load("v-labels.npy")
    labels[np.flatnonzero(labels >= 0)[0]] = -100
    np.save("v-labels.npy", labels)
    after = tokens().fingerprint
    assert after["val_labels"] != before.fingerprint["val_labels"]
    assert after["train_labels"] == before.fingerprint["train_labels"]
    assert "train_labels" not in tokens(train_labels=None, val_labels=None).fingerprint
    with pytest.raises(DataChanged, match=f"^{re.escape(str(folder / 'v-labels.npy'))}: "):
        before.check_content()


def test_a_run_trains_on_the_targets_that_its_labels_leave(folder):
    """And `verify data` finds the same windows."""
    settings = [
        "data=tokens", "data.train_files=a.npy", "data.train_labels=a-labels.npy",
        "data.val_files=v.npy", "data.val_labels=v-labels.npy", "data.shuffle=false",
        "tokenizer=bytes", "batch.real_batch_size=2", "train.max_steps=2", "train.log_every=1",
    ]  # fmt: skip
    run = train(folder, "run", *settings)
    labels = np.load("a-labels.npy")
    wanted = [int((labels[1 + 24 * n : 25 + 24 * n] >= 0).sum()) for n in range(2)]
    assert [row["target_tokens"] for row in run.rows()] == wanted
    proof = llmexp("verify", "data", *TINY, *settings, "hydra.run.dir=proof", cwd=folder)
    assert (proof.code, proof.err) == (0, "")
