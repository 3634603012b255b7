"""The knobs of the section data that sources share, and the others whose effect settings knows."""

from __future__ import annotations

import re
from typing import Annotated, Any

from llmexp.config.values import choice, knob, where

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,39}")  # of a source, or of a validation set


class Knobs:
    shuffle = Annotated[
        bool,
        knob("sequences in a random order, another one each epoch; false: file order", False),
    ]
    ignore_id = Annotated[
        int | None, knob("targets with this token id are masked; null: none", 0, at_least=0)
    ]
    train_files = Annotated[
        Any,
        knob(
            "needed: a glob, or a list of globs, from the current folder: corpus/**/*.txt",
            "corpus/**/*.txt",
        ),
    ]
    val_files = Annotated[
        Any,
        knob(
            "the same for validation; null: the share val_ratio of train_files", "corpus/val/*.txt"
        ),
    ]
    train_labels = Annotated[
        Any,
        knob(
            ".npy of signed ints for each of train_files: the id there, or -100 where it is no "
            "target; null: none"
        ),
    ]
    val_labels = Annotated[Any, knob("the same for each of val_files; null: none")]
    val_ratio = Annotated[
        float,
        knob(
            "share for validation where no files are: of token files the last part; of text as "
            "docs/corpus.md#validation says",
            0.1,
            at_least=0,
            below=1,
            acts=where("data.val_files", None),
        ),
    ]
    max_tokens = Annotated[
        int | None,
        knob(
            "tokens in all, training and validation (with val_files: of training); null: all there "
            "are",
            1_000_000,
            at_least=2,
        ),
    ]
    seed = Annotated[
        int,
        knob(
            "of a synthetic stream; else of the order of the files, without val_files",
            0,
            at_least=0,
            acts=where("data.val_files", None),
        ),
    ]
    cache_dir = Annotated[
        str | None,
        knob(
            "folder for the prepared tokens, or what is known of files; null: $LLMEXP_CACHE_DIR, "
            "else ~/.cache/llmexp",
            "cache",
            affects="nothing",
        ),
    ]
    max_epochs = Annotated[
        float | None,
        knob(
            "refuse a run that walks a source more often than this; null: only warn",
            4.0,
            above=0,
            affects="nothing",
        ),
    ]
    on_bad_record = Annotated[
        str,
        choice(
            "a record that cannot be read ends the preparation, or is counted and left out",
            "refuse | skip",
            affects="nothing",
        ),
    ]
