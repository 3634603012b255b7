"""Texts that llmexp prints, held against files in tests/golden/words.

`make words` writes these files anew; the reviewer reads their diff. Other tests assert figures,
keys and marks, never a sentence.
"""

import difflib
import os
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
FOLDER = TESTS / "golden" / "words"
WRITING = os.environ.get("LLMEXP_WORDS") == "write"
HEADING = re.compile(r"^#### (.*)\n", re.MULTILINE)


def file_of(name: str) -> Path:
    """Return the file of a name; features/NAME/... stands beside the tests of the feature."""
    return (TESTS if name.startswith("features/") else FOLDER) / f"{name}.txt"


def parts_of(name: str) -> dict[str, str]:
    """Return the texts of a file by their headings."""
    path = file_of(name)
    _, *found = HEADING.split(path.read_text(encoding="utf-8")) if path.exists() else [""]
    return dict(zip(found[::2], (text.strip("\n") for text in found[1::2]), strict=True))


def write(name: str, parts: dict[str, str]) -> None:
    path = file_of(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    texts = (f"#### {heading}\n{text}\n" for heading, text in parts.items())
    path.write_text("\n".join(texts), encoding="utf-8")


class Words:
    """The fixture `words`: `words(name, text, part)` fails with a diff where the text is another.

    Each path in `places` is written as its name, and what a pattern in `hidden` finds as what
    stands beside it: what differs between machines and days.
    """

    def __init__(self) -> None:
        self.places: dict[Path, str] = {}
        self.hidden = {r"\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d": "TIME"}

    def plain(self, text: str) -> str:
        for path in sorted(self.places, key=lambda path: -len(str(path))):
            text = text.replace(str(path), self.places[path])
        for pattern, instead in self.hidden.items():
            text = re.sub(pattern, instead, text)
        return "\n".join(line.rstrip() for line in text.splitlines()).strip("\n")

    def __call__(self, name: str, text: str, part: str = "text") -> None:
        found, heading = self.plain(text), " ".join(part.split())
        known = parts_of(name)
        if known.get(heading) == found:
            return
        if WRITING:
            write(name, {**known, heading: found})
            return
        before = known.get(heading, "").splitlines()
        now = found.splitlines()
        diff = "\n".join(difflib.unified_diff(before, now, "golden", "now", lineterm="", n=9))
        test = os.environ.get("PYTEST_CURRENT_TEST", "").partition("::")[0]
        where = f"{heading} of {file_of(name).relative_to(TESTS.parent)}"
        accept = f"Where the new text is right: make words ARGS={test}"
        pytest.fail(f"{where}:\n{diff}\n{accept}", pytrace=False)

    def only(self, name: str, parts: list[str]) -> None:
        """Fail where a file lacks one of these parts or has another; `make words` drops others."""
        known = parts_of(name)
        if WRITING:
            write(name, {part: known[part] for part in parts if part in known})
        else:
            assert {*known} == {*parts}, f"make words ARGS=-k {name.rpartition('/')[2]}"
