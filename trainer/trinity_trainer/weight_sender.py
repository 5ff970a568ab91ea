"""Sends the versions that the ranks hold to the engines: see `weight_sending`."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from itertools import accumulate

from trinity_data.errors import EngineDiedError, EngineError, TrainerError, WeightsGoneError, WorkerDiedError
from trinity_data.weight_sending import Receiver, SendingGroup
from trinity_data.weights import Weights
from trinity_trainer.worker_group import WorkerGroup
from trinity_trainer.worker_restarts import WorkerRestarts

BUFFER_BYTES = 256 << 20
"""At most, of each rank that shares its GPU."""


class WeightSender:
    """Of one stage."""

    def __init__(self, ranks: WorkerGroup, workers: WorkerRestarts, *, max_buffer: int | None = None) -> None:
        """`workers` starts the ranks again where they die in a send. With `max_buffer` engines have the GPUs
        of the ranks, which sleep in a send, and have buffers of so many bytes at most.
        """
        self.ranks, self.workers, self.max_buffer = ranks, workers, max_buffer
        self._group: SendingGroup | None = None
        self._members: list[object] = []
        """Processes of the group."""

    async def send(self, weights: Weights, receivers: Sequence[Receiver], *, during: bool) -> None:
        """As of `weight_sending.Sender`. Raises TrainerError where ranks are not started again."""
        if not during:
            await asyncio.gather(*(each.become_idle() for each in receivers))
        send = self._send if self.max_buffer is None else self._send_awake
        await self.workers.call(weights.version, partial(send, weights.version, receivers, during))

    async def _send_awake(self, version: int, receivers: Sequence[Receiver], during: bool) -> None:
        """New ranks have the GPUs until they are where those before them were, and sleep too."""
        await asyncio.gather(*(each.wake() for each in receivers))
        try:
            await self._send(version, receivers, during)
        except WorkerDiedError:
            await asyncio.gather(*(each.sleep() for each in receivers))
            raise

    async def _send(self, version: int, receivers: Sequence[Receiver], during: bool) -> None:
        # so that engines do not stand still for as long as a training step takes
        async with self.ranks.turn:
            if version not in self.ranks.held and not self.ranks.have_failed:
                raise WeightsGoneError(f"the trainer's ranks do not hold version {version} any more")
            group = await self._group_with(receivers, version)
            first_members = accumulate((each.num_workers for each in receivers), initial=group.num_senders)
            sending = asyncio.ensure_future(self.ranks.send_weights(version, group))
            receiving = [
                asyncio.ensure_future(receiver.receive_weights(version, group, first, during=during))
                for receiver, first in zip(receivers, first_members, strict=False)
            ]
            try:
                await asyncio.wait([sending, *receiving])
            finally:
                for each in (sending, *receiving):
                    each.cancel()  # where the run is being stopped
            errors = [error for each in (sending, *receiving) if (error := each.exception()) is not None]
            if errors or sending.result():
                self._group = None
                raise _cause(errors) or EngineError(
                    f"version {version} could not be sent to the engines: {sending.result()}"
                )

    async def _group_with(self, receivers: Sequence[Receiver], version: int) -> SendingGroup:
        """The one before, where it has the same processes."""
        members: list[object] = [*self.ranks.workers, *(each.process for each in receivers)]
        if self._group is None or members != self._members:
            num_workers = sum(each.num_workers for each in receivers)
            self._group = await self.ranks.offer_group(version, num_workers, self.max_buffer)
            self._members = members
        return self._group


def _cause(errors: Sequence[BaseException]) -> BaseException | None:
    """What the others follow from: the death of a rank, then that of an engine."""
    for kind in (TrainerError, EngineDiedError, BaseException):
        for error in errors:
            if isinstance(error, kind):
                return error
    return None
