"""What a trainer asks of its workers, asked again of new ones where a worker died or hung meanwhile.

New workers are brought to where the old ones were: they load the newest checkpoint, and are trained on the
batches that are recorded after it. An error that a worker raises, such as a lack of memory, would come again:
it ends the run.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from trinity_data.config import StageConfig
from trinity_data.errors import TrainerError, WorkerDiedError
from trinity_data.nodes import ray_is_lost
from trinity_data.restart_log import RestartLog
from trinity_data.shutdown import Shutdown
from trinity_data.status import Status
from trinity_data.store.protocol import WritableStore
from trinity_data.synchronizer import Synchronizer
from trinity_trainer.worker_group import WorkerGroup

T = TypeVar("T")

# what is left of `sync_timeout` lets the explorer learn of a restart before its own wait is over
HANGS_AFTER = 0.9
_LOOK_SECONDS = 0.5


class WorkerRestarts:
    """Of one stage. Sets after how many seconds without an answer its workers count as hanging."""

    def __init__(
        self,
        stage: StageConfig,
        ranks: WorkerGroup,
        put_back: Callable[[], Awaitable[int]],
        *,
        store: WritableStore,
        synchronizer: Synchronizer,
        status: Status,
        stop: Shutdown,
    ) -> None:
        """`put_back` brings new workers to where the old ones were; returns the step of their checkpoint."""
        self.stage, self.ranks, self.put_back = stage.stage_name, ranks, put_back
        self.log = RestartLog(store, status, kind="trainer")
        self.synchronizer, self.status, self.stop = synchronizer, status, stop
        self._restarting = asyncio.Lock()
        """Held while workers are started again: steps and sends of weights both hear of one death."""
        ranks.max_seconds = HANGS_AFTER * stage.synchronizer.sync_timeout

    async def call(self, step: int, work: Callable[[], Awaitable[T]]) -> T:
        """What `work` of `step` returns, which is done again where a worker died in it.

        Raises TrainerError after more than `cluster.max_restarts` deaths: in an hour, or in this work however
        long it takes. Where the run is being stopped, or Ray is lost, no worker is started again.
        """
        death: WorkerDiedError | None = None
        num_deaths = 0
        while True:
            try:
                async with self._restarting:
                    if death is not None and self.ranks.have_failed:
                        await self._wait_for_a_restart(step, death, num_deaths)
                        await self._start_again(step, death)
                return await work()
            except WorkerDiedError as error:
                if self.stop.times or await _ray_is_lost():
                    raise
                death, num_deaths = error, num_deaths + 1

    async def _wait_for_a_restart(self, step: int, death: WorkerDiedError, num_deaths: int) -> None:
        self.log.died("trainer", f"step {step}: {death}")
        limit = self.ranks.restarts
        delay = None if num_deaths > limit.max_per_hour else limit.next_delay()
        if delay is None:
            raise TrainerError(
                f"stage {self.stage}, step {step}: {death}; the trainer's ranks were started again as often"
                f" as cluster.max_restarts allows: {limit.max_per_hour} times an hour, or for one part of a"
                " step; the same command goes on from the newest checkpoint"
            ) from death
        await asyncio.sleep(delay)

    async def _start_again(self, step: int, death: WorkerDiedError) -> None:
        activity, self.status.activity = self.status.activity, "starting the trainer's ranks again"
        started = time.perf_counter()
        await self.synchronizer.still_training()
        await self.ranks.start_again()
        checkpoint_step = await self.put_back()
        await self.synchronizer.still_training()
        seconds = time.perf_counter() - started
        self.status.activity = activity
        message = f"step {step}: {seconds:.1f} s, from the checkpoint of step {checkpoint_step}; {death}"
        self.log.restarted("trainer", message)


async def _ray_is_lost() -> bool:
    # all of its processes may be about to end
    await asyncio.sleep(_LOOK_SECONDS)
    return await asyncio.to_thread(ray_is_lost)
