"""Text -> token shards in the cache folder: streamed in constant memory, made once, committed whole
or not at all.

The cut of the text into pieces never shows in the tokens: the result is `encode_ordinary` of each
whole document, with the end-of-text token between two documents.
"""

from __future__ import annotations

import codecs
import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import sys
import time
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from llmexp.data.files import cpu_count, state_of
from llmexp.data.stream import DataChanged, TokenStream, sample_digest
from llmexp.data.tokenizers import Own, Tokenizer, end_of_text_id, identity, is_byte_level

FORMAT = 1  # of the shards; part of their key
PIECE_BYTES = 1 << 19  # text that one thread encodes at a time
MAX_THREADS = 32
QUIET_S = 2.0  # shorter preparations print nothing

# Where a text may be cut without a change of its tokens. In the split patterns of the encodings
# below no match crosses these places, and none looks past them, so that split(a + b) = split(a) +
# split(b):
# x| y     before a space that follows a non-space: only the first character of a match may be a
# space before
# other things, and a run of spaces looks one character ahead, which is still x's side or all of y's
# x\n|y    after a single newline between non-spaces; o200k lets "/" follow "!\n" in one match, so y
# is not "/"
# a|.      between a letter or digit and white space or punctuation: the runs of letters and of
# digits end there
# ("'" is left out: it starts 's, which o200k joins to the word; marks are left out for the same
# reason) The characters are listed, not classed: Python and tiktoken may know different versions of
# Unicode.
BOUNDARY = re.compile(
    r"(?<=\S)(?= )"
    r"|(?<=\S\n)(?=[^\s/])"
    r"|(?<=[A-Za-z0-9\u0430-\u044f\u3041-\u3094\u30a1-\u30fa\u4e00-\u9fa5\uac00-\ud7a3])"
    r"(?=[\t\n\r !\"#$%&()*+,\-./:;<=>?@\[\]\\_{|}\u2026\u3000-\u3002\u300c\u300d\uff01\uff0c\uff1a\uff1b\uff1f])"  # noqa: E501
)
CUTTABLE = (
    "gpt2",
    "r50k_base",
    "p50k_base",
    "cl100k_base",
    "o200k_base",
)  # others: a document is one piece

_Encoded = Generator[
    tuple[np.ndarray, int], None, None
]  # tokens, and how many bytes of text they are


@dataclass(frozen=True)
class Segment:
    """Bytes [start, stop) of a UTF-8 text file, between characters; `content` is the sha256 of the
    whole file."""

    path: Path
    start: int
    stop: int
    content: str
    state: tuple[int, int]  # `state_of` the file, from before it was hashed


def prepare(
    splits: dict[str, list[Segment]],
    max_tokens: dict[str, int | None],
    encoding: Tokenizer,
    cache: Path,
    write: bool,
) -> dict[str, TokenStream]:
    """Return a token stream per split ("train", "val"), each cut at its `max_tokens`; from the
    cache where it is there.

    Without `write` nothing is written: what is not in the cache is counted, and its stream knows
    its length only. Raises ValueError for text that is not UTF-8 (file and byte offset), for a file
    that is not what was hashed any more, and for a cache that cannot be written.
    """
    recipe = {
        name: {
            "segments": [(s.content, s.start, s.stop) for s in segments],
            "max_tokens": max_tokens[name],
        }
        for name, segments in splits.items()
    }
    key = hashlib.sha256(
        json.dumps([FORMAT, identity(encoding), recipe], sort_keys=True).encode()
    ).hexdigest()[:32]
    folder = cache / "tokens" / key
    if (there := _open(folder, list(splits))) is not None:
        return there
    progress = _Progress(
        sum(s.stop - s.start for segments in splits.values() for s in segments), write
    )
    if not write:
        counts = {
            name: sum(map(len, encode_segments(segments, encoding, max_tokens[name], progress)))
            for name, segments in splits.items()
        }
        progress.end()
        return {name: TokenStream.unprepared(count) for name, count in counts.items()}
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _locked(folder.with_suffix(".lock")):
            if (there := _open(folder, list(splits))) is None:  # else another process was faster
                _build(folder, splits, max_tokens, encoding, progress)
                progress.end()
                there = _open(folder, list(splits))
    except DataChanged:  # is an OSError too
        raise
    except OSError as error:
        raise ValueError(
            f"data.cache_dir={cache}: the token cache cannot be written there "
            f"({error.strerror or error}); set data.cache_dir or the environment variable "
            "LLMEXP_CACHE_DIR to a folder with room that you may write to"
        ) from error
    if there is None:
        raise ValueError(
            f"data.cache_dir={cache}: what was just written to {folder} reads back damaged"
        )
    return there


