"""The section `explorer`: engines, workflows at a time, deadlines and evaluation."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path
from typing import Literal

from pydantic import ByteSize, Field

from trinity_data.config.base import Section, derived

NAME = r"^[A-Za-z0-9_][A-Za-z0-9_.-]*$"


class EngineConfig(Section):
    """What the engines of the rollout model and of auxiliary models share."""

    engine_type: Literal["auto", "vllm", "transformers", "fake"] = "auto"
    """What generates tokens; `auto` takes vLLM where it is usable. `vllm_async` is
    another spelling of `vllm`.
    """
    engine_num: int = Field(default=1, ge=1)
    """Engines."""
    tensor_parallel_size: int = Field(default=1, ge=1)
    """GPUs of each engine."""
    gpu_memory_utilization: float = Field(default=0.9, gt=0, le=1)
    """Share of a GPU's memory that vLLM may take."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = derived(None, "what suits the device")
    """Number format of the engine's weights."""
    enforce_eager: bool | None = derived(None, "true on a CPU")
    """No CUDA graphs (`vllm`)."""
    max_num_seqs: int | None = Field(default=None, ge=1)
    """Most sequences in flight in one engine."""
    enable_prefix_caching: bool = True
    """Reuse the keys and values of equal beginnings (`vllm`)."""
    seed: int = derived(0, "the run's `seed`", ge=0)
    """Seed of sampling."""
    script: Path | None = None
    """Answers of the `fake` engine."""

    def weights_dtype(self, *, on_gpus: bool) -> str:
        """The number format of the weights that it is sent; float32 where vLLM chooses one by itself."""
        if self.dtype is not None:
            return self.dtype
        by_transformers = choose_engine_type(self.engine_type) == "transformers"
        return "bfloat16" if on_gpus and by_transformers else "float32"

    @property
    def num_gpus(self) -> int:
        """Of all engines, where there are GPUs."""
        return self.engine_num * self.tensor_parallel_size


class RolloutModelConfig(EngineConfig):
    max_logprob_diff_mean: float = Field(default=0.05, gt=0)
    """How far an engine's log-probs may be off the trainer's on average,
    at equal weights; else the run stops.
    """
    max_logprob_diff: float = Field(default=1.0, gt=0)
    """The same for the token that is farthest off."""


class AuxiliaryModelConfig(EngineConfig):
    name: str = derived("", "the last part of `model_path`")
    """What operators call it, as `model: NAME`, and workflows, as `auxiliary_models["NAME"]`."""
    model_path: str = Field(min_length=1)
    """As of `model.model_path`. Its weights stay as they are."""
    max_model_len: int | None = Field(default=None, ge=1)
    """Longest prompt and answer together; without it, what the model allows."""
    chat_template: str | None = None
    """A Jinja chat template in place of the tokenizer's."""


class OverRolloutConfig(Section):
    ratio: float = Field(default=0.0, ge=0, lt=1)
    """Share of a step's groups that may be late: the step ends without them, and they go to a later batch."""
    wait_after_min: float = Field(default=30.0, ge=0)
    """Seconds that a step waits for them once the others are whole."""

    def most_late(self, num_groups: int) -> int:
        """Groups of a step that may be late; n - ⌈n (1 - ratio)⌉, without the error of the difference."""
        return math.floor(num_groups * self.ratio + 1e-9)


class DynamicTimeoutConfig(Section):
    enable: bool = False
    """Give a rollout `ratio` times the mean time of those before it, and never more than `max_timeout`."""
    ratio: float = Field(default=3.0, gt=1)
    """Of the mean over the rollouts of this stage that have ended."""
    warmup_min_steps: int = Field(default=1, ge=1)
    """Steps whose rollouts have `max_timeout`."""


class ExplorerConfig(Section):
    name: str = Field(default="explorer", pattern=NAME)
    """Part of every experience's id; unique among the explorers of a run."""
    runner_per_model: int = Field(default=8, ge=1)
    """Rollouts at a time on each engine, those of evaluations and of task operators included."""
    max_timeout: float = Field(default=900, gt=0)
    """Seconds a rollout may take, retries included."""
    max_retry_times: int = Field(default=2, ge=0)
    """Times a failed rollout is repeated."""
    engine_timeout: float = Field(default=300, gt=0)
    """Seconds without a sign of life after which an engine that is asked for something hangs: it is ended,
    and started again like one that died. Loading weights may take as long.
    """
    dynamic_timeout: DynamicTimeoutConfig = DynamicTimeoutConfig()
    over_rollout: OverRolloutConfig = OverRolloutConfig()
    max_inflight_batches: int = derived(1, "1; 2 with `sync_style: fully_async`", ge=1)
    """Steps that may be explored at a time, as far as `sync_style` lets the next one begin before its
    predecessor is trained.
    """
    env_vars: dict[str, str] = Field(default_factory=dict)
    """Environment variables of workflows and reward functions, and of the engines."""
    workflow_memory_bytes: ByteSize = Field(default=ByteSize(16 * 2**30), ge=2**28)
    """Most private memory of a process that runs workflows and reward functions of your own, such as 4GiB."""
    rollout_model: RolloutModelConfig = RolloutModelConfig()
    auxiliary_models: tuple[AuxiliaryModelConfig, ...] = ()
    """Further models, with engines of their own, that operators and workflows ask."""
    eval_interval: int | None = Field(default=None, ge=1)
    """Steps between evaluations; none in between where not given."""
    eval_on_startup: bool = True
    """Evaluate before the first step; not when a run is resumed."""
    eval_at_end: bool = True
    """Evaluate after a stage's last step."""
    bench_on_latest_checkpoint: bool = False
    """With `mode: bench`: evaluate the newest checkpoint only, not the model and every checkpoint."""
    refill_rounds: int = Field(default=0, ge=0)
    """How often a step whose groups were filtered away may ask for more tasks."""
    proxy_port: int = Field(default=8010, ge=0, lt=2**16)
    """Port of the endpoint (`mode: serve`); 0 takes one that is free."""
    listen_address: str = Field(default="127.0.0.1", min_length=1)
    """Address that the endpoint listens on (`mode: serve`); `0.0.0.0` is open to other machines."""
    session_timeout: float = Field(default=86400, gt=0)
    """Seconds without a request after which a session that has no reward fails (`mode: serve`)."""
    max_failed_steps: int = Field(default=1, ge=1)
    """Steps in a row in which every rollout failed; so many stop the run."""
    max_dropped_steps: int | None = Field(default=None, ge=1)
    """Steps in a row of which operators left nothing;
    so many stop the run. Only a warning where not given.
    """


def engines_of(explorer: ExplorerConfig) -> list[tuple[tuple[str | int, ...], EngineConfig]]:
    """The rollout model's and the auxiliary models', each with its key path."""
    auxiliary = enumerate(explorer.auxiliary_models)
    return [
        (("explorer", "rollout_model"), explorer.rollout_model),
        *((("explorer", "auxiliary_models", number), model) for number, model in auxiliary),
    ]


def choose_engine_type(engine_type: str) -> str:
    """vLLM where it can be imported, else transformers."""
    if engine_type != "auto":
        return engine_type
    return "vllm" if importlib.util.find_spec("vllm") is not None else "transformers"
