"""Sealed rows: one zstd Parquet file a segment, with a checksum for every page, that never changes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from trinity_data.atomic import replace_file
from trinity_data.store.denormalize import nothing_final, num_final, with_final, with_final_columns
from trinity_data.store.segments import (
    SEALED,
    Segment,
    file_checksum,
    num_row_groups,
)

_TEXTS = frozenset({"content", "response_text", "prompt", "info", "tools", "tool_calls", "message"})


def write_sealed(
    root: Path,
    segment: Segment,
    parts: Iterable[pa.Table],
    schema: pa.Schema,
    *,
    epoch: int,
    final: pa.Table | None = None,
) -> Segment:
    """Writes rows as the Parquet file of `segment`; it is complete and durable on return.

    Beside experiences it puts what finally became of them, as far as `final` says.
    """
    if segment.table == "experiences":
        final = nothing_final(segment.num_rows) if final is None else final
        parts, schema = with_final_columns(parts, final), with_final(schema)
    target = (root / segment.file).with_suffix(f".{epoch}.parquet")
    leaves = list(_leaves(schema))
    dictionary: Any = [name for name, kind in leaves if _repeats(name, kind)]
    with replace_file(target) as unfinished:
        with pq.ParquetWriter(
            unfinished,
            schema,
            compression="zstd",
            write_page_checksum=True,
            use_dictionary=dictionary,
            column_encoding={name: "BYTE_STREAM_SPLIT" for name, kind in leaves if pa.types.is_float32(kind)},
        ) as writer:
            for group in _row_groups(parts, segment.num_rows):
                writer.write_table(group, row_group_size=group.num_rows)
                del group  # else it would stay while the next one is put together
                pa.default_memory_pool().release_unused()
        num_bytes = unfinished.stat().st_size
        checksum = file_checksum(unfinished, num_bytes)
    file = str(target.relative_to(root))
    return replace(
        segment,
        kind=SEALED,
        file=file,
        num_bytes=num_bytes,
        checksum=checksum,
        num_final=0 if final is None else num_final(final),
    )


def _row_groups(parts: Iterable[pa.Table], num_rows: int) -> Iterator[pa.Table]:
    """The same rows in pieces of one size. Beside a piece one part is held in memory."""
    waiting, num_held, per_group = list[pa.Table](), 0, 0
    for part in parts:
        start = 0
        while start < part.num_rows:
            if not waiting:
                num_bytes = num_rows * part.nbytes // part.num_rows
                per_group = -(-num_rows // num_row_groups(num_rows, num_bytes))
            piece = part.slice(start, per_group - num_held)
            waiting.append(piece)
            start, num_held = start + piece.num_rows, num_held + piece.num_rows
            if num_held == per_group:
                yield pa.concat_tables(waiting)
                waiting, num_rows, num_held = [], num_rows - num_held, 0
    if waiting:
        yield pa.concat_tables(waiting)


def _repeats(name: str, kind: pa.DataType) -> bool:
    """Whether a Parquet dictionary makes a column smaller: names and numbers repeat,
    texts and log-probs do not.
    """
    if pa.types.is_string(kind):
        return name.split(".")[-1] not in _TEXTS
    return bool(pa.types.is_integer(kind) or pa.types.is_float64(kind))


def _leaves(fields: Iterable[pa.Field[Any]], prefix: str = "") -> Iterator[tuple[str, pa.DataType]]:
    """The columns that Parquet makes of nested ones, by its own names for them."""
    for field in fields:
        name, kind = prefix + field.name, field.type
        if pa.types.is_struct(kind):
            yield from _leaves(kind, f"{name}.")
        elif pa.types.is_map(kind):
            yield from ((f"{name}.key_value.key", kind.key_type), (f"{name}.key_value.value", kind.item_type))
        elif pa.types.is_list(kind):
            yield from _leaves([kind.value_field.with_name("element")], f"{name}.list.")
        else:
            yield name, kind
