"""Finished rollouts on their way into the store.

Rows are written as they come, groups are judged as they become whole,
and all that waits goes into one commit. A row is acknowledged only when it is durable.
"""

from __future__ import annotations

import asyncio
import json
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby
from operator import itemgetter

import pyarrow as pa
import pyarrow.compute as pc

from trinity_data.schema import TABLES, group_of, rows_to_table
from trinity_data.store.commit import Commit
from trinity_data.store.store import Store
from trinity_explorer.rollout import UNTRAINABLE, Row
from trinity_operators import trainable
from trinity_operators.base import Operator
from trinity_operators.registry import is_ours
from trinity_operators.runner import (
    OperatorCount,
    Result,
    Watch,
    counts_table,
    outcomes_table,
    run_operators,
)
from trinity_operators.state_replay import replay_state, stateful_part
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
    """One a stage. `add` and `judge` return when what they were given is on disk."""

    def __init__(
        self,
        store: Store,
        operators: Sequence[Operator],
        stage: str,
        *,
        explorer: str,
        operator_timeout: float = 600.0,
    ) -> None:
        self.store, self.operators, self.stage, self.explorer = store, operators, stage, explorer
        self.operator_timeout = operator_timeout
        # a change of thread for each commit takes a tenth of the rate of rollouts
        self._apart = not all(map(is_ours, operators))
        self.runs_on_steps = any(each.whole_steps for each in operators)
        """Whether groups wait for each other before they are judged."""
        self.kept_groups: dict[int, int] = {}
        """Groups of which rows were kept, by step."""
        self.counts: dict[tuple[int, int], OperatorCount] = {}
        """Rows in and out and the time, by step and the operator's position."""
        self._waiting = _Waiting()
        self._flusher: asyncio.Task[None] | None = None
        self._failure: Exception | None = None

    def add(self, rows: list[Row]) -> None:
        """Takes the rows of one rollout; they are on disk when something that was asked for later is."""
        self._waiting.rows += rows
        self._begin_flush()

    async def add_group(self, rows: list[Row], group: list[Row]) -> None:
        """Stores a group's last rows and, with them, what the operators make of the whole group."""
        self._waiting.rows += rows
        self._waiting.groups.append(group)
        await self.flushed()

    async def judge(self, group: pa.Table) -> None:
        """Judges a group whose rows are all stored already."""
        self._waiting.stored.append(group)
        await self.flushed()

    async def flushed(self) -> None:
        """Returns when all that was taken is on disk."""
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
                commit = await self._in_time(batch)
                await asyncio.wrap_future(self.store.submit(commit))
            except Exception as error:  # whoever waits, now or later, hears why rows are not on disk
                self._failure = error
                for done in batch.done:
                    if not done.done():
                        done.set_exception(error)
                continue
            for done in batch.done:
                if not done.done():
                    done.set_result(None)

    async def _in_time(self, batch: _Waiting) -> Commit:
        if not (self._apart and (batch.groups or batch.stored)):
            return self._commit(batch)
        return await in_time(partial(self._commit, batch), self.operator_timeout)

    async def replay_state(self) -> None:
        """Shows operators that keep state the experiences of the sessions before.

        To be called before anything is judged.
        """
        if stateful_part(self.operators):
            await in_time(self._replay_state, self.operator_timeout)

    def _replay_state(self, watch: Watch) -> None:
        """In the order in which they were judged, at once those of a step that were judged
        without another between.
        """
        columns = ["experience_id", "step", "dropped_by"]
        judged = self.store.table("outcomes", columns=columns, stage=self.stage)
        mine = pc.starts_with(judged["experience_id"], f"{self.explorer}/")
        seen = pc.not_equal(pc.fill_null(judged["dropped_by"], ""), trainable.OPERATOR)
        rows = judged.filter(pc.and_(mine, seen)).to_pylist()
        for _, together in groupby(rows, key=itemgetter("step")):
            part = list(together)
            experiences = self.store.read([row["experience_id"] for row in part])
            replay_state(
                self.operators,
                experiences.select(TABLES["experiences"].names),
                [row["dropped_by"] for row in part],
                row_kind="experience",
                stage=self.stage,
                watch=watch,
            )

    def _commit(self, batch: _Waiting, watch: Watch | None = None) -> Commit:
        tables = {"experiences": rows_to_table("experiences", batch.rows)} if batch.rows else {}
        groups = [*batch.stored]
        if batch.groups:
            rows = [row for group in batch.groups for row in group]
            # most groups end within one commit, and then their rows are a table already
            same = len(rows) == len(batch.rows) and all(map(operator.is_, rows, batch.rows))
            groups.append(tables["experiences"] if same else rows_to_table("experiences", rows))
        if groups:
            tables |= self._judge(pa.concat_tables(groups), watch)
        return Commit(tables=tables)

    def _judge(self, rows: pa.Table, watch: Watch | None = None) -> dict[str, pa.Table]:
        """Runs the operators over whole groups, step by step,
        leaving out what failed and what is not trained.
        """
        outcomes: list[pa.Table] = []
        decisions: list[pa.Table] = []
        for step in pc.unique(rows["step"]).to_pylist():
            alive = _where(rows, pc.and_(pc.equal(rows["step"], step), pc.equal(rows["error"], "")))
            if not alive.num_rows:
                continue
            if reasons := _untrainable(alive):
                outcomes.append(self._left_out(reasons, step))
                decisions.append(
                    trainable.decisions(reasons, row_kind="experience", stage=self.stage, step=step)
                )
                alive = alive.filter(pc.invert(pc.is_in(alive["experience_id"], pa.array(list(reasons)))))
            result = run_operators(
                self.operators,
                alive,
                row_kind="experience",
                id_column="experience_id",
                stage=self.stage,
                step=step,
                watch=watch,
            )
            self._count(step, result)
            outcomes.append(outcomes_table(result, alive, stage=self.stage, step=step))
            decisions.append(result.decisions)
        if not outcomes:
            return {}
        return {"outcomes": pa.concat_tables(outcomes), "decisions": pa.concat_tables(decisions)}

    def _left_out(self, reasons: Mapping[str, str], step: int) -> pa.Table:
        dropped = {"stage": self.stage, "step": step, "kept": False, "dropped_by": trainable.OPERATOR}
        return rows_to_table(
            "outcomes", [dropped | {"experience_id": row, "group_id": group_of(row)} for row in reasons]
        )

    def _count(self, step: int, result: Result) -> None:
        survivors = result.survivors
        self.kept_groups[step] = self.kept_groups.get(step, 0) + len(pc.unique(survivors["group_id"]))
        for count in result.counts:
            key = (step, count.position)
            self.counts[key] = _add(self.counts[key], count) if key in self.counts else count

    def count_stored(self, step: int) -> None:
        """Counts what was judged before a restart towards its step."""
        outcomes = self.store.table("outcomes", stage=self.stage)
        mine = pc.starts_with(outcomes["experience_id"], f"{self.explorer}/")
        kept = outcomes.filter(pc.and_(pc.and_(pc.equal(outcomes["step"], step), outcomes["kept"]), mine))
        self.kept_groups[step] = len(pc.unique(kept["group_id"]))
        decisions = self.store.table("decisions", stage=self.stage)
        mine = pc.and_(pc.equal(decisions["step"], step), pc.equal(decisions["row_kind"], "experience"))
        mine = pc.and_(mine, pc.starts_with(decisions["row_id"], f"{self.explorer}/"))
        # what went stale was no operator's doing, and has no place among them
        mine = pc.and_(mine, pc.is_valid(decisions["position"]))
        sums = decisions.filter(mine).group_by(["operator", "position", "version"])
        for row in sums.aggregate([("kept", "count"), ("kept", "sum"), ("microseconds", "sum")]).to_pylist():
            self.counts[step, row["position"]] = OperatorCount(
                operator=row["operator"],
                position=row["position"],
                version=row["version"],
                rows_in=row["kept_count"],
                rows_out=row["kept_sum"],
                microseconds=row["microseconds_sum"],
            )

    def counts_of(self, step: int) -> list[OperatorCount]:
        """What each operator let through in `step`, in their order."""
        return [count for (counted_step, _), count in sorted(self.counts.items()) if counted_step == step]

    def operator_rows(self, step: int) -> pa.Table:
        """The same for the `operators` table."""
        return counts_table(self.counts_of(step), pipeline="experience", stage=self.stage, step=step)


def _untrainable(rows: pa.Table) -> dict[str, str]:
    """Why rows are not trained, by id; most rows have nothing in `info` and are not looked at."""
    noted = rows.select(["experience_id", "info"]).filter(pc.not_equal(rows["info"], "{}"))
    found = ((row["experience_id"], json.loads(row["info"]).get(UNTRAINABLE)) for row in noted.to_pylist())
    return {row: why for row, why in found if why}


def _where(rows: pa.Table, chosen: pa.ChunkedArray) -> pa.Table:
    """Filtering copies every column, so not when nothing is left out."""
    return rows if pc.all(chosen).as_py() else rows.filter(chosen)


def _add(one: OperatorCount, other: OperatorCount) -> OperatorCount:
    return replace(
        one,
        rows_in=one.rows_in + other.rows_in,
        rows_out=one.rows_out + other.rows_out,
        microseconds=one.microseconds + other.microseconds,
    )
