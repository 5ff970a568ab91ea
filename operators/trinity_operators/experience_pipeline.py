"""The experience pipeline: the experience operators of a stage over whole groups, step by step.

Rows of `experiences` go in; rows of `outcomes` and `decisions` come out, and counts for each step: the same
for the same rows in a live run, in `whatif` and in a unit test. In a live run, `ExperienceWriter` stores rows
as they come, and with the last of a group what the pipeline makes of it.
"""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby
from operator import is_, itemgetter
from typing import TypeAlias

import pyarrow as pa
import pyarrow.compute as pc

from trinity_data.config import StageConfig
from trinity_data.errors import OperatorError
from trinity_data.schema import TABLES, filled, group_of, rows_to_table, values_of
from trinity_data.store.protocol import ReadableStore, WritableStore
from trinity_data.store.types import Commit
from trinity_operators import trainable
from trinity_operators.base import Operator
from trinity_operators.calls import Calls, Watch, run_calls
from trinity_operators.counts import OperatorCount, counts_table
from trinity_operators.off_loop import OffLoop, leaves_the_loop
from trinity_operators.preparation import prepared
from trinity_operators.registry import is_built_in
from trinity_operators.result import outcomes_table
from trinity_operators.runner import ERROR_REASON, operator_calls
from trinity_operators.saved_state import EXPERIENCES, SavedStates, encoded, load_states
from trinity_operators.state_replay import replay_state
from trinity_operators.stored_counts import metrics_progress, stored_counts
from trinity_operators.timeout import in_time

Row: TypeAlias = dict[str, object]
"""A row of `experiences`."""
_Place: TypeAlias = tuple[int, str, str]
"""Of an operator the position, the label and the version, which may differ after a resume."""


@dataclass(frozen=True)
class ProcessedRows:
    """What the operators made of whole groups: rows for tables, and by step what is counted."""

    tables: dict[str, pa.Table]
    counts: dict[int, Sequence[OperatorCount]]
    kept_groups: dict[int, int]


