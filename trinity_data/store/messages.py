"""What travels between the process that owns a store and its clients."""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from trinity_data.errors import TrinityError
from trinity_data.store.participants import Place

PIECE_BYTES = 90_000
"""Ray sends an argument above 100 KB by its object store: for one of 64 rows half of the call's time."""
MAX_PIECES = 16
MARKS = "store_clients"
"""What the keys of `progress` begin with that mark writes as done."""
OPEN_WRITES = 1024
"""A mark takes the place of the one so many writes before; a client has fewer than that without an answer."""


@dataclass(frozen=True)
class Write:
    """A call of a method of `Store` that writes."""

    client: str
    """The id of a `RemoteStore`."""
    number: int
    """From 1 on, in the client's order."""
    method: str
    arguments: tuple[Any, ...]
    options: dict[str, Any]
    place: Place | None = None
    """Of the participant whose client it is; a write of one that has lost its place is refused."""

    @property
    def mark_key(self) -> str:
        """Where its mark stands in `progress`."""
        return f"{MARKS}/{self.client}/{self.number % OPEN_WRITES}"


@dataclass(frozen=True)
class Answer:
    """Errors travel as data, since Ray would bury them in its own."""

    value: Any = None
    error: TrinityError | None = None


@dataclass(frozen=True)
class SentTable:
    """A table on its way to another process, where it is a table again.

    As one buffer, since Ray sends each buffer of a column by itself: for 64 experiences a tenth of the time.
    """

    table: pa.Table

    def __reduce__(self) -> tuple[Any, ...]:
        return _reduce_table(self.table)


def _reduce_table(table: pa.Table) -> tuple[Any, ...]:
    stream = pa.BufferOutputStream()
    with pa.ipc.new_stream(stream, table.schema) as writer:
        writer.write_table(table)
    return _read_table, (stream.getvalue(),)


def _read_table(buffer: pa.Buffer | bytes) -> pa.Table:
    return pa.ipc.open_stream(buffer).read_all()


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        return _reduce_table(value) if isinstance(value, pa.Table) else NotImplemented


def pack(write: Write) -> bytes:
    """With its tables, each as one buffer."""
    content = io.BytesIO()
    _Pickler(content, protocol=5).dump(write)
    return content.getvalue()


def unpack(content: bytes | pa.Buffer) -> Write:
    """Of a process of the same user."""
    write: Write = pickle.loads(content)
    return write


def pieces_of(content: bytes) -> Sequence[bytes]:
    """As arguments that travel with a call of Ray's, as long as they are not large."""
    size = PIECE_BYTES if len(content) <= MAX_PIECES * PIECE_BYTES else len(content)
    return [content[start : start + size] for start in range(0, len(content), size)]
