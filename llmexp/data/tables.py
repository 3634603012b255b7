"""Read the documents of tables: Parquet, and Arrow's files and streams (Feather is one of them)."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

from llmexp.config.commands import need_package
from llmexp.config.values import refuse
from llmexp.data.records import BadRecord, Record, as_text
from llmexp.system.text import first_of

ROWS_AT_ONCE = 1024  # read at a time
TEXT_TYPES = ("string", "large_string", "string_view", "binary", "large_binary", "binary_view")


def parquet(key: str, place: str, text_key: str, file: io.BufferedReader) -> Iterator[Record]:
    library = need_package("pyarrow.parquet", key, f"reading {place}")
    table = library.ParquetFile(file)
    path = _path(key, place, table.schema_arrow, text_key)
    batches = table.iter_batches(batch_size=ROWS_AT_ONCE, columns=[".".join(path)])
    yield from _rows(f"{key}={place}", batches, path, text_key)


def arrow(key: str, place: str, text_key: str, file: io.BufferedReader) -> Iterator[Record]:
    library = need_package("pyarrow", key, f"reading {place}")
    if file.peek(6).startswith(b"ARROW1"):
        table = library.ipc.open_file(file)
        batches = (table.get_batch(number) for number in range(table.num_record_batches))
    else:
        table = batches = library.ipc.open_stream(file)
    path = _path(key, place, table.schema, text_key)
    yield from _rows(f"{key}={place}", batches, path, text_key)


def _path(key: str, place: str, schema: Any, text_key: str) -> list[str]:
    """Return the names that lead to the column of text: one, or those of structs around it.

    Raises ValueError.
    """
    kind, path, left = schema, list[str](), text_key
    while left:
        name = left if left in kind.names else left.partition(".")[0]
        if name not in kind.names:
            names = first_of(kind.names, 8) or "none"
            there = f"the fields of {'.'.join(path)}" if path else "the columns"
            raise refuse("bad_data", key, place, f"no column {text_key!r}; {there} are: {names}")
        path.append(name)
        kind, left = kind.field(name).type, left[len(name) + 1 :]
        if left and not hasattr(kind, "names"):
            left = ""
    kind = getattr(kind, "value_type", kind) if hasattr(kind, "index_type") else kind
    if ".".join(path) != text_key or str(kind) not in TEXT_TYPES:
        raise refuse(
            "bad_data", key, place, f"the column {'.'.join(path)!r} is not text but {kind}"
        )
    return path


def _rows(where: str, batches: Any, path: list[str], text_key: str) -> Iterator[Record]:
    number = 0
    for batch in batches:
        column = batch.column(batch.schema.get_field_index(path[0]))
        for name in path[1:]:
            column = column.flatten()[column.type.get_field_index(name)]
        for start in range(0, len(column), ROWS_AT_ONCE):
            for text in _texts_of(column.slice(start, ROWS_AT_ONCE)):
                number += 1
                row = f"{where}, row {number:,}"
                if text is None:
                    yield BadRecord(f"{row}: {text_key!r} is null")
                elif isinstance(text, UnicodeDecodeError):
                    yield BadRecord(f"{row}: {text_key!r} is not UTF-8 ({text.reason})")
                else:
                    yield as_text(row, text, text_key)


def _texts_of(column: Any) -> Iterator[Any]:
    """Yield texts, nulls, and the error of each value that is not UTF-8."""
    try:
        yield from column.to_pylist()
        return
    except UnicodeDecodeError:
        pass
    for value in column:
        try:
            found = value.as_py()
        except UnicodeDecodeError as error:
            found = error
        yield found
