"""Provenance in the folder of a run: real repositories, real diffs, and git as bad as it gets."""

import json
import os
import shutil
import stat
import subprocess
from pathlib import Path

import pytest

from llmexp.compare.reading import read as read_records
from llmexp.features.provenance import folders as provenance
from llmexp.features.provenance.compare import differences
from llmexp.folders.find import find
from tests.conftest import TINY, llmexp

HOOK = "def watch(event, context):\n    return None\n"
OWN = ["--allow", "own", "hooks=[own.watch]", "data=synthetic", "train.max_steps=2"]


def git(where: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "protocol.file.allow=always"]
    done = subprocess.run(
        ["git", *identity, *arguments], cwd=where, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def repository(path: Path, **files: bytes) -> Path:
    """One with a commit of these files; `__` stands for a dot."""
    path.mkdir(parents=True)
    git(path, "init", "-q", "-b", "trunk")
    for name, content in files.items():
        (path / name.replace("__", ".")).write_bytes(content)
    git(path, "add", ".")
    git(path, "commit", "-q", "--allow-empty", "-m", "first")
    return path


def tree(path: Path) -> dict[str, tuple[bytes, bool]]:
    """The tracked files as they are now, and whether they can be executed."""
    files = [path / name for name in git(path, "ls-files", "-z").split("\0") if name]
    return {
        file.name: (file.read_bytes(), bool(file.stat().st_mode & stat.S_IXUSR))
        for file in files
        if file.exists()
    }


@pytest.fixture
def in_repository(tmp_path, monkeypatch):
    """A repository of one file that has changed, as the current folder."""
    work = repository(tmp_path / "work", own__py=HOOK.encode())
    (work / "own.py").write_text(HOOK + "\n# changed\n")
    monkeypatch.chdir(work)
    monkeypatch.delenv("LLMEXP_ALLOW", raising=False)
    return work


def gathered() -> dict:
    """The findings of a search about the one repository."""
    (one,) = provenance.gather().about["repositories"]
    return one


def recorded(run: Path) -> tuple[dict, str]:
    """What is recorded of the one repository, and its diff, after a search of its own."""
    run.mkdir()
    provenance.start.cache_clear()
    provenance.record(run, resumed=False)
    provenance.start.cache_clear()
    told = json.loads((run / provenance.FOLDER / provenance.FILE).read_text())
    assert told["packages_sha256"]
    assert {"torch", "numpy"} <= provenance.read_packages(run / provenance.FOLDER).keys()
    (one,) = told["repositories"]
    return one, (run / provenance.FOLDER / one["diff"]).read_text(errors="surrogateescape")


def test_the_diff_on_the_commit_gives_the_tree(tmp_path, monkeypatch):
    text = "".join(f"line {n}\n" for n in range(40))
    work = repository(
        tmp_path / "work", own__py=HOOK.encode(), logo__bin=bytes(range(256)) * 8,
        old__txt=text.encode(),
        gone__txt=b"to be deleted", run__sh=b"echo", latin__txt="caf\u00e9\n".encode("latin-1"),
        gone__bin=b"\0" * 99,
    )  # fmt: skip
    git(work, "config", "diff.noprefix", "true")  # habits of the user's
    git(work, "config", "diff.mnemonicPrefix", "true")
    git(work, "config", "color.ui", "always")
    (work / "own.py").write_text(HOOK + "\n# changed\n")
    (work / "logo.bin").write_bytes(bytes(reversed(range(256))) * 9)
    git(work, "mv", "old.txt", "new name.txt")
    (work / "new name.txt").write_text(text.replace("line 7", "line seven"))
    (work / "gone.txt").unlink()
    (work / "gone.bin").unlink()
    (work / "run.sh").chmod(0o755)
    (work / "latin.txt").write_bytes("\u00e9t\u00e9\n".encode("latin-1"))
    (work / "added.py").write_text("new = 1\n")
    git(work, "add", "added.py")
    (work / "notes.txt").write_text("not tracked")
    monkeypatch.chdir(work)
    one, _ = recorded(tmp_path / "run")
    assert (one["commit"], one["branch"]) == (git(work, "rev-parse", "HEAD"), "trunk")
    assert (one["untracked"], one["diff"], one["notes"]) == (["notes.txt"], "work.diff", [])
    assert {"M own.py", "M logo.bin", "D gone.txt"} <= set(one["changed"])
    clone = tmp_path / "clone"
    git(tmp_path, "clone", "-q", str(work), str(clone))
    git(clone, "checkout", "-q", one["commit"])
    git(clone, "apply", "--index", str(tmp_path / "run" / "provenance" / one["diff"]))
    assert tree(clone) == tree(work)


def test_a_repository_of_an_allowed_package_counts_too(tmp_path, monkeypatch, in_repository):
    other = repository(tmp_path / "lib" / "theirs", theirs_pkg__py=b"x = 1")
    (other / "theirs_pkg.py").write_text("x = 2")
    monkeypatch.syspath_prepend(str(other))
    monkeypatch.setenv("LLMEXP_ALLOW", "theirs_pkg.inner, nowhere_to_be_found")
    found = provenance.gather()
    assert [one["name"] for one in found.about["repositories"]] == ["work", "theirs"]
    assert sorted(found.files) == ["theirs.diff", "work.diff"]
    (in_repository / ".git" / "HEAD").unlink()  # what one does not tell, the next may
    assert sorted(provenance.gather().files) == ["theirs.diff"]


def test_what_looks_like_a_secret_in_a_diff_is_left_out(tmp_path, monkeypatch):
    work = repository(tmp_path / "work", own__py=b"  HF_TOKEN: abcdefgh12345678\n")
    lines = {
        'API_KEY = "hf_abcdefgh12345678"': False,
        "WANDB_API_KEY=0123456789abcdef0123456789abcdef01234567": False,
        'client = Client("sk-abcdefgh12345678")': False,
        "tokens = batch.tokens_per_step": True,
        'API_KEY = os.environ["API_KEY"]': True,
        "API_KEY: ${oc.env:API_KEY}": True,
    }
    (work / "own.py").write_text("".join(f"{line}\n" for line in lines))
    monkeypatch.chdir(work)
    one, diff = recorded(tmp_path / "run")
    assert "\n-  HF_TOKEN: <" in diff
    for line, kept in lines.items():
        assert (f"\n+{line}\n" in diff) is kept
    assert "12345678" not in diff
    assert "0123456789abcdef" not in diff
    assert "may not apply" in one["notes"][0]


def test_each_run_looks_when_it_starts_and_a_resumed_one_again(tmp_path):
    """A secret of the environment is in no file of a run."""
    secret = "canary0123456789"
    work = repository(tmp_path / "work", own__py=HOOK.encode())
    (work / "own.py").write_text(HOOK + f"TEXT = '{secret}'\n")
    (work / f"{secret}.txt").touch()
    tools, real = tmp_path / "tools", shutil.which("git")
    tools.mkdir()
    (tools / "git").write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\nexec {real} "$@"\n')
    (tools / "git").chmod(0o755)
    env = {"PATH": f"{tools}{os.pathsep}{os.environ['PATH']}", "HF_TOKEN": secret}
    sweep = [*TINY, *OWN, "-m", "train.seed=1,2", f"hydra.sweep.dir={tmp_path / 'sweep'}"]
    done = llmexp("train", *sweep, cwd=work, **env)
    assert done.code == 0, done.err
    calls = (tmp_path / "calls").read_text().splitlines()
    looks = [call for call in calls if str(work) not in call and " status " in call]
    assert len(looks) == 1 + 2  # when they are queued, and each as it starts
    runs = sorted(p for p in (tmp_path / "sweep").iterdir() if p.is_dir())
    assert len({(run / "provenance" / "work.diff").read_text() for run in runs}) == 1
    assert all(len(provenance.folders(run)) == 1 for run in runs)
    assert differences(read_records(find([tmp_path / "sweep"])[0])) == []
    assert "+TEXT = '<$HF_TOKEN>'" in (runs[0] / "provenance" / "work.diff").read_text()
    for path in (tmp_path / "sweep").rglob("*"):
        assert not path.is_file() or secret.encode() not in path.read_bytes(), path

    one = tmp_path / "one"
    run = llmexp("train", *TINY, *OWN, "train.stop_step=1", f"hydra.run.dir={one}", cwd=work)
    assert run.code == 75, run.err
    (work / "own.py").write_text(HOOK + "# other\n")
    (manifest,) = (one / "checkpoints").glob("*/manifest.json")
    manifest.rename(tmp_path / "kept")
    assert llmexp("resume", str(one), "--allow", "own", cwd=work).code == 2
    assert provenance.folders(one) == [one / "provenance"]  # of a refusal nothing is left
    (tmp_path / "kept").rename(manifest)
    assert llmexp("resume", str(one), "--allow", "own", cwd=work).code == 0
    assert provenance.folders(one) == [one / "provenance", one / "provenance-2"]
    assert "+# other" in (one / "provenance-2" / "work.diff").read_text()
    said = differences(read_records(find([tmp_path / "sweep", one])[0]))
    assert said[0].startswith("Uncommitted changes to work at ")
    assert said[1] == "Resumed with other code, packages or drivers: one."
    # one whose record was cut short by a kill is written again
    (one / "provenance-2" / provenance.FILE).unlink()
    provenance.record(one, resumed=True)
    assert provenance.folders(one) == [one / "provenance", one / "provenance-2"]
    assert (one / "provenance-2" / provenance.FILE).exists()


def test_without_git_outside_of_a_repository_and_before_the_first_commit(
    tmp_path, monkeypatch, in_repository
):
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    assert "is git installed?" in gathered()["notes"][0]
    monkeypatch.undo()
    (tmp_path / "plain").mkdir()
    monkeypatch.chdir(tmp_path / "plain")
    assert "is in no git repository" in provenance.gather().about["left_out"]
    (tmp_path / "new").mkdir()
    git(tmp_path / "new", "init", "-q")
    monkeypatch.chdir(tmp_path / "new")
    one = gathered()
    assert "commit" not in one
    assert one["notes"][0].startswith("git rev-parse: fatal")
    (tmp_path / "broken" / ".git").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "broken")
    assert "not a git repository" in gathered()["notes"][0]


