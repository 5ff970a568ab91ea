"""The weights of the rollout model's engines: which version they have, and when they take a newer one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from trinity_data.errors import WeightsGoneError, WrongModelError
from trinity_data.status import Status
from trinity_data.store.protocol import WritableStore
from trinity_data.synchronizer import Synchronizer
from trinity_data.weights import Weights
from trinity_explorer.engines.pool import EnginePool

_AGAIN_SECONDS = 1.0


class PolicyWeights:
    """Of one stage."""

    def __init__(
        self,
        engines: EnginePool,
        synchronizer: Synchronizer,
        *,
        store: WritableStore,
        stage: str,
        status: Status,
    ) -> None:
        self.engines, self.synchronizer = engines, synchronizer
        self.store, self.stage, self.status = store, stage, status
        self.unchanged = asyncio.Lock()
        """While it is held, the engines keep the version that they have."""
        self.loaded: Weights | None = None
        """In this session."""

    async def load_before(self, step: int) -> Weights:
        """Those that the step is begun with."""
        async with self.unchanged:
            version = self.synchronizer.version_to_load(step, loaded=self.engines.model_version)
            # an equal version may lie in another folder, as that of the stage before
            if version >= self.engines.model_version:
                await self._load(version)
            assert self.loaded is not None
            return self.loaded

    async def load(self, version: int) -> None:
        """A version that is published."""
        async with self.unchanged:
            await self._load(version)

    @asynccontextmanager
    async def taken_over(self) -> AsyncIterator[None]:
        """Until the block ends, each version is loaded as soon as it is published, whatever is under way;
        where `sync_style` has it so.
        """
        if not self.synchronizer.rule.loads_at_any_time:
            yield
            return
        async with asyncio.TaskGroup() as tasks:
            follow = tasks.create_task(self._follow())
            yield
            # not in the middle of a load
            async with self.unchanged:
                follow.cancel()

    async def _follow(self) -> None:
        while True:
            await self.synchronizer.wait_published(newer_than=self.engines.model_version)
            async with self.unchanged:
                await self._load(self.synchronizer.newest_version)

    async def _load(self, version: int) -> None:
        """Where they do not arrive as they were trained, that is an event, and the end."""
        end = time.monotonic() + self.synchronizer.config.sync_timeout
        weights = self.synchronizer.weights_of(version)
        try:
            while not await self._is_loaded(weights, is_last_try=time.monotonic() > end):
                # a trainer that is started again makes them again, perhaps on another machine
                await asyncio.sleep(_AGAIN_SECONDS)
                weights = self.synchronizer.weights_of(version)
        except WrongModelError as error:
            event = self.store.log_event(self.stage, weights.version, "wrong_model", str(error))
            await asyncio.wrap_future(event)
            raise
        await self.synchronizer.finished_loading(self.engines.model_version)
        self.status.engine_version = self.engines.model_version

    async def _is_loaded(self, weights: Weights, *, is_last_try: bool) -> bool:
        """False where they have gone with the trainer that published them."""
        self.loaded = weights
        try:
            await self.engines.load_weights(weights, during=self.synchronizer.rule.loads_at_any_time)
        except WeightsGoneError:
            if is_last_try:
                raise
            return False
        return True
