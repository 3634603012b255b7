"""The files that a source names: against independent walks through links, folders and globs."""

import glob
import os
import re
import shutil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmexp.__main__ import run
from llmexp.config.values import ConfigError
from llmexp.data.hub import dataset_identity
from llmexp.data.matching import match_files
from llmexp.data.remote import RemoteCache
from tests.conftest import TINY

pytestmark = pytest.mark.usefixtures("suggestions_are_read")

PLAIN = ["a", "b", "c.txt", ".h", "dd"]
ODD = ["d[d]", "e*", "?", "[!a]"]


def trees(names: list[str]) -> st.SearchStrategy:
    places = st.lists(st.sampled_from(names), min_size=1, max_size=3)
    kinds = st.sampled_from(["file", "file", "folder", "link"])
    return st.lists(st.tuples(places, kinds, places), min_size=1, max_size=12)


def plant(root: Path, tree: list[tuple[list[str], str, list[str]]]) -> None:
    """Make files, folders, and links to any place, or to none, where there is room."""
    for number, (parts, kind, target) in enumerate(tree):
        path = root.joinpath(*parts)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if kind == "link":
                os.symlink(root.joinpath(*target), path)
            elif kind == "folder":
                path.mkdir()
            elif not os.path.lexists(path):
                path.write_text(str(number))
        except (OSError, RuntimeError):
            continue


class Endless(Exception):
    pass


def below(folder: Path, *way: Path) -> set[str]:
    """The real paths of what is no folder and not hidden below a folder. Raises Endless."""
    found = set()
    for entry in folder.iterdir():
        if entry.name.startswith("."):
            continue
        if not entry.is_dir():
            found.add(os.path.realpath(entry))
            continue
        real = entry.resolve()
        if any(real in (one, *one.parents) for one in (*way, folder)):
            raise Endless
        found |= below(real, *way, folder)
    return found


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("tree")


def planted(root: Path, tree) -> Path:
    """Return a new tree."""
    shutil.rmtree(root)
    root.mkdir()
    plant(root, tree)
    return root


def named_by_their_names(root: Path) -> None:
    """Assert that a name that exists is meant as it stands, also where only its folders exist and a
    glob follows."""
    for path in filter(Path.is_file, list(root.rglob("*"))):
        assert match_files("k", str(path), []) == [path]
        here = {one for one in path.parent.iterdir() if not one.name.startswith(".")}
        if here and all(one.is_file() for one in here) and not (path.parent / "*").exists():
            found = match_files("k", f"{path.parent}/*", [])
            assert {os.path.realpath(one) for one in found} == set(map(os.path.realpath, here))


@settings(max_examples=80)
@given(tree=trees(PLAIN + ODD))
def test_a_folder_stands_for_all_below_it_by_way_of_links_too(root: Path, tree) -> None:
    named_by_their_names(planted(root, tree))
    refused = r"there are no files|cannot be read"
    try:
        wanted = below(root.resolve())
    except Endless:
        wanted, refused = set(), r"is a link to .* it has no end|cannot be read"
    if not wanted or not all(map(os.path.exists, wanted)):
        with pytest.raises(ConfigError, match=refused):
            match_files("data.train_files", str(root), [])
        return
    left: list[str] = []
    found = match_files("data.train_files", str(root), left)
    assert sorted(map(os.path.realpath, found)) == sorted(wanted)  # each once
    # nothing that is left out goes unsaid: what is hidden, and other names of what is read
    said = {one.partition(" (it is ")[0] for one in left}
    for path in map(str, root.rglob("*")):
        parts = Path(path).relative_to(root).parts
        seen = [Path(root, *parts[:n]) for n in range(1, len(parts) + 1)]
        assert os.path.isdir(path) or Path(path) in found or said & set(map(str, seen)), path


PARTS = st.sampled_from([*PLAIN, "*", "**", "*.txt", "?", "[a-c]*"])


@settings(max_examples=80)
@given(tree=trees(PLAIN), pattern=st.lists(PARTS, min_size=1, max_size=4))
def test_a_glob_is_the_files_that_the_systems_glob_finds(root: Path, tree, pattern) -> None:
    name = os.path.join(root, *pattern)
    try:
        below(planted(root, tree).resolve())
    except Endless:
        return  # the library's glob goes around until the system refuses
    if os.path.isdir(name):
        return
    names = glob.glob(name, recursive=True)
    wanted = {os.path.realpath(one) for one in names if one[-1] != "/" and not os.path.isdir(one)}
    if not wanted or not all(map(os.path.exists, wanted)):
        with pytest.raises(ConfigError, match=r"no file matches|is a folder|cannot be read"):
            match_files("data.train_files", name, [])
        return
    found = match_files("data.train_files", name, [])
    assert sorted(map(os.path.realpath, found)) == sorted(wanted)


