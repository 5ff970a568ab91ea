"""Batches with a share of rows from an auxiliary buffer, each of which counts as a rollout.

Those rows become rows of this run in the same transaction as the batch that takes them.
"""

from __future__ import annotations

import asyncio
from typing import Any

from trinity_data.store.store import Store
from trinity_trainer.offline_sampler import EpochSampler, OfflineDataset, copied_rows
from trinity_trainer.sampling.explored import ExploredSampler
from trinity_trainer.sampling.selection import num_rollouts


class MixedSampler:
    """`num_experts` rows of `data` behind those of `explored`.

    Fewer, in proportion, where a batch is not full.
    """

    def __init__(
        self,
        store: Store,
        explored: ExploredSampler,
        data: OfflineDataset,
        *,
        name: str,
        num_experts: int,
        expert_advantage: float,
        first_step: int,
        seed: int,
        replay: bool,
    ) -> None:
        """`expert_advantage` is that of rows that no run has judged."""
        self.store, self.explored, self.data, self.name = store, explored, data, name
        self.num_experts, self.expert_advantage, self.replay = num_experts, expert_advantage, replay
        self.order = EpochSampler(
            data.num_units, first_step=first_step, per_step=num_experts, seed=seed, shuffle=True
        )

    async def next(self, step: int) -> list[str] | None:
        """Ids of the batch of `step`, which is recorded already.

        An empty one takes nothing from the buffer.
        """
        usual = await self.explored.next(step)
        if not usual:
            return usual
        rows = await asyncio.to_thread(self._expert_rows, step, self._num_experts(num_rollouts(usual)))
        stage = self.explored.stage
        ids, tables = copied_rows(rows, self.name, stage, step)
        batch = [*usual, *ids]
        self.store.form_batch(stage, step, batch, replay=self.replay, with_rows=tables)
        return batch

    def _num_experts(self, num_usual: int) -> int:
        return min(self.num_experts, num_usual * self.num_experts // self.explored.train_batch_size)

    def _expert_rows(self, step: int, count: int) -> list[dict[str, Any]]:
        rows = self.data.rows(self.order.units(step)[:count])
        judged = {"advantage": self.expert_advantage}
        return [row if row.get("advantage") is not None else row | judged for row in rows]
