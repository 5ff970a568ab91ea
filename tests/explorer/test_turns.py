"""Several turns are one rollout: batches hold whole tries, the queue does not grow, and ages are bounded."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from trinity_data.config import SynchronizerConfig
from trinity_data.dataset.task import Task
from trinity_data.query.audit import audit
from trinity_data.schema import group_of, rollout_of
from trinity_data.store.sql import open_sql
from trinity_data.store.store import Store
from trinity_data.store.types import State
from trinity_data.synchronizer import Synchronizer
from trinity_explorer.chat import ChatClient
from trinity_explorer.explorer import Explorer
from trinity_explorer.rewards.math import Reward
from trinity_trainer.metrics import batch_metrics
from trinity_trainer.sampling.sampler import ExploredSampler, FifoSelection
from trinity_trainer.trainer import TRAIN_COLUMNS

GROUPS_A_STEP, REPEAT_TIMES, LAST_STEP = 3, 4, 6
ROLLOUTS_A_STEP = GROUPS_A_STEP * REPEAT_TIMES


class Turns:
    """Asks as often as `turns` says for the rollout's seed; right for an even one."""

    def __init__(self, turns: Callable[[int], int]) -> None:
        self.turns = turns

    async def run(self, task: Task, model: ChatClient) -> Reward:
        messages, seed = [dict(message) for message in task.messages], model.sampling.seed
        for _ in range(self.turns(seed)):
            reply = await model.chat(messages)
            messages += [{"role": "assistant", "content": reply.text}, {"role": "user", "content": "Go on."}]
        right = float(seed % 2 == 0)
        return Reward(right, {"accuracy": right}, {"accuracy": right})


async def train(
    store: Store, batches: ExploredSampler, synchronizer: Synchronizer
) -> tuple[list[list[str]], list[int], list[dict[str, float]]]:
    """Batches, how many rollouts waited after each, and the numbers of each."""
    taken, waiting, metrics = list[list[str]](), list[int](), list[dict[str, float]]()
    for step in range(1, LAST_STEP + 1):
        ids = await batches.next(step)
        assert ids is not None
        store.form_batch("rl", step, ids)
        taken.append(ids)
        waiting.append(store.num_pending_rollouts("rl", through_step=step))
        metrics.append(batch_metrics(store.read(ids, columns=TRAIN_COLUMNS), trained_version=step - 1))
        await synchronizer.finished_training(step)
    return taken, waiting, metrics


@pytest.mark.parametrize("sync_offset", [0, 1])
@pytest.mark.parametrize("turns", [lambda seed: 2, lambda seed: 2 + seed % 2], ids=["two", "two_or_three"])
def test_a_run_of_several_turns_trains_as_many_rollouts_as_it_makes(
    store: Store,
    make_explorer: Callable[..., Explorer],
    tmp_path: Path,
    turns: Callable[[int], int],
    sync_offset: int,
) -> None:
    async def run() -> tuple[list[list[str]], list[int], list[dict[str, float]]]:
        synchronizer = Synchronizer(SynchronizerConfig(sync_offset=sync_offset))
        explorer = make_explorer("explorer", synchronizer)
        explorer.runner.workflow_for = lambda task: Turns(turns)
        batches = ExploredSampler(
            store, synchronizer, FifoSelection(store, "rl", whole_groups=True), stage="rl",
            train_batch_size=ROLLOUTS_A_STEP, max_read_timeout=60.0, max_staleness=sync_offset,
            whole_groups=True,
        )  # fmt: skip
        async with asyncio.TaskGroup() as both:
            both.create_task(explorer.explore(1, LAST_STEP))
            training = both.create_task(train(store, batches, synchronizer))
        return training.result()

    taken, waiting, metrics = asyncio.run(run())
    assert waiting == [0] * LAST_STEP
    for step, ids in enumerate(taken, 1):
        assert len({rollout_of(row) for row in ids}) == ROLLOUTS_A_STEP
        # the batch of a step is that step's rollouts with all their turns, and its groups are whole
        assert sorted(ids) == sorted(row for row, _ in store.group_progress("rl", step))
        tries = {rollout_of(row): group_of(row) for row in ids}
        assert set(Counter(tries.values()).values()) == {REPEAT_TIMES}
    rows = store.table("experiences").to_pylist()
    assert Counter(row["turn"] for row in rows)[1] == ROLLOUTS_A_STEP * LAST_STEP
    for step, numbers in enumerate(metrics, 1):
        mine = {rollout_of(r["experience_id"]): r for r in rows if r["step"] == step}
        assert numbers["num_rollouts"] == ROLLOUTS_A_STEP
        assert numbers["reward/mean"] == pytest.approx(
            sum(r["reward"] for r in mine.values()) / ROLLOUTS_A_STEP
        )
        assert numbers["turns/mean"] == pytest.approx(len(taken[step - 1]) / ROLLOUTS_A_STEP)
        assert numbers["staleness/max"] <= sync_offset
    report = audit(tmp_path)
    assert report.problems == [] and report.total.states[State.TRAINED] == len(rows) == report.total.generated
    with open_sql([store.root]) as session:
        (answer,) = session.query(
            "SELECT count(*) FILTER (state = 'trained') AS trained, "
            "max(trained_step - 1 - model_version) AS oldest FROM experiences"
        ).to_pylist()
    assert answer == {"trained": len(rows), "oldest": sync_offset}
