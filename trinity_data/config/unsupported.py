"""The documents' keys that the models do not have: not supported yet, set by the run, or renamed.

By the name of the section's model. A key is a field or stands here; anything else is a misspelling.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class SectionKeys(NamedTuple):
    """What one section's model does not have."""

    unsupported: Mapping[str, object] = {}
    """Keys that this version cannot serve, each with the value that requests nothing."""
    unsupported_values: Mapping[str, tuple[str, ...]] = {}
    """Values of fields that this version cannot serve."""
    managed: tuple[str, ...] = ()
    """Keys that the run sets by itself and a person never does."""
    renamed: Mapping[str, str] = {}
    """Old spellings, each with today's key path."""
    aliases: Mapping[str, Mapping[str, str]] = {}
    """By field, second spellings of a value, each with the one that is kept."""


_ENGINE_KEYS = SectionKeys(
    unsupported={
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
    },
    unsupported_values={"engine_type": ("openai", "sglang", "tinker", "external")},
    managed=(
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
    ),
    aliases={"engine_type": {"vllm_async": "vllm"}},
)
_OF_AUXILIARY_MODELS = ("name", "model_path", "max_model_len", "chat_template", "enable_openai_api")

DOCUMENTED_KEYS: dict[str, SectionKeys] = {
    "RunConfig": SectionKeys(
        unsupported={
            "group": "",
            "ignore_validator_suggestions": False,
        },
        managed=("checkpoint_job_dir",),
    ),
    "OptimizerConfig": SectionKeys(
        unsupported={"optimizer_type": "adam"},
        renamed={"warmup_style": "algorithm.optimizer.lr_scheduler_type"},
    ),
    "RolloutCorrectionConfig": SectionKeys(
        unsupported={
            "rollout_rs": None,
            "rollout_rs_threshold": None,
            "rollout_is_batch_normalize": False,
            "bypass_mode": False,
            "loss_type": None,
        },
    ),
    "AlgorithmConfig": SectionKeys(
        unsupported={
            "kl_penalty_fn_args": None,
            "enable_router_replay": False,
        },
        unsupported_values={
            "algorithm_type": (
                "ppo",
                "mix",
                "mix_chord",
                "cpt",
                "multi_step_grpo",
                "gigpo",
                "on_policy_distill",
                "jsd",
                "grpo_verl",
            ),
            "advantage_fn": (
                "ppo",
                "grpo_verl",
                "step_wise_grpo",
                "gigpo",
                "remax",
                "opmd_verl",
                "asymre_verl",
                "on_policy_distill",
                "jsd",
                "clipb",
                "clipv",
            ),
            "policy_loss_fn": ("mix", "mix_chord"),
            "kl_loss_fn": ("adaptive",),
            "kl_penalty_fn": ("k1", "k2", "k3", "low_var_kl", "abs", "corrected_k3", "adaptive"),
            "entropy_loss_fn": ("mix",),
            "sample_strategy": ("warmup",),
        },
    ),
    "ModelConfig": SectionKeys(
        unsupported={
            "trust_remote_code": False,
            "critic_model_path": None,
            "chat_template_path": None,
            "logprobs": 0,
            "repetition_penalty": 1.0,
            "enable_thinking": None,
            "lora_configs": None,
            "fully_sharded_loras": False,
            "max_cpu_loras": None,
            "rope_scaling": None,
            "rope_theta": None,
            "tinker": None,
            "external_model": None,
        },
    ),
    "ClusterConfig": SectionKeys(
        unsupported={"ray_address": "auto"},
        managed=(
            "total_gpu_num",
            "rollout_gpu_num",
            "auxiliary_model_gpu_num",
            "explorer_gpu_num",
            "trainer_gpu_num",
            "trainer_node_num",
            "trainer_gpu_num_per_node",
        ),
    ),
    "FormatConfig": SectionKeys(
        unsupported={
            "tools_key": None,
            "image_key": None,
            "video_key": None,
            "reply_prefix": None,
            "enable_concatenated_multi_turn": False,
            "chat_template": None,
            "enable_thinking": None,
        },
    ),
    "RolloutArgs": SectionKeys(
        unsupported={"logprobs": 0},
        renamed={"n": "repeat_times of the task set"},
    ),
    "TasksetConfig": SectionKeys(
        unsupported={
            "max_retry_times": 3,
            "max_retry_interval": 1,
            "enable_progress_bar": False,
        },
        managed=(
            "index",
            "is_eval",
            "batch_size",
            "total_epochs",
            "total_steps",
            "ray_namespace",
        ),
    ),
    "ExperienceBufferConfig": SectionKeys(
        unsupported={
            "max_retry_times": 3,
            "max_retry_interval": 1,
            "enable_progress_bar": False,
            "data_selector": None,
        },
        managed=(
            "index",
            "batch_size",
            "tokenizer_path",
            "total_epochs",
            "total_steps",
            "ray_namespace",
        ),
    ),
    "BufferConfig": SectionKeys(
        managed=("explorer_output", "tokenizer_path", "cache_dir"),
    ),
    "RolloutModelConfig": _ENGINE_KEYS,
    "AuxiliaryModelConfig": _ENGINE_KEYS._replace(
        unsupported={
            key: value for key, value in _ENGINE_KEYS.unsupported.items() if key not in _OF_AUXILIARY_MODELS
        },
        # operators ask through the run itself
        managed=(*_ENGINE_KEYS.managed, "enable_openai_api"),
    ),
    "ExplorerConfig": SectionKeys(
        unsupported={
            "runner_prepare_concurrency": 8,
            "runner_prepare_max_retries": 2,
            "concurrent_mode": None,
            "max_repeat_times_per_runner": None,
            "service_status_check_interval": 60,
            "min_running_model_num": 1,
            "db_url": None,
            "runner_state_report_interval": 0,
        },
        renamed={"runner_num": "explorer.runner_per_model"},
    ),
    # no rollout is thrown away, and no group is trained in parts
    "OverRolloutConfig": SectionKeys(unsupported={"return_partial_tasks": False}),
    "TrainerConfig": SectionKeys(
        unsupported={
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
        },
        unsupported_values={"trainer_type": ("tinker",)},
        managed=("trust_remote_code",),
        renamed={
            "ppo_max_token_len_per_gpu": "trainer.max_token_len_per_gpu",
            "ppo_micro_batch_size_per_gpu": "trainer.micro_batch_size_per_gpu",
        },
        aliases={"trainer_type": {"verl": "fsdp"}},
    ),
    "SynchronizerConfig": SectionKeys(
        unsupported={
            "group_name": None,
            "wait_for_checkpoint": False,
        },
        managed=("explorer_world_size", "ray_namespace"),
        aliases={
            "sync_method": {"online": "nccl", "offline": "checkpoint"},
            "sync_style": {
                "dynamic_by_explorer": "explorer_driven",
                "dynamic_by_trainer": "trainer_driven",
            },
        },
    ),
    # the documents have a whole task set here; ours is a folder, and the other keys are those of the set read
    "TaskOutputConfig": SectionKeys(
        unsupported={
            "max_retry_times": 3,
            "max_retry_interval": 1,
            "enable_progress_bar": False,
        },
        renamed={
            name: f"{name} of the task set"
            for name in (
                "name",
                "storage_type",
                "default_workflow_type",
                "default_reward_fn_type",
                "rollout_args",
                "workflow_args",
                "reward_fn_args",
                "task_selector",
                "data_selector",
                "split",
                "subset_name",
                "format",
                "repeat_times",
            )
        },
        managed=("index", "is_eval", "batch_size", "total_epochs", "total_steps", "ray_namespace"),
    ),
    "ExperiencePipelineConfig": SectionKeys(
        unsupported={
            "inputs": None,
            "output": None,
        },
    ),
    "MonitorConfig": SectionKeys(
        unsupported_values={"monitor_type": ("swanlab",)},
        managed=("cache_dir",),
    ),
    "LogConfig": SectionKeys(
        managed=("save_dir",),
    ),
}
