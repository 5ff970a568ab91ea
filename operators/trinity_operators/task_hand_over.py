"""A task set that begins in process and goes on in workers, where those would end sooner by the time that the
operators have taken so far.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Generator
from contextlib import closing

import pyarrow.compute as pc
import ray

from trinity_operators.task_chunks import Chunk, ChunkSource, InProcessChunks

log = logging.getLogger(__name__)

START_SECONDS = 10.0
"""From the start of workers until their first rows: Ray Data is imported, and each loads the operators."""
MOST_WORKERS = 8
"""That are started without having been asked for."""
# the first rows may load what an operator needs, and any may come while the machine is busy
_FEWEST_SPANS = 4


def workers_at_hand() -> int:
    """How many workers a chain may move to for which the pipeline file names no number; 0 without Ray.

    One core stays with the run, which decodes and stores what they send: two workers on two cores were slower
    than no worker.
    """
    return min((os.cpu_count() or 1) - 1, MOST_WORKERS) if ray.is_initialized() else 0


class OperatorCost:
    """What the operators take for a row, as far as rows have passed them."""

    def __init__(self) -> None:
        self.num_spans, self.seconds_per_row = 0, float("inf")

    def add(self, chunk: Chunk) -> None:
        if chunk.filtered is None:
            return
        seconds = float(pc.sum(chunk.filtered.operators["microseconds"]).as_py() or 0.0) / 1e6
        self.seconds_per_row = min(self.seconds_per_row, seconds / (chunk.end - chunk.start))
        self.num_spans += 1

    def seconds_saved(self, num_rows: int, num_workers: int) -> float:
        """How much sooner so many rows have passed the operators in workers than in process."""
        if self.num_spans < _FEWEST_SPANS:
            return 0.0
        return num_rows * self.seconds_per_row * (1 - 1 / num_workers) - START_SECONDS


class MovingChunks:
    """Rows of `in_process`, until the others would have passed the operators sooner in workers; then those of
    `in_workers`, which is given the first row that is left and the first that the explorer has not taken.
    """

    def __init__(
        self,
        name: str,
        in_process: InProcessChunks,
        in_workers: Callable[[int, int], ChunkSource],
        *,
        end_row: int,
        num_workers: int,
    ) -> None:
        self.name, self.end_row, self.num_workers = name, end_row, num_workers
        self._source: ChunkSource = in_process
        self._in_process, self._in_workers = in_process, in_workers
        self._acknowledged, self._closed = in_process.spec.first_row, False

    def __iter__(self) -> Generator[Chunk]:
        cost, row = OperatorCost(), self._acknowledged
        with closing(self._in_process.__iter__()) as chunks:
            for chunk in chunks:
                yield chunk
                cost.add(chunk)
                row = chunk.end
                if cost.seconds_saved(self.end_row - row, self.num_workers) > 0:
                    break
            else:
                return
        self._move(row, cost)
        yield from self._source

    def _move(self, row: int, cost: OperatorCost) -> None:
        num_rows = self.end_row - row
        each, rest = cost.seconds_per_row * 1e3, cost.seconds_per_row * num_rows
        log.info(
            "%s goes on in %d workers at row %d: the operators take %.3g ms a row, and in process %.0f s for "
            "the %d rows that are left", self.name, self.num_workers, row, each, rest, num_rows,
        )  # fmt: skip
        self._source = self._in_workers(row, self._acknowledged)
        # what came meanwhile went to the other one
        self._source.acknowledge(self._acknowledged)
        if self._closed:
            self._source.close()

    def acknowledge(self, row: int) -> None:
        self._acknowledged = row
        self._source.acknowledge(row)

    def at_work(self) -> tuple[str, float]:
        return self._source.at_work()

    def describe_crash(self) -> str:
        return self._source.describe_crash()

    def close(self) -> None:
        self._closed = True
        self._source.close()
