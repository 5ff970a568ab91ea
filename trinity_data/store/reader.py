"""Reading a store, from the process that writes it or from any other, while it is written.

Each call sees one state of the ledger: all of a commit or nothing of it.
"""

from __future__ import annotations

import json
import sqlite3
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from trinity_data.errors import StoreError, unknown_name
from trinity_data.progress import stage_done_key
from trinity_data.schema import STORED, Column, rollout_of, values_of
from trinity_data.store import index
from trinity_data.store.ledger import naming_errors, open_for_reading, transaction
from trinity_data.store.protocol import ReadableStore
from trinity_data.store.retention import ExpiredRows, all_expired, refuse_expired
from trinity_data.store.segment_reader import SegmentFiles, retry_if_moved
from trinity_data.store.segments import Segment, all_segments, check_checkpoint, segments_of
from trinity_data.store.snapshot import Snapshot, take_snapshot
from trinity_data.store.types import Checkpoint, State

_LEDGER_COLUMNS = ("advantage", "shaped_reward")
_OF_OUTCOMES = ("token_advantages", "scores")


class StoreReader:
    """The questions that a store answers. Never writes; may be shared between threads."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._connection = open_for_reading(root)
        self._lock = threading.Lock()
        self._files = SegmentFiles(root)

    def close(self) -> None:
        with self._lock:
            self._connection.close()

    def progress(self, key: str) -> Any | None:
        """The value last committed under `key`."""
        with self._ledger() as ledger:
            row = ledger.execute("SELECT value FROM progress WHERE key = ?", (key,)).fetchone()
        return None if row is None else json.loads(row[0])

    def progress_below(self, prefix: str) -> dict[str, Any]:
        """The values of all keys that begin with `prefix`."""
        with self._ledger() as ledger:
            rows = ledger.execute(
                # a range of the key's index, up to the largest character there is
                "SELECT key, value FROM progress WHERE key >= ? AND key < ? ORDER BY key",
                (prefix, f"{prefix}\U0010ffff"),
            ).fetchall()
        return {key: json.loads(value) for key, value in rows}

    def stage_ended_at(self, stage: str) -> int | None:
        """The last step of a stage; None of one that is not done."""
        step: int | None = self.progress(stage_done_key(stage))
        return step

    def counts(self, *, stage: str | None = None) -> dict[State, int]:
        """How many experiences are in each state."""
        with self._ledger() as ledger:
            return index.counts(ledger, stage)

    def group_progress(self, stage: str, step: int) -> list[tuple[str, State]]:
        """The experiences that a step has already, so that after a crash only the
        missing ones are tried again.
        """
        with self._ledger() as ledger:
            return index.of_step(ledger, stage, step)

    def num_rows_by_step(self, stage: str) -> dict[int, tuple[int, int]]:
        """Of each step how many experiences it has, and how many of them did not fail."""
        with self._ledger() as ledger:
            return index.num_rows_by_step(ledger, stage)

    def pending(self, stage: str, *, through_step: int | None = None, limit: int | None = None) -> list[str]:
        """Ids that wait for a batch, in the order (step, position, rollout, turn)."""
        with self._ledger() as ledger:
            return index.in_state(ledger, stage, State.PENDING, through_step=through_step, limit=limit)

    def num_pending(self, stage: str, *, through_step: int | None = None) -> int:
        """How many wait for a batch."""
        with self._ledger() as ledger:
            return index.num_in_state(ledger, stage, State.PENDING, through_step=through_step)

    def num_pending_rollouts(self, stage: str, *, through_step: int | None = None) -> int:
        """How many rollouts they belong to."""
        with self._ledger() as ledger:
            return index.num_rollouts_in_state(ledger, stage, State.PENDING, through_step=through_step)

    def candidates(self, stage: str, *, through_step: int, num_used: int) -> list[index.Candidate]:
        """Rows that wait, and those of the newest `num_used` rollouts that were trained, with their uses."""
        with self._ledger() as ledger:
            return index.candidates(ledger, stage, through_step=through_step, num_used=num_used)

    def raw(self, stage: str) -> list[str]:
        """Ids whose pipeline decision is missing: not made yet, or lost in a crash."""
        with self._ledger() as ledger:
            return index.in_state(ledger, stage, State.RAW)

    def batch(self, step: int) -> list[str] | None:
        """The ids that were recorded for a step, in order; None when no batch was formed."""
        with self._ledger() as ledger:
            return index.batch(ledger, step)

    def latest_checkpoint(self) -> Checkpoint | None:
        """The checkpoint of the highest step."""
        with self._ledger() as ledger:
            row = ledger.execute(
                "SELECT step, path, stage, sequence FROM checkpoints ORDER BY step DESC LIMIT 1"
            ).fetchone()
        if row is not None:
            check_checkpoint(row[1])
        return None if row is None else Checkpoint(*row)

    def segments(self) -> list[Segment]:
        """Every file of the store, as of now."""
        with self._ledger() as ledger:
            return all_segments(ledger)

    def read(self, experience_ids: Sequence[str], columns: Sequence[str] | None = None) -> pa.Table:
        """Experiences in exactly the order asked, with `advantage`
        and `shaped_reward` from their outcomes; `token_advantages` and `scores` only where `columns` names
        them.
        """
        for name in _OF_OUTCOMES:
            if columns is not None and name in columns:
                others = self.read(experience_ids, [column for column in columns if column != name])
                return others.append_column(name, self._of_outcomes(experience_ids, name))
        if columns is not None:
            columns = [column for column in columns if column not in _LEDGER_COLUMNS]

        def attempt() -> pa.Table:
            with self._ledger() as ledger:
                rows, advantages, shaped = index.locate(ledger, experience_ids)
                if columns == []:
                    return pa.table(dict(zip(_LEDGER_COLUMNS, (advantages, shaped), strict=True)))
                refuse_expired(ledger, experience_ids, rows, columns)
                first, end = (int(rows.min()), int(rows.max()) + 1) if len(rows) else (0, 0)
                segments = segments_of(ledger, "experiences", first_row=first, end_row=end)
            needed = [s for s in segments if np.any((rows >= s.first_row) & (rows < s.end_row))]
            found = self._files.rows(needed, rows, columns) if len(rows) else _empty("experiences", columns)
            return found.append_column("advantage", advantages).append_column("shaped_reward", shaped)

        return retry_if_moved(attempt)

    def _of_outcomes(self, experience_ids: Sequence[str], name: str) -> Column:
        """Null where there is no outcome, or none of it."""
        with self._ledger() as ledger:
            is_there = name != _OF_OUTCOMES[0] or index.has_token_advantages(ledger)
        if not is_there:
            kind = STORED["outcomes"].field(name).type
            return pa.chunked_array([pa.nulls(len(experience_ids), kind)])
        return self._newest("outcomes", "experience_id", experience_ids, [name])[name]

    def tasks(self, task_ids: Sequence[str], *, stage: str, columns: Sequence[str]) -> pa.Table:
        """These tasks, in their order; nulls of one that the stage does not have."""
        return self._newest("tasks", "task_id", task_ids, columns, stage=stage)

    def snapshot(self) -> Snapshot:
        """As `take_snapshot`, without mapping the tails once more."""
        return take_snapshot(self.root, files=self._files)

    def _newest(
        self,
        table: str,
        key: str,
        values: Sequence[str],
        columns: Sequence[str],
        *,
        stage: str | None = None,
    ) -> pa.Table:
        """Columns of the rows with these keys; the newest files first, because such rows are among them."""
        keys = pa.array(values, pa.string())
        is_wanted = pc.field(key).isin(keys)
        if stage is not None:
            is_wanted &= pc.field("stage") == stage

        def attempt() -> pa.Table:
            with self._ledger() as ledger:
                segments = segments_of(ledger, table)
            found = _empty(table, [*dict.fromkeys((key, *columns, "stage"))])
            for segment in reversed(segments):
                rows = self._files.whole(segment, found.column_names).filter(is_wanted)
                found = pa.concat_tables([found, rows])
                if not pc.index_in(keys, value_set=found[key]).null_count:
                    break
            return found.take(pc.index_in(keys, value_set=found[key])).select(list(columns))

        return retry_if_moved(attempt)

    def table(self, name: str, *, columns: Sequence[str] | None = None, stage: str | None = None) -> pa.Table:
        """All rows of one table, in the order they were committed."""
        if name not in STORED:
            raise StoreError(unknown_name("table", name, STORED))
        names = list(STORED[name].names if columns is None else columns)
        read_names = names if stage is None or "stage" in names else [*names, "stage"]

        def attempt() -> pa.Table:
            with self._ledger() as ledger:
                segments = segments_of(ledger, name)
            parts = [self._files.whole(segment, read_names) for segment in segments]
            return pa.concat_tables(parts) if parts else _empty(name, read_names)

        rows = retry_if_moved(attempt)
        return rows if stage is None else rows.filter(pc.equal(rows["stage"], pa.scalar(stage))).select(names)

    def of_steps(self, name: str, stage: str, first: int, last: int, *, columns: Sequence[str]) -> pa.Table:
        """The rows of a table about these steps, both included; row groups that hold none are not read."""

        def attempt() -> pa.Table:
            with self._ledger() as ledger:
                segments = segments_of(ledger, name)
            parts = [_empty(name, columns)]
            read = [*dict.fromkeys((*columns, "stage", "step"))]
            is_wanted = (
                (pc.field("stage") == stage) & (pc.field("step") >= first) & (pc.field("step") <= last)
            )
            for segment in segments:
                for batch in self._files.around(segment, "step", first, last, read):
                    parts.append(pa.Table.from_batches([batch]).filter(is_wanted).select(list(columns)))
            return pa.concat_tables(parts)

        return retry_if_moved(attempt)

    def parts(self, name: str) -> Iterator[pa.Table]:
        """All rows that a table has now, in the order they were committed, a segment in memory at a time."""
        row, end = self.row_range(name)
        while row < end:
            rows = self.rows_from(name, row).slice(0, end - row)
            yield rows
            row += rows.num_rows

    def row_range(self, name: str) -> tuple[int, int]:
        """The number of a table's first row, and the one after its last; twice 0 where it has none."""
        with self._ledger() as ledger:
            segments = segments_of(ledger, name)
        return (segments[0].first_row, segments[-1].end_row) if segments else (0, 0)

    def rows_from(self, name: str, row: int) -> pa.Table:
        """The rows from number `row` to the end of its segment."""

        def attempt() -> pa.Table:
            with self._ledger() as ledger:
                segment = segments_of(ledger, name, first_row=row, end_row=row + 1)[0]
            return self._files.whole(segment).slice(row - segment.first_row)

        # sealing and merging may put another segment in place of the one that was seen
        return retry_if_moved(attempt)

    def have_ended(self, first_row: int, end_row: int) -> bool:
        """Whether nothing more can become of the experiences with these row numbers."""
        with self._ledger() as ledger:
            return index.have_ended(ledger, first_row, end_row)

    def forget(self, segment: Segment) -> None:
        """Lets go of a tail that was sealed; what was read from it stays valid."""
        self._files.forget(segment)

    def expired(self) -> list[ExpiredRows]:
        """Experiences whose contents were taken off the disk."""
        with self._ledger() as ledger:
            return all_expired(ledger)

    @contextmanager
    def _ledger(self) -> Iterator[sqlite3.Connection]:
        """One consistent view of the ledger."""
        with self._lock, naming_errors(self.root), transaction(self._connection, "DEFERRED"):
            yield self._connection


