"""Generation with vLLM's asynchronous engine, on a GPU or on the CPU build.

Weights go in through `reload_weights`: the only way that works where vLLM has repacked them.
"""

from __future__ import annotations

import asyncio
import os
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# before vLLM reads them: no phone home, and on a CPU one thread and one GiB of cache unless the user says otherwise
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
if not os.path.exists("/dev/nvidiactl"):
    # else the CPU build insists on a worker process beside the engine's, and each spins while it waits for the other
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")

import torch
from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM

from trinity_data.errors import EngineError
from trinity_data.weights import Weights
from trinity_explorer.engines.engine import Completion, Request, Sampling


class VllmEngine:
    """One AsyncLLM, with its workers."""

    name = "vllm"

    def __init__(self, model_path: str, *, args: dict[str, Any]) -> None:
        given = {key: value for key, value in args.items() if value is not None}
        self.engine = AsyncLLM.from_engine_args(
            AsyncEngineArgs(
                model=model_path,
                logprobs_mode="processed_logprobs",
                worker_extension_cls="trinity_explorer.engines.vllm_worker.WorkerExtension",
                disable_log_stats=True,
                **given,
            )
        )
        self.model_version = 0

    async def generate(self, requests: Sequence[Request]) -> list[Completion]:
        return list(await asyncio.gather(*(self._one(request) for request in requests)))

    async def _one(self, request: Request) -> Completion:
        version = self.model_version
        prompt = {"prompt_token_ids": request.prompt_token_ids}
        stream = self.engine.generate(prompt, _sampling_params(request.sampling), request_id=uuid.uuid4().hex)
        final: Any = None
        async for output in stream:
            final = output
        if final is None:
            raise EngineError("vLLM ended a request without an answer")
        answer = final.outputs[0]
        logprobs = [
            step[token].logprob for step, token in zip(answer.logprobs, answer.token_ids, strict=True)
        ]
        return Completion(
            list(answer.token_ids),
            logprobs,
            "length" if answer.finish_reason == "length" else "stop",
            version,
        )

    async def load_weights(self, weights: Weights) -> None:
        if not any(Path(weights.folder).glob("*.safetensors")):
            raise EngineError(f"{weights.folder} holds no weights of version {weights.version}")
        await self.engine.pause_generation(mode="wait")
        await self.engine.collective_rpc("reload_weights", kwargs={"weights_path": weights.folder})
        if not torch.cuda.is_available():
            await self.engine.collective_rpc("refresh_tied_head")
        await self.engine.reset_prefix_cache()
        await self.engine.resume_generation()
        self.model_version = weights.version

    async def close(self) -> None:
        self.engine.shutdown(timeout=0)


def _sampling_params(sampling: Sampling) -> SamplingParams:
    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_tokens=sampling.min_tokens,
        max_tokens=sampling.max_tokens,
        seed=sampling.seed,
        logprobs=0,
        # text is made from the tokens once, by the workflow's model
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
