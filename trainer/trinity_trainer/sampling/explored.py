"""Batches of what the explorer makes: when a step's batch may be formed, and from which rows."""

from __future__ import annotations

import asyncio

from trinity_data.store.store import Store
from trinity_data.synchronizer import Synchronizer
from trinity_trainer.sampling.selection import Selection
from trinity_trainer.sampling.staleness import mark_stale


class ExploredSampler:
    """Kept experiences, once the explorer has finished the step."""

    def __init__(
        self,
        store: Store,
        synchronizer: Synchronizer,
        selection: Selection,
        *,
        stage: str,
        train_batch_size: int,
        max_read_timeout: float,
        max_staleness: int | None = None,
        whole_groups: bool = False,
    ) -> None:
        self.store, self.synchronizer, self.selection, self.stage = store, synchronizer, selection, stage
        self.train_batch_size, self.max_read_timeout = train_batch_size, max_read_timeout
        self.max_staleness, self.whole_groups = max_staleness, whole_groups

    async def next(self, step: int) -> list[str] | None:
        """After `max_read_timeout` seconds the batch is what there is by then, if there is anything."""
        while True:
            try:
                explored = self.synchronizer.wait_explored(step)
                if not await asyncio.wait_for(explored, self.max_read_timeout):
                    return None
                # below `step` when so many rows wait that the explorer does not go on
                through_step = min(step, self.synchronizer.explored)
                break
            except TimeoutError:
                through_step = step
                if self.store.pending(self.stage, through_step=step, limit=1):
                    break
        if self.max_staleness is not None:
            await mark_stale(
                self.store,
                self.stage,
                step,
                max_staleness=self.max_staleness,
                through_step=through_step,
                whole_groups=self.whole_groups,
            )
        return self.selection.choose(step, through_step=through_step, size=self.train_batch_size)
