"""Datasets of Hugging Face: a folder on this machine, or a name on the hub at one commit."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from llmexp.data.files import remembered, sha256_of
from llmexp.data.places import Answers, in_time, need, next_in_time
from llmexp.data.readers import Counts, Document, Found, counted, record_text


def hub_documents(
    key: str,
    name: str,
    revision: str | None,
    split: str,
    text_key: str,
    skip_bad: bool,
    counts: Counts,
) -> Iterator[Document]:
    """Yield the documents of a folder made by `save_to_disk`, or of a name on the hub, which is
    streamed at the commit `revision`. Raises ValueError."""
    datasets = need("datasets", key, f"reading {name}")
    if Path(name).is_dir():
        records = _of_folder(datasets, key, name, split)
    else:
        table = in_time(
            key,
            name,
            lambda: datasets.load_dataset(name, revision=revision, split=split, streaming=True),
        )
        records = next_in_time(key, name, table)
    yield from counted(_texts(key, name, text_key, records), skip_bad, counts)


def _of_folder(datasets: Any, key: str, name: str, split: str) -> Any:
    if not any(Path(name).glob("**/state.json")):
        raise ValueError(
            f"{key}={name}: this folder was not made by save_to_disk; for files in it use "
            f"{key.removesuffix('hf')}files={name}/*.parquet"
        )
    found = in_time(key, name, lambda: datasets.load_from_disk(name))
    parts = found if isinstance(found, dict) else {"train": found}
    if split not in parts:
        known = ", ".join(parts)
        raise ValueError(f"{key}={name}: there is no split {split}; the splits are: {known}")
    return parts[split]


def _texts(key: str, name: str, text_key: str, records: Any) -> Iterator[Found]:
    number = 0
    try:
        for record in records:
            number += 1
            yield record_text(f"{key}={name}, record {number:,}", record, text_key)
    except UnicodeDecodeError as error:  # the library decodes many records at a time
        raise ValueError(
            f"{key}={name}: after record {number:,} there is text that is not UTF-8 "
            f"({error.reason})"
        ) from None


def hub_identity(key: str, name: str, answers: Answers) -> tuple[str, str | None]:
    """Return what identifies the content of a dataset (the digests of a folder's files, or the
    commit on the hub), and the commit. Raises ValueError."""
    folder = Path(name)
    if folder.is_dir():
        paths = sorted(path for path in folder.rglob("*") if path.is_file())
        names = [str(path.relative_to(folder)) for path in paths]
        digests = remembered(
            answers.cache, "sha256", None, paths, lambda: sha256_of(paths), answers.write
        )
        return json.dumps([names, digests]), None

    def ask() -> str:
        hub = need("huggingface_hub", key, f"reading {name}")
        return str(in_time(key, name, lambda: hub.HfApi().dataset_info(name)).sha)

    commit = answers.get(key, f"hub {name}", ask)
    return f"{name}@{commit}", commit
