"""What rollouts of tasks before the first step have come to: the rows of `task_probes` of several runs."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from trinity_data.errors import StoreError
from trinity_data.runs import find_runs
from trinity_data.schema import TABLES, values_of
from trinity_data.store.protocol import WritableStore
from trinity_data.store.sql import open_sql
from trinity_operators.task_engines import TriedTask

log = logging.getLogger(__name__)

_COLUMNS = ("probe", "rollouts", "rewards")


class ProbeRecord:
    """Of the run that `store` is of, and of others. Each is read once."""

    def __init__(self, store: WritableStore) -> None:
        self.store = store
        self._tables: dict[Path, pa.Table] = {}
        """By the folders of their runs."""
        self._made: dict[str, TriedTask] = {}
        """In this session, by their keys."""

    def add(self, key: str, tried: TriedTask) -> None:
        self._made[key] = tried

    def find(
        self, keys: Collection[str], num_rollouts: int, runs: Sequence[Path] | None
    ) -> dict[str, TriedTask]:
        """By key, what had as many rollouts and not only failed ones; not to be called in an event loop.

        Of this run and of `runs`; of the others of its project where None.
        """
        own, wanted = self.store.root.parent, pa.array(list(keys), pa.string())
        if runs is None:
            runs = [run for run in find_runs(own.parent.parent) if run.parent == own.parent]
        found = dict[str, TriedTask]()
        for run in (*(run for run in runs if run.resolve() != own.resolve()), own):
            table = self._table(run)
            has_enough = pc.and_(
                pc.greater_equal(table["rollouts"], pa.scalar(num_rollouts, table["rollouts"].type)),
                pc.greater(pc.list_value_length(table["rewards"]), pa.scalar(0, pa.int32())),
            )
            rows = table.filter(pc.and_(has_enough, pc.is_in(table["probe"], wanted)))
            for key, rewards in zip(values_of(rows["probe"]), values_of(rows["rewards"]), strict=True):
                found[key] = TriedTask(tuple(rewards))
        for key in keys:
            made = self._made.get(key)
            if made is not None and made.rewards and made.num_rollouts >= num_rollouts:
                found[key] = TriedTask(made.rewards)
        return found

    def _table(self, run: Path) -> pa.Table:
        """Without rows where they cannot be read."""
        if run in self._tables:
            return self._tables[run]
        if run == self.store.root.parent:
            table = self.store.table("task_probes", columns=_COLUMNS)
        else:
            table = TABLES["task_probes"].empty_table().select(list(_COLUMNS))
            try:
                with open_sql([run], timeout_seconds=None) as session:
                    table = session.query(f"SELECT {', '.join(_COLUMNS)} FROM task_probes").cast(table.schema)
            except StoreError as error:
                log.warning("pass rates that %s has on record cannot be read: %s", run, error)
        self._tables[run] = table
        return table
