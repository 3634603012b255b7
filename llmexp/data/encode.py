"""Turn documents into token ids, in constant memory and by several threads.

The cut of a text into pieces never shows in the tokens: the result is `encode_ordinary` of each
whole document, with the end-of-text token between two documents.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from llmexp.data.tokenizers.base import Tokenizer
from llmexp.system.devices import cpu_count

PIECE_CHARACTERS = 1 << 19  # text that one thread encodes at a time
MAX_THREADS = 32

# Encodings and split patterns for which BOUNDARY holds. A .tiktoken file does not say how
# text is split before the bytes of a piece are merged. The expressions mean the same to tiktoken
# and to tokenizers, where {1,3}+ would be a repetition.
PUBLISHED = ("gpt2", "r50k_base", "p50k_base", "cl100k_base", "o200k_base")
PATTERNS = {
    "gpt2": r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s",
    "cl100k_base": (
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}| ?[^\s\p{L}\p{N}]++[\r\n]*+"
        r"|\s++$|\s*[\r\n]|\s+(?!\S)|\s"
    ),
}
# The places where a text may be cut without a change of its tokens. In the split patterns of
# PUBLISHED and PATTERNS no match crosses these places, and none looks past them, so
# that split(a + b) = split(a) + split(b):
# x| y   before a space that follows a non-space: only the first character of a match may be a
#        space before other things, and a run of spaces looks one character ahead, which is still
#        x's side or all of y's
# x\n|y  after a single newline between non-spaces; o200k lets "/" follow "!\n" in one match, so y
#        is not "/"
# a|.    between a letter or digit and white space or punctuation: the runs of letters and of digits
#        end there. "'" is left out: it starts 's, which o200k joins to the word; marks are left out
#        for the same reason.
# The characters are listed, not classed: Python and tiktoken may know different versions of
# Unicode.
BOUNDARY = re.compile(
    r"(?<=\S)(?= )"
    r"|(?<=\S\n)(?=[^\s/])"
    r"|(?<=[A-Za-z0-9\u0430-\u044f\u3041-\u3094\u30a1-\u30fa\u4e00-\u9fa5\uac00-\ud7a3])"
    r"(?=[\t\n\r !\"#$%&()*+,\-./:;<=>?@\[\]\\_{|}\u2026\u3000-\u3002\u300c\u300d\uff01\uff0c\uff1a\uff1b\uff1f])"  # noqa: E501
)

_T = TypeVar("_T")
R = TypeVar("R")


def pieces_of(tokenizer: Tokenizer) -> Callable[[Iterator[str]], Iterator[str]]:
    """Return the function that cuts the blocks of a text into pieces to encode one by one."""
    if tokenizer.is_byte_level:
        return iter
    return split_text if tokenizer.is_cuttable else lambda texts: iter(("".join(texts),))


def ahead(
    work: Callable[[_T], R], items: Iterator[_T], threads: int | None
) -> Generator[tuple[_T, R], None, None]:
    """Yield each item with what `work` makes of it, in order.

    Threads, by default one per core, work a few items ahead.
    """
    threads = min(threads or cpu_count(), MAX_THREADS)
    pool = ThreadPoolExecutor(threads, thread_name_prefix="llmexp-prepare")
    waiting: deque[tuple[_T, Future[R]]] = deque()
    try:
        for item in items:
            waiting.append((item, pool.submit(work, item)))
            while len(waiting) > 2 * threads:
                done, future = waiting.popleft()
                yield done, future.result()
        while waiting:
            done, future = waiting.popleft()
            yield done, future.result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def split_text(texts: Iterator[str], size: int | None = None) -> Iterator[str]:
    """Yield the same text in pieces of about `size` characters that can be encoded one by one.

    They end at a BOUNDARY. Where there is none the piece grows until there is one.
    """
    size = size or PIECE_CHARACTERS
    pending = []
    length, enough = 0, size
    for text in texts:
        pending.append(text)
        length += len(text)
        if length < enough:
            continue
        joined = "".join(pending)
        end = 0  # the last place where it may be cut
        for width in (4096, len(joined)):
            for match in BOUNDARY.finditer(joined, max(0, len(joined) - width)):
                end = match.start()
            if end:
                yield joined[:end]
                break
        pending, length = [joined[end:]], len(joined) - end
        # Doubling keeps the cost of a text without boundaries linear.
        enough = size if end else 2 * length
    if length:
        yield "".join(pending)
