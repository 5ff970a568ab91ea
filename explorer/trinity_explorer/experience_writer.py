"""Finished rollouts on their way into the store.

Rows are written as they come, whole groups pass through the experience pipeline, and all that waits goes into
one commit. A row is acknowledged only when it is durable.
"""

from __future__ import annotations

import asyncio
import operator
from dataclasses import dataclass, field
from functools import partial

import pyarrow as pa

from trinity_data.schema import rows_to_table
from trinity_data.store.store import Store
from trinity_data.store.types import Commit
from trinity_explorer.rollout import Row
from trinity_operators.experience_pipeline import ExperiencePipeline
from trinity_operators.registry import is_built_in
from trinity_operators.runner import Watch
from trinity_operators.timeout import in_time


@dataclass
class _Waiting:
    rows: list[Row] = field(default_factory=list)
    groups: list[list[Row]] = field(default_factory=list)
    """Groups that became whole with these rows."""
    stored: list[pa.Table] = field(default_factory=list)
    """Groups whose rows are all stored."""
    done: list[asyncio.Future[None]] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.rows or self.groups or self.stored or self.done)


class ExperienceWriter:
    """One for each stage. The awaited methods return when their rows and the pipeline's are on disk."""

    def __init__(
        self, store: Store, pipeline: ExperiencePipeline, *, explorer: str, operator_timeout: float = 600.0
    ) -> None:
        """`operator_timeout` in seconds for each call of an operator."""
        self.store, self.pipeline, self.explorer = store, pipeline, explorer
        self.operator_timeout = operator_timeout
        # a change of thread for each commit takes a tenth of the rate of rollouts
        self._needs_deadline = not all(map(is_built_in, pipeline.operators))
        self._waiting = _Waiting()
        self._flusher: asyncio.Task[None] | None = None
        self._failure: Exception | None = None

    async def replay_state(self) -> None:
        """Shows operators that keep state the experiences of earlier sessions; called before `add`."""
        if self.pipeline.keeps_state:
            prefix = f"{self.explorer}/"
            replay = partial(self.pipeline.replay_state, self.store, id_prefix=prefix)
            await in_time(replay, self.operator_timeout)

    def add(self, rows: list[Row]) -> None:
        """Takes the rows of one rollout; they are on disk when something that was awaited later is."""
        self._waiting.rows += rows
        self._begin_flush()

    async def add_group(self, rows: list[Row], group: list[Row]) -> None:
        """Stores a group's last rows and, with them, the pipeline's rows about the whole group."""
        self._waiting.rows += rows
        self._waiting.groups.append(group)
        await self.flushed()

    async def add_stored(self, groups: pa.Table) -> None:
        """Passes whole groups through the pipeline whose rows are all stored already."""
        self._waiting.stored.append(groups)
        await self.flushed()

    async def flushed(self) -> None:
        """Returns when all that was added is on disk."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.done.append(done)
        self._begin_flush()
        await done

    def _begin_flush(self) -> None:
        if self._flusher is None or self._flusher.done():
            self._flusher = asyncio.get_running_loop().create_task(self._flush())

    async def _flush(self) -> None:
        while self._waiting:
            batch, self._waiting = self._waiting, _Waiting()
            try:
                if self._failure is not None:
                    raise self._failure
                if self._needs_deadline and (batch.groups or batch.stored):
                    commit = await in_time(partial(self._commit, batch), self.operator_timeout)
                else:
                    commit = self._commit(batch)
                await asyncio.wrap_future(self.store.submit(commit))
            except Exception as error:  # every waiter, now or later, gets the reason why rows are not on disk
                self._failure = error
                for done in batch.done:
                    if not done.done():
                        done.set_exception(error)
                continue
            for done in batch.done:
                if not done.done():
                    done.set_result(None)

    def _commit(self, batch: _Waiting, watch: Watch | None = None) -> Commit:
        tables = {"experiences": rows_to_table("experiences", batch.rows)} if batch.rows else {}
        groups = [*batch.stored]
        if batch.groups:
            rows = [row for group in batch.groups for row in group]
            # most groups end within one commit, and then their rows are a table already
            same = len(rows) == len(batch.rows) and all(map(operator.is_, rows, batch.rows))
            groups.append(tables["experiences"] if same else rows_to_table("experiences", rows))
        if groups:
            tables |= self.pipeline.apply(pa.concat_tables(groups), watch)
        return Commit(tables=tables)
