"""The task set through workers of one Ray Data execution that lasts as long as the stream.

Each worker is a read task that reads chunks and passes them through the operators. Blocks come back as they
are done, and are put in order here. A block is one row, because Ray Data would divide it otherwise: the
chunk's tasks, decisions and counts are lists of their typed rows.
"""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib import import_module
from itertools import islice
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import ray
from ray.exceptions import RayActorError, RayError

from trinity_data.errors import OperatorError
from trinity_data.schema import TABLES
from trinity_operators.at_work import AtWork, WorkerNote, describe_end
from trinity_operators.base import Operator, in_words
from trinity_operators.preparation import prepared
from trinity_operators.registry import build_operator
from trinity_operators.remote_operators import (
    START_SECONDS,
    OperatorActors,
    OperatorPart,
    OwnWorkers,
    check_resources,
    start_actors,
)
from trinity_operators.task_chunks import Chunk, ChunkWorker, StreamSpec
from trinity_operators.task_execution import Execution, OperatorWorkers, operator_parts_of
from trinity_operators.task_filtering import CHUNK_ROWS, FilteredTasks
from trinity_operators.task_window import WindowActor

_TABLES = ("tasks", "decisions", "operators")
_PARTS_AT_ONCE = 64
"""Of a saved state on the way to a worker."""


class RayChunks:
    """`window` holds the arguments of `Window`, and `acknowledged` is its last one."""

    def __init__(
        self,
        spec: StreamSpec,
        execution: Execution,
        operators: list[Operator],
        window: tuple[int, ...],
        acknowledged: int | None = None,
    ) -> None:
        """Raises OperatorError where Ray can never have the workers that operators declare."""
        self.spec, self.execution, self.operators = spec, execution, operators
        self._wanted = [self._workers_of(own) for own in execution.own_workers]
        check_resources(self._wanted)
        # a worker may wait in it, and the stream calls it besides
        concurrency = execution.num_workers + 8
        actor = ray.remote(num_cpus=0, max_concurrency=concurrency)(WindowActor)
        self.window: Any = actor.remote(*window, acknowledged)
        self.own_workers: dict[int, OperatorActors] = {}
        self._has_ended = False
        self._next_row = spec.first_row
        self._acknowledged = spec.first_row if acknowledged is None else acknowledged
        num_window_rows = window[3]
        self._step = max(CHUNK_ROWS // 4, num_window_rows // 16)
        """Rows that are acknowledged at once."""

    def __iter__(self) -> Generator[Chunk]:
        """In the order of the rows. Raises OperatorError where operators cannot be prepared."""
        try:
            self._start(self._wanted)
            self._load_states()
            yield from self._in_order()
        finally:
            for actors in self.own_workers.values():
                actors.close()
            self._has_ended = True

    def _start(self, workers: Sequence[OwnWorkers]) -> None:
        """All processes at once, as each takes seconds to start and to import what it needs."""
        with ThreadPoolExecutor(len(workers) + 1) as pool:
            started = pool.map(self._start_actors, workers)
            pool.submit(_import_ray_data)
            # in processes that Ray keeps for the reading
            reader = ray.remote(_import_ray_data).options(num_cpus=0, max_retries=0)
            imports = [reader.remote() for _ in range(self.execution.num_workers)]
            for _ in started:
                pass
        ray.wait(imports, num_returns=len(imports), timeout=START_SECONDS)

    def _start_actors(self, workers: OwnWorkers) -> None:
        actors = start_actors(workers, num_callers=self.execution.num_workers)
        self.own_workers[workers.part.position] = actors

    def _workers_of(self, own: OperatorWorkers) -> OwnWorkers:
        part = OperatorPart(
            own.name,
            own.args,
            own.position,
            self.spec.base_dir,
            self.spec.pipeline.operator_timeout,
            id_column="task_id",
            first_turn=self.spec.first_turn if own.in_order else None,
        )
        return OwnWorkers(self.operators[own.position], part, own.num_workers)

    def _load_states(self) -> None:
        """Of the operators with workers of their own; the others are loaded where they run."""
        states = dict(self.spec.states or {})
        for position, actors in self.own_workers.items():
            values = iter(states.pop(position, ()))
            while part := list(islice(values, _PARTS_AT_ONCE)):
                if error := actors.load(part):
                    raise OperatorError(error)
        if self.spec.states is not None:
            others = {position: list(values) for position, values in states.items()}
            self.spec = replace(self.spec, states=others)

    def acknowledge(self, row: int) -> None:
        # workers wait for whole chunks, and a message costs more than most operators do for a row
        if row >= self._next_row or row - self._acknowledged >= self._step:
            self._acknowledged = row
            self.window.acknowledge.remote(row)

    def at_work(self) -> tuple[str, float]:
        return "", 0.0

    def describe_crash(self) -> str:
        try:
            notes: list[WorkerNote] = ray.get(self.window.notes.remote(), timeout=10)
        except RayError:  # the actor is gone as well
            notes = []
        for actors in self.own_workers.values():
            notes = [*actors.notes, *notes]
        return describe_end(notes, self.spec.pipeline.operator_timeout)

    def close(self) -> None:
        if self._has_ended:
            # what refers to it may be there until Python looks for garbage
            ray.kill(self.window)
        else:
            self.window.close.remote()

    def _in_order(self) -> Iterator[Chunk]:
        waiting: dict[int, Chunk] = {}
        for block in _blocks(self.spec, self.window, self.execution, self.own_workers):
            chunk = _chunk_of(block)
            if chunk.start < 0:
                yield chunk
            waiting[chunk.start] = chunk
            while self._next_row in waiting:
                chunk = waiting.pop(self._next_row)
                self._next_row = chunk.end
                yield chunk


def _import_ray_data() -> None:
    import_module("ray.data")


def _blocks(
    spec: StreamSpec, window: Any, execution: Execution, own_workers: Mapping[int, OperatorActors]
) -> Iterator[pa.Table]:
    """As the workers make them."""
    # Ray Data takes seconds to import, which would be seconds before anything else starts
    import ray.data
    from ray.data.block import BlockMetadata
    from ray.data.datasource import Datasource, ReadTask
    from ray.util.annotations import RayDeprecationWarning

    class TaskSource(Datasource):  # type: ignore[misc]
        """A read task for each worker."""

        def estimate_inmemory_data_size(self) -> None:
            return None

        def get_read_tasks(self, *_: Any, **__: Any) -> list[ReadTask]:
            metadata = BlockMetadata(num_rows=None, size_bytes=None, input_files=None, exec_stats=None)
            return [
                ReadTask(_WorkerTask(spec, window, own_workers, number), metadata)
                for number in range(execution.num_workers)
            ]

    logging.getLogger("ray.data").setLevel(logging.CRITICAL)  # an error is the stream's own
    # Ray would start a worker that ends again and again without limit; a resume starts it in order
    options = {"max_retries": 0, "num_cpus": 0}
    with warnings.catch_warnings():
        # it has no parameter of its own for retries
        warnings.simplefilter("ignore", RayDeprecationWarning)
        stream = ray.data.read_datasource(
            TaskSource(), override_num_blocks=execution.num_workers, ray_remote_args=options
        )
    # of this stream alone: the process may use Ray Data for something else
    stream.context.enable_progress_bars = False
    stream.context.memory_usage_poll_interval_s = None  # each poll walks the memory of a worker
    # with Ray's default, blocks would be held back until 128 MiB of them have come together
    stream.context.target_max_block_size = 1
    # a worker waits for the rows of the others to be taken, so theirs may not wait for its end
    stream.context.execution_options.preserve_order = False
    yield from stream.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=0)


