"""The section `explorer`: engines, workflows at a time, deadlines and evaluation."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field

from trinity_data.config.base import Section, derived

NAME = r"^[A-Za-z0-9_][A-Za-z0-9_.-]*$"


class RolloutModelConfig(Section):
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
    max_logprob_diff_mean: float = Field(default=0.05, gt=0)
    """How far an engine's log-probs may be off the trainer's on average,
    at equal weights; else the run stops.
    """
    max_logprob_diff: float = Field(default=1.0, gt=0)
    """The same for the token that is farthest off."""
    script: Path | None = None
    """Answers of the `fake` engine."""

    not_yet: ClassVar[Mapping[str, object]] = {
        "model_path": None,
        "name": None,
        "trust_remote_code": False,
        "data_parallel_size": 1,
        "pipeline_parallel_size": 1,
        "enable_expert_parallel": False,
        "extra_engine_args": None,
        "use_v1": True,
        "enable_chunked_prefill": True,
        "max_model_len": None,
        "max_prompt_tokens": None,
        "max_response_tokens": None,
        "min_response_tokens": None,
        "enable_prompt_truncation": None,
        "repetition_penalty": None,
        "ignore_eos": False,
        "enable_multimodal": False,
        "chat_template": None,
        "enable_thinking": None,
        "enable_history": False,
        "enable_openai_api": False,
        "enable_log_requests": False,
        "base_port": None,
        "api_key": "EMPTY",
        "enable_auto_tool_choice": False,
        "tool_call_parser": None,
        "reasoning_parser": None,
        "external_model_config": None,
        "weight_sync_buffer_size": None,
    }
    not_yet_values: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "engine_type": ("openai", "sglang", "tinker", "external")
    }
    computed: ClassVar[Collection[str]] = (
        "gpu_per_engine",
        "temperature",
        "top_p",
        "top_k",
        "logprobs",
        "nnodes",
        "node_rank",
        "enable_return_routed_experts",
        "bundle_indices",
        "engine_id",
        "ray_namespace",
        "ray_actor_name",
        "sync_method",
        "checkpoint_job_dir",
        "cuda_visible_devices",
        "enable_lora",
        "enable_runtime_lora_updating",
        "lora_modules",
        "lora_kwargs",
        "rope_scaling",
        "rope_theta",
    )
    same_as: ClassVar[Mapping[str, Mapping[str, str]]] = {"engine_type": {"vllm_async": "vllm"}}

    @property
    def num_gpus(self) -> int:
        """Of all engines, where there are GPUs."""
        return self.engine_num * self.tensor_parallel_size


class ExplorerConfig(Section):
    name: str = Field(default="explorer", pattern=NAME)
    """Part of every experience's id; unique among the explorers of a run."""
    runner_per_model: int = Field(default=8, ge=1)
    """Rollouts at a time for each engine."""
    max_timeout: float = Field(default=900, gt=0)
    """Seconds a try may take, retries included."""
    max_retry_times: int = Field(default=2, ge=0)
    """Times a failed try is repeated."""
    env_vars: dict[str, str] = Field(default_factory=dict)
    """Environment variables of workflows and reward functions, and of the engines."""
    workflow_memory_bytes: int = Field(default=16 * 2**30, ge=2**28)
    """Most private memory of a process that runs workflows and reward functions of your own."""
    rollout_model: RolloutModelConfig = RolloutModelConfig()
    eval_interval: int | None = Field(default=None, ge=1)
    """Steps between evaluations; none in between where not given."""
    eval_on_startup: bool = True
    """Evaluate before the first step; not when a run is resumed."""
    eval_at_end: bool = True
    """Evaluate after a stage's last step."""
    refill_rounds: int = Field(default=0, ge=0)
    """How often a step whose groups were filtered away may ask for more tasks."""
    max_failed_steps: int = Field(default=1, ge=1)
    """Steps in a row in which every rollout failed; so many stop the run."""
    max_dropped_steps: int | None = Field(default=None, ge=1)
    """Steps in a row of which operators left nothing;
    so many stop the run. Only a warning where not given.
    """

    not_yet: ClassVar[Mapping[str, object]] = {
        "auxiliary_models": None,
        "runner_prepare_concurrency": 8,
        "runner_prepare_max_retries": 2,
        "concurrent_mode": None,
        "max_repeat_times_per_runner": None,
        "bench_on_latest_checkpoint": False,
        "proxy_port": None,
        "listen_address": None,
        "service_status_check_interval": None,
        "min_running_model_num": None,
        "db_url": None,
        "over_rollout": None,
        "dynamic_timeout": None,
        "runner_state_report_interval": 0,
        "max_inflight_batches": None,
    }
    moved: ClassVar[Mapping[str, str]] = {"runner_num": "explorer.runner_per_model"}
