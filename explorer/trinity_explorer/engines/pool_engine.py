"""One engine of a pool: what it has to do, and how it is started again when its process has ended."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TypeVar

from trinity_data.errors import EngineDiedError, EngineError, WeightsGoneError, WrongModelError
from trinity_data.nodes import are_there
from trinity_data.probe import ProbeBounds, ProbeDifference, probe_difference
from trinity_data.processes import this_process
from trinity_data.restart_log import RestartLog
from trinity_data.restarts import RestartLimit
from trinity_data.weights import Weights
from trinity_explorer.engines.actor import RemoteEngine
from trinity_explorer.engines.engine import (
    Completion,
    Engine,
    Heard,
    Request,
    RestartableEngine,
    StreamingEngine,
)

_T = TypeVar("_T")


class PoolEngine:
    """An engine that is started again as often as its limit allows, with the newest weights."""

    def __init__(
        self,
        engine: Engine,
        part: str,
        limit: RestartLimit,
        newest: Callable[[], Weights | None],
        send: Callable[[Weights, Sequence[PoolEngine], bool], Awaitable[None]],
        *,
        bounds: ProbeBounds | None,
        model: str,
        log: RestartLog | None,
    ) -> None:
        """`part` is its name for people; `newest` gives the weights that it is to have, None for the
        model itself. `send` brings weights that the ranks hold, the last argument being `during`.
        """
        self.engine, self.part, self.limit, self.newest, self.send = engine, part, limit, newest, send
        self.bounds, self.model, self.log = bounds, model, log
        self.num_requests = 0
        """Under way."""
        self.version = -1
        self.difference: ProbeDifference | None = None
        self.restart: asyncio.Task[None] | None = None
        """While it is down."""
        self.failure: EngineError | None = None
        """Why it is not started again."""
        self.received = -1
        """The version that was sent to it last, before its log-probs were compared."""
        self.lacks_weights = False
        """Whether those that it is to have were gone when it was started again."""
        self._calls: dict[object, float] = {}
        """Those under way, with their beginnings."""
        self._starts = 0
        self._down_since, self._lost_seconds = 0.0, 0.0

    @property
    def where(self) -> str:
        """For people."""
        if self.restart is not None:
            return "being started again"
        return self.engine.where if isinstance(self.engine, RemoteEngine) else this_process()

    @property
    def takes_requests(self) -> bool:
        return self.restart is None and not self.lacks_weights

    def lost_seconds(self) -> float:
        """For how long it was down, each time from the beginning of the oldest request that was lost."""
        down = time.monotonic() - self._down_since if self.restart is not None else 0.0
        return self._lost_seconds + down

    async def start(self) -> None:
        """For the first time.

        Raises EngineError where the engine cannot be built, or may not be started again.
        """
        assert isinstance(self.engine, RestartableEngine)
        try:
            await self.engine.start()
        except EngineDiedError as error:
            self._begin_restart(error, self._starts)
        if self.restart is not None:
            await asyncio.wait([self.restart])
        if self.failure is not None:
            raise self.failure

    async def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """EngineDiedError where it ended meanwhile; it is being started again then."""
        return await self._asked(len(requests), self.engine.generate(requests))

    async def stream(self, request: Request, heard: Heard) -> Completion:
        """As `generate` of one request; an engine that cannot stream lets nothing be heard before its end."""
        if not isinstance(self.engine, StreamingEngine):
            (completion,) = await self.generate([request])
            return completion
        return await self._asked(1, self.engine.stream(request, heard))

    async def _asked(self, num_requests: int, answering: Awaitable[_T]) -> _T:
        call, starts = object(), self._starts
        self._calls[call] = time.monotonic()
        self.num_requests += num_requests
        try:
            return await answering
        except EngineDiedError as error:
            self._begin_restart(error, starts)
            raise
        finally:
            self.num_requests -= num_requests
            del self._calls[call]

    async def load_weights(self, weights: Weights, *, during: bool = False) -> None:
        """Of however many processes it takes."""
        await self._until_done(
            partial(self._load, weights, during=during), lambda: self.version == weights.version
        )

    async def sleep(self) -> None:
        """As of its process."""
        await self._until_done(self.engine.sleep)

    async def wake(self) -> None:
        """As of its process. One that ended while it slept is started again now that there is room for it."""
        await self._until_done(self.engine.wake)

    async def _until_done(
        self, call: Callable[[], Awaitable[None]], is_done: Callable[[], bool] = lambda: False
    ) -> None:
        """Calls another process where one ends meanwhile, unless that has brought it about."""
        while not is_done() and self.failure is None:
            if self.restart is not None:
                await asyncio.wait([self.restart])
                continue
            starts = self._starts
            try:
                await call()
                return
            except EngineDiedError as error:
                self._begin_restart(error, starts)
        if self.failure is not None:
            raise self.failure

    async def _load(self, weights: Weights, *, during: bool = False) -> None:
        if not weights.are_held:
            await self.engine.load_weights(weights, during=during)
        elif self.received != weights.version:
            await self.send(weights, [self], during)
            self.received = weights.version
        if weights.probe is not None and self.bounds is not None:
            score = await self.engine.score(weights.probe.sequences)
            self.difference = probe_difference(weights.probe, score) if score is not None else None
            if self.difference is not None and self.difference.exceeds(self.bounds):
                raise WrongModelError(self._wrong_model(weights.version, self.difference, self.bounds))
        self.version, self.lacks_weights = weights.version, False

    def _wrong_model(self, version: int, off: ProbeDifference, bounds: ProbeBounds) -> str:
        other = "transformers" if self.engine.name == "vllm" else "vllm"
        return (
            f"the {self.engine.name} engine samples from another model than the one that is trained: "
            f"{self.model} at version {version}, log-probs of {off.num_tokens} tokens "
            f"off the trainer's by {off.mean:.3g} on average and {off.largest:.3g} at most; "
            f"allowed: {bounds.mean:g} and {bounds.largest:g}; "
            f"set explorer.rollout_model.engine_type={other}, or dtype=float32 where the "
            "number format is the cause, or raise max_logprob_diff_mean and max_logprob_diff"
        )

    def _begin_restart(self, cause: EngineDiedError, starts: int) -> None:
        """`starts` says which of its processes ended; several calls hear of one end."""
        if starts != self._starts or self.failure is not None:
            return
        self._starts += 1
        self.version = self.received = -1
        self._down_since = min(self._calls.values(), default=time.monotonic())
        if not isinstance(self.engine, RestartableEngine):
            self.failure = cause
            return
        reason = f"{cause}; {self.num_requests} requests were under way"
        self.restart = asyncio.create_task(self._restart(self.engine, cause, reason))

    async def _restart(self, engine: RestartableEngine, cause: EngineError, reason: str) -> None:
        """Leaves it able to generate, or with a failure. `reason` is the cause as the log has it."""
        try:
            self._report_death(reason)
            while (error := await self._start_again(engine, cause)) is not None:
                cause = error
                self._report_death(f"{cause}")
        except EngineError as error:
            self.failure = error
        except Exception as error:  # such as the store's: nobody awaits this task
            self.failure = EngineError(f"{self.part} cannot be started again: {error}")
        finally:
            self._lost_seconds, self.restart = self.lost_seconds(), None

    async def _start_again(self, engine: RestartableEngine, cause: EngineError) -> EngineError | None:
        """What it ended with this time, None where it can generate.

        Raises EngineError above the limit, WrongModelError where its weights are not the trainer's.
        """
        delay = self.limit.next_delay()
        if delay is None:
            raise EngineError(self._above_limit(cause))
        await asyncio.sleep(delay)
        try:
            await engine.start()
            await self._load_newest()
        except WrongModelError as error:
            self._report_death(f"{error}")
            raise
        except EngineError as error:
            return error
        if self.log is not None:
            down = time.monotonic() - self._down_since
            weights = f"with the weights of version {self.version}" if self.version >= 0 else "with its model"
            self.log.restarted(self.part, f"{weights}, {down:.1f} s after its oldest request was lost")
        return None

    async def _load_newest(self) -> None:
        """While they were loaded there may have come newer ones."""
        while (weights := self.newest()) is not None and weights.version != self.version:
            if not are_there(weights):
                # those of a stage that has ended meanwhile; the next one brings its own
                self.lacks_weights = True
                return
            try:
                await self._load(weights)
            except WeightsGoneError:
                if not weights.are_held:
                    raise
                self.lacks_weights = True
                return

    async def close(self) -> None:
        if self.restart is not None:
            self.restart.cancel()
        await self.engine.close()

    def _report_death(self, reason: str) -> None:
        if self.log is not None:
            self.log.died(self.part, reason)

    def _above_limit(self, cause: EngineError) -> str:
        allowed = self.limit.max_per_hour
        return (
            f"{self.part} ended once more than it is started again: cluster.max_restarts allows {allowed} "
            f"restarts an hour; the last cause: {cause}; remove it, or allow more restarts, "
            "and run the same command again, which goes on from the newest checkpoint"
        )