class ExperiencePipeline:
    """The operators of one stage, their state, and the counts of the steps they ran on."""

    def __init__(self, operators: Sequence[Operator], stage: str, *, max_error_rate: float = 0.0) -> None:
        """`max_error_rate` is the share of a step's rows on which an operator may fail; with 0, the first
        error is raised.
        """
        self.operators, self.stage, self.max_error_rate = operators, stage, max_error_rate
        self.whole_steps = any(each.whole_steps or each.whole_set for each in operators)
        """An operator needs all groups of a step in one call of `apply`."""
        self.keeps_state = any(each.keeps_state for each in operators)
        self.kept_groups: dict[int, int] = {}
        """Groups of which rows were kept, by step."""
        self._counts = defaultdict[int, dict[_Place, OperatorCount]](dict)
        """By step."""
        self.ended_through = -1
        """The last step whose counts were taken: groups of it and of earlier ones are late."""
        self._reopened = set[int]()
        """Steps up to `ended_through` that are not over: another explorer has left them."""
        self._late_counts: list[pa.Table] = []
        """Rows of `operators` about late groups, which were not taken yet."""
        self._expected_rows: dict[int, int] = {}
        self._prepared: ExitStack | None = None

    def expect(self, step: int, num_rows: int) -> None:
        """Says before they are made how many more rows a step will have, for the rate of errors."""
        self._expected_rows[step] = self._expected_rows.get(step, 0) + num_rows

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
        """Runs the operators over whole groups, step by step, and counts what they did.

        Returns the rows for the tables `outcomes` and `decisions`, and neither if every row failed. Failed
        rows are left out; rows marked as untrainable are dropped before the first operator.
        """
        self.prepare(watch)
        processed = run_calls(self.calls(rows), watch)
        self.record(processed)
        return processed.tables

    def calls(self, rows: pa.Table) -> Calls[ProcessedRows]:
        """The same without counting, the calls of the operators being left to the caller."""
        outcomes: list[pa.Table] = []
        decisions: list[pa.Table] = []
        counts: dict[int, Sequence[OperatorCount]] = {}
        kept_groups: dict[int, int] = {}
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
            result = yield from operator_calls(
                self.operators,
                finished,
                row_kind="experience",
                id_column="experience_id",
                stage=self.stage,
                step=step,
                drops_failures=self.max_error_rate > 0,
            )
            kept_groups[step] = len(pc.unique(result.survivors["group_id"]))
            counts[step] = result.counts
            outcomes.append(outcomes_table(result, finished, stage=self.stage, step=step))
            decisions.append(result.decisions)
        tables = {}
        if outcomes:
            tables = {"outcomes": pa.concat_tables(outcomes), "decisions": pa.concat_tables(decisions)}
        return ProcessedRows(tables, counts, kept_groups)

    def record(self, processed: ProcessedRows) -> None:
        """Adds the counts to those of their steps.

        Raises OperatorError, with a row, where an operator failed on more of a step's rows than it may.
        """
        for step, num_groups in processed.kept_groups.items():
            self.kept_groups[step] = self.kept_groups.get(step, 0) + num_groups
        for step, counts in processed.counts.items():
            if self._is_over(step):
                self._late_counts.append(self._table(counts, step))
            of_step = self._counts[step]
            for count in counts:
                place = _place(count)
                of_step[place] = of_step[place] + count if place in of_step else count
            for count in self.counts(step) if any(count.errors for count in counts) else ():
                self._check_errors(step, count, processed.tables["decisions"])

    def _check_errors(self, step: int, count: OperatorCount, decisions: pa.Table) -> None:
        num_seen = sum(each.rows_in for each in self.counts(step) if each.position == 0)
        num_rows = max(self._expected_rows.get(step, 0), num_seen)
        if count.errors <= self.max_error_rate * num_rows:
            return
        failed = decisions.filter(
            pc.and_(
                pc.equal(filled(decisions["position"], -1), pa.scalar(count.position, pa.int32())),
                pc.starts_with(filled(decisions["reason"], ""), ERROR_REASON),
            )
        )
        rows = failed.slice(0, 1).select(["row_id", "reason"]).to_pylist()
        example = "".join(f"; {row['row_id']}: {row['reason'].removeprefix(ERROR_REASON)}" for row in rows)
        raise OperatorError(
            f"step {step}: {count.operator!r} failed on {count.errors} of {num_rows} rows, "
            f"and max_error_rate is {self.max_error_rate:g}{example}"
        )

    def counts(self, step: int) -> list[OperatorCount]:
        """Rows in and out and the time of each operator in `step`, in their order."""
        return [count for _, count in sorted(self._counts[step].items())]

    def counts_table(self, step: int) -> pa.Table:
        """The same as rows of the table `operators`."""
        return self._table(self.counts(step), step)

    def _table(self, counts: Sequence[OperatorCount], step: int) -> pa.Table:
        return counts_table(counts, pipeline="experience", stage=self.stage, step=step)

    def end_step(self, step: int) -> pa.Table:
        """The counts of a step as rows of `operators`; those of its late groups come later."""
        self._reopened.discard(step)
        self.ended_through = max(self.ended_through, step)
        for earlier in [each for each in self._counts if each < step and self._is_over(each)]:
            del self._counts[earlier]
        return self.counts_table(step)

    def take_late_counts(self) -> list[pa.Table]:
        """Rows of `operators`, to be stored with the outcomes that they are about."""
        taken, self._late_counts = self._late_counts, []
        return taken

    def running_counts(self) -> dict[int, list[OperatorCount]]:
        """Of the steps that go on."""
        return {step: self.counts(step) for step in self._counts if not self._is_over(step)}

    def _is_over(self, step: int) -> bool:
        return step <= self.ended_through and step not in self._reopened

    def expect_late(self, step: int, under_way: Collection[int]) -> None:
        """Groups of a step that another explorer has ended are to come; `under_way` are steps that were begun
        here and go on.
        """
        if step > self.ended_through:
            self._reopened |= {each for each in under_way if each <= step}
            self.ended_through = step

    def resume_step(self, store: ReadableStore, step: int, groups: Sequence[str]) -> None:
        """Goes on with a step of which an earlier session, or another explorer, has begun these groups: what
        operators made of their experiences counts.
        """
        if step <= self.ended_through:
            self._reopened.add(step)
        outcomes = store.of_steps("outcomes", self.stage, step, step, columns=["group_id", "kept"])
        outcomes = outcomes.filter(pc.is_in(outcomes["group_id"], pa.array(groups, pa.string())))
        self.kept_groups[step] = len(pc.unique(outcomes.filter(outcomes["kept"])["group_id"]))
        stored = stored_counts(store, stage=self.stage, step=step, groups=groups)
        self._counts[step] = {_place(count): count for count in stored}

    def replay_state(self, store: ReadableStore, watch: Watch | None = None, *, id_prefix: str = "") -> None:
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
            rows = store.read([row["experience_id"] for row in part]).select(TABLES["experiences"].names)
            by = [row["dropped_by"] for row in part]
            replay_state(self.operators, rows, by, row_kind="experience", stage=self.stage, watch=watch)