def encode_segments(
    segments: Sequence[Segment],
    encoding: Tokenizer,
    max_tokens: int | None,
    progress: _Progress | None = None,
) -> Iterator[np.ndarray]:
    """Yield the tokens of the segments in order, as arrays; the end-of-text token between two
    segments. At most `max_tokens` in all. Raises ValueError, with file and byte offset, for text
    that is not UTF-8.
    """
    left = sys.maxsize if max_tokens is None else max_tokens
    encode = _encode_bytes if is_byte_level(encoding) else _encode_text
    with contextlib.closing(encode(segments, encoding)) as encoded:
        for tokens, n_bytes in encoded:
            if left <= 0:
                return
            if progress is not None:
                progress.add(n_bytes)
            yield tokens[:left]
            left -= len(tokens)


def _encode_bytes(segments: Sequence[Segment], encoding: Tokenizer) -> _Encoded:
    for i, segment in enumerate(segments):
        if i:
            yield np.array([end_of_text_id(encoding)]), 0
        for raw, _ in _blocks(segment):
            yield np.frombuffer(raw, dtype=np.uint8), len(raw)


def _encode_text(segments: Sequence[Segment], encoding: Tokenizer) -> _Encoded:
    """Pieces are encoded by threads (tiktoken releases the GIL) and come back in order, a few of
    them ahead."""
    cuttable = encoding.name in CUTTABLE and not isinstance(encoding, Own)

    def encode(text: str, path: Path) -> tuple[np.ndarray, int]:
        try:
            return encoding.encode_to_numpy(text, disallowed_special=()), len(text.encode())
        except ValueError as error:
            raise ValueError(
                f"{path}: the tokenizer {encoding.name} gave up on this text: {error}"
            ) from None

    threads = min(cpu_count(), MAX_THREADS)
    pool = ThreadPoolExecutor(threads, thread_name_prefix="llmexp-prepare")
    ahead: deque[Future[tuple[np.ndarray, int]]] = deque()
    try:
        for i, segment in enumerate(segments):
            if i:
                ahead.append(_done((np.array([end_of_text_id(encoding)]), 0)))
            texts = (text for _, text in _blocks(segment))
            for piece in cut(texts, PIECE_BYTES) if cuttable else filter(None, ["".join(texts)]):
                ahead.append(pool.submit(encode, piece, segment.path))
                while len(ahead) > 2 * threads:
                    yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _done(value: tuple[np.ndarray, int]) -> Future[tuple[np.ndarray, int]]:
    future: Future[tuple[np.ndarray, int]] = Future()
    future.set_result(value)
    return future


def cut(texts: Iterator[str], size: int) -> Iterator[str]:
    """Yield the same text in pieces of about `size` characters that can be encoded one by one (see
    BOUNDARY).

    Where there is no boundary the piece grows until there is one.
    """
    pending: list[str] = []
    length, enough = 0, size
    for text in texts:
        pending.append(text)
        length += len(text)
        if length < enough:
            continue
        joined = "".join(pending)
        end = _last_boundary(joined)
        if end:
            yield joined[:end]
        pending, length = [joined[end:]], len(joined) - end
        enough = (
            size if end else 2 * length
        )  # doubling keeps the cost of a text without boundaries linear
    if length:
        yield "".join(pending)


def _last_boundary(text: str) -> int:
    """Of the last place where `text` may be cut; 0 if there is none."""
    for width in (4096, len(text)):
        places = [m.start() for m in BOUNDARY.finditer(text, max(0, len(text) - width))][-1:]
        if places:
            return places[0]
    return 0


