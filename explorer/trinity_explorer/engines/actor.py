"""An engine in a Ray actor of its own: the part in the actor, and the part that calls it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, cast

import ray
from ray.exceptions import RayError, RayTaskError

from trinity_data.errors import EngineDiedError, EngineError, WeightsGoneError
from trinity_data.log_files import LogFiles
from trinity_data.nodes import living_nodes, ray_folder
from trinity_data.placement import Places
from trinity_data.processes import end_with_raylet, this_process
from trinity_data.weight_sending import SendingGroup
from trinity_data.weight_transfer import NodeWeights
from trinity_data.weights import Weights
from trinity_explorer.engines.cause import causes_named
from trinity_explorer.engines.engine import (
    Completion,
    Engine,
    Heard,
    PingedEngine,
    Request,
    StreamingEngine,
    Tokens,
)

if TYPE_CHECKING:
    from ray.actor import ActorHandle

    from trinity_explorer.engines.vllm import VllmEngine

# an engine that is started again may take so many times as long as it took before
_SLOWER = 4
_LEAST_START_SECONDS = 120.0


class EngineActor:
    """What runs in the Ray actor: builds the engine there and passes calls on."""

    def __init__(
        self, engine_type: str, model_path: str, args: dict[str, Any], logs: LogFiles | None, role: str
    ) -> None:
        end_with_raylet()
        if logs is not None:
            logs.take_over(role)
        self.engine_type, self.model_path, self.args = engine_type, model_path, args
        self.engine: Engine | None = None
        self.node_weights = NodeWeights()

    async def start(self) -> str:
        """Returns where it runs."""
        if self.engine_type == "vllm":
            # for its sockets, which it leaves when it is killed
            os.environ.setdefault("VLLM_RPC_BASE_PATH", str(ray_folder()))
            from trinity_explorer.engines.vllm import VllmEngine

            try:
                with causes_named():
                    self.engine = VllmEngine(self.model_path, args=self.args)
            except EngineDiedError as error:
                # mostly what it was configured with, which another start would not change
                raise EngineError(str(error)) from error
        else:
            from trinity_explorer.engines.transformers import TransformersEngine

            self.engine = TransformersEngine(self.model_path, **self.args)
        return this_process()

    async def generate(self, requests: Sequence[Request]) -> list[Completion]:
        assert self.engine is not None
        with causes_named():
            return await self.engine.generate(requests)

    async def stream(self, request: Request) -> AsyncIterator[Tokens | Completion]:
        """What the engine says of its answer, and then the answer."""
        assert self.engine is not None
        if not isinstance(self.engine, StreamingEngine):
            (completion,) = await self.generate([request])
            yield completion
            return
        parts = asyncio.Queue[Tokens | asyncio.Task[Completion]]()
        answering = asyncio.create_task(self.engine.stream(request, parts.put_nowait))
        answering.add_done_callback(parts.put_nowait)
        while isinstance(part := await parts.get(), Tokens):
            yield part
        with causes_named():
            yield await part

    async def load_weights(self, weights: Weights, *, during: bool = False) -> None:
        assert self.engine is not None
        with causes_named(), ExitStack() as stack:
            here = await asyncio.to_thread(stack.enter_context, self.node_weights.here(weights))
            await self.engine.load_weights(here, during=during)

    async def become_idle(self) -> None:
        with causes_named():
            await self._vllm.become_idle()

    async def receive_weights(
        self, version: int, group: SendingGroup, first_member: int, *, during: bool
    ) -> None:
        with causes_named():
            await self._vllm.receive_weights(version, group, first_member, during=during)

    @property
    def _vllm(self) -> VllmEngine:
        """Others do not receive weights."""
        return cast("VllmEngine", self.engine)

    async def sleep(self) -> None:
        assert self.engine is not None
        with causes_named():
            await self.engine.sleep()

    async def wake(self) -> None:
        assert self.engine is not None
        with causes_named():
            await self.engine.wake()

    async def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]] | None:
        assert self.engine is not None
        with causes_named():
            return await self.engine.score(sequences)

    async def ping(self) -> None:
        """Returns when all processes of the engine have answered."""
        if isinstance(self.engine, PingedEngine):
            with causes_named():
                await self.engine.ping()

    async def close(self) -> None:
        if self.engine is not None:
            await self.engine.close()
        self.node_weights.close()


class RemoteEngine:
    """The near end of an EngineActor.

    Raises EngineDiedError where the actor, or vLLM's process below it, has ended or hangs; `start` begins
    another.
    """

    def __init__(
        self,
        name: str,
        make_actor: Callable[[], ActorHandle],
        places: Places,
        *,
        max_silence: float | None = None,
        max_start_seconds: float | None = None,
        num_workers: int = 1,
    ) -> None:
        """`make_actor` puts it into one of `places`. While it is asked for something it is pinged; one that
        gives no answer to that for `max_silence` seconds hangs, and is ended. `max_start_seconds` bounds its
        first start.
        """
        self.name, self.make_actor, self.places = name, make_actor, places
        self.max_silence, self.max_start_seconds = max_silence, max_start_seconds
        self.num_workers = num_workers
        self._num_calls = 0
        self._hung = ""
        self._watch: asyncio.Task[None] | None = None
        self._actor: ActorHandle | None = None
        self.where = "not started"
        """For people."""
        self._start_seconds: float | None = None
        """Of the start before."""

    @property
    def actor(self) -> ActorHandle:
        assert self._actor is not None, "it was started"
        return self._actor

    async def start(self) -> None:
        """EngineDiedError where it takes much longer than the start before: what it needs may have gone with
        its machine. PlacementError where the cluster has no room for it. EngineError where the first start
        takes longer than it may.
        """
        while True:
            self._end()
            await self.places.wait()
            nodes = await asyncio.to_thread(living_nodes)
            try:
                await self._start()
                break
            except EngineDiedError:
                # a place that Ray did not know to be lost yet says nothing about the engine
                if await asyncio.to_thread(living_nodes) >= nodes:
                    raise
        if self.max_silence is not None:
            self._watch = asyncio.create_task(self._ping(self.actor, self.max_silence))

    async def _start(self) -> None:
        """In its place, as `start`."""
        before = self._start_seconds
        longest = self.max_start_seconds if before is None else max(_LEAST_START_SECONDS, _SLOWER * before)
        started, self._actor = time.monotonic(), self.make_actor()
        try:
            self.where = await asyncio.wait_for(self._call(self._actor.start.remote()), longest)
        except TimeoutError as error:
            text = f"the {self.name} engine did not start within {longest:g} s"
            if before is None:
                raise EngineError(
                    f"{text} (synchronizer.sync_timeout); its file in log/ says how far it came; "
                    "give a model that loads slowly more seconds"
                ) from error
            raise EngineDiedError(f"{text}; the start before took {before:.0f} s") from error
        self._start_seconds = time.monotonic() - started

    async def _ping(self, actor: ActorHandle, max_silence: float) -> None:
        """Ends the actor when it hangs, and with it the calls that wait for it."""
        while True:
            await asyncio.sleep(max_silence / 4)
            if not self._num_calls:
                continue
            try:
                await asyncio.wait_for(self._call(actor.ping.remote()), max_silence)
            except TimeoutError:
                self._hung = f"hung: it gave no sign of life for {max_silence:g} seconds"
                ray.kill(actor)
                return
            except EngineError:
                return  # the calls that wait for it say so

    async def generate(self, requests: Sequence[Request]) -> list[Completion]:
        return cast(list[Completion], await self._call(self.actor.generate.remote(requests)))

    async def stream(self, request: Request, heard: Heard) -> Completion:
        return cast(Completion, await self._call(self._stream(request, heard)))

    async def _stream(self, request: Request, heard: Heard) -> Completion:
        part: Tokens | Completion | None = None
        async for reference in self.actor.stream.options(num_returns="streaming").remote(request):
            part = await reference
            if isinstance(part, Tokens):
                heard(part)
        assert isinstance(part, Completion), "it comes last"
        return part

    async def load_weights(self, weights: Weights, *, during: bool = False) -> None:
        await self._call(self.actor.load_weights.remote(weights, during=during))

    @property
    def process(self) -> object:
        return self._actor

    async def become_idle(self) -> None:
        await self._call(self.actor.become_idle.remote())

    async def receive_weights(
        self, version: int, group: SendingGroup, first_member: int, *, during: bool
    ) -> None:
        await self._call(self.actor.receive_weights.remote(version, group, first_member, during=during))

    async def sleep(self) -> None:
        await self._call(self.actor.sleep.remote())

    async def wake(self) -> None:
        await self._call(self.actor.wake.remote())

    async def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]] | None:
        return cast(list[list[float]] | None, await self._call(self.actor.score.remote(sequences)))

    async def close(self) -> None:
        # it is being taken down anyway
        with contextlib.suppress(EngineError, TimeoutError):
            await asyncio.wait_for(self._call(self.actor.close.remote()), timeout=5)
        self._end()

    def _end(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
        if self._actor is not None:
            ray.kill(self._actor)
        self._hung = ""

    async def _call(self, reference: Any) -> Any:
        self._num_calls += 1
        try:
            return await reference
        except RayTaskError as error:
            kinds = (EngineDiedError, WeightsGoneError)
            kind = next((kind for kind in kinds if isinstance(error.cause, kind)), EngineError)
            raise kind(f"the {self.name} engine failed: {error.cause or error}") from error
        except RayError as error:
            why = self._hung or f"died: {exit_detail(str(error))}"
            raise EngineDiedError(f"the {self.name} engine {why}") from error
        finally:
            self._num_calls -= 1


def exit_detail(error: str) -> str:
    """What an error of Ray's says about the end of a process, without where it ran; else its first line."""
    found = re.search(r"Worker exit detail: (.*)", error)
    return found.group(1).strip() if found else next(iter(error.strip().splitlines()), "no reason is known")


def remote_engine(
    engine_type: str,
    model_path: str,
    args: dict[str, Any],
    *,
    places: Places,
    number: int,
    env: dict[str, str],
    logs: LogFiles | None,
    role: str,
    max_silence: float | None = None,
    max_start_seconds: float | None = None,
) -> RemoteEngine:
    """Not started yet; it is to have the place of this number. Without `logs` Ray keeps what it prints."""
    # Ray keeps processes ready for actors that ask for no environment of their own
    environment = {"runtime_env": {"env_vars": env}} if env else {}
    actor = ray.remote(EngineActor).options(max_concurrency=10_000, **environment, **places.options(number))

    def make_actor() -> ActorHandle:
        return cast("ActorHandle", actor.remote(engine_type, model_path, args, logs, role))

    return RemoteEngine(
        engine_type,
        make_actor,
        places,
        max_silence=max_silence,
        max_start_seconds=max_start_seconds,
        num_workers=args.get("tensor_parallel_size") or 1,
    )