@pytest.mark.parametrize("command", ["rev-parse", "status", "diff"])
def test_a_git_that_hangs_is_ended_and_what_was_known_is_kept(
    tmp_path, monkeypatch, in_repository, command
):
    tools, real = tmp_path / "tools", shutil.which("git")
    tools.mkdir()
    hang = f'for a in "$@"; do [ "$a" = {command} ] && exec sleep 600; done'
    (tools / "git").write_text(f'#!/bin/sh\n{hang}\nexec {real} "$@"\n')
    (tools / "git").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}{os.pathsep}{os.environ['PATH']}")
    one = gathered()
    assert one["notes"] == [f"git {command}: did not end within 5 s"]
    assert ("commit" in one) == (command != "rev-parse")
    assert one.get("changed", []) == (["M own.py"] if command == "diff" else [])


def test_a_diff_that_is_too_large_is_left_out_and_binary_files_first(monkeypatch, in_repository):
    (in_repository / "big.bin").write_bytes(os.urandom(20_000))
    git(in_repository, "add", "big.bin")
    monkeypatch.setattr(provenance, "MAX_DIFF", 5000)
    found = provenance.gather()
    (one,) = found.about["repositories"]
    assert "the diff has no binary files" in one["notes"][0]
    assert b"# changed" in found.files["work.diff"]
    monkeypatch.setattr(provenance, "MAX_DIFF", 50)
    one = gathered()
    assert "the diff is left out: it is larger than 50 bytes" in one["notes"][0]
    assert "diff" not in one
    assert one["diff_sha256"]


