"""The experience pipeline: the experience operators of a stage over whole groups, step by step.

Rows of `experiences` go in; rows of `outcomes` and `decisions` come out, and counts for each step: the same
for the same rows in a live run, in `whatif` and in a unit test. In a live run, `ExperienceWriter` stores rows
as they come, and with the last of a group what the pipeline makes of it.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from operator import is_, itemgetter
from typing import TypeAlias

import pyarrow as pa
import pyarrow.compute as pc

from trinity_data.schema import TABLES, filled, group_of, rows_to_table, values_of
from trinity_data.store.reader import StoreReader
from trinity_data.store.store import Store
from trinity_data.store.types import Commit
from trinity_operators import trainable
from trinity_operators.base import Operator
from trinity_operators.registry import is_built_in
from trinity_operators.runner import (
    OperatorCount,
    Watch,
    counts_table,
    outcomes_table,
    prepared,
    run_operators,
)
from trinity_operators.saved_state import SavedStates
from trinity_operators.state_replay import replay_state
from trinity_operators.timeout import in_time

Row: TypeAlias = dict[str, object]
"""A row of `experiences`."""


class ExperiencePipeline:
    """The operators of one stage, their state, and the counts of the steps they ran on."""

    def __init__(self, operators: Sequence[Operator], stage: str) -> None:
        self.operators, self.stage = operators, stage
        self.whole_steps = any(each.whole_steps or each.whole_set for each in operators)
        """An operator needs all groups of a step in one call of `apply`."""
        self.keeps_state = any(each.keeps_state for each in operators)
        self.kept_groups: dict[int, int] = {}
        """Groups of which rows were kept, by step."""
        self._counts: dict[tuple[int, int], OperatorCount] = {}
        """By step and the operator's position."""
        self._prepared: ExitStack | None = None

    def prepare(self, watch: Watch | None = None) -> None:
        """Prepares the operators, where `apply` did not before."""
        if self._prepared is None:
            self._prepared = ExitStack()
            self._prepared.enter_context(prepared(self.operators, watch))

    def close(self) -> None:
        """Closes the operators that were prepared."""
        if self._prepared is not None:
            self._prepared.close()
            self._prepared = None

    def apply(self, rows: pa.Table, watch: Watch | None = None) -> dict[str, pa.Table]:
        """Runs the operators over whole groups, step by step.

        Returns the rows for the tables `outcomes` and `decisions`, and neither if every row failed. Failed
        rows are left out; rows marked as untrainable are dropped before the first operator.
        """
        self.prepare(watch)
        outcomes: list[pa.Table] = []
        decisions: list[pa.Table] = []
        no_error = pc.equal(filled(rows["error"], ""), pa.scalar(""))
        for step in values_of(pc.unique(rows["step"])):
            is_finished = pc.and_(pc.equal(rows["step"], pa.scalar(step)), no_error)
            # filtering copies every column, so not where every row is finished
            finished = rows if pc.all(is_finished).as_py() else rows.filter(is_finished)
            if not finished.num_rows:
                continue
            if reasons := _untrainable(finished):
                outcome = {"stage": self.stage, "step": step, "kept": False, "dropped_by": trainable.OPERATOR}
                names = [{"experience_id": row_id, "group_id": group_of(row_id)} for row_id in reasons]
                outcomes.append(rows_to_table("outcomes", [outcome | each for each in names]))
                decisions.append(
                    trainable.decisions(reasons, row_kind="experience", stage=self.stage, step=step)
                )
                ids = pa.array(list(reasons))
                finished = finished.filter(pc.invert(pc.is_in(finished["experience_id"], ids)))
            result = run_operators(
                self.operators,
                finished,
                row_kind="experience",
                id_column="experience_id",
                stage=self.stage,
                step=step,
                watch=watch,
            )
            num_kept = len(pc.unique(result.survivors["group_id"]))
            self.kept_groups[step] = self.kept_groups.get(step, 0) + num_kept
            for count in result.counts:
                key = (step, count.position)
                self._counts[key] = self._counts[key] + count if key in self._counts else count
            outcomes.append(outcomes_table(result, finished, stage=self.stage, step=step))
            decisions.append(result.decisions)
        if not outcomes:
            return {}
        return {"outcomes": pa.concat_tables(outcomes), "decisions": pa.concat_tables(decisions)}

    def counts(self, step: int) -> list[OperatorCount]:
        """Rows in and out and the time of each operator in `step`, in their order."""
        return [count for (counted_step, _), count in sorted(self._counts.items()) if counted_step == step]

    def counts_table(self, step: int) -> pa.Table:
        """The same as rows of the table `operators`."""
        return counts_table(self.counts(step), pipeline="experience", stage=self.stage, step=step)

    def count_stored(self, store: StoreReader, step: int, *, id_prefix: str = "") -> None:
        """After a restart: counts the stored decisions of `step` about experiences whose ids begin so."""
        outcomes = store.table("outcomes", stage=self.stage)
        outcomes = outcomes.filter(pc.equal(outcomes["step"], pa.scalar(step)))
        outcomes = outcomes.filter(pc.starts_with(outcomes["experience_id"], id_prefix))
        self.kept_groups[step] = len(pc.unique(outcomes.filter(outcomes["kept"])["group_id"]))
        decisions = store.table("decisions", stage=self.stage)
        decisions = decisions.filter(pc.equal(decisions["step"], pa.scalar(step)))
        decisions = decisions.filter(pc.equal(decisions["row_kind"], pa.scalar("experience")))
        decisions = decisions.filter(pc.starts_with(decisions["row_id"], id_prefix))
        # a row that was dropped as stale or untrainable has a decision without a position
        decisions = decisions.filter(pc.is_valid(decisions["position"]))
        sums = decisions.group_by(["operator", "position", "version"])
        for row in sums.aggregate([("kept", "count"), ("kept", "sum"), ("microseconds", "sum")]).to_pylist():
            names = {name: row[name] for name in ("operator", "position", "version")}
            self._counts[step, row["position"]] = OperatorCount(
                **names,
                rows_in=row["kept_count"],
                rows_out=row["kept_sum"],
                microseconds=row["microseconds_sum"],
            )

    def replay_state(self, store: StoreReader, watch: Watch | None = None, *, id_prefix: str = "") -> None:
        """After a restart, before the first `apply`: shows operators that keep state the stored experiences
        whose ids begin so.

        In the order of their outcomes; consecutive outcomes of a step go through the operators together.
        Raises OperatorError where an operator drops other rows than before.
        """
        if not self.keeps_state:
            return
        self.prepare(watch)
        outcomes = store.table("outcomes", columns=["experience_id", "step", "dropped_by"], stage=self.stage)
        outcomes = outcomes.filter(pc.starts_with(outcomes["experience_id"], id_prefix))
        dropped_by = filled(outcomes["dropped_by"], "")
        outcomes = outcomes.filter(pc.not_equal(dropped_by, pa.scalar(trainable.OPERATOR)))
        for _, group in groupby(outcomes.to_pylist(), key=itemgetter("step")):
            part = list(group)
            experiences = store.read([row["experience_id"] for row in part])
            replay_state(
                self.operators,
                experiences.select(TABLES["experiences"].names),
                [row["dropped_by"] for row in part],
                row_kind="experience",
                stage=self.stage,
                watch=watch,
            )


