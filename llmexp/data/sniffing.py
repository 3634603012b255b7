"""Tell what a file is by its first bytes."""

from __future__ import annotations

import re
import shlex

from llmexp.settings.values import refuse

HEAD = 512  # bytes that are looked at
CONVERT = "convert it first: iconv -f {kind} -t UTF-8 {{path}} > FILE"
# Expressions of first bytes. Files that are read:
READ = {
    "gzip": rb"\x1f\x8b",
    "zstd": rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18",  # a frame, or one to skip
    "xz": rb"\xfd7zXZ\x00",
    "bzip2": rb"BZh[1-9]1AY&SY",
    "parquet": rb"PAR1",
    "arrow": rb"ARROW1|\xff\xff\xff\xff",  # a file, a stream
    "array": rb"[\s\xef\xbb\xbf]*\[\s*\{\s*[\"}]",  # of JSON objects
    "strings": rb"[\s\xef\xbb\xbf]*\[\s*[\"\]]",  # an array of texts, or a text
}
# Files that are not read: what they are, and what to do with them.
REFUSED = {
    rb"PK\x03\x04": ("a zip archive, not text", "unpack it first: unzip {path}"),
    rb"[\s\S]{257}ustar": ("a tar archive, not text", "unpack it first: tar -xf {path}"),
    rb"\x93NUMPY": ("an array of NumPy, not text", "for token ids use data=tokens"),
    rb"FEA1": ("a Feather file of version 1", "write it anew as version 2 with pyarrow.feather"),
    rb"\xff\xfe\0\0|\0\0\xfe\xff": ("text in UTF-32, not UTF-8", CONVERT.format(kind="UTF-32")),
    rb"\xff\xfe|\xfe\xff": ("text in UTF-16, not UTF-8", CONVERT.format(kind="UTF-16")),
}


def sniffed(key: str, place: str, head: bytes) -> str | None:
    """Return the name in READ of a file that begins with these bytes, or None.

    Raises ValueError, with what to do, for a file that is not read.
    """
    for form, (what, way) in REFUSED.items():
        if re.match(form, head):
            raise refuse(key, place, f"is {what}; {way.format(path=shlex.quote(place))}")
    return next((name for name, form in READ.items() if re.match(form, head)), None)