def _empty(name: str, columns: Sequence[str] | None) -> pa.Table:
    names = STORED[name].names
    for column in columns or ():
        if column not in names:
            raise StoreError(unknown_name(f"column of {name}", column, names))
    table = STORED[name].empty_table().replace_schema_metadata(None)
    return table if columns is None else table.select(list(columns))


@dataclass(frozen=True)
class PendingRollouts:
    """What of a stage waits for a batch or for its operators."""

    stage: str
    rollouts: int
    rows: int
    first_step: int
    """The step that the oldest were made for."""
    last_step: int
    ended_at: int | None
    """The last step of the stage; None of one that is not done."""

    def __str__(self) -> str:
        steps = (
            f"step {self.first_step}"
            if self.first_step == self.last_step
            else f"steps {self.first_step} to {self.last_step}"
        )
        why = (
            "the stage is not done: they are trained as it goes on, by the same command where it has stopped"
            if self.ended_at is None
            else f"the stage ended at step {self.ended_at}, "
            "and its batches took fewer rollouts than were kept "
            "(buffer.train_batch_size)"
        )
        return (
            f"stage {self.stage}: {self.rollouts:,} rollouts ({self.rows:,} rows) made for {steps} wait "
            f"untrained: {why}"
        )


def pending_at_the_end(store: ReadableStore, stage: str, *, ended_at: int) -> PendingRollouts | None:
    """None where every rollout that was kept has been trained."""
    rows = store.pending(stage) + store.raw(stage)
    if not rows:
        return None
    steps = values_of(store.read(rows, columns=["step"])["step"])
    number = len({rollout_of(row) for row in rows})
    return PendingRollouts(stage, number, len(rows), min(steps), max(steps), ended_at)
