"""The engines of a run behind one door: each real engine in a Ray actor of its own,
new requests to the least busy.

An actor that dies makes every later call fail with EngineError; nothing is retried on stale weights.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import ray
from ray.exceptions import RayActorError, RayTaskError

from trinity_data.config import EngineConfig, RolloutModelConfig
from trinity_data.config.architecture import read_architecture
from trinity_data.config.explorer import choose_engine_type
from trinity_data.errors import EngineError, WrongModelError
from trinity_data.probe import ProbeBounds, ProbeDifference, probe_difference
from trinity_data.processes import end_with_raylet
from trinity_data.weights import Weights
from trinity_explorer.engines.cause import causes_named
from trinity_explorer.engines.engine import Completion, Engine, Request
from trinity_explorer.engines.fake import FakeEngine, Tokenizer, guess_arithmetic, script_from_file

if TYPE_CHECKING:
    from ray.actor import ActorHandle

CPU_BATCHED_TOKENS = 8192


class EngineActor:
    """What runs in the Ray actor: builds the engine there and passes calls on."""

    def __init__(self, engine_type: str, model_path: str, args: dict[str, Any]) -> None:
        end_with_raylet()
        self.engine_type, self.model_path, self.args = engine_type, model_path, args
        self.engine: Engine | None = None

    async def start(self) -> str:
        if self.engine_type == "vllm":
            from trinity_explorer.engines.vllm import VllmEngine

            with causes_named():
                self.engine = VllmEngine(self.model_path, args=self.args)
        else:
            from trinity_explorer.engines.transformers import TransformersEngine

            self.engine = TransformersEngine(self.model_path, **self.args)
        return self.engine.name

    async def generate(self, requests: Sequence[Request]) -> list[Completion]:
        assert self.engine is not None
        with causes_named():
            return await self.engine.generate(requests)

    async def load_weights(self, weights: Weights) -> None:
        assert self.engine is not None
        with causes_named():
            await self.engine.load_weights(weights)

    async def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]] | None:
        assert self.engine is not None
        with causes_named():
            return await self.engine.score(sequences)

    async def close(self) -> None:
        if self.engine is not None:
            await self.engine.close()


class RemoteEngine:
    """The near end of an EngineActor."""

    def __init__(
        self, engine_type: str, model_path: str, args: dict[str, Any], *, num_gpus: int, env: dict[str, str]
    ) -> None:
        # Ray keeps processes ready for actors that ask for no environment of their own
        options = {"num_cpus": 0, "num_gpus": num_gpus, "max_concurrency": 10_000} | (
            {"runtime_env": {"env_vars": env}} if env else {}
        )
        self.name = engine_type
        self.actor: ActorHandle = (
            ray.remote(EngineActor).options(**options).remote(engine_type, model_path, args)
        )

    async def start(self) -> None:
        await self._call(self.actor.start.remote())

    async def generate(self, requests: Sequence[Request]) -> list[Completion]:
        return cast(list[Completion], await self._call(self.actor.generate.remote(requests)))

    async def load_weights(self, weights: Weights) -> None:
        await self._call(self.actor.load_weights.remote(weights))

    async def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]] | None:
        return cast(list[list[float]] | None, await self._call(self.actor.score.remote(sequences)))

    async def close(self) -> None:
        # it is being taken down anyway
        with contextlib.suppress(EngineError, TimeoutError):
            await asyncio.wait_for(self._call(self.actor.close.remote()), timeout=5)
        ray.kill(self.actor)

    async def _call(self, reference: Any) -> Any:
        try:
            return await reference
        except RayActorError as error:
            raise EngineError(f"the {self.name} engine died: {error}") from error
        except RayTaskError as error:
            raise EngineError(f"the {self.name} engine failed: {error.cause or error}") from error


@dataclass(frozen=True)
class Usage:
    """What engines have done so far."""

    tokens: int
    busy_seconds: float
    """Time during which at least one request was under way."""

    def since(self, before: Usage) -> Usage:
        return Usage(self.tokens - before.tokens, self.busy_seconds - before.busy_seconds)


class EnginePool:
    """Several engines that all hold the same model version."""

    def __init__(
        self, engines: Sequence[Engine], *, bounds: ProbeBounds | None = None, model: str = ""
    ) -> None:
        """`bounds` say how far an engine's log-probs may be off the trainer's.

        `model` names the architecture.
        """
        self.engines = list(engines)
        self.bounds, self.model = bounds, model
        self.difference: ProbeDifference | None = None
        self.name = engines[0].name
        self.model_version = -1
        self._busy = [0] * len(engines)
        self._tokens, self._busy_seconds, self._busy_since = 0, 0.0, 0.0

    def usage(self) -> Usage:
        return Usage(self._tokens, self._busy_seconds)

    async def generate(self, requests: Sequence[Request]) -> list[Completion]:
        chosen = min(range(len(self.engines)), key=self._busy.__getitem__)
        if not any(self._busy):
            self._busy_since = time.perf_counter()
        self._busy[chosen] += len(requests)
        try:
            completions = await self.engines[chosen].generate(requests)
            self._tokens += sum(len(completion.token_ids) for completion in completions)
            return completions
        finally:
            self._busy[chosen] -= len(requests)
            if not any(self._busy):
                self._busy_seconds += time.perf_counter() - self._busy_since

    async def load_weights(self, weights: Weights) -> None:
        """Raises a WrongModelError where an engine's log-probs are then not the trainer's."""
        if weights.version == self.model_version:
            return
        await asyncio.gather(*(engine.load_weights(weights) for engine in self.engines))
        probe, bounds = weights.probe, self.bounds
        if probe is not None and bounds is not None:
            scores = await asyncio.gather(*(engine.score(probe.sequences) for engine in self.engines))
            differences = [probe_difference(probe, score) for score in scores if score is not None]
            other = "transformers" if self.name == "vllm" else "vllm"
            for off in differences:
                if off.exceeds(bounds):
                    raise WrongModelError(
                        f"the {self.name} engine samples from another model than the one that is trained: "
                        f"{self.model} at version {weights.version}, log-probs of {off.num_tokens} tokens "
                        f"off the trainer's by {off.mean:.3g} on average and {off.largest:.3g} at most; "
                        f"allowed: {bounds.mean:g} and {bounds.largest:g}; "
                        f"set explorer.rollout_model.engine_type={other}, or dtype=float32 where the "
                        "number format is the cause, or raise max_logprob_diff_mean and max_logprob_diff"
                    )
            self.difference = max(differences, key=lambda difference: difference.mean, default=None)
        self.model_version = weights.version

    async def close(self) -> None:
        await asyncio.gather(*(engine.close() for engine in self.engines))


async def build_engines(
    config: EngineConfig,
    *,
    max_model_len: int | None,
    model_path: str,
    tokenizer: Tokenizer,
    num_gpus: int,
    env: dict[str, str],
) -> EnginePool:
    """Starts the engines; returns when all of them can generate."""
    engine_type = choose_engine_type(config.engine_type)
    if engine_type == "fake":
        script = script_from_file(config.script) if config.script is not None else guess_arithmetic
        return EnginePool([FakeEngine(tokenizer, script=script)])
    args = (
        _vllm_args(config, max_model_len)
        if engine_type == "vllm"
        else {"dtype": config.dtype, "max_num_seqs": config.max_num_seqs}
    )
    share = config.tensor_parallel_size if num_gpus else 0
    engines = [
        RemoteEngine(engine_type, model_path, args, num_gpus=share, env=env) for _ in range(config.engine_num)
    ]
    await asyncio.gather(*(engine.start() for engine in engines))
    architecture = read_architecture(model_path)
    return EnginePool(
        engines,
        bounds=_bounds(config) if isinstance(config, RolloutModelConfig) else None,
        model=architecture.name if architecture is not None else model_path,
    )


def _bounds(config: RolloutModelConfig) -> ProbeBounds:
    return ProbeBounds(config.max_logprob_diff_mean, config.max_logprob_diff)


def _vllm_args(config: EngineConfig, max_model_len: int | None) -> dict[str, Any]:
    on_cpu = not os.path.exists("/dev/nvidiactl")
    return {
        "dtype": config.dtype or ("float32" if on_cpu else None),
        "max_model_len": max_model_len,
        "tensor_parallel_size": config.tensor_parallel_size,
        "distributed_executor_backend": "uni" if on_cpu and config.tensor_parallel_size == 1 else None,
        "gpu_memory_utilization": None if on_cpu else config.gpu_memory_utilization,
        "enforce_eager": config.enforce_eager or on_cpu,
        "max_num_seqs": config.max_num_seqs,
        "enable_prefix_caching": config.enable_prefix_caching,
        # the smallest that the CPU's attention takes: only whole blocks are shared by the rollouts of a task
        "block_size": 32 if on_cpu else None,
        "seed": config.seed,
        # with it, seeded requests that are prefilled in parts kill the CPU build
        "enable_chunked_prefill": False if on_cpu else None,
        "max_num_batched_tokens": max(CPU_BATCHED_TOKENS, max_model_len or 0) if on_cpu else None,
    }
