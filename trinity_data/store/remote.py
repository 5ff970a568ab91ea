"""A store that another process owns, with the methods of `Store`."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from trinity_data.errors import StoreError
from trinity_data.store import index
from trinity_data.store.calls import ACTOR_ENDED, MAX_RESTARTS, StoreCalls, actor_ended
from trinity_data.store.messages import OPEN_WRITES, Answer, Write, pack
from trinity_data.store.reader import StoreReader
from trinity_data.store.service import LedgerFile, StoreActor
from trinity_data.store.shared_bytes import Parts
from trinity_data.store.snapshot import Snapshot
from trinity_data.store.store import check_commit, conformed, event_commit
from trinity_data.store.types import Checkpoint, Commit, Place, State

MAX_UNDER_WAY = 16
"""Writes of a client that travel or wait for the disk at a time."""


def start_store(root: Path, *, shared_as: str | None = None, **arguments: Any) -> Any:
    """The Ray actor that owns the store in folder `root`. An end of its process is the end of no write.

    With `shared_as` it is the one of this name in the namespace, which is started only where there is none,
    on this machine, and outlives this process. `arguments` are those of `StoreActor`.
    """
    options: dict[str, Any] = {
        "num_cpus": 0,
        "max_restarts": MAX_RESTARTS,
        "max_task_retries": -1,
        "max_concurrency": 1000,
    }
    if shared_as is not None:
        node = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        options |= {"name": shared_as, "get_if_exists": True, "lifetime": "detached"}
        options |= {"scheduling_strategy": node}
    return ray.remote(StoreActor).options(**options).remote(root, **arguments)


def local_reader(actor: Any, root: Path) -> StoreReader | None:
    """Reads the files of the actor's store from this process, where they are the files of this folder.

    None on another machine: SQLite shares a ledger by memory.
    """
    ledger: LedgerFile | None = ray.get(actor.ledger_file.remote())
    return StoreReader(root) if ledger is not None and ledger == LedgerFile.of(root) else None


class RemoteStore:
    """One client of the actor; may be shared between threads.

    Writes are done in the order of the calls, also where the actor's process ended in between. With a
    `reader` it reads without the actor. `place` is that of the participant whose client it is.
    """

    def __init__(
        self, actor: Any, root: Path, *, place: Place | None = None, reader: StoreReader | None = None
    ) -> None:
        self.root, self._actor, self.client = root, actor, uuid.uuid4().hex
        self._calls, self.place, self._reader = StoreCalls(actor, root), place, reader
        self._number, self._open = 0, dict[int, Future[None]]()
        self._answered = threading.Condition()
        self._threads = ThreadPoolExecutor(MAX_UNDER_WAY, "store-writes")

    def give_up(self, error: StoreError) -> None:
        """Ends what waits for the actor, and all that would, with this error."""
        with self._answered:
            self._calls.lost = error
            left, self._open = list(self._open.values()), {}
            self._answered.notify_all()
        for result in left:
            result.set_exception(error)

    def submit(self, commit: Commit) -> Future[None]:
        """As of `Store`."""
        return self._write("submit", replace(commit, tables=check_commit(commit)))

    def commit(self, commit: Commit) -> None:
        """As of `Store`."""
        self.submit(commit).result()

    def log_event(
        self, stage: str, step: int, kind: str, message: str, *, commit: Commit | None = None
    ) -> Future[None]:
        """As of `Store`."""
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
        """As of `Store`."""
        ids, tables = list(experience_ids), conformed(with_rows or {})
        self._write("form_batch", stage, step, ids, replay=replay, with_rows=tables).result()

    def take_batch(
        self,
        stage: str,
        step: int,
        experience_ids: Sequence[str],
        *,
        columns: Sequence[str] | None = None,
        replay: bool = False,
    ) -> pa.Table:
        """As of `Store`."""
        self.form_batch(stage, step, experience_ids, replay=replay)
        return self.read(experience_ids, columns)

    def record_checkpoint(self, step: int, path: str, *, stage: str) -> None:
        """As of `Store`."""
        self._write("record_checkpoint", step, path, stage=stage).result()

    def forget_checkpoint(self, step: int) -> None:
        """As of `Store`."""
        self._write("forget_checkpoint", step).result()

    def seal(self) -> None:
        """As of `Store`."""
        self._write("seal").result()

    def close(self) -> None:
        """Waits for what was submitted. The actor serves others."""
        with self._answered:
            self._answered.wait_for(lambda: not self._open)
        self._threads.shutdown(wait=False)
        self._calls.disconnect()
        if self._reader is not None:
            self._reader.close()

    def progress(self, key: str) -> Any | None:
        """As of `StoreReader`."""
        return self._ask("progress", key)

    def progress_below(self, prefix: str) -> dict[str, Any]:
        """As of `StoreReader`."""
        values: dict[str, Any] = self._ask("progress_below", prefix)
        return values

    async def news(
        self, seen: Mapping[str, Any], keys: Sequence[str], below: str, seconds: float
    ) -> dict[str, Any]:
        """The progress of `keys`, and of all that begin with `below`: once it differs from `seen`, or after
        so many seconds.
        """
        try:
            answer: Answer = await self._actor.news.remote(dict(seen), list(keys), below, seconds)
        except ACTOR_ENDED as error:
            raise actor_ended(self.root, error) from error
        if answer.error is not None:
            raise answer.error
        progress: dict[str, Any] = answer.value
        return progress

    def stage_ended_at(self, stage: str) -> int | None:
        """As of `StoreReader`."""
        step: int | None = self._ask("stage_ended_at", stage)
        return step

    def counts(self, *, stage: str | None = None) -> dict[State, int]:
        """As of `StoreReader`."""
        counts: dict[State, int] = self._ask("counts", stage=stage)
        return counts

    def group_progress(self, stage: str, step: int) -> list[tuple[str, State]]:
        """As of `StoreReader`."""
        experiences: list[tuple[str, State]] = self._ask("group_progress", stage, step)
        return experiences

    def num_rows_by_step(self, stage: str) -> dict[int, tuple[int, int]]:
        """As of `StoreReader`."""
        numbers: dict[int, tuple[int, int]] = self._ask("num_rows_by_step", stage)
        return numbers

    def pending(self, stage: str, *, through_step: int | None = None, limit: int | None = None) -> list[str]:
        """As of `StoreReader`."""
        ids: list[str] = self._ask("pending", stage, through_step=through_step, limit=limit)
        return ids

    def num_pending(self, stage: str, *, through_step: int | None = None) -> int:
        """As of `StoreReader`."""
        return int(self._ask("num_pending", stage, through_step=through_step))

    def num_pending_rollouts(self, stage: str, *, through_step: int | None = None) -> int:
        """As of `StoreReader`."""
        return int(self._ask("num_pending_rollouts", stage, through_step=through_step))

    def candidates(self, stage: str, *, through_step: int, num_used: int) -> list[index.Candidate]:
        """As of `StoreReader`."""
        rows: list[index.Candidate] = self._ask(
            "candidates", stage, through_step=through_step, num_used=num_used
        )
        return rows

    def raw(self, stage: str) -> list[str]:
        """As of `StoreReader`."""
        ids: list[str] = self._ask("raw", stage)
        return ids

    def batch(self, step: int) -> list[str] | None:
        """As of `StoreReader`."""
        ids: list[str] | None = self._ask("batch", step)
        return ids

    def latest_checkpoint(self) -> Checkpoint | None:
        """As of `StoreReader`."""
        checkpoint: Checkpoint | None = self._ask("latest_checkpoint")
        return checkpoint

    def read(self, experience_ids: Sequence[str], columns: Sequence[str] | None = None) -> pa.Table:
        """As of `StoreReader`."""
        rows: pa.Table = self._ask("read", list(experience_ids), columns)
        return rows

    def table(self, name: str, *, columns: Sequence[str] | None = None, stage: str | None = None) -> pa.Table:
        """As of `StoreReader`."""
        rows: pa.Table = self._ask("table", name, columns=columns, stage=stage)
        return rows

    def tasks(self, task_ids: Sequence[str], *, stage: str, columns: Sequence[str]) -> pa.Table:
        """As of `StoreReader`."""
        rows: pa.Table = self._ask("tasks", list(task_ids), stage=stage, columns=columns)
        return rows

    def of_steps(self, name: str, stage: str, first: int, last: int, *, columns: Sequence[str]) -> pa.Table:
        """As of `StoreReader`."""
        rows: pa.Table = self._ask("of_steps", name, stage, first, last, columns=columns)
        return rows

    def parts(self, name: str) -> Iterator[pa.Table]:
        """As of `StoreReader`."""
        row, end = self.row_range(name)
        while row < end:
            rows = self.rows_from(name, row).slice(0, end - row)
            yield rows
            row += rows.num_rows

    def row_range(self, name: str) -> tuple[int, int]:
        """As of `StoreReader`."""
        first, end = self._ask("row_range", name)
        return first, end

    def rows_from(self, name: str, row: int) -> pa.Table:
        """As of `StoreReader`."""
        rows: pa.Table = self._ask("rows_from", name, row)
        return rows

    def snapshot(self) -> Snapshot:
        """As of `StoreReader`; without a reader all rows travel."""
        if self._reader is not None:
            return self._reader.snapshot()
        snapshot: Snapshot = self._calls.value("snapshot")
        return snapshot

    def have_ended(self, first_row: int, end_row: int) -> bool:
        """As of `StoreReader`."""
        return bool(self._ask("have_ended", first_row, end_row))

    def _write(self, method: str, *arguments: Any, **options: Any) -> Future[None]:
        result = Future[None]()
        with self._answered:
            self._calls.refuse_if_lost()
            self._answered.wait_for(
                lambda: not self._open or self._number + 1 - min(self._open) < OPEN_WRITES
            )
            self._calls.refuse_if_lost()
            number = self._number + 1
            # raises for what cannot be sent, which then has no number that the next write would wait for
            content = pack(Write(self.client, number, method, arguments, options, self.place))
            self._number, self._open[number] = number, result
            # in their order: one that waits for the write before it keeps a thread
            self._threads.submit(self._send, number, content)
        return result

    def _send(self, number: int, content: Parts) -> None:
        error: BaseException | None
        try:
            error = self._calls.write(content).error
        except Exception as failure:  # the boundary of the thread: who waits for the write hears of it
            error = failure
        with self._answered:
            result = self._open.pop(number, None)
            self._answered.notify_all()
        if result is None:  # given up meanwhile
            return
        if error is None:
            result.set_result(None)
        else:
            result.set_exception(error)

    def _ask(self, method: str, *arguments: Any, **options: Any) -> Any:
        if self._reader is not None:
            return getattr(self._reader, method)(*arguments, **options)
        return self._calls.value("ask", method, arguments, options)
