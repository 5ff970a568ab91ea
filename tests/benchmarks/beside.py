"""Other ways to keep the same rows, each as durable as ours: it returns when the rows survive a power cut."""

from __future__ import annotations

import asyncio
import os
import pickle
import sqlite3
import time
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.parquet as pq
from sqlalchemy import ForeignKey, LargeBinary, select
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from trinity_data.schema import TABLES


class Beside(Protocol):
    """Appends tables and reads the oldest rows."""

    def append(self, table: pa.Table) -> None: ...

    def read(self, first: int, count: int) -> object: ...


class _Base(DeclarativeBase):
    pass


class _Row(_Base):
    __tablename__ = "experience"
    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=True)
    timestamp: Mapped[float] = mapped_column(index=True)
    task_id: Mapped[str] = mapped_column(index=True)
    run_id: Mapped[int] = mapped_column(index=True)
    msg_id: Mapped[str] = mapped_column(index=True)
    model_version: Mapped[int] = mapped_column(index=True)
    reward: Mapped[float]
    consumed: Mapped[int] = mapped_column(default=0, index=True)


class _Blob(_Base):
    __tablename__ = "experience_blob"
    id: Mapped[int] = mapped_column(ForeignKey("experience.id"), primary_key=True)
    content: Mapped[bytes] = mapped_column(LargeBinary)


class PickledRows:
    """A row of six indexes and a pickled blob, a flush a row through SQLAlchemy's asyncio,
    a commit a call: the incumbent's way.
    """

    def __init__(self, folder: Path) -> None:
        self.loop = asyncio.new_event_loop()
        self.engine = create_async_engine(f"sqlite+aiosqlite:///{folder / 'pickled.db'}")
        self.loop.run_until_complete(self._create())

    def append(self, table: pa.Table) -> None:
        self.loop.run_until_complete(self._append(table.to_pylist()))

    def read(self, first: int, count: int) -> list[object]:
        return self.loop.run_until_complete(self._read(first, count))

    async def _create(self) -> None:
        async with self.engine.begin() as connection:
            await connection.run_sync(_Base.metadata.create_all)

    async def _append(self, rows: list[dict[str, Any]]) -> None:
        async with AsyncSession(self.engine) as session, session.begin():
            for row in rows:
                stored = _Row(
                    timestamp=time.time(),
                    task_id=row["task_id"],
                    run_id=row["rollout"],
                    msg_id=row["experience_id"],
                    model_version=row["model_version"],
                    reward=row["reward"],
                )
                session.add(stored)
                await session.flush()
                session.add(_Blob(id=stored.id, content=pickle.dumps(row)))

    async def _read(self, first: int, count: int) -> list[object]:
        wanted = select(_Blob.content).where(_Blob.id > first).order_by(_Blob.id).limit(count)
        async with AsyncSession(self.engine) as session:
            return [pickle.loads(content) for content in await session.scalars(wanted)]


class SqliteRows:
    """Typed columns with the lists as bytes, one executemany and one commit a call."""

    def __init__(self, folder: Path) -> None:
        self.connection = sqlite3.connect(folder / "rows.db", isolation_level=None)
        self.connection.execute("PRAGMA journal_mode = WAL")
        self.connection.execute("PRAGMA synchronous = FULL")
        columns = ", ".join(f'"{name}"' for name in TABLES["experiences"].names)
        self.connection.execute(f"CREATE TABLE rows (id INTEGER PRIMARY KEY, {columns})")
        marks = ", ".join("?" for _ in TABLES["experiences"].names)
        self.insert = f"INSERT INTO rows ({columns}) VALUES ({marks})"

    def append(self, table: pa.Table) -> None:
        columns = [_sqlite_values(table[name]) for name in table.column_names]
        self.connection.execute("BEGIN IMMEDIATE")
        self.connection.executemany(self.insert, zip(*columns, strict=True))
        self.connection.execute("COMMIT")

    def read(self, first: int, count: int) -> list[tuple[object, ...]]:
        sql = "SELECT token_ids, logprobs, action_mask FROM rows WHERE id > ? ORDER BY id LIMIT ?"
        return self.connection.execute(sql, (first, count)).fetchall()


class ParquetFiles:
    """A zstd file a commit, synced, and its folder too."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "files"
        self.folder.mkdir()
        self.descriptor = os.open(self.folder, os.O_RDONLY)
        self.number = 0

    def append(self, table: pa.Table) -> None:
        path = self.folder / f"{self.number:06d}.parquet"
        self.number += 1
        with path.open("wb") as file:
            pq.write_table(table, file, compression="zstd")
            file.flush()
            os.fsync(file.fileno())
        os.fsync(self.descriptor)

    def read(self, first: int, count: int) -> pa.Table:
        rows = 64
        files = [
            self.folder / f"{n:06d}.parquet" for n in range(first // rows, (first + count - 1) // rows + 1)
        ]
        return pa.concat_tables(
            pq.read_table(file, columns=["token_ids", "logprobs", "action_mask"]) for file in files
        )


class ArrowStream:
    """One stream that grows, synced after every table: the least that can be done."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "plain.arrows"
        self.file = self.path.open("wb", buffering=0)
        self.stream = pa.ipc.new_stream(self.file, TABLES["experiences"])

    def append(self, table: pa.Table) -> None:
        self.stream.write_table(table)
        os.fsync(self.file.fileno())

    def read(self, first: int, count: int) -> pa.Table:
        with pa.memory_map(str(self.path)) as file:
            rows = pa.ipc.open_stream(file).read_all()
        return rows.slice(first, count).select(["token_ids", "logprobs", "action_mask"])


def _sqlite_values(column: pa.ChunkedArray) -> list[object]:
    kind = column.type
    if pa.types.is_list(kind) and pa.types.is_primitive(kind.value_type):
        return [
            bytes(memoryview(row.values.to_numpy(zero_copy_only=False))) if row.is_valid else None
            for row in column
        ]
    if pa.types.is_nested(kind):
        return [None if row is None else str(row) for row in column.to_pylist()]
    if pa.types.is_timestamp(kind):
        return column.cast(pa.int64()).to_pylist()
    return column.to_pylist()
