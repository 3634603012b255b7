"""Read datasets of Hugging Face: a folder of `save_to_disk`, or a name on the hub at one commit."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from llmexp.config.commands import need_package
from llmexp.config.values import refuse, typed
from llmexp.data.documents import Record, record_text
from llmexp.data.matching import SAVED, readable, walk
from llmexp.data.remote import RemoteCache, reading


def read_dataset(
    key: str, name: str, split: str, revision: str | None, text_key: str
) -> Iterator[Record]:
    """Yield the records of one split. Raises ValueError."""
    datasets = need_package("datasets", key, f"reading {name}")
    is_folder = Path(name).is_dir()
    if is_folder and not any(Path(name, saved).exists() for saved in SAVED):
        files = typed(f"{key.removesuffix('hf')}files", f"{name}/*.parquet")
        text = f"this folder was not made by save_to_disk; for files in it use {files}"
        raise refuse("bad_data", key, name, text)
    with reading(key, name):
        if is_folder:
            found = datasets.load_from_disk(name)
            parts = found if isinstance(found, dict) else {"train": found}
            if split not in parts:
                text = f"there is no split {split}; the splits are: {', '.join(parts)}"
                raise refuse("unknown_option", key, name, text)
            records = parts[split]
        else:
            records = datasets.load_dataset(name, revision=revision, split=split, streaming=True)
    number = 0
    try:
        with reading(key, name):
            for number, record in enumerate(records, 1):
                yield record_text(f"{key}={name}, record {number:,}", record, text_key)
    except UnicodeDecodeError as error:  # the library decodes many records at a time
        text = f"after record {number:,} there is text that is not UTF-8 ({error.reason})"
        raise refuse("bad_data", key, name, text) from None


def dataset_identity(key: str, name: str, remote: RemoteCache) -> tuple[str, str | None]:
    """Return what identifies the content of a dataset, and its commit if it is on the hub.

    A folder is identified by the digests of its files. Raises ValueError.
    """
    folder = Path(name)
    if folder.is_dir():
        with readable(key, name):
            paths = sorted(path for path in map(Path, walk(key, name, [])) if path.is_file())
            names = [str(path.relative_to(folder)) for path in paths]
            return json.dumps([names, remote.digests(paths)]), None

    def ask() -> str:
        hub = need_package("huggingface_hub", key, f"reading {name}")
        with reading(key, name):
            return str(hub.HfApi().dataset_info(name).sha)

    commit = remote.get(key, f"hub {name}", ask)
    return f"{name}@{commit}", commit
