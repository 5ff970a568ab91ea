"""Another experience pipeline over stored rollouts, its steps spread over workers of Ray Data.

Each worker opens the store itself and prepares the operators once. Ranges of steps come back in their order,
as far ahead as Ray's object store holds; without tables a step is only what was counted.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import pyarrow as pa
import ray
from pydantic import TypeAdapter
from ray.exceptions import RayError

from trinity_data.config import StageConfig
from trinity_data.errors import OperatorError, TrinityError
from trinity_data.launch.whatif import TABLES, Rerun, RerunStep, checked_operators, configured_and_stored
from trinity_data.processes import end_with_raylet
from trinity_data.schema import values_of
from trinity_operators.at_work import AtWork, WorkerNote, WorkerNotes, describe_end
from trinity_operators.base import Operator
from trinity_operators.compare import Comparison
from trinity_operators.experience_workers import own_workers
from trinity_operators.remote_operators import OperatorActors, start_actors

ROWS_A_RANGE = 16_384
"""In one piece of work: enough to make up for opening files."""


@dataclass(frozen=True)
class Spread:
    """What workers rerun."""

    run: Path
    stage: StageConfig
    base_dir: Path
    allowed: tuple[str, ...] = ()
    with_tables: bool = True
    """Whether steps come with their tables, which only a branch needs."""

    def configured_and_chain(self) -> tuple[list[Operator], list[Operator]]:
        """As of `configured_and_stored`."""
        return configured_and_stored(self.run, self.stage, self.base_dir, allowed=self.allowed)


def rerun_spread(spread: Spread, steps: Mapping[int, int]) -> Iterator[RerunStep]:
    """The same as `rerun_operators`, in the order of the steps, which come as of `stored_steps`. Ray must be
    running.

    Raises OperatorError for an operator that keeps state, or that ends a worker.
    """
    configured, chain = spread.configured_and_chain()
    operators = checked_operators(spread.stage, chain, allowed=spread.allowed)
    stateful = [each.label for each in operators if each.keeps_state]
    if stateful:
        raise OperatorError(f"{stateful[0]!r} keeps state, so the steps cannot run beside each other")
    pipeline = spread.stage.data_processor.experience_pipeline
    notes: Any = ray.remote(num_cpus=0)(WorkerNotes).remote()
    with ExitStack() as stack:
        stack.callback(ray.kill, notes)
        own = dict[int, OperatorActors]()
        for each in own_workers(operators, configured, pipeline, spread.base_dir):
            own[each.part.position] = start_actors(each)
            stack.callback(own[each.part.position].close)
        try:
            for block in _blocks(spread, _ranges(steps), own, notes):
                yield from _steps_of(block)
        except TrinityError:
            raise
        except Exception as error:  # the boundary to Ray Data, which wraps what ends its workers
            known = [*(note for each in own.values() for note in each.notes), *_notes_of(notes)]
            ended = describe_end(known, pipeline.operator_timeout)
            raise OperatorError(ended or f"a worker failed: {type(error).__name__}: {error}") from error


def _ranges(steps: Mapping[int, int]) -> list[list[int]]:
    """Consecutive steps with about as many rows each."""
    ranges, rows = list[list[int]](), ROWS_A_RANGE
    for step, num_rows in steps.items():
        if rows >= ROWS_A_RANGE:
            ranges.append([])
            rows = 0
        ranges[-1].append(step)
        rows += num_rows
    return ranges


def _blocks(
    spread: Spread, ranges: list[list[int]], own: Mapping[int, OperatorActors], notes: Any
) -> Iterator[pa.Table]:
    """One for each range, in order."""
    import ray.data  # takes seconds

    logging.getLogger("ray.data").setLevel(logging.CRITICAL)  # an error is raised here
    taken = sum(len(actors.actors) * actors.num_cpus for actors in own.values())
    num_workers = max(1, min(len(ranges), int(ray.cluster_resources()["CPU"] - taken) - 1))
    work = ray.data.from_items([{"steps": each} for each in ranges], override_num_blocks=len(ranges))
    # of this work alone: the process may use Ray Data for something else
    work.context.enable_progress_bars = False
    work.context.execution_options.preserve_order = True
    done = work.map_batches(
        _RerunWorker,
        fn_constructor_args=(spread, own, notes),
        concurrency=num_workers,
        batch_size=None,
        batch_format="pyarrow",
        # Ray would start a worker that ends again and again without limit
        max_restarts=0,
        max_task_retries=0,
    )
    yield from done.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=0)


class _RerunWorker:
    """What runs in a worker. Errors travel as data, since Ray would bury them in its own."""

    def __init__(self, spread: Spread, own: Mapping[int, OperatorActors], notes: Any) -> None:
        end_with_raylet()
        self.spread, self.own = spread, own
        self.at_work = AtWork(spread.stage.data_processor.experience_pipeline.operator_timeout)
        ray.get(notes.register.remote(self.at_work.note))
        self.rerun: Rerun | None = None

    def __call__(self, rows: pa.Table) -> pa.Table:
        try:
            steps: list[int] = values_of(rows["steps"])[0]
            done = list(self._opened().steps(steps))
        except TrinityError as error:
            return pa.table({"error": [str(error)]})
        finally:
            self.at_work("")
        columns: dict[str, list[Any]] = {
            "error": [""] * len(done),
            "step": [each.step for each in done],
            "comparison": [_comparisons().dump_json(each.comparison) for each in done],
        }
        for name in TABLES:
            tables = [getattr(each, name) for each in done]
            columns[name] = [
                _to_bytes(each if self.spread.with_tables else each.slice(0, 0)) for each in tables
            ]
        return pa.table(columns)

    def _opened(self) -> Rerun:
        if self.rerun is None:
            _, operators = self.spread.configured_and_chain()
            for position, actors in self.own.items():
                operators[position] = actors.for_worker(os.getpid(), self.at_work)
            self.rerun = Rerun(self.spread.run, operators, self.spread.stage.stage_name, self.at_work)
        return self.rerun


def _steps_of(block: pa.Table) -> Iterator[RerunStep]:
    """Raises OperatorError for the error of the range."""
    for row in block.to_pylist():
        if row["error"]:
            raise OperatorError(row["error"])
        tables = [pa.ipc.open_stream(row[name]).read_all() for name in TABLES]
        yield RerunStep(row["step"], _comparisons().validate_json(row["comparison"]), *tables)


def _notes_of(notes: Any) -> list[WorkerNote]:
    try:
        known: list[WorkerNote] = ray.get(notes.notes.remote(), timeout=10)
    except RayError:
        return []
    return known


def _to_bytes(table: pa.Table) -> bytes:
    """The table as an Arrow IPC stream."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return bytes(sink.getvalue())


@lru_cache(maxsize=1)
def _comparisons() -> TypeAdapter[Comparison]:
    return TypeAdapter(Comparison)