def test_a_submodule_a_detached_head_and_many_names(tmp_path, monkeypatch, in_repository):
    lib = repository(tmp_path / "lib", a__txt=b"1")
    git(in_repository, "submodule", "--quiet", "add", str(lib), "sub")
    git(in_repository, "commit", "-q", "-am", "second")
    (in_repository / "sub" / "a.txt").write_text("2")
    git(in_repository / "sub", "commit", "-qam", "moved")
    (in_repository / "sub" / "a.txt").write_text("3")
    git(in_repository, "checkout", "-q", "--detach")
    for number in range(provenance.MAX_NAMES + 5):
        (in_repository / f"u{number}").touch()
    found = provenance.gather()
    (one,) = found.about["repositories"]
    assert (one["branch"], one["changed"]) == (None, ["M sub"])
    assert b"Subproject commit" in found.files["work.diff"]
    assert one["notes"] == [
        "205 untracked files, of which 200 are named",
        "uncommitted changes inside submodules are left out",
    ]
    assert len(one["untracked"]) == provenance.MAX_NAMES
    monkeypatch.chdir(in_repository / "sub")  # the innermost is meant
    assert gathered()["name"] == "sub"


def test_the_image_of_the_container_where_it_is_named(monkeypatch):
    for name in (provenance.IMAGE, "APPTAINER_CONTAINER", "SINGULARITY_CONTAINER"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NVIDIA_BUILD_ID", "123")
    assert "123" in (provenance.image() or "")
    monkeypatch.setenv(provenance.IMAGE, "me/train:7")
    assert provenance.image() == "me/train:7"


def test_a_run_folder_that_cannot_be_written_only_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    provenance.record(tmp_path / "gone", resumed=False)
    monkeypatch.setattr(provenance, "installed", lambda: 1 / 0)
    provenance.record(tmp_path / "gone", resumed=False)
    provenance.start.cache_clear()
    said = capsys.readouterr().err
    assert "could not be written: No such file or directory; the run continues" in said
    assert "ZeroDivisionError: division by zero; the run continues" in said


def test_what_compare_says_of_runs_that_differ(tmp_path):
    """A few plain lines, however many runs and packages there are."""

    def made(name: str, commit: str, torch: str, **more: str) -> None:
        where = tmp_path / name / "provenance"
        where.mkdir(parents=True)
        one = {"name": "proj", "commit": commit * 20, "changed": [], "notes": []}
        told = {"repositories": [one], "packages_sha256": torch, **more}
        (where / provenance.FILE).write_text(json.dumps(told))
        (where / provenance.PACKAGES).write_text(f"a==1\ntorch=={torch}\n")
        (tmp_path / name / "config.yaml").write_text("name: x\n")
        (tmp_path / name / "run.json").write_text("{}")

    made("a", "12", "2.4", driver="550")
    made("b", "12", "2.5", driver="550")
    made("c", "ab", "2.4", driver="535")
    said = differences(read_records(find([tmp_path])[0]))
    assert said == [
        "Commit of proj: 1212121212 in a, b or ababababab in c.",
        "Packages: torch 2.4 or 2.5.",
        "NVIDIA driver: 550 in a, b or 535 in c.",
    ]
    for text in ("[1]", "{", '{"repositories": [3], "packages_sha256": 7}'):
        (tmp_path / "c" / "provenance" / provenance.FILE).write_text(text)
        differences(read_records(find([tmp_path])[0]))
    (tmp_path / "c" / "provenance" / provenance.FILE).write_text('{"repositories": {"a": 1}}')
    assert not any("ababab" in line for line in differences(read_records(find([tmp_path])[0])))
