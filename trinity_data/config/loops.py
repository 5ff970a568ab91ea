"""The sections `explorer`, `trainer` and `synchronizer`: the two loops of a run and how they keep pace."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field

from trinity_data.config.section import Section, derived

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


class TrainerConfig(Section):
    name: str = Field(default="trainer", min_length=1)
    """A label for the reader of the file; nothing is named after it."""
    trainer_type: Literal["fsdp"] = "fsdp"
    """PyTorch FSDP2. `verl` is the documents' spelling of the same."""
    save_interval: int = Field(default=0, ge=0)
    """Steps between checkpoints; 0 saves at a stage's end."""
    total_steps: int | None = derived(None, "`buffer.total_steps`", ge=1)
    """The same as `buffer.total_steps`."""
    grad_clip: float = derived(0.0, "`algorithm.optimizer.clip_grad`", gt=0)
    """Norm the gradient is clipped to."""
    use_dynamic_bsz: bool = True
    """Make micro-batches by tokens (`max_token_len_per_gpu`); false: by rows (`micro_batch_size_per_gpu`)."""
    max_token_len_per_gpu: int = derived(0, "2 × `model.max_model_len`", ge=1)
    """Most tokens of a micro-batch, padding included (`use_dynamic_bsz: true`)."""
    micro_batch_size_per_gpu: int | None = Field(default=None, ge=1)
    """Most rows of a micro-batch (`use_dynamic_bsz: false`)."""
    shared_prompts: bool = True
    """Run a prompt once for all rows of the batch that begin with it,
    where that saves time (`use_dynamic_bsz: true`).
    """
    max_skipped_updates: int = Field(default=3, ge=1)
    """Updates in a row that may be skipped because their gradient is not finite; then the run stops."""
    ulysses_sequence_parallel_size: Literal[1] = 1
    """GPUs that share one sequence."""
    world_size: int = derived(0, "the GPUs that the engines leave, or 1 without GPUs", ge=1)
    """Trainer processes."""
    save_hf_checkpoint: Literal["last", "always", "never"] = "always"
    """Which checkpoints also hold a Hugging Face folder."""
    max_checkpoints_to_keep: int = Field(default=0, ge=0)
    """Checkpoints that stay on disk; 0 is all."""
    stop_timeout: float = Field(default=60, ge=0)
    """Seconds that Ctrl-C leaves for the step under way and a checkpoint of it."""

    not_yet: ClassVar[Mapping[str, object]] = {
        "trainer_strategy": "fsdp2",
        "enable_preview": False,
        "use_remove_padding": True,
        "balance_batch": True,
        "critic_warmup": 0,
        "fix_actor_microbatch_loss_scale": True,
        "param_offload": False,
        "optimizer_offload": False,
        "grad_offload": False,
        "offload_policy": False,
        "save_strategy": "unrestricted",
        "megatron": None,
        "trainer_config": None,
        "trainer_config_path": None,
    }
    not_yet_values: ClassVar[Mapping[str, tuple[str, ...]]] = {"trainer_type": ("tinker",)}
    computed: ClassVar[Collection[str]] = ("trust_remote_code",)
    moved: ClassVar[Mapping[str, str]] = {
        "ppo_max_token_len_per_gpu": "trainer.max_token_len_per_gpu",
        "ppo_micro_batch_size_per_gpu": "trainer.micro_batch_size_per_gpu",
    }
    same_as: ClassVar[Mapping[str, Mapping[str, str]]] = {"trainer_type": {"verl": "fsdp"}}


class SynchronizerConfig(Section):
    sync_method: Literal["nccl", "checkpoint", "memory"] = derived(
        "memory", "`memory`; `checkpoint` in `mode: train`"
    )
    """How weights travel: over the disk, or through shared memory; `nccl`, between GPUs,
    goes through memory and says so.
    """
    sync_style: Literal["fixed"] = "fixed"
    """Explorer and trainer meet every `sync_interval` steps."""
    sync_interval: int = Field(default=1, ge=1)
    """Steps between two transfers of weights."""
    sync_offset: int = Field(default=0, ge=0)
    """Steps the explorer may be ahead of the trainer's start."""
    sync_timeout: float = Field(default=3600, gt=0)
    """Seconds one side waits for the other to finish another step; then the run ends with an error."""

    not_yet: ClassVar[Mapping[str, object]] = {
        "explorer_sync_interval": None,
        "trainer_sync_interval": None,
        "group_name": None,
        "wait_for_checkpoint": False,
    }
    not_yet_values: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "sync_style": (
            "explorer_driven",
            "trainer_driven",
            "fully_async",
            "dynamic_by_explorer",
            "dynamic_by_trainer",
        )
    }
    computed: ClassVar[Collection[str]] = ("explorer_world_size", "ray_namespace")
    same_as: ClassVar[Mapping[str, Mapping[str, str]]] = {
        "sync_method": {"online": "nccl", "offline": "checkpoint"}
    }

    @property
    def weights_method(self) -> Literal["checkpoint", "memory"]:
        """Where the engines read the weights."""
        return "checkpoint" if self.sync_method == "checkpoint" else "memory"
