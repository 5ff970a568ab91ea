"""What travels between the process that owns a store and its clients."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from itertools import chain
from typing import Any

import pyarrow as pa

from trinity_data import errors
from trinity_data.errors import TrinityError
from trinity_data.schema import STORED
from trinity_data.store.shared_bytes import Parts
from trinity_data.store.types import MARKS, Commit, Place, State

PIECE_BYTES = 90_000
"""Ray sends an argument above 100 KB by its object store: for one of 64 rows half of the call's time."""
MAX_PIECES = 16
_LENGTH_BYTES, _ALIGNMENT = 4, 8
_TABLES = "with_rows"
"""The option that holds tables."""
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
        below = f"{MARKS}/" if self.place is None else self.place.marks
        return f"{below}{self.client}/{self.number % OPEN_WRITES}"


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
        return _read_table, (_table_bytes(self.table),)


def _table_bytes(table: pa.Table) -> pa.Buffer:
    stream = pa.BufferOutputStream()
    with pa.ipc.new_stream(stream, table.schema) as writer:
        writer.write_table(table)
    return stream.getvalue()


def _read_table(buffer: pa.Buffer | bytes) -> pa.Table:
    return pa.ipc.open_stream(buffer).read_all()


def _messages(table: pa.Table) -> list[pa.Buffer]:
    """Its rows without their schema, which took two thirds of the time and is known by the table's name."""
    return [batch.serialize() for batch in table.combine_chunks().to_batches()]


def _read_messages(name: str, content: pa.Buffer) -> pa.Table:
    batches, stream = list[pa.RecordBatch](), pa.BufferReader(content)
    while stream.tell() < content.size:
        batches.append(pa.ipc.read_record_batch(pa.ipc.read_message(stream), STORED[name]))
    return pa.Table.from_batches(batches, schema=STORED[name])


def pack(write: Write) -> Parts:
    """The length of a header in JSON, the header, and the rows of each table in its stored columns."""
    header = {name: getattr(write, name) for name in ("client", "number", "method", "options")}
    tables, arguments = write.options.get(_TABLES) or {}, write.arguments
    if write.method == "submit":
        (commit,) = write.arguments
        tables, arguments = commit.tables, ()
        header["commit"] = {field.name: getattr(commit, field.name) for field in fields(commit)} | {
            "tables": {}
        }
    if write.options.get(_TABLES):
        header["options"] = {**write.options, _TABLES: {}}
    content = {name: _messages(table) for name, table in tables.items()}
    header |= {
        "arguments": arguments,
        "place": None if write.place is None else asdict(write.place),
        "tables": {name: sum(each.size for each in messages) for name, messages in content.items()},
    }
    text = json.dumps(header).encode()
    # Arrow reads numbers where they lie, which must be at a multiple of their size
    text += b" " * (-(_LENGTH_BYTES + len(text)) % _ALIGNMENT)
    return [len(text).to_bytes(_LENGTH_BYTES) + text, *chain.from_iterable(content.values())]


def unpack(content: bytes | pa.Buffer) -> Write:
    """What was packed; its tables are views of `content`."""
    whole = pa.py_buffer(content)
    start = _LENGTH_BYTES + int.from_bytes(whole[:_LENGTH_BYTES].to_pybytes())
    header = json.loads(whole[_LENGTH_BYTES:start].to_pybytes())
    tables: dict[str, pa.Table] = {}
    for name, size in header.pop("tables").items():
        tables[name], start = _read_messages(name, whole[start : start + size]), start + size
    if header["place"] is not None:
        header["place"] = Place(**header["place"])
    if (values := header.pop("commit", None)) is not None:
        states = [(row, State(state)) for row, state in values["states"]]
        header["arguments"] = [Commit(**values | {"tables": tables, "states": states})]
    elif tables:
        header["options"][_TABLES] = tables
    return Write(**header | {"arguments": tuple(header["arguments"])})


def pack_answer(answer: Answer) -> bytes:
    """In JSON."""
    error = None if answer.error is None else [type(answer.error).__name__, str(answer.error)]
    return json.dumps([answer.value, error]).encode()


def unpack_answer(content: bytes | pa.Buffer) -> Answer:
    """What was packed."""
    value, error = json.loads(bytes(content))
    return Answer(value, None if error is None else named_error(*error))


def named_error(kind: str, message: str) -> TrinityError:
    """One of ours, by the name of its class."""
    error: TrinityError = getattr(errors, kind)(message)
    return error


def pieces_of(parts: Parts) -> Sequence[bytes]:
    """As arguments that travel with a call of Ray's, as long as they are not large."""
    content = b"".join(parts)
    size = PIECE_BYTES if len(content) <= MAX_PIECES * PIECE_BYTES else len(content)
    return [content[start : start + size] for start in range(0, len(content), size)]