def test_what_a_folder_stands_for_at_the_command_line(tmp_path, monkeypatch, capsys):
    """A snapshot of a repository of data, whose files are links to another disk, and one split."""
    monkeypatch.setenv("LLMEXP_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    Path("snap/data").mkdir(parents=True)
    Path("disk").mkdir()
    for number in range(8):
        folder = "snap/data" if number < 3 else "disk"
        Path(folder, f"{number}.txt").write_text(f"document {number}")
    about = ["README.md", "LICENSE", ".gitattributes", "data/_SUCCESS"]
    for name in about:
        Path("snap", name).write_text("about the data")
    for name in ("more", "once more"):
        os.symlink(tmp_path / "disk", f"snap/data/{name}")

    def prepared(*overrides: str, code: int = 0) -> str:
        assert run(["prepare", *TINY, *overrides]) == code
        return "".join(capsys.readouterr())

    for data in ("data=text data.train_files=snap", "data=corpus data.sources.x.files=snap"):
        out = prepared(*data.split())
        assert [name for name in (*about, "data/once more") if f"snap/{name}" not in out] == []
        assert "8 documents" in out or "data=corpus" in data
    assert "11 documents" in prepared("data=text", "data.train_files=[snap,'snap/*','snap/**']")
    os.rename("snap/data/0.txt", "snap/data/test-0.txt")
    refused = prepared("data=text", "data.train_files=snap", code=2)
    assert "train (snap/data/1.txt)" in refused
    assert "test (snap/data/test-0.txt)" in refused


SPLITS = {
    "train-00000-of-00002.parquet": "train", "test.jsonl": "test", "data/validation-1.json": "val",
    "dev/x.txt": "val", "wiki.test.tokens": "test", "c4-train.0001.json.gz": "train",
    "EVAL/q.txt": "test", "en_valid.txt": "val", "latest.txt": "train",
    "contest/medieval.txt": "train", "a.txt": "train", "test_utils.py": "train", "dev.py": "train",
    "validation_01": "val", "evaluation-of-trees.txt": "train", "testing/x.py": "test",
}  # fmt: skip


@given(names=st.sets(st.sampled_from(sorted(SPLITS)), min_size=1, max_size=4))
def test_a_folder_stands_for_one_split(root: Path, names: set[str]) -> None:
    shutil.rmtree(root)
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("text")
    if len({SPLITS[name] for name in names}) == 1:
        assert {str(path.relative_to(root)) for path in match_files("k", str(root), [])} == names
        return
    with pytest.raises(ConfigError, match="several splits") as refused:
        match_files("k", str(root), [])
    *ways, every = re.findall(r"""k='?([^'": ,]+)""", str(refused.value))[1:]
    assert ways or "move the files of the others away" in str(refused.value)
    for way in ways:
        (chosen,) = {SPLITS[str(p.relative_to(root))] for p in match_files("k", way, [])}
        assert chosen == "train" or "train" not in map(SPLITS.get, names)
    assert {str(path.relative_to(root)) for path in match_files("k", every, [])} == names


def test_a_folder_that_cannot_be_read_is_no_empty_one(tmp_path, monkeypatch):
    (tmp_path / "a").mkdir()
    (tmp_path / "b.txt").write_text("b")
    listdir = os.listdir

    def forbidden(path: str) -> list[str]:
        if Path(path).name == "a":
            raise PermissionError(13, "Permission denied", path)
        return listdir(path)

    monkeypatch.setattr("llmexp.data.matching.os.listdir", forbidden)
    for pattern in (str(tmp_path), f"{tmp_path}/**", f"{tmp_path}/**/*.txt"):
        with pytest.raises(ConfigError, match="/a cannot be read: Permission denied"):
            match_files("k", pattern, [])
    with pytest.raises(ConfigError, match="/a cannot be read: Permission denied"):
        dataset_identity("k", str(tmp_path), RemoteCache(tmp_path / "cache"))


def test_a_dataset_of_hugging_face_is_told_by_what_is_behind_its_links(tmp_path: Path) -> None:
    (tmp_path / "disk/train").mkdir(parents=True)
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved/dataset_dict.json").write_text("{}")
    (tmp_path / "disk/train/data.arrow").write_text("one")
    os.symlink(tmp_path / "disk/train", tmp_path / "saved/train")
    key, name = "data.sources.x.hf", str(tmp_path / "saved")
    remote = RemoteCache(tmp_path / "cache")
    before, _ = dataset_identity(key, name, remote)
    (tmp_path / "disk/train/data.arrow").write_text("two")
    after, _ = dataset_identity(key, name, remote)
    assert after != before
    os.symlink(tmp_path / "saved", tmp_path / "disk/train/home")
    with pytest.raises(ConfigError, match=r"saved/train/home is a link to .* it has no end"):
        dataset_identity(key, name, remote)
