"""What explorer and trainer of a stage have to do with each other: one object that both are handed, or, where
they are processes of their own, one in each, that tells its peer and hears from it.

A rule of `sync_rules` says which weights a step may be begun with. Beside it, the explorer begins no step
while too many rows wait, and the trainer goes on with those without waiting for the next step.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any, Protocol, TypeVar

from trinity_data.config import SynchronizerConfig
from trinity_data.errors import SyncError
from trinity_data.sync_rules import build_rule
from trinity_data.turns import Side, Turns
from trinity_data.weights import HeldVersions, WeightFolders, Weights

log = logging.getLogger(__name__)

T = TypeVar("T")


class PendingLimit(Protocol):
    """Back-pressure, such as `store.backpressure.Backpressure`."""

    def excess(self, through_step: int) -> str:
        """What is too much of the rows of steps up to `through_step`; empty while there is room."""
        ...


class Peer(Protocol):
    """The other side, where explorer and trainer are processes of their own. What it knows is durable."""

    async def tell_trained(self, step: int) -> None:
        """The trainer has finished `step`."""
        ...

    async def tell_still_training(self) -> None:
        """The trainer is at work on what comes before its next step."""
        ...

    async def tell_published(self, weights: Sequence[Weights]) -> None:
        """The versions whose folders are there."""
        ...

    async def tell_all_explored(self, last_step: int) -> None:
        """No step beyond it will be explored."""
        ...

    async def tell_loaded(self, version: int) -> None:
        """The engines have these weights, and no use for older ones."""
        ...

    async def tell_requested(self, version: int) -> None:
        """The explorer waits for weights of this version, or newer ones."""
        ...


class Synchronizer:
    """Finished steps, published weights and back-pressure of one stage.

    Either side waits here for the other; SyncError ends a wait of more than `sync_timeout` seconds.
    """

    silent_seconds = 30.0
    """A command that waits longer for another one logs what for."""

    def __init__(
        self,
        config: SynchronizerConfig,
        *,
        first_step: int = 1,
        trained: int | None = None,
        explored: int | None = None,
        limit: PendingLimit | None = None,
        folders: WeightFolders | HeldVersions | None = None,
        peer: Peer | None = None,
        max_staleness: int | None = None,
    ) -> None:
        """`trained` and `explored` are the last steps that earlier sessions finished; `max_staleness` is the
        rule's, as in `sync_rules.build_rule`.

        Without `folders` this side hands no weights over.
        """
        self.config, self.first_step, self.limit, self.folders = config, first_step, limit, folders
        self.peer = peer
        self.rule = build_rule(config, first_step=first_step, max_staleness=max_staleness)
        self.trained = first_step - 1 if trained is None else trained
        self.explored = first_step - 1 if explored is None else explored
        self.last_step: int | None = None
        """Set when no step beyond it will be explored."""
        self.ended_at: int | None = None
        """The last step of a trainer elsewhere that has come to its end."""
        self.published: dict[int, Weights] = {}
        """By version."""
        self.requested = -1
        """The newest version that an explorer waits for, where the trainer publishes on request."""
        self.turns: Turns | None = None
        """Where the two sides share GPUs; a side that waits for the other has no turn."""
        self._begun = first_step - 1
        """The last step for which this explorer's engines took weights."""
        self.waits: dict[str, str] = {}
        """What each side waits for now."""
        self._changed = asyncio.Condition()
        self._waits_since: dict[str, float] = {}
        self._logged_since: dict[str, float] = {}
        """The beginning of the last wait of each side that is in the log."""
        self._still_training: str | None = None
        self._peer_takes_part = True

    @property
    def newest_version(self) -> int:
        """Of those that are published; -1 before the first."""
        return max(self.published, default=-1)

    def required_version(self, step: int) -> int:
        """The trained step without which `step` may not be explored."""
        return self.rule.required_version(step)

    def version_to_load(self, step: int, *, loaded: int) -> int:
        """The version that explores `step`, which is begun now, where the engines have `loaded`."""
        version = self.rule.version_to_load(
            step, before=self._begun, loaded=loaded, newest=self.newest_version
        )
        self._begun = step
        return version

    def publishes_version(self, version: int) -> bool:
        """Whether the trainer publishes the weights of `version`, which it has just trained."""
        is_requested = self.newest_version < self.requested <= version
        return self.folders is not None and (is_requested or self.rule.publishes(version))

    async def publish(self, weights: Weights) -> None:
        """Hands the weights of a version over to the explorer."""
        async with self._changed:
            self.published[weights.version] = weights
            self._changed.notify_all()
        if self.peer is not None:
            await self.peer.tell_published(list(self.published.values()))

    async def answer_requests(
        self, waiting: Coroutine[Any, Any, T], publish: Callable[[int], Coroutine[Any, Any, None]]
    ) -> T:
        """The result of what the trainer waits for; meanwhile it publishes the weights of its last step
        whenever an explorer requests them.
        """
        result = asyncio.ensure_future(waiting)
        try:
            while True:
                requested = asyncio.ensure_future(self._wait_requested())
                await asyncio.wait({result, requested}, return_when=asyncio.FIRST_COMPLETED)
                if not requested.done():
                    requested.cancel()
                    return await result
                await publish(self.trained)
        finally:
            result.cancel()

    async def _wait_requested(self) -> None:
        await self.wait_until(lambda: self.newest_version < self.requested <= self.trained)

    async def wait_published(self, *, newer_than: int) -> None:
        """Until there is a newer version; however long it takes."""
        await self.wait_until(lambda: self.newest_version > newer_than)

    def weights_of(self, version: int) -> Weights:
        """Those that were published; of the oldest newer version where a restart could not make it again."""
        return self.published[min(number for number in self.published if number >= version)]

    async def finished_loading(self, version: int) -> None:
        """The engines have the weights of `version`: older ones are removed."""
        if self.folders is not None:
            self.folders.remove(before=version)
        if self.peer is not None:
            await self.peer.tell_loaded(version)

    async def forget_weights(self, *, before: int) -> None:
        """No explorer elsewhere needs versions before one: they are removed, once nobody is sent to them."""
        kept = {version: weights for version, weights in self.published.items() if version >= before}
        if kept and len(kept) < len(self.published):
            self.published = kept
            if self.peer is not None:
                await self.peer.tell_published(list(kept.values()))
            if self.folders is not None:
                self.folders.remove(before=min(kept))

    async def wait_to_explore(self, step: int, *, unless: Callable[[], bool] = lambda: False) -> bool:
        """False where the trainer has ended before `step`. Ends early where another explorer has begun it, as
        `unless` says.
        """
        version = self.rule.requested_version(step, before=self._begun, trained=self.trained)
        if self.rule.publishes_on_request and self.newest_version < version:
            await self._request(version)
        hands_over = self.folders is not None or self.peer is not None

        def is_there() -> bool:
            # one that hears of a step may not have heard of its weights yet
            return self.trained >= version and (not hands_over or self.newest_version >= version)

        await self._wait(
            "explorer",
            lambda: is_there() or self._has_ended_before(step) or unless(),
            lambda: (
                f"trainer to finish step {version}, without which step {step} is not explored; "
                f"it has finished {self.trained}"
            ),
        )
        return not self._has_ended_before(step)

    async def _request(self, version: int) -> None:
        async with self._changed:
            self.requested = version
            self._changed.notify_all()
        if self.peer is not None:
            await self.peer.tell_requested(version)

    async def wait_explored(self, step: int) -> bool:
        """False when `step` will never be explored.

        Does not wait while there are so many rows that the explorer waits.
        """
        await self._wait(
            "trainer",
            lambda: self.explored >= step or self._is_beyond_end(step) or self.excess() != "",
            lambda: f"explorer to finish step {step}; it has finished {self.explored}",
        )
        return not self._is_beyond_end(step)

    async def wait_until(self, condition: Callable[[], bool]) -> None:
        """Asks again whenever something was heard or finished; waits however long it takes."""
        async with self._changed:
            await self._changed.wait_for(condition)

    async def wait_trained(self, step: int) -> None:
        """However long it takes."""
        await self.wait_until(lambda: self.trained >= step)

    def excess(self) -> str:
        """What is too much of the rows that explored steps have left; empty while there is room."""
        return "" if self.limit is None else self.limit.excess(self.explored)

    async def wait_for_room(self, last_step: int | None) -> bool:
        """Waits while there is too much; False when the trainer has ended meanwhile and takes no more."""

        def has_ended() -> bool:
            return self.ended_at is not None or (last_step is not None and self.trained >= last_step)

        await self._wait(
            "explorer",
            lambda: has_ended() or not self.excess(),
            lambda: f"trainer to take rows ({self.excess()}); it has finished step {self.trained}",
        )
        return not has_ended()

    async def finished_exploring(self, step: int) -> None:
        """All steps up to `step` are explored."""
        async with self._changed:
            self.explored = max(self.explored, step)
            self._waits_since.pop("trainer", None)
            self._changed.notify_all()

    async def still_exploring(self) -> None:
        """The explorer has done a part of what comes before a step: the trainer's wait begins anew."""
        async with self._changed:
            self._waits_since.pop("trainer", None)
            self._changed.notify_all()

    async def finished_training(self, step: int) -> None:
        async with self._changed:
            self.trained = step
            self._waits_since.pop("explorer", None)
            self._changed.notify_all()
        if self.peer is not None:
            await self.peer.tell_trained(step)

    async def still_training(self) -> None:
        """The trainer has done a part of what comes before its next step, such as a start of its workers:
        the explorer's wait begins anew.
        """
        async with self._changed:
            self._waits_since.pop("explorer", None)
            self._changed.notify_all()
        if self.peer is not None:
            await self.peer.tell_still_training()

    async def no_more_steps(self, last_step: int) -> None:
        async with self._changed:
            self.last_step = last_step
            self._changed.notify_all()
        if self.peer is not None:
            await self.peer.tell_all_explored(last_step)

    async def hear_trainer(
        self,
        *,
        trained: int | None,
        published: Sequence[Weights],
        ended_at: int | None,
        still_training: str | None = None,
        explored: int | None = None,
        takes_part: bool = True,
    ) -> None:
        """What the trainer has reported; `published` are the versions that are there, and `explored` the step
        up to which this explorer and others have explored all. `takes_part`: there is a trainer now.
        """
        async with self._changed:
            self._peer_takes_part = takes_part
            self.explored = max(self.explored, -1 if explored is None else explored)
            if trained is not None and trained > self.trained:
                self.trained = trained
                self._waits_since.pop("explorer", None)
            if still_training != self._still_training:
                self._still_training = still_training
                self._waits_since.pop("explorer", None)
            if published:
                self.published = {weights.version: weights for weights in published}
            self.ended_at = ended_at
            self._changed.notify_all()

    async def hear_explorer(
        self, *, explored: int | None, last_step: int | None, requested: int = -1, takes_part: bool = True
    ) -> None:
        """What the explorer has reported; of several, `requested` is the newest. `takes_part` as above."""
        async with self._changed:
            self._peer_takes_part = takes_part
            if explored is not None and explored > self.explored:
                self.explored = explored
                self._waits_since.pop("trainer", None)
            self.last_step, self.requested = last_step, requested
            self._changed.notify_all()

    async def wait_ended(self) -> int:
        """Waits for the end of a trainer elsewhere; its last step."""
        await self._wait(
            "explorer",
            lambda: self.ended_at is not None,
            lambda: f"trainer to end; it has finished step {self.trained}",
        )
        assert self.ended_at is not None
        return self.ended_at

    async def wait_last_weights(self, version: int) -> None:
        """Waits for the weights of the last step of a trainer elsewhere that has ended."""
        await self._wait(
            "explorer",
            lambda: self.newest_version >= version,
            lambda: (
                f"weights of the last step, {version}, which have gone with the trainer's memory; its "
                "command publishes them again"
            ),
        )

    def _has_ended_before(self, step: int) -> bool:
        return self.ended_at is not None and step > self.ended_at

    def _is_beyond_end(self, step: int) -> bool:
        return self.last_step is not None and step > self.last_step

    async def begin_turn(self, side: Side) -> None:
        """Before GPUs are used."""
        if self.turns is not None:
            await self.turns.begin(side)

    async def end_turn(self, side: Side) -> None:
        """When they are not used for now."""
        if self.turns is not None:
            await self.turns.end(side)

    async def _wait(self, side: Side, condition: Callable[[], bool], what: Callable[[], str]) -> None:
        """A wait that its caller gives up and begins again counts from its first beginning."""

        def awaited() -> str:
            peer = "trainer" if side == "explorer" else "explorer"
            return what() + ("" if self._peer_takes_part else f"; no {peer} takes part in the run now")

        if not condition():
            await self.end_turn(side)
        async with self._changed:
            try:
                while not condition():
                    self.waits[side] = f"the {side} waits for the {awaited()}"
                    await self._wait_for_change(side, awaited)
            finally:
                self.waits.pop(side, None)
            self._waits_since.pop(side, None)

    async def _wait_for_change(self, side: Side, what: Callable[[], str]) -> None:
        """Also ends without a change, so that a long wait can be logged; SyncError after `sync_timeout`."""
        timeout, now = self.config.sync_timeout, time.monotonic()
        since = self._waits_since.setdefault(side, now)
        if now - since >= timeout:
            raise SyncError(
                f"the {side} has waited {timeout:g} seconds (synchronizer.sync_timeout) for the "
                f"{what()}; give synchronizer.sync_timeout more seconds if a step may take as long"
            )
        ends_at = since + timeout
        # where both sides are one command, the steps of the other are in its log
        if self.peer is not None and self._logged_since.get(side) != since:
            if now - since >= self.silent_seconds:
                self._logged_since[side] = since
                log.info("%s; at most %g s (synchronizer.sync_timeout)", self.waits[side], timeout)
            else:
                ends_at = min(ends_at, since + self.silent_seconds)
        with suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), ends_at - now)
