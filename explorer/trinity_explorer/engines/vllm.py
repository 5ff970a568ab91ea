"""Generation with vLLM's asynchronous engine, on a GPU or on the CPU build.

Weights go in through `reload_weights`: the only way that works where vLLM has repacked them.
"""

from __future__ import annotations

import asyncio
import math
import os
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

# before vLLM reads them: no phone home, and on a CPU one thread and one GiB of cache unless
# the user says otherwise
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
# its processes are on one node
os.environ.setdefault("VLLM_HOST_IP", "127.0.0.1")
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
if not os.path.exists("/dev/nvidiactl"):
    # else the CPU build insists on a worker process beside the engine's,
    # and each spins while it waits for the other
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")

import torch
from vllm import SamplingParams
from vllm.distributed.weight_transfer.base import WeightTransferInitRequest, WeightTransferUpdateRequest
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM

from trinity_data.errors import EngineError
from trinity_data.kept_tokens import MOST_KEPT_TOKENS
from trinity_data.weight_sending import SendingGroup
from trinity_data.weights import Weights
from trinity_explorer.engines.engine import Completion, Heard, Request, Sampling, Tokens

# room for tokens as likely as the last one that `top_k` keeps, all of which vLLM keeps
TIED_TOKENS = 32
DEATH_CHECK_SECONDS = 0.5