def _place(count: OperatorCount) -> _Place:
    return count.position, count.operator, count.version


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
        self,
        store: WritableStore,
        pipeline: ExperiencePipeline,
        *,
        explorer: str,
        operator_timeout: float = 600.0,
        max_waiting_groups: int = 64,
        built_from: object = None,
    ) -> None:
        """`operator_timeout` in seconds for each call of an operator; with `max_waiting_groups` groups in
        operators that wait, `wait_for_room` waits too. `built_from` as `SavedStates` has it.
        """
        self.store, self.pipeline, self.explorer = store, pipeline, explorer
        self.max_waiting_groups = max_waiting_groups
        off_loop = any(map(leaves_the_loop, pipeline.operators))
        self._off_loop = OffLoop(pipeline.operators, timeout=operator_timeout) if off_loop else None
        self._num_waiting = 0
        self._has_room = asyncio.Event()
        self._has_room.set()
        self._said_full = False
        # an operator that keeps state sees groups in the order of their outcomes
        self._in_order = asyncio.Semaphore(1 if pipeline.keeps_state else max_waiting_groups)
        self.operator_timeout = operator_timeout
        # a change of thread for each commit takes a tenth of the rate of rollouts
        self._needs_deadline = not all(map(is_built_in, pipeline.operators))
        self._waiting = _Waiting()
        # of rows and the counts of them, so that a step ends with the counts of what is on record by then
        self._committing = asyncio.Lock()
        self._flusher: asyncio.Task[None] | None = None
        self._failure: Exception | None = None
        key = f"{EXPERIENCES}/{pipeline.stage}/{explorer}"
        self._states = SavedStates(pipeline.operators, key=key, built_from=built_from)

    async def prepare(self) -> None:
        """Prepares the operators, and gives those that keep state the one of earlier sessions, or shows them
        their experiences; called before `add`.
        """

        def work(watch: Watch) -> None:
            self.pipeline.prepare(watch)
            states = self._states.read(self.store, self._num_stored()) if self._states.saving else None
            if states is None:
                self.pipeline.replay_state(self.store, watch, id_prefix=f"{self.explorer}/")
            else:
                load_states(self.pipeline.operators, states, watch)

        await in_time(work, self.operator_timeout)

    def _num_stored(self) -> int:
        """How many experiences of the stage operators have seen in earlier sessions."""
        outcomes = self.store.table("outcomes", columns=["experience_id", "dropped_by"])
        prefix = f"{self.explorer}/{self.pipeline.stage}/"
        return _num_seen(outcomes.filter(pc.starts_with(outcomes["experience_id"], prefix)))

    def add(self, rows: list[Row]) -> None:
        """Takes the rows of one rollout; they are on disk when something that was awaited later is."""
        self._waiting.rows += rows
        self._begin_flush()

    async def add_group(self, rows: list[Row], group: list[Row]) -> None:
        """Stores a group's last rows and, with them, the pipeline's rows about the whole group.

        With an operator that waits, the pipeline's rows come later, in one commit.
        """
        self._waiting.rows += rows
        if self._off_loop is not None:
            await self.flushed()
            await self._process(rows_to_table("experiences", group), self._off_loop)
            return
        self._waiting.groups.append(group)
        await self.flushed()

    async def add_stored(self, groups: pa.Table) -> None:
        """Passes whole groups through the pipeline whose rows are all stored already."""
        if self._off_loop is not None:
            await self._process(groups, self._off_loop)
            return
        self._waiting.stored.append(groups)
        await self.flushed()

    async def wait_for_room(self, step: int) -> None:
        """Waits, with one event, while `max_waiting_groups` groups wait for operators."""
        if self._has_room.is_set() or self._off_loop is None:
            return
        if not self._said_full:
            self._said_full = True
            labels = ", ".join(self._off_loop.labels)
            message = f"{self._num_waiting} groups wait for {labels} (max_waiting_groups)"
            event = self.store.log_event(self.pipeline.stage, step, "operators_behind", message)
            await asyncio.wrap_future(event)
        await self._has_room.wait()

    def _count_waiting(self, change: int) -> None:
        self._num_waiting += change
        if self._num_waiting >= self.max_waiting_groups:
            self._has_room.clear()
        elif not self._has_room.is_set():
            self._has_room.set()
            self._said_full = False

    async def _process(self, groups: pa.Table, off_loop: OffLoop) -> None:
        """Passes stored groups through the operators, beside other groups."""
        self._count_waiting(1)
        try:
            async with self._in_order:
                processed = await off_loop.run(self.pipeline.calls(groups))
                async with self._committing:
                    self.pipeline.record(processed)
                    tables = processed.tables
                    # the state may be in another process
                    commit = (
                        await asyncio.to_thread(self._commit_of, tables)
                        if self.pipeline.keeps_state
                        else self._commit_of(tables)
                    )
                    stored = self.store.submit(commit)
                await asyncio.wrap_future(stored)
        finally:
            self._count_waiting(-1)

    async def flushed(self) -> None:
        """Returns when all that was added is on disk."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.done.append(done)
        self._begin_flush()
        await done

    async def end_step(self, step: int) -> pa.Table:
        """As of the pipeline, between two commits."""
        async with self._committing:
            return self.pipeline.end_step(step)

    def _begin_flush(self) -> None:
        if self._flusher is None or self._flusher.done():
            self._flusher = asyncio.get_running_loop().create_task(self._flush())

    async def _flush(self) -> None:
        while self._waiting:
            batch, self._waiting = self._waiting, _Waiting()
            try:
                if self._failure is not None:
                    raise self._failure
                async with self._committing:
                    if self._needs_deadline and (batch.groups or batch.stored):
                        commit = await in_time(partial(self._commit, batch), self.operator_timeout)
                    else:
                        commit = self._commit(batch)
                    stored = self.store.submit(commit)
                await asyncio.wrap_future(stored)
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
        results = self._commit_of(self.pipeline.apply(pa.concat_tables(groups), watch))
        return replace(results, tables={**tables, **results.tables})

    def _commit_of(self, results: dict[str, pa.Table]) -> Commit:
        """The rows that the operators made, with the state that they have then and what they reported."""
        if not results:
            return Commit(tables={})
        outcomes, running = results["outcomes"], self.pipeline.running_counts()
        reported = metrics_progress(running, stage=self.pipeline.stage, explorer=self.explorer)
        if late := self.pipeline.take_late_counts():
            results = {**results, "operators": pa.concat_tables(late)}
        states = {position: encoded(each) for position, each in self._states.saving.items()}
        saved = self._states.of_commit(states, _num_seen(outcomes))
        return Commit(tables=results, progress=saved | reported)


def _num_seen(outcomes: pa.Table) -> int:
    """How many of the rows operators have seen."""
    by_others = pc.not_equal(filled(outcomes["dropped_by"], ""), pa.scalar(trainable.OPERATOR))
    return values_of(by_others).count(True)


def build_writer(stage: StageConfig, operators: Sequence[Operator], store: WritableStore) -> ExperienceWriter:
    """The writer of a stage's experiences, with its pipeline of `operators`."""
    config = stage.data_processor.experience_pipeline
    return ExperienceWriter(
        store,
        ExperiencePipeline(operators, stage.stage_name, max_error_rate=config.max_error_rate),
        explorer=stage.explorer.name,
        operator_timeout=config.operator_timeout,
        max_waiting_groups=config.max_waiting_groups,
        built_from=[[each.name, each.args] for each in config.operators],
    )