class _WorkerTask:
    """What runs in a worker. Errors travel as data, since Ray would bury them in its own."""

    def __init__(
        self, spec: StreamSpec, window: Any, own_workers: Mapping[int, OperatorActors], number: int
    ) -> None:
        self.spec, self.window, self.own_workers, self.number = spec, window, own_workers, number

    def __call__(self) -> Iterator[pa.Table]:
        start, at_work = -1, AtWork(self.spec.pipeline.operator_timeout)
        try:
            # the window's process may still start, and is waited for where an operator could end this one
            registered = self.window.register.remote(at_work.note)
            operators = self._operators(at_work)
            worker = ChunkWorker(self.spec, self.spec.open_reader(), operators, at_work)
            ray.get(registered)
            # those elsewhere are prepared
            here = [each for number, each in enumerate(operators) if number not in self.own_workers]
            with prepared(here, at_work):
                at_work("")
                while (span := ray.get(self.window.take.remote())) is not None:
                    start = span[0]
                    yield _block(worker.chunk(*span))
                    start = -1
        except RayActorError:
            ended = "the process of its window ended or was killed"
            yield _block(Chunk(start, start, None, ended, worker_ended=True))
        except Exception as error:  # the boundary to the files of a task set
            died = isinstance(error.__cause__, RayActorError)
            yield _block(Chunk(start, start, None, in_words(error), worker_ended=died))
        finally:
            at_work.close()

    def _operators(self, at_work: AtWork) -> list[Operator]:
        parts = operator_parts_of(self.spec.pipeline.operators, self.spec.base_dir)
        return [
            self.own_workers[position].for_worker(self.number, at_work)
            if position in self.own_workers
            else build_operator(name, args, base_dir=self.spec.base_dir)
            for position, (_, name, args) in enumerate(parts)
        ]


def _block(chunk: Chunk) -> pa.Table:
    """One row: its tables as lists of their rows."""
    columns: dict[str, Any] = {"start": [chunk.start], "end": [chunk.end], "error": [chunk.error]}
    columns |= {"states": [json.dumps(chunk.states)], "worker_ended": [chunk.worker_ended]}
    for name in _TABLES:
        table = TABLES[name].empty_table() if chunk.filtered is None else chunk.filtered.tables[name]
        arrays = [table[column].combine_chunks() for column in table.column_names]
        rows = pa.StructArray.from_arrays(arrays, fields=list(table.schema))
        columns[name] = pa.ListArray.from_arrays(pa.array([0, table.num_rows], pa.int32()), rows)
    return pa.table(columns)


def _chunk_of(block: pa.Table) -> Chunk:
    tables = {}
    for name in _TABLES:
        rows: Any = pc.list_flatten(block[name].combine_chunks())
        tables[name] = pa.table(pa.RecordBatch.from_struct_array(rows))
    names = ("start", "end", "error", "states", "worker_ended")
    start, end, error, states, worker_ended = (block[name][0].as_py() for name in names)
    by_position = {int(position): state for position, state in json.loads(states).items()}
    return Chunk(start, end, None if error else FilteredTasks(**tables), error, by_position, worker_ended)
