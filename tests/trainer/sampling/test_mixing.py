"""A share of each batch from rows that lie ready: how many, which, and that the books still balance."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from trinity_data.config import (
    ExperienceBufferConfig,
    ReplayBufferConfig,
    SampleStrategyArgs,
    SynchronizerConfig,
)
from trinity_data.errors import StoreError
from trinity_data.query.audit import audit
from trinity_data.schema import rows_to_table
from trinity_data.store.sql import open_sql
from trinity_data.store.store import Store
from trinity_data.store.types import Commit, State
from trinity_data.synchronizer import Synchronizer
from trinity_trainer.offline_sampler import dataset_row, left_out
from trinity_trainer.sampling.mixed import MixedSampler
from trinity_trainer.sampling.priority import PrioritySelection
from trinity_trainer.sampling.sampler import ExploredSampler, FifoSelection

if TYPE_CHECKING:
    from conftest import Put


class Answers:
    """Ten answers, of which number 9 has an advantage of its own."""

    num_units = 10

    def rows(self, units: Sequence[int]) -> list[dict[str, Any]]:
        return [self._row(unit) | ({"advantage": -2.0} if unit == 9 else {}) for unit in units]

    def _row(self, unit: int) -> dict[str, Any]:
        origin: dict[str, object] = {"source": "answers.jsonl", "row": unit}
        return dataset_row(
            prompt_ids=[1], response_ids=[unit + 2], messages=[], response=str(unit), origin=origin
        )


def mixed(
    store: Store, *, explored: int = 99, usual: int = 6, experts: int = 3, seed: int = 5
) -> MixedSampler:
    synchronizer = Synchronizer(SynchronizerConfig(), explored=explored)
    fifo = FifoSelection(store, "rl", whole_groups=False)
    batches = ExploredSampler(
        store, synchronizer, fifo, stage="rl", train_batch_size=usual, max_read_timeout=30.0
    )
    return MixedSampler(
        batches, Answers(), name="answers", num_experts=experts, expert_advantage=1.0, first_step=1,
        seed=seed, replay=False,
    )  # fmt: skip


def units_of(store: Store, ids: list[str]) -> list[int]:
    return [json.loads(row["info"])["row"] for row in store.read(ids, columns=["info"]).to_pylist()]


@pytest.mark.parametrize(
    ("ratio", "size", "experts"),
    [(0.5, 8, 4), (0.5, 7, 4), (0.1, 30, 3), (0.3, 10, 3), (0.29, 100, 29), (0.01, 8, 1), (0.333, 3, 1)],
)
def test_the_share_is_rounded_up_to_whole_rows_and_never_by_a_float(
    ratio: float, size: int, experts: int
) -> None:
    assert SampleStrategyArgs(expert_data_ratio=ratio).num_experts(size) == experts


def test_a_batch_takes_its_share_and_every_answer_in_turn(store: Store, put: Put, tmp_path: Path) -> None:
    seen: list[int] = []
    for step in range(1, 11):
        usual = put(step, (6,))
        batch = asyncio.run(mixed(store).next(step))
        assert batch is not None and batch[:6] == usual and len(batch) == 9
        assert batch[6] == f"answers/rl/{step:07d}/00000/000/00"
        assert store.batch(step) == batch
        seen += units_of(store, batch[6:])
    # thirty rows are three epochs, each in an order of its own
    assert [sorted(seen[i : i + 10]) for i in (0, 10, 20)] == [list(range(10))] * 3
    assert seen[:10] != seen[10:20]
    report = audit(tmp_path)
    assert report.problems == [] and report.total.states[State.TRAINED] == report.total.generated == 90
    assert report.tasksets["training data answers.jsonl"].states[State.TRAINED] == 30


def test_expert_rows_have_the_advantage_that_was_asked_for_or_their_own(store: Store, put: Put) -> None:
    for step in range(1, 5):
        put(step, (6,))
        asyncio.run(mixed(store).next(step))
    with open_sql([store.root]) as session:
        found = session.query(
            "SELECT (info ->> '$.row')::INT AS unit, advantage FROM experiences WHERE engine = 'dataset'"
        ).to_pylist()
    assert {row["unit"]: row["advantage"] for row in found} == dict.fromkeys(range(9), 1.0) | {9: -2.0}


def test_an_incomplete_batch_keeps_the_share(store: Store, put: Put) -> None:
    put(1, (5,))
    batch = asyncio.run(mixed(store).next(1))
    assert batch is not None and len(batch) == 5 + 2  # 3 of 6 are 2.5 of 5
    assert units_of(store, batch[5:]) == mixed(store).order.units(1)[:2]


def test_a_batch_without_explored_rows_takes_nothing(store: Store) -> None:
    assert asyncio.run(mixed(store).next(1)) == []
    assert store.table("experiences").num_rows == 0


def test_a_restart_mixes_the_same_rows(store: Store, put: Put) -> None:
    put(1, (6,))
    batch = asyncio.run(mixed(store).next(1))
    assert batch is not None
    # the trainer records what is recorded already; another session knows the batch
    store.form_batch("rl", 1, batch)
    root = store.root
    store.close()
    reopened = Store.create_or_open(root)
    assert reopened.batch(1) == batch
    assert (
        units_of(reopened, batch[6:])
        == mixed(reopened).order.units(1)
        != mixed(reopened, seed=6).order.units(1)
    )
    assert reopened.pending("rl") == []
    reopened.close()


def test_rows_that_cannot_be_stored_leave_no_batch(store: Store, put: Put) -> None:
    put(1, (6,))
    batch = asyncio.run(mixed(store).next(1))
    put(2, (6,))
    assert batch is not None
    twice = store.read(batch[6:]).select(["experience_id"])
    with pytest.raises(StoreError):
        store.form_batch("rl", 2, store.pending("rl"), with_rows={"experiences": twice})
    assert store.batch(2) is None and len(store.pending("rl")) == 6


def test_replay_leaves_expert_rows_to_their_buffer(store: Store, put: Put) -> None:
    usual = put(1, (6,))
    batch = asyncio.run(mixed(store).next(1))
    assert batch is not None and len(batch) == 9
    row: dict[str, object] = {"step": 1, "stage": "rl", "started_at": datetime(2026, 1, 1, tzinfo=UTC)}
    store.commit(Commit(tables={"steps": rows_to_table("steps", [row])}))
    replay = ReplayBufferConfig(enable=True, reuse_cooldown_time=0.0)
    buffer = ExperienceBufferConfig(capacity=99, whole_groups=False, replay_buffer=replay)
    again = PrioritySelection(store, "rl", buffer, max_staleness=None, seed=0, auxiliary="answers")
    assert again.choose(2, through_step=2, size=9) == usual


def test_an_expert_row_that_cannot_be_trained_is_stored_dropped_and_not_in_the_batch(
    store: Store, put: Put
) -> None:
    class HalfBad(Answers):
        def rows(self, units: Sequence[int]) -> list[dict[str, Any]]:
            return [
                left_out(row, "no answer") if number else row
                for number, row in enumerate(super().rows(units))
            ]

    usual = put(1, (6,))
    batches = mixed(store)
    batches.data = HalfBad()
    batch = asyncio.run(batches.next(1))
    assert batch == [*usual, "answers/rl/0000001/00000/000/00"]
    assert (store.counts()[State.TRAINED], store.counts()[State.DROPPED]) == (7, 2)
    assert store.table("decisions")["reason"].to_pylist() == ["no answer"] * 2
    assert audit(store.root.parent).problems == []