def _untrainable(rows: pa.Table) -> dict[str, str]:
    """Why rows are not trained, by id; most rows have nothing in `info` and are not parsed."""
    with_info = rows.select(["experience_id", "info"]).filter(pc.not_equal(rows["info"], pa.scalar("{}")))
    reasons = (
        (row["experience_id"], json.loads(row["info"]).get(trainable.INFO_KEY))
        for row in with_info.to_pylist()
    )
    return {row_id: reason for row_id, reason in reasons if reason}


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
        self._states = SavedStates(pipeline.operators, stage=pipeline.stage, explorer=explorer)

    async def prepare(self) -> None:
        """Prepares the operators, and gives those that keep state the one of earlier sessions, or shows them
        their experiences; called before `add`.
        """

        def work(watch: Watch) -> None:
            self.pipeline.prepare(watch)
            if not self._states.load(self.store):
                self.pipeline.replay_state(self.store, watch, id_prefix=f"{self.explorer}/")

        await in_time(work, self.operator_timeout)

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
            same = len(rows) == len(batch.rows) and all(map(is_, rows, batch.rows))
            groups.append(tables["experiences"] if same else rows_to_table("experiences", rows))
        if not groups:
            return Commit(tables=tables)
        results = self.pipeline.apply(pa.concat_tables(groups), watch)
        states = self._states.of_commit(results["outcomes"]) if results else {}
        return Commit(tables=tables | results, progress=states)
