"""Batches with a share of rows from an auxiliary buffer, each of which counts as a rollout.

Those rows become rows of this run in the same transaction as the batch that takes them.
"""

from __future__ import annotations

import asyncio

from trinity_trainer.offline_sampler import EpochSampler, OfflineDataset, copied_rows
from trinity_trainer.sampling.sampler import ExploredSampler, num_rollouts


class MixedSampler:
    """`num_experts` rows of `data` behind those of `explored`.

    Fewer, in proportion, where a batch is not full.
    """

    def __init__(
        self,
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
        """`expert_advantage` is that of rows without one of their own."""
        self.store, self.explored, self.data, self.name = explored.store, explored, data, name
        self.num_experts, self.expert_advantage, self.replay = num_experts, expert_advantage, replay
        self.order = EpochSampler(
            data.num_units, first_step=first_step, per_step=num_experts, seed=seed, shuffle=True
        )

    async def next(self, step: int) -> list[str] | None:
        """Ids of the batch of `step`, which is recorded already.

        An empty one takes nothing from the buffer.
        """
        explored_ids = await self.explored.next(step)
        if not explored_ids:
            return explored_ids
        share = num_rollouts(explored_ids) * self.num_experts // self.explored.train_batch_size
        units = self.order.units(step)[: min(self.num_experts, share)]
        rows = await asyncio.to_thread(self.data.rows, units)
        default = {"advantage": self.expert_advantage}
        rows = [row if row.get("advantage") is not None else row | default for row in rows]
        stage = self.explored.stage
        ids, tables = copied_rows(rows, self.name, stage, step)
        batch = [*explored_ids, *ids]
        self.store.form_batch(stage, step, batch, replay=self.replay, with_rows=tables)
        return batch
