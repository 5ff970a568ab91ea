"""What travels through Ray Data: chunks of the task set, and what a worker needs to make them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa

from trinity_data.config import TasksetConfig
from trinity_data.dataset.reader import DatasetSpec
from trinity_operators.registry import OperatorSpec

CHUNK_ROWS = 64
PARTS = ("rows", "tasks", "decisions", "operators")


@dataclass(frozen=True)
class StreamSpec:
    """What a Ray worker needs to read and filter the task set from `first_row` of its order."""

    taskset: TasksetConfig
    source: DatasetSpec
    operators: Sequence[OperatorSpec]
    stage: str
    seed: int
    operator_timeout: float = 600.0
    first_row: int = 0
    seen: bytes | None = None
    """Who dropped each row before `first_row`, as an Arrow stream; for operators that keep state."""


def chunk(*, error: str = "", **parts: bytes) -> pa.Table:
    """A chunk on its way through Ray Data: one row of Arrow bytes,
    because Ray Data would cut it into rows otherwise.
    """
    columns = {name: pa.array([parts.get(name, b"")], pa.binary()) for name in PARTS}
    return pa.table(columns | {"error": [error]})


def to_bytes(table: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return bytes(sink.getvalue())


def from_bytes(data: bytes) -> pa.Table:
    return pa.ipc.open_stream(data).read_all()
