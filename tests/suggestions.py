"""The overrides and commands that a message gives to paste, each run through its own parser."""

import os
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

from hydra.core.override_parser.overrides_parser import OverridesParser

from llmexp.__main__ import COMMANDS
from llmexp.cli.running import function_of, read_line
from llmexp.config.sections import Config

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


COMMAND = re.compile(rf"llmexp (?:{'|'.join(COMMANDS)}) .*")


def commands(text: str) -> Iterator[list[str]]:
    """Give the words after `llmexp` of each command in a message, as a shell passes them on.

    A command goes on to the end of its line, or to a `;`, an `&&` or a word of prose; what the
    user fills in, `...`, is left out."""
    for found in COMMAND.finditer(text):
        words = shlex.shlex(found[0].rstrip(".)"), posix=True, punctuation_chars=";&")
        words.whitespace_split, words.commenters = True, ""
        given = []
        for word in list(words)[1:]:
            if set(word) <= set(";&"):
                break
            given.append(word)
        yield [word for word in given if word != "..."]


def read(words: list[str]) -> None:
    """Read a command line as its command does, and start nothing; raises ConfigError."""
    with mock.patch.dict(os.environ):
        read_line(words[0], function_of(words[0]), words[1:])


def check(text: str) -> None:
    for word in suggested(text):
        assert PARSER.parse_override(word), text
    for words in commands(text.partition("for example ")[2]):
        read(words)