class VllmEngine:
    """One AsyncLLM, with its workers."""

    name = "vllm"

    def __init__(self, model_path: str, *, args: dict[str, Any]) -> None:
        set_args = {key: value for key, value in args.items() if value is not None}
        self.engine = AsyncLLM.from_engine_args(
            AsyncEngineArgs(
                model=model_path,
                logprobs_mode="processed_logprobs",
                max_logprobs=MOST_KEPT_TOKENS + TIED_TOKENS,
                worker_extension_cls="trinity_explorer.engines.vllm_worker.WorkerExtension",
                disable_log_stats=True,
                **set_args,
            )
        )
        # what vLLM forbids before `min_tokens`: the tokenizer's end and those of the generation config
        params, config = SamplingParams(), self.engine.model_config
        tokenizer = self.engine.get_tokenizer()
        params.update_from_generation_config(config.try_get_generation_config(), tokenizer.eos_token_id)
        self.end_tokens = sorted(params.all_stop_token_ids)
        self.model_version, self.is_asleep = 0, False
        self._has_weights = asyncio.Event()
        """Not set while others are loaded."""
        self._has_weights.set()
        self._is_idle = asyncio.Event()
        self._is_idle.set()
        self._num_running = 0
        self._group: SendingGroup | None = None
        """That its workers are members of."""

    async def generate(self, requests: Sequence[Request]) -> list[Completion]:
        return list(await asyncio.gather(*(self._one(request) for request in requests)))

    async def stream(self, request: Request, heard: Heard) -> Completion:
        return await self._one(request, heard)

    async def _one(self, request: Request, heard: Heard | None = None) -> Completion:
        # vLLM would answer a request that comes while it loads with weights of another version than this one
        await self._has_weights.wait()
        self._num_running += 1
        self._is_idle.clear()
        try:
            return await self._answer(request, heard)
        finally:
            self._num_running -= 1
            if not self._num_running:
                self._is_idle.set()

    async def _answer(self, request: Request, heard: Heard | None) -> Completion:
        prompt, params = {"prompt_token_ids": request.prompt_token_ids}, _sampling_params(request.sampling)
        if heard is not None:
            params.output_kind = RequestOutputKind.CUMULATIVE
        final: Any = None
        num_heard = 0
        async for output in self.engine.generate(prompt, params, request_id=uuid.uuid4().hex):
            final = output
            if heard is not None:
                num_heard = _pass_on(output.outputs[0], num_heard, heard)
        if final is None:
            raise EngineError("vLLM ended a request without an answer")
        answer = final.outputs[0]
        tokens, logprobs, sampling = list(answer.token_ids), answer.logprobs, request.sampling
        versions = [(span.start, _version(span.version)) for span in answer.weight_versions or ()]
        kept: list[list[int] | None] | None = None
        banned: list[list[int] | None] | None = None
        if sampling.reports_cuts and _is_cut(sampling):
            spans = zip(logprobs.start_indices, logprobs.end_indices, strict=True)
            # what was cut has no probability
            kept = [
                sorted({logprobs.token_ids[i] for i in range(*span) if logprobs.logprobs[i] > -math.inf})
                for span in spans
            ]
        elif sampling.reports_cuts and (early := min(sampling.min_tokens, len(tokens))):
            banned = [self.end_tokens] * early + [None] * (len(tokens) - early)
        return Completion(
            tokens,
            _sampled(logprobs, 0),
            "length" if answer.finish_reason == "length" else "stop",
            versions[0][1] if versions else self.model_version,
            kept,
            banned,
            versions if len(versions) > 1 else None,
        )

    async def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        return list(await asyncio.gather(*(self._score(sequence) for sequence in sequences)))

    async def _score(self, sequence: Sequence[int]) -> list[float]:
        params = SamplingParams(
            temperature=0.0,
            max_tokens=1,
            prompt_logprobs=0,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        final: Any = None
        prompt = {"prompt_token_ids": list(sequence)}
        async for output in self.engine.generate(prompt, params, request_id=uuid.uuid4().hex):
            final = output
        if final is None:
            raise EngineError("vLLM ended a request without an answer")
        return [
            step[token].logprob
            for step, token in zip(final.prompt_logprobs[1:], list(sequence)[1:], strict=True)
        ]

    async def load_weights(self, weights: Weights, *, during: bool = False) -> None:
        if not any(Path(weights.folder).glob("*.safetensors")):
            raise EngineError(f"{weights.folder} holds no weights of version {weights.version}")
        if not during:
            await self.become_idle()
        reload = partial(
            self.engine.collective_rpc, "reload_weights", kwargs={"weights_path": weights.folder}
        )
        await self._replace_weights(weights.version, reload, during=during)

    async def become_idle(self) -> None:
        """Begins no answer until it has other weights; returns when none is under way."""
        self._has_weights.clear()
        await self._is_idle.wait()

    async def receive_weights(
        self, version: int, group: SendingGroup, first_member: int, *, during: bool
    ) -> None:
        """As of `weight_sending.Receiver`."""
        await self._replace_weights(version, partial(self._receive, group, first_member), during=during)

    async def _receive(self, group: SendingGroup, first_member: int) -> None:
        if group != self._group:
            await self.engine.shutdown_weight_transfer_engine()
            meeting: dict[str, Any] = {
                "master_address": group.address,
                "master_port": group.port,
                "rank_offset": first_member,
                "world_size": group.size,
                "packed": True,
            }
            if group.buffers:
                meeting["buffers"] = [asdict(each) for each in group.buffers]
            await self.engine.init_weight_transfer_engine(WeightTransferInitRequest(meeting))
            self._group = group
        update = {
            "names": [each.name for each in group.tensors],
            "dtype_names": [each.dtype for each in group.tensors],
            "shapes": [list(each.shape) for each in group.tensors],
        }
        try:
            await self.engine.start_weight_update()
            await self.engine.update_weights(WeightTransferUpdateRequest(update))
            await self.engine.finish_weight_update()
        except Exception as error:  # the boundary of vLLM
            self._group = None
            if not self.engine.errored:
                await self.engine.collective_rpc("forget_received_weights")
            raise EngineError(f"vLLM did not get the weights: {error}") from error

    async def sleep(self) -> None:
        """Weights go to the memory of the machine, keys and values are dropped. On a CPU nothing moves."""
        if not self.is_asleep:
            await self._while_alive(self.engine.sleep(level=1))
            self.is_asleep = True

    async def wake(self) -> None:
        if self.is_asleep:
            await self._while_alive(self.engine.wake_up())
            self.is_asleep = False

    async def _while_alive(self, work: Coroutine[Any, Any, Any]) -> None:
        """vLLM leaves calls other than `generate` without an answer when its engine process ends."""
        task = asyncio.create_task(work)
        while not (await asyncio.wait([task], timeout=DEATH_CHECK_SECONDS))[0]:
            if self.engine.errored:
                task.cancel()
                raise self.engine.dead_error
        task.result()

    async def _replace_weights(
        self, version: int, load: Callable[[], Awaitable[Any]], *, during: bool
    ) -> None:
        """By what `load` does."""
        self._has_weights.clear()
        await self._while_alive(self._pause_and(version, load, during=during))
        self.model_version = version
        self._has_weights.set()

    async def _pause_and(self, version: int, load: Callable[[], Awaitable[Any]], *, during: bool) -> None:
        # what is under way loses its keys and values
        await self.engine.pause_generation(mode="keep" if during else "wait")
        if not torch.cuda.is_available():
            await self.engine.collective_rpc("forget_packed_experts")
        await load()
        if not torch.cuda.is_available():
            await self.engine.collective_rpc("refresh_tied_head")
        await self.engine.reset_prefix_cache()
        await self.engine.update_weight_version(str(version))
        await self.engine.resume_generation()

    async def ping(self) -> None:
        await self.engine.is_sleeping()

    async def close(self) -> None:
        self.engine.shutdown(timeout=0)


def _pass_on(answer: Any, num_heard: int, heard: Heard) -> int:
    """Tells of the tokens behind those that were heard of; returns how many there are."""
    if len(answer.token_ids) > num_heard:
        heard(Tokens(list(answer.token_ids[num_heard:]), _sampled(answer.logprobs, num_heard)))
    return len(answer.token_ids)


def _sampled(logprobs: Any, first: int) -> list[float]:
    """Of the tokens from `first` on. Of each position the sampled token comes first."""
    return [logprobs.logprobs[start] for start in logprobs.start_indices[first:]]


def _version(name: str) -> int:
    """Of a span of vLLM's. The weights that it started with have a name of its own."""
    return int(name) if name.isdigit() else 0


def _sampling_params(sampling: Sampling) -> SamplingParams:
    num_logprobs = 0
    if sampling.reports_cuts and _is_cut(sampling):
        # the likeliest tokens, which come beside the sampled one
        limit = min(sampling.top_k, MOST_KEPT_TOKENS) + TIED_TOKENS
        num_logprobs = limit if sampling.top_k > 0 else MOST_KEPT_TOKENS
    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_tokens=sampling.min_tokens,
        max_tokens=sampling.max_tokens,
        seed=sampling.seed,
        logprobs=num_logprobs,
        # lists of numbers instead of an object a token
        flat_logprobs=True,
        # text is made from the tokens once, by the workflow's model
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def _is_cut(sampling: Sampling) -> bool:
    return sampling.temperature > 0 and (sampling.top_k > 0 or sampling.top_p < 1)
