"""The overrides that a message gives to paste, each run through Hydra's own parser."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser

from llmexp.settings.config import Config

PARSER = OverridesParser.create()
CONF = Path(__file__).parents[1] / "conf"
FIRST = {path.name for path in CONF.iterdir() if path.is_dir()} | set(Config.__annotations__)
KEY = rf"(?:{'|'.join(sorted(FIRST))})(?:[./]\w+)*"
# not that which stands before a colon at the start of a line: it is what is refused
REFUSED = re.compile(rf"^(?:llmexp: |\s*[^\s:]+: )?['\"]?[+~]*{KEY}=.*?: ", re.MULTILINE)
SUGGESTED = re.compile(rf"(?<![\w.,/=-])['\"]?[+~]*{KEY}=(?=[^\s.;,:)=])(?!\{{$)")


def suggested(text: str) -> Iterator[str]:
    """Give each override in a message as a shell passes it on, but the one that is refused."""
    text = REFUSED.sub("", text)
    for found in SUGGESTED.finditer(text):
        words = shlex.shlex(text[found.start() :], posix=True)
        words.whitespace_split, words.commenters = True, ""
        word = str(words.get_token())
        yield word.rstrip(".;,:?") if word.count("(") else word.rstrip(".;,:?)")


def check(text: str) -> None:
    for word in suggested(text):
        assert PARSER.parse_override(word), text
