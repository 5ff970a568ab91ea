"""The Ray Data execution of a task stream: one task that reads, one that runs the operators, chunk by chunk."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import ray
import ray.data
from ray.data.block import BlockMetadata
from ray.data.datasource import Datasource, ReadTask

from trinity_data.errors import ConfigError, TrinityError
from trinity_data.pipeline.chunk import CHUNK_ROWS, StreamSpec, chunk, from_bytes, to_bytes
from trinity_data.pipeline.judging import judge_tasks
from trinity_data.pipeline.operator import Operator
from trinity_data.pipeline.registry import build_operators
from trinity_data.pipeline.source import Source, chunks, row_order
from trinity_data.pipeline.task import (
    TaskRows,
    build_task_rows,
    check_taskset,
    wanted_columns,
    with_own_columns,
)


def execute(spec: StreamSpec, feed: Any) -> Iterator[pa.Table]:
    """Tables of chunks, as the feed allows."""
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    # with Ray's default, chunks would be held back until 128 MiB of them have come together
    context.target_max_block_size = 1
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    stream = ray.data.read_datasource(_TaskSource(spec, feed), override_num_blocks=1).map_batches(
        _Judge(spec), batch_format="pyarrow", batch_size=None
    )
    yield from stream.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=0)


class _TaskSource(Datasource):  # type: ignore[misc]
    """One read task that reads chunk by chunk, as the feed allows."""

    def __init__(self, spec: StreamSpec, feed: Any) -> None:
        super().__init__()
        self.spec, self.feed = spec, feed

    def estimate_inmemory_data_size(self) -> None:
        return None

    def get_read_tasks(
        self, parallelism: int, per_task_row_limit: int | None = None, **_: Any
    ) -> list[ReadTask]:
        spec, feed = self.spec, self.feed

        def read() -> Iterator[pa.Table]:
            try:
                for rows in _read(spec, feed):
                    yield chunk(rows=to_bytes(rows))
            except Exception as error:  # the boundary to the files of a task set
                yield chunk(error=_said(error))

        metadata = BlockMetadata(num_rows=None, size_bytes=None, input_files=None, exec_stats=None)
        return [ReadTask(read, metadata)]


def _read(spec: StreamSpec, feed: Any) -> Iterator[pa.Table]:
    source = Source(spec.source)
    columns = source.columns(wanted_columns(spec.taskset))
    check_taskset(spec.taskset, columns, source.name)
    if not source.num_rows:
        raise ConfigError(f"{source.name}: split {spec.source.split!r} has no rows")
    order = row_order(source.num_rows, shuffle=spec.taskset.shuffle, seed=spec.seed)
    position = spec.first_row
    for places in chunks(order[spec.first_row :], CHUNK_ROWS):
        if not ray.get(feed.ask.remote(len(places))):
            return
        rows = build_task_rows(
            spec.taskset,
            source.rows(places),
            stage=spec.stage,
            source=source.name,
            source_rows=source.row_numbers(places),
            first_position=position,
            columns=columns,
        )
        yield rows.to_table()
        position += len(places)


def _said(error: Exception) -> str:
    return str(error) if isinstance(error, TrinityError) else f"{type(error).__name__}: {error}"


class _Judge:
    """Runs the operators on a chunk in the worker. An error travels as data, since Ray would bury it in its own."""

    def __init__(self, spec: StreamSpec) -> None:
        self.spec = spec
        self.operators: list[Operator] | None = None

    def __call__(self, block: pa.Table) -> pa.Table:
        return pa.concat_tables(
            [
                chunk(error=row["error"]) if row["error"] else self._try(row["rows"])
                for row in block.to_pylist()
            ]
        )

    def _try(self, packed: bytes) -> pa.Table:
        try:
            return self._judge(from_bytes(packed))
        except TrinityError as error:
            return chunk(error=_said(error))

    def _judge(self, rows: pa.Table) -> pa.Table:
        if self.operators is None:
            self.operators = build_operators(self.spec.operators)
            self._remember()
        judged = judge_tasks(self.operators, TaskRows.from_table(rows), stage=self.spec.stage)
        return chunk(
            tasks=to_bytes(judged.tasks),
            decisions=to_bytes(judged.decisions),
            operators=to_bytes(judged.operators),
        )

    def _remember(self) -> None:
        """Gives operators that keep state the rows of the session before."""
        if self.spec.seen is None:
            return
        for operator in self.operators or ():
            if operator.keeps_state and hasattr(operator, "remember"):
                operator.remember(with_own_columns(from_bytes(self.spec.seen)))
