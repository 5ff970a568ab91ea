"""What a choice of tasks rests on: what the ledger holds of this explorer's earlier steps, and of the
training that the step waits for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from trinity_data.config import CurriculumConfig
from trinity_data.errors import ConfigError, StoreError
from trinity_data.schema import filled, rollout_of
from trinity_data.store.protocol import ReadableStore
from trinity_data.store.sql import SqlSession
from trinity_data.store.task_stats import before_step
from trinity_explorer.curriculum.difficulty import StepRates
from trinity_explorer.curriculum.pool import Floats, TaskPool
from trinity_explorer.curriculum.samplers import Tried

_MEMORY, _SECONDS = "2GB", 300.0


@dataclass(frozen=True)
class History:
    """Of one task set in one stage."""

    store: ReadableStore
    stage: str
    taskset: str
    explorer: str
    trained_before: Callable[[int], int]
    """The step whose training a step waits for before it is explored."""

    def rates(self, pool: TaskPool, first_step: int, end_step: int) -> Iterator[StepRates]:
        """Of each explored step from `first_step` on, without those in which no rollout of the set ended."""
        for step in range(first_step, end_step):
            mine = f"{self.explorer}/"
            ids = [name for name, _ in self.store.group_progress(self.stage, step) if name.startswith(mine)]
            if ids:
                rates = _rates(pool, ids, self.store.read(ids, columns=["task_id", "reward", "error"]))
                if len(rates.places):
                    yield rates

    def ask(self, sql: str, step: int) -> pa.Table:
        """The rows of a query over what a choice for `step` may see. Raises StoreError in DuckDB's words."""
        where = before_step(
            step,
            stage=self.stage,
            taskset=self.taskset,
            explorer=self.explorer,
            trained=self.trained_before(step),
        )
        snapshots = {self.taskset: self.store.snapshot()}
        with SqlSession(snapshots, _SECONDS, _MEMORY, None, where=where) as session:
            return session.query(sql)

    def weights(self, pool: TaskPool, curriculum: CurriculumConfig, step: int) -> Floats:
        """What the query gives each task of the pool before `step`. Raises ConfigError with its reason."""
        try:
            answer = self.ask(curriculum.sql, step)
        except StoreError as error:
            raise ConfigError(f"task set {self.taskset!r}: curriculum.sql at step {step}: {error}") from error
        return weights_of(answer, pool, curriculum, where=f"task set {self.taskset!r}, step {step}")


def tried_tasks(store: ReadableStore, stage: str) -> list[Tried]:
    """The tasks of all groups on record, with the set of each."""
    recorded = store.table("groups", columns=["step", "task_id"], stage=stage)
    if not recorded.num_rows:
        return []
    tasks = store.table("tasks", columns=["task_id", "taskset"], stage=stage)
    rows = pc.index_in(recorded["task_id"], value_set=tasks["task_id"])
    columns = (recorded["step"], tasks["taskset"].take(rows), recorded["task_id"])
    return [Tried(*row) for row in zip(*(column.to_pylist() for column in columns), strict=True)]


def _rates(pool: TaskPool, ids: Sequence[str], rows: pa.Table) -> StepRates:
    """The mean raw reward, from 0 to 1, of the rollouts of each task that ended."""
    rewards: dict[int, dict[str, float]] = {}
    columns = (rows["reward"].to_pylist(), rows["error"].to_pylist(), pool.places(rows["task_id"]).tolist())
    for name, reward, error, place in zip(ids, *columns, strict=True):
        if place >= 0 and not error and reward is not None and math.isfinite(reward):
            # each turn of a rollout has its reward
            rewards.setdefault(place, {})[rollout_of(name)] = reward
    means = [math.fsum(each.values()) / len(each) for each in rewards.values()]
    return StepRates(np.array(list(rewards), np.int64), np.clip(np.array(means, np.float64), 0.0, 1.0))


def weights_of(answer: pa.Table, pool: TaskPool, curriculum: CurriculumConfig, *, where: str) -> Floats:
    """The weights of a pool's tasks; `default_weight` for those without a row, or with null.

    Raises ConfigError for an answer that gives no weights.
    """

    def refuse(text: str) -> ConfigError:
        return ConfigError(f"{where}: curriculum.sql {text}")

    check_columns(answer.schema, refuse)
    places, values = pool.places(answer["task_id"]), answer["weight"].cast(pa.float64())
    known = places >= 0
    if known.any() and np.bincount(places[known]).max() > 1:
        raise refuse("gives a task more than one row; group by task_id")
    weights = np.full(len(pool), curriculum.default_weight)
    given = filled(values, curriculum.default_weight).to_numpy(zero_copy_only=False)
    # sums that DuckDB makes in another order differ in their last digits
    weights[places[known]] = given[known].astype(np.float32)
    wrong = np.flatnonzero(~(np.isfinite(weights) & (weights >= 0)))
    if len(wrong):
        task = pool.rows["task_id"][int(wrong[0])].as_py()
        raise refuse(f"gives task {task} the weight {weights[wrong[0]]:g}; allowed: 0 and more")
    if not np.any(weights > 0):
        text = f"gives none of the {len(pool):,} tasks a weight above 0"
        raise refuse(f"{text}; let it keep some, or write curriculum.default_weight")
    return weights


def check_columns(schema: pa.Schema, refuse: Callable[[str], ConfigError]) -> None:
    """Raises what `refuse` makes of an answer without the two columns, or with a weight that is no number."""
    for name in ("task_id", "weight"):
        if name not in schema.names:
            found = ", ".join(schema.names)
            raise refuse(f"has no column {name!r}; it has {found}; write `select task_id, … as weight`")
    kind = schema.field("weight").type
    if not (
        pa.types.is_integer(kind)
        or pa.types.is_floating(kind)
        or pa.types.is_decimal(kind)
        or pa.types.is_boolean(kind)
    ):
        raise refuse(f"gives weights of type {kind}; numbers are expected")
