"""The engines of a run behind one door: each real engine in a Ray actor of its own,
new requests to the least busy.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from trinity_data.config import EngineConfig, RolloutModelConfig
from trinity_data.config.architecture import read_architecture
from trinity_data.config.explorer import choose_engine_type
from trinity_data.errors import BrokenAnswerError, EngineDiedError, EngineError, WeightsGoneError
from trinity_data.log_files import LogFiles
from trinity_data.placement import ENGINE_SHARE, Places
from trinity_data.probe import ProbeBounds, ProbeDifference
from trinity_data.restart_log import RestartLog
from trinity_data.restarts import RestartLimit
from trinity_data.weight_sending import Receiver, Sender
from trinity_data.weights import Weights
from trinity_explorer.engines.actor import remote_engine
from trinity_explorer.engines.engine import Completion, Engine, Heard, Request, Tokens
from trinity_explorer.engines.fake import FakeEngine, Tokenizer, guess_arithmetic, script_from_file
from trinity_explorer.engines.pool_engine import PoolEngine

log = logging.getLogger(__name__)

CPU_BATCHED_TOKENS = 8192


@dataclass(frozen=True)
class Usage:
    """What engines have done so far."""

    tokens: int
    busy_seconds: float
    """Time during which at least one request was under way."""

    def since(self, before: Usage) -> Usage:
        return Usage(self.tokens - before.tokens, self.busy_seconds - before.busy_seconds)


class EnginePool:
    """Several engines that all hold the same model version.

    What was asked of an engine that died is asked again of another, or of itself once it was started again:
    requests carry their seeds, so that nothing but time is lost.
    """

    def __init__(
        self,
        engines: Sequence[Engine],
        *,
        bounds: ProbeBounds | None = None,
        model: str = "",
        role: str = "engine",
        max_restarts: int = 0,
        log: RestartLog | None = None,
        places: Places | None = None,
    ) -> None:
        """`bounds` say how far an engine's log-probs may be off the trainer's.

        `places` are the engines'; they end with the pool. `model` names the architecture. Each engine is a
        role, named `role` and its number, and is started again at most `max_restarts` times an hour.
        """
        self.engines = [
            PoolEngine(
                engine,
                f"{role}_{number}",
                RestartLimit(max_restarts),
                lambda: self._weights,
                self._send,
                bounds=bounds,
                model=model,
                log=log,
            )
            for number, engine in enumerate(engines)
        ]
        self.places = places
        self.sender: Sender | None = None
        """Of the ranks, where they hold the weights."""
        self.difference: ProbeDifference | None = None
        self.name = engines[0].name
        self.model_version = -1
        self._weights: Weights | None = None
        """That all of them have, or are being given."""
        self._num_calls = 0
        self._tokens, self._busy_seconds, self._busy_since = 0, 0.0, 0.0

    def usage(self) -> Usage:
        return Usage(self._tokens, self._busy_seconds)

    def lost_seconds(self) -> float:
        """At least as long as any request has waited for engines to be started again."""
        lost = 0.0
        for engine in self.engines:  # for each rollout: a generator takes three times as long
            lost += engine.lost_seconds()
        return lost

    async def generate(
        self, requests: Sequence[Request], *, preferred: int | None = None
    ) -> list[Completion]:
        """On the engine with this number where it runs, or else on the least busy one.

        Raises EngineError where an engine may not be started again.
        """
        with self._busy():
            while True:
                engine = await self._chosen(preferred)
                with contextlib.suppress(EngineDiedError):
                    completions = await engine.generate(requests)
                    break
            self._tokens += sum(len(completion.token_ids) for completion in completions)
            return completions

    async def stream(self, request: Request, heard: Heard, *, preferred: int | None = None) -> Completion:
        """As `generate` of one request. BrokenAnswerError where an engine died that was heard of: another
        would not go on as it began.
        """
        num_heard = 0

        def hear(tokens: Tokens) -> None:
            nonlocal num_heard
            num_heard += len(tokens.token_ids)
            heard(tokens)

        with self._busy():
            while True:
                engine = await self._chosen(preferred)
                try:
                    completion = await engine.stream(request, hear)
                    break
                except EngineDiedError as error:
                    if num_heard:
                        text = f"the engine died after {num_heard} tokens of the answer; ask again"
                        raise BrokenAnswerError(text) from error
            self._tokens += len(completion.token_ids)
            return completion

    @contextlib.contextmanager
    def _busy(self) -> Iterator[None]:
        """Counts the time during which at least one block is open."""
        if not self._num_calls:
            self._busy_since = time.perf_counter()
        self._num_calls += 1
        try:
            yield
        finally:
            self._num_calls -= 1
            if not self._num_calls:
                self._busy_seconds += time.perf_counter() - self._busy_since

    async def _chosen(self, preferred: int | None) -> PoolEngine:
        """The preferred engine, or else the least busy of those that run; waits where none does."""
        while True:
            for engine in self.engines:
                if engine.failure is not None:
                    raise engine.failure
            if preferred is not None and self.engines[preferred].takes_requests:
                return self.engines[preferred]
            if ready := [engine for engine in self.engines if engine.takes_requests]:
                return min(ready, key=lambda engine: engine.num_requests)
            restarts = [engine.restart for engine in self.engines if engine.restart is not None]
            if not restarts:
                raise EngineError(f"no engine has the weights of {self._weights}, which were removed")
            await asyncio.wait(restarts, return_when=asyncio.FIRST_COMPLETED)

    async def load_weights(self, weights: Weights, *, during: bool = False) -> None:
        """Waits for answers under way, or, with `during`, changes the weights in their middle.

        Raises a WrongModelError where an engine's log-probs are then not the trainer's, a WeightsGoneError
        where they cannot be read; all engines have ended loading then.
        """
        self._weights = weights
        lacking = any(engine.lacks_weights for engine in self.engines)
        if weights.version == self.model_version and not lacking:
            return
        if weights.are_held:
            await self._send_to_all(weights, during)
        loads = [engine.load_weights(weights, during=during) for engine in self.engines]
        for result in await asyncio.gather(*loads, return_exceptions=True):
            if isinstance(result, BaseException):
                raise result
        differences = [engine.difference for engine in self.engines if engine.difference is not None]
        self.difference = max(differences, key=lambda difference: difference.mean, default=None)
        self.model_version = weights.version

    async def _send_to_all(self, weights: Weights, during: bool) -> None:
        """At once; where that fails, each engine gets them for itself, as after its restart."""
        engines = [engine for engine in self.engines if engine.restart is None and engine.failure is None]
        try:
            await self._send(weights, engines, during)
        except WeightsGoneError:
            raise
        except EngineError as error:
            log.warning("version %d goes to each engine for itself: %s", weights.version, error)
            return
        for engine in engines:
            engine.received = weights.version if engine.restart is None else -1

    async def _send(self, weights: Weights, engines: Sequence[PoolEngine], during: bool) -> None:
        receivers = [engine.engine for engine in engines if isinstance(engine.engine, Receiver)]
        assert self.sender is not None, "the ranks hold the weights"
        if receivers:
            await self.sender.send(weights, receivers, during=during)

    async def sleep(self) -> None:
        """Gives the memory of the GPUs back; nothing is asked until the engines are awake."""
        await asyncio.gather(*(engine.sleep() for engine in self.engines))

    async def wake(self) -> None:
        """The engines have their weights again."""
        await asyncio.gather(*(engine.wake() for engine in self.engines))

    async def close(self) -> None:
        await asyncio.gather(*(engine.close() for engine in self.engines))
        if self.places is not None:
            self.places.remove()


async def build_engines(
    config: EngineConfig,
    *,
    max_model_len: int | None,
    model_path: str,
    tokenizer: Tokenizer,
    num_gpus: int,
    shares_gpus: bool = False,
    receives_weights: bool = False,
    env: dict[str, str],
    max_restarts: int = 0,
    max_seconds_for_room: float | None = None,
    max_silence: float | None = None,
    max_start_seconds: float | None = None,
    log: RestartLog | None = None,
    logs: LogFiles | None = None,
    role: str = "engine",
) -> EnginePool:
    """Starts the engines; returns when all of them can generate. With `shares_gpus` each has a part of a GPU,
    beside a rank, and can sleep. With `receives_weights` those of vLLM can take versions that the
    ranks send. `max_restarts` and `log` as of the pool, `max_seconds_for_room` as `max_seconds` of `Places`,
    `max_silence` and `max_start_seconds` as of `RemoteEngine`.

    Each engine is a role, named `role` and its number.
    """
    engine_type = choose_engine_type(config.engine_type)
    if engine_type == "fake":
        script = script_from_file(config.script) if config.script is not None else guess_arithmetic
        return EnginePool([FakeEngine(tokenizer, script=script)])
    args: dict[str, Any] = {"dtype": config.dtype, "max_num_seqs": config.max_num_seqs}
    if engine_type == "vllm":
        args = _vllm_args(config, max_model_len, has_gpus=num_gpus > 0, shares_gpus=shares_gpus)
        if receives_weights:
            # `linked` is ours, of vllm_worker.py
            args["weight_transfer_config"] = {"backend": "nccl" if num_gpus and not shares_gpus else "linked"}
    places = Places(
        f"engine of {role}",
        config.engine_num,
        num_gpus=(ENGINE_SHARE if shares_gpus else config.tensor_parallel_size) if num_gpus else 0,
        strategy="SPREAD",
        max_seconds=max_seconds_for_room,
    )
    engine = partial(remote_engine, engine_type, model_path, args, places=places, env=env, logs=logs)
    bounded = partial(engine, max_silence=max_silence, max_start_seconds=max_start_seconds)
    pool = EnginePool(
        [bounded(number=number, role=f"{role}_{number}") for number in range(config.engine_num)],
        bounds=_bounds(config) if isinstance(config, RolloutModelConfig) else None,
        model=_architecture_name(model_path),
        role=role,
        max_restarts=max_restarts,
        log=log,
        places=places,
    )
    await asyncio.gather(*(engine.start() for engine in pool.engines))
    return pool


def _architecture_name(model_path: str) -> str:
    """The path itself where it names none."""
    architecture = read_architecture(model_path)
    return architecture.name if architecture is not None else model_path


def _bounds(config: RolloutModelConfig) -> ProbeBounds:
    return ProbeBounds(config.max_logprob_diff_mean, config.max_logprob_diff)


def _vllm_args(
    config: EngineConfig, max_model_len: int | None, *, has_gpus: bool, shares_gpus: bool
) -> dict[str, Any]:
    # the engine may run on another machine than this one
    on_cpu = not has_gpus and not os.path.exists("/dev/nvidiactl")
    # of several GPUs, one process each on the engine's own node; vLLM would let Ray choose nodes for them
    backend = "mp" if config.tensor_parallel_size > 1 else "uni" if on_cpu else None
    return {
        "dtype": config.dtype or ("float32" if on_cpu else None),
        "max_model_len": max_model_len,
        "tensor_parallel_size": config.tensor_parallel_size,
        "distributed_executor_backend": backend,
        "gpu_memory_utilization": None if on_cpu else config.gpu_memory_utilization,
        "enforce_eager": config.enforce_eager or on_cpu,
        "max_num_seqs": config.max_num_seqs,
        "enable_prefix_caching": config.enable_prefix_caching,
        # the smallest that the CPU's attention takes: only whole blocks are shared by the rollouts of a task
        "block_size": 32 if on_cpu else None,
        "seed": config.seed,
        "enable_sleep_mode": has_gpus and shares_gpus,
        # with it, seeded requests that are prefilled in parts kill the CPU build
        "enable_chunked_prefill": False if on_cpu else None,
        "max_num_batched_tokens": max(CPU_BATCHED_TOKENS, max_model_len or 0) if on_cpu else None,
    }