def _blocks(segment: Segment) -> Iterator[tuple[bytes, str]]:
    """Yield (bytes, their text) of a segment. A character may be split between two blocks of
    bytes."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    at = segment.start
    try:
        with open(segment.path, "rb") as file:
            file.seek(at)
            while at < segment.stop:
                raw = file.read(min(PIECE_BYTES, segment.stop - at))
                if not raw:
                    raise ValueError(f"{segment.path}: the file became shorter while it was read")
                before = at - len(decoder.getstate()[0])
                at += len(raw)
                yield raw, decoder.decode(raw, final=at == segment.stop)
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{segment.path}: not UTF-8 at byte {before + error.start:,} ({error.reason}); convert "
            f"the file, for example with iconv -f latin1 -t utf-8"
        ) from None
    except OSError as error:
        raise ValueError(f"{segment.path}: cannot be read: {error.strerror}") from None


def _build(
    folder: Path,
    splits: dict[str, list[Segment]],
    max_tokens: dict[str, int | None],
    encoding: Tokenizer,
    progress: _Progress,
) -> None:
    """Write a shard per split beside `folder`, the manifest last, and rename. The caller holds the
    lock."""
    # one name: what a killed process left is cleared by the next one
    temporary = folder.with_suffix(".tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    dtype = np.dtype("<u2" if encoding.n_vocab <= 1 << 16 else "<u4")
    manifest: dict[str, Any] = {"format": FORMAT, "dtype": dtype.str, "splits": {}}
    try:
        for name, segments in splits.items():
            path, count, content = temporary / f"{name}.bin", 0, hashlib.sha256()
            with open(path, "wb") as file:
                for tokens in encode_segments(segments, encoding, max_tokens[name], progress):
                    written = tokens.astype(dtype).data
                    file.write(written)
                    content.update(written)
                    count += len(tokens)
                file.flush()
                os.fsync(file.fileno())
            sample = sample_digest(_shard(path, dtype, count))
            manifest["splits"][name] = {
                "tokens": count,
                "sample": sample,
                "sha256": content.hexdigest(),
            }
        _refuse_changed(splits)  # else other tokens would be found under the hash of the old text
        with open(temporary / "manifest.json", "w") as file:
            json.dump(manifest, file)
            file.flush()
            os.fsync(file.fileno())
        _sync_folder(temporary)
        shutil.rmtree(folder, ignore_errors=True)  # a damaged one
        temporary.rename(folder)
        _sync_folder(folder.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _refuse_changed(splits: dict[str, list[Segment]]) -> None:
    known = {s.path: s.state for segments in splits.values() for s in segments}
    for path, state in known.items():
        if state_of(path) != state:
            raise DataChanged(
                f"{path}: this text file changed while it was being prepared; start again"
            )


def _open(folder: Path, names: list[str]) -> dict[str, TokenStream] | None:
    """Return the streams of a cache entry, or None where it is missing, torn or damaged."""
    try:
        manifest = json.loads((folder / "manifest.json").read_text())
        dtype = np.dtype(manifest["dtype"])
        streams = {}
        for name in names:
            told = manifest["splits"][name]
            if (folder / f"{name}.bin").stat().st_size != told["tokens"] * dtype.itemsize:
                return None
            streams[name] = _shard(folder / f"{name}.bin", dtype, told["tokens"])
            if sample_digest(streams[name]) != told["sample"]:
                return None
        return streams
    except (OSError, ValueError, KeyError, TypeError):
        return None


def recorded(path: Path) -> dict[str, str]:
    """Return what was noted of a shard when it was written: the "sha256" of its bytes and its
    "sample" (`sample_digest`).

    Less where an older version wrote it, nothing for what is no shard of the cache.
    """
    try:
        found = json.loads((path.parent / "manifest.json").read_text())["splits"][path.stem]
        return {key: found[key] for key in ("sha256", "sample") if isinstance(found.get(key), str)}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def _shard(path: Path, dtype: np.dtype, count: int) -> TokenStream:
    return TokenStream([np.memmap(path, dtype, "r", shape=(count,))] if count else [])


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the lock file; the kernel lets it go when the process dies."""
    with open(path, "a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(
                f"waiting for another process that prepares the same data ({path})",
                file=sys.stderr,
                flush=True,
            )
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


class _Progress:
    """A line on stderr every two seconds of a preparation that takes longer."""

    def __init__(self, total_bytes: int, write: bool) -> None:
        self.total, self.done = total_bytes, 0
        self.verb = "preparing" if write else "counting the tokens of"
        self.started = self.last = time.monotonic()
        self.printed = False

    def add(self, n_bytes: int) -> None:
        self.done += n_bytes
        now = time.monotonic()
        if now - self.last >= QUIET_S:
            self.last, self.printed = now, True
            self._line(
                f"{self.done / 1e6:,.0f} MB, {self.done / 1e6 / (now - self.started):.1f} MB/s"
            )

    def end(self) -> None:
        if self.printed:
            self._line(f"done in {time.monotonic() - self.started:.1f} s")

    def _line(self, text: str) -> None:
        print(
            f"{self.verb} {self.total / 1e6:,.0f} MB of text: {text}", file=sys.stderr, flush=True
        )
