"""The Ray Data execution of a task stream: one task that reads,
one that runs the operators, chunk by chunk.
"""

from __future__ import annotations

import logging
import signal
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa
import ray
import ray.data
from ray.data.block import BlockMetadata
from ray.data.datasource import Datasource, ReadTask
from ray.util.annotations import RayDeprecationWarning

from trinity_data.dataset.reader import Source, row_order
from trinity_data.dataset.task import (
    TaskRows,
    build_task_rows,
    check_taskset,
    wanted_columns,
)
from trinity_data.errors import ConfigError, TrinityError
from trinity_operators.base import Operator
from trinity_operators.chunk import CHUNK_ROWS, StreamSpec, chunk, from_bytes, to_bytes
from trinity_operators.registry import build_operators
from trinity_operators.state_replay import show_again, stateful_part
from trinity_operators.task_filtering import filter_tasks


def execute(spec: StreamSpec, feed: Any) -> Iterator[pa.Table]:
    """Tables of chunks, as the feed allows."""
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    # with Ray's default, chunks would be held back until 128 MiB of them have come together
    context.target_max_block_size = 1
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    # Ray would start a worker that ends again and again, for ever; a resume starts it in order
    once = {"max_retries": 0}
    with warnings.catch_warnings():
        # `read_datasource` has no parameter of its own for retries
        warnings.simplefilter("ignore", RayDeprecationWarning)
        rows = ray.data.read_datasource(_TaskSource(spec, feed), override_num_blocks=1, ray_remote_args=once)
    stream = rows.map_batches(_Judge(spec, feed), batch_format="pyarrow", batch_size=None, **once)
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


class _TaskReader:
    """The task set's rows in the order of reading, in chunks that are the same in every session."""

    def __init__(self, spec: StreamSpec) -> None:
        self.spec, self.source = spec, Source(spec.source)
        self.columns = self.source.columns(wanted_columns(spec.taskset))
        check_taskset(spec.taskset, self.columns, self.source.name)
        if not self.source.num_rows:
            raise ConfigError(f"{self.source.name}: split {spec.source.split!r} has no rows")
        self.order = row_order(self.source.num_rows, shuffle=spec.taskset.shuffle, seed=spec.seed)

    def rows(self, start: int, end: int) -> TaskRows:
        places = [int(place) for place in self.order[start:end]]
        return build_task_rows(
            self.spec.taskset,
            self.source.rows(places),
            stage=self.spec.stage,
            source=self.source.name,
            source_rows=self.source.row_numbers(places),
            first_position=start,
            columns=self.columns,
        )


def _read(spec: StreamSpec, feed: Any) -> Iterator[pa.Table]:
    reader = _TaskReader(spec)
    for start in range(spec.first_row, len(reader.order), CHUNK_ROWS):
        end = min(start + CHUNK_ROWS, len(reader.order))
        if not ray.get(feed.ask.remote(end - start)):
            return
        yield reader.rows(start, end).to_table()


def _said(error: Exception) -> str:
    return str(error) if isinstance(error, TrinityError) else f"{type(error).__name__}: {error}"


class _Judge:
    """Runs the operators on a chunk in the worker.

    An error travels as data, since Ray would bury it in its own.
    """

    def __init__(self, spec: StreamSpec, feed: Any) -> None:
        self.spec, self.feed = spec, feed
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
            self._show_again(self.operators)
        judged = filter_tasks(
            self.operators, TaskRows.from_table(rows), stage=self.spec.stage, watch=self._begin
        )
        self._begin("")
        return chunk(
            tasks=to_bytes(judged.tasks),
            decisions=to_bytes(judged.decisions),
            operators=to_bytes(judged.operators),
        )

    def _show_again(self, operators: Sequence[Operator]) -> None:
        """Shows operators that keep state the rows of the sessions before, chunk by chunk as then."""
        if self.spec.seen is None or not stateful_part(operators):
            return
        reader, seen = _TaskReader(self.spec), from_bytes(self.spec.seen)["dropped_by"].to_pylist()
        for start in range(0, self.spec.first_row, CHUNK_ROWS):
            rows = reader.rows(start, min(start + CHUNK_ROWS, self.spec.first_row))
            before = [by for by, reason in zip(seen[start:], rows.reasons, strict=False) if not reason]
            show_again(
                operators, rows.for_operators(), before,
                row_kind="task", stage=self.spec.stage, watch=self._begin,
            )  # fmt: skip

    def _begin(self, what: str) -> None:
        """Told before it is done, since it may be the last that this process does:
        the kernel ends it when time is up.

        No thread of ours could, while an operator holds Python's lock.
        """
        ray.get(self.feed.begin.remote(what))
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, self.spec.operator_timeout if what else 0)
