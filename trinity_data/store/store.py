"""The store of a run, for the one process that writes it.

A row is durable before its write is acknowledged, and is in exactly one state from then on.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa

from trinity_data.errors import ConflictError, StoreError
from trinity_data.schema import REPLAYED, STORED, conform, rows_to_table, values_of
from trinity_data.store import index
from trinity_data.store.ledger import naming_errors, open_for_writing, take_epoch, transaction
from trinity_data.store.maintenance import Maintenance
from trinity_data.store.reader import StoreReader
from trinity_data.store.recovery import Recovered, recover
from trinity_data.store.segments import SEGMENTS_FOLDER, check_checkpoint, fsync_ancestors
from trinity_data.store.tail import Tails
from trinity_data.store.types import Commit, State
from trinity_data.store.writer import Changes, Writer, record_snapshot

_TAIL_BYTES = 96 << 20
# a tail of many tiny commits is slow to read, whatever its size
_TAIL_BATCHES = 4096


class Store(StoreReader):
    """Reads and writes. Opening it fences an older writer, whose next commit raises StoreLockedError."""

    def __init__(
        self, root: Path, ledger: sqlite3.Connection, epoch: int, recovered: Recovered, tail_bytes: int
    ) -> None:
        super().__init__(root)
        self._writing_ledger = ledger
        tails = Tails(
            root, max_bytes=tail_bytes, max_batches=_TAIL_BATCHES, next_number=recovered.next_number
        )
        for tail in recovered.tails:
            tails.adopt(tail)
        self._sealer = Maintenance(self, epoch=epoch)
        self._writer = Writer(
            root,
            ledger,
            tails,
            epoch=epoch,
            next_rows=recovered.next_rows,
            on_closed=self._sealer.add,
        )
        self._sealer.start(self._writer, recovered.closed, recovered.next_rows)

    @classmethod
    def create_or_open(cls, root: Path, *, tail_bytes: int = _TAIL_BYTES) -> Store:
        """The store in folder `root`, made when missing; recovers what a crash left."""
        with naming_errors(root):
            (root / SEGMENTS_FOLDER).mkdir(parents=True, exist_ok=True)
            ledger = open_for_writing(root)
            try:
                fsync_ancestors(root / SEGMENTS_FOLDER)
                with transaction(ledger):
                    epoch = take_epoch(ledger)
                    recovered = recover(root, ledger)
            except BaseException:
                ledger.close()
                raise
        return cls(root, ledger, epoch, recovered, tail_bytes)

    def commit(self, commit: Commit) -> None:
        """Writes all of it or nothing; returns when it is durable.

        Raises ConflictError where progress is not as the commit expects it.
        """
        self.submit(commit).result()

    def submit(self, commit: Commit) -> Future[None]:
        """The same without waiting. What waits together is written together, in the order of submission."""
        tables, states = check_commit(commit), dict(commit.states)
        progress = [(key, json.dumps(value)) for key, value in commit.progress.items() if value is not None]
        removed = [(key,) for key, value in commit.progress.items() if value is None]

        def work(changes: Changes) -> None:
            _check_expected(changes.ledger, commit.expected)
            _apply_rows(changes, tables, states)
            changes.ledger.executemany(
                "INSERT INTO progress VALUES (?, ?) ON CONFLICT (key) DO UPDATE SET value = excluded.value",
                progress,
            )
            changes.ledger.executemany("DELETE FROM progress WHERE key = ?", removed)

        return self._writer.submit(work, tables)

    def log_event(
        self, stage: str, step: int, kind: str, message: str, *, commit: Commit | None = None
    ) -> Future[None]:
        """Adds a row to `events`, in one transaction with `commit` where one is passed."""
        return self.submit(event_commit(stage, step, kind, message, commit=commit))

    def form_batch(
        self,
        stage: str,
        step: int,
        experience_ids: Sequence[str],
        *,
        replay: bool = False,
        with_rows: Mapping[str, pa.Table] | None = None,
    ) -> None:
        """Records the batch of a step and takes its rows out of `pending`, for good and in one transaction.

        With `replay` it may hold rows that earlier batches held. Rows from elsewhere come
        with it as tables by name.
        """
        identifiers = list(experience_ids)
        tables = conformed(with_rows or {})

        def work(changes: Changes) -> None:
            recorded = index.batch(changes.ledger, step)
            if recorded == identifiers:
                return
            if recorded is not None:
                raise StoreError(f"step {step} has another batch already, of {len(recorded)} experiences")
            _apply_rows(changes, tables, {})
            if replay:
                index.allow_replay(changes.ledger, stage)
            used = index.form_batch(changes.ledger, stage, step, identifiers, changes.sequence, replay=replay)
            moved = [REPLAYED if again else str(State.TRAINED) for again in used]
            changes.append("state_changes", _state_changes(changes.sequence, identifiers, moved, step))
            record_snapshot(changes)

        self._writer.submit(work, tables).result()

    def take_batch(
        self,
        stage: str,
        step: int,
        experience_ids: Sequence[str],
        *,
        columns: Sequence[str] | None = None,
        replay: bool = False,
    ) -> pa.Table:
        """Records the batch of a step as `form_batch` does; returns its rows in order as `read` does.

        A batch that is recorded already is only read.
        """
        self.form_batch(stage, step, experience_ids, replay=replay)
        return self.read(experience_ids, columns)

    def record_checkpoint(self, step: int, path: str, *, stage: str) -> None:
        """Names the ledger position that a trainer checkpoint stands for.

        `path` is its folder's name, global_step_N.
        """
        check_checkpoint(path)

        def work(changes: Changes) -> None:
            changes.ledger.execute(
                "INSERT OR REPLACE INTO checkpoints VALUES (?, ?, ?, ?)",
                (step, stage, path, changes.sequence),
            )
            record_snapshot(changes)

        self._writer.submit(work).result()

    def forget_checkpoint(self, step: int) -> None:
        """The checkpoint is gone, or about to go."""

        def work(changes: Changes) -> None:
            changes.ledger.execute("DELETE FROM checkpoints WHERE step = ?", (step,))

        self._writer.submit(work).result()

    def seal(self) -> None:
        """Turns all rows so far into Parquet and waits for it; for the end of a run."""

        def work(changes: Changes) -> None:
            changes.close_tails = True

        self._writer.submit(work).result()
        self._sealer.wait()

    def close(self) -> None:
        """Writes what was submitted and lets go of the files.

        What is not sealed is sealed at the next start.
        """
        self._sealer.close()
        self._writer.close()
        super().close()
        self._writing_ledger.close()


def check_commit(commit: Commit) -> dict[str, pa.Table]:
    """Its tables as the schema has them. Raises StoreError for what no store takes."""
    if len(dict(commit.states)) != len(commit.states):
        raise StoreError("a commit names two states for one experience")
    if State.TRAINED in dict(commit.states).values():
        raise StoreError("only form_batch makes an experience 'trained'")
    return conformed(commit.tables)


def conformed(tables: Mapping[str, pa.Table]) -> dict[str, pa.Table]:
    """Tables by name, in their stored columns. Raises StoreError for what no store takes."""
    return {name: conform(name, table) for name, table in tables.items()}


def event_commit(stage: str, step: int, kind: str, message: str, *, commit: Commit | None = None) -> Commit:
    """A row of `events`, beside what `commit` has."""
    row: dict[str, object] = {
        "at": datetime.now(UTC),
        "stage": stage,
        "step": step,
        "kind": kind,
        "message": message,
    }
    commit = commit or Commit()
    return replace(commit, tables={**commit.tables, "events": rows_to_table("events", [row])})


def _check_expected(ledger: sqlite3.Connection, expected: Mapping[str, Any]) -> None:
    for key, value in expected.items():
        found = ledger.execute("SELECT value FROM progress WHERE key = ?", (key,)).fetchone()
        if (None if found is None else json.loads(found[0])) != value:
            raise ConflictError(f"another process has changed {key!r} meanwhile")


def _apply_rows(changes: Changes, tables: dict[str, pa.Table], states: dict[str, State]) -> None:
    first_rows = {name: changes.append(name, rows) for name, rows in tables.items()}
    outcomes, moved = tables.get("outcomes"), states
    if outcomes is not None and outcomes["token_advantages"].null_count < outcomes.num_rows:
        index.note_token_advantages(changes.ledger, set(values_of(outcomes["stage"])))
    if (rows := tables.get("experiences")) is not None:
        outcomes = index.insert(changes.ledger, rows, first_rows["experiences"], states, outcomes)
        stored = set(values_of(rows["experience_id"])) if states else set()
        moved = {identifier: state for identifier, state in states.items() if identifier not in stored}
    if outcomes is not None:
        index.record_outcomes(changes.ledger, outcomes)
    if moved:
        index.change_states(changes.ledger, moved)
    if states:
        changes.append(
            "state_changes",
            _state_changes(changes.sequence, list(states), [str(state) for state in states.values()]),
        )


def _state_changes(
    sequence: int, identifiers: list[str], states: list[str], step: int | None = None
) -> pa.Table:
    size = len(identifiers)
    positions = range(size) if step is not None else [None] * size
    columns: list[Sequence[Any]] = [[sequence] * size, identifiers, states, [step] * size, positions]
    schema = STORED["state_changes"]
    return pa.Table.from_arrays(
        [pa.array(column, field.type) for column, field in zip(columns, schema, strict=True)], schema=schema
    )
