"""Find the files that a source names by paths, folders and globs.

Links are followed everywhere, and each file is read once, under its first name. A name that exists
is meant as it stands, also with characters of a glob in it. A glob stands for the files that it
matches; a folder for the documents below it, of one split of the data: not for what is hidden or is
about the data, such as a README. What lies there and is left out is reported.
"""

from __future__ import annotations

import contextlib
import fnmatch
import glob
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from llmexp.config.kinds import kind_of_error
from llmexp.config.values import refuse, typed
from llmexp.system.text import first_of

SAVED = ("state.json", "dataset_dict.json")  # in a folder of save_to_disk
# Names of files that are about the data.
ABOUT = re.compile(
    r"(readme|licen[cs]e)([-_.].*)?|(copying|notice|citation|changelog)(\.\w+)?|dataset_infos?\.json"
    r"|_(success|metadata|common_metadata)|.*\.(md5|sha1|sha256|crc)|(md5|sha\d+)sums?(\.txt)?",
    re.IGNORECASE,
)
# A folder's name, or a file's without its suffixes, is of the split that it ends in, also with the
# number of a shard: wiki.test.tokens, test-00000-of-00005.parquet. A file of code is of none.
SPLIT = re.compile(
    r"(?<![^\W\d_])(?:(?P<train>train(?:ing)?)|(?P<validation>val(?:id(?:ation)?)?|dev)"
    r"|(?P<test>test(?:ing)?|eval(?:uation)?))(?=(?:[-_.]?(?:\d+|of))*(?:\.(?!(?:py|ipynb|go|rs|c|cc"
    r"|cpp|h|hpp|java|kt|scala|cs|swift|jsx?|tsx?|rb|php|pl|r|jl|lua|sh)\Z)\w+)*(?:/|\Z))",
    re.IGNORECASE,
)


def match_files(key: str, patterns: Any, left: list[str]) -> list[Path]:
    """Return the readable files that a glob, or a list of globs, names: sorted per glob, each once.

    Relative globs start in the current folder; `**` crosses folders. `left` gets what is left out.
    Raises ConfigError, naming `key`, for a glob without a match and for what is no readable file.
    """
    found = []
    for pattern in patterns_of(key, patterns):
        expanded = os.path.expanduser(pattern)
        with readable(key, pattern):
            if os.path.isdir(expanded):
                names = _documents_below(key, expanded, left)
            else:
                names = sorted(_expanded(key, expanded, left))
            if not names:
                text = f"no file matches (looked in {os.path.abspath(os.curdir)})"
                raise refuse("unknown_file", key, pattern, text)
            folders = {name for name in names if os.path.isdir(name)}
            if len(folders) == len(names):
                text = f"{names[0]} is a folder; for its files write {typed(key, names[0])}"
                raise refuse("unknown_file", key, pattern, text)
            left += [f"{name} (a folder)" for name in folders if "**" not in pattern]
            paths = [str(Path(name)) for name in names if name not in folders]
            for path in paths:
                if os.path.exists(path) and not os.path.isfile(path):  # it could block for ever
                    text = f"{path} is a pipe or a device, and data files are read more than once"
                    way = "write what comes out of it to a plain file first"
                    raise refuse("unsupported", key, pattern, f"{text}; {way}")
                with open(path, "rb") as file:
                    file.read(1)
        found += paths
    return [Path(name) for name in named_once(found, left)]


@contextlib.contextmanager
def readable(key: str, name: str) -> Iterator[None]:
    """Raise ConfigError where the files or folders of a name cannot be read."""
    try:
        yield
    except OSError as error:
        text = f"{error.filename} cannot be read: {error.strerror}"
        raise refuse(kind_of_error(error), key, name, text) from None


def patterns_of(key: str, given: Any) -> list[str]:
    """Return a glob, or the globs of a list. Raises ConfigError for what is neither."""
    wanted = [given] if isinstance(given, str) else given
    several = isinstance(wanted, (list, tuple)) and all(isinstance(p, str) and p for p in wanted)
    if not wanted or not several:
        text = "a glob or a list of globs is needed"
        raise refuse(
            "wrong_type" if wanted else "missing_value", key, given, text, "corpus/**/*.txt"
        )
    return list(wanted)


def named_once(names: Iterable[str], left: list[str]) -> list[str]:
    """Return the names of files, one for each file; `left` gets the others, but none of these."""
    found = dict[str, str]()
    for name in names:
        if (first := found.setdefault(os.path.realpath(name), name)) != name:
            left.append(f"{name} (it is {first})")
    left[:] = sorted({*left} - {*found.values()})
    return list(found.values())


def left_out_text(left: Sequence[str], of: str = "") -> str:
    """Return `; left out: NAMES` for what is left out, or the empty string."""
    return f"; left out{of}: {first_of(left, 6)}" if left else ""


def walk(key: str, folder: str, left: list[str]) -> Iterator[str]:
    """Yield the paths of all below a folder, by way of links too.

    Hidden folders are not entered, nor is one that was entered under another name: `left` gets
    this one. Raises ConfigError for a link that leads to where it is, and OSError.
    """
    real = os.path.realpath(folder)
    seen = {real: folder}
    stack: list[tuple[str, tuple[str, ...]]] = [(folder, (real,))]
    while stack:
        place, above = stack.pop()
        for name in sorted(os.listdir(place or ".")):
            yield (path := os.path.join(place, name))
            if name.startswith(".") or not os.path.isdir(path):
                continue
            real = os.path.realpath(path)
            if any(f"{one}/".startswith(os.path.join(real, "")) for one in above):
                text = f"{path} is a link to {real}, in which it lies itself, so it has no end"
                raise refuse(
                    "bad_data",
                    key,
                    folder,
                    f"{text}; remove the link, or name the folders beside it",
                )
            if (first := seen.setdefault(real, path)) == path:
                stack.append((path, (*above, real)))
            else:
                left.append(f"{path} (it is {first})")


def _expanded(key: str, pattern: str, left: list[str]) -> set[str]:
    """Return the files and folders that a glob matches, part by part of its path.

    Hidden names match neither `*` nor `**`. Raises OSError.
    """
    found = {"/"[: pattern[0] == "/"]}
    for part in filter(None, pattern.split("/")):
        places, found = found, set()
        for place in places:
            is_folder = os.path.isdir(place or ".")  # false also for one that may not be read
            if is_folder and part == "**":
                below = walk(key, place, left)
                found |= {place, *(p for p in below if os.path.basename(p)[0] != ".")}
                continue
            names = [part]  # also where it is there as it stands
            if is_folder and glob.has_magic(part) and not _exists(os.path.join(place, part)):
                there = os.listdir(place or ".")
                names = fnmatch.filter([n for n in there if n[0] != "." or part[0] == "."], part)
            found |= {os.path.join(place, name) for name in names}
    return {path for path in found if path and _exists(path)}


def _exists(path: str) -> bool:
    """Return whether a name is there. Raises OSError where it may be."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        return bool(os.lstat(path))
    return False


def _documents_below(key: str, folder: str, left: list[str]) -> list[str]:
    """Return the files that a folder stands for, sorted. Raises ConfigError, and OSError."""
    if any(os.path.exists(os.path.join(folder, name)) for name in SAVED):
        of_source = key.endswith(".files")
        hf = f"{key.removesuffix('files')}hf" if of_source else "data.sources.main.hf"
        way = "data=corpus " * (not of_source) + typed(hf, folder)
        raise refuse(
            "bad_data", key, folder, f"this folder was made by save_to_disk of datasets; use {way}"
        )
    splits, found, out = dict[str, str](), list[str](), list[str]()
    for path in walk(key, folder, left):
        name = os.path.basename(path)
        inside = os.path.isdir(path)
        if name[0] == "." or (not inside and ABOUT.fullmatch(name)):
            out.append(path)
        elif not inside:
            found.append(path)
            hit = SPLIT.search(path, len(folder))  # names that say nothing are of training
            splits.setdefault(str(hit.lastgroup) if hit else "train", path)
    if not found:
        raise refuse(
            "unknown_file", key, folder, f"there are no files in this folder{left_out_text(out)}"
        )
    if len(splits) > 1:
        there = ", ".join(f"{split} ({path})" for split, path in splits.items())
        one, way = splits.get("train", found[0]), "move the files of the others away"
        if (hit := SPLIT.search(one, len(folder))) is not None:
            rest = one[hit.end() :]
            way = typed(key, one[: hit.end()] + ("*/**" if "/" in rest else "*"))
        text = f"its files are of several splits: {there}; a folder stands for one, so choose: "
        every = typed(key, os.path.join(folder, "**"))
        raise refuse("missing_value", key, folder, f"{text}{way}, or all of them: {every}")
    left += sorted(out)
    return sorted(found, key=lambda path: path.split(os.sep))
