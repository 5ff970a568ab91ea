"""The pipeline file: what may stand in it, and how it is read. Nothing heavy is imported here."""

from __future__ import annotations

from trinity_data.config.algorithm import (
    ALGORITHM_TYPES,
    AlgorithmConfig,
    AlgorithmTraits,
    OptimizerConfig,
    SampleStrategyArgs,
)
from trinity_data.config.buffer import (
    BufferConfig,
    ExperienceBufferConfig,
    ExplorerInput,
    FormatConfig,
    RolloutArgs,
    TasksetConfig,
    TrainerInput,
)
from trinity_data.config.loading import load_pipeline_file
from trinity_data.config.loops import ExplorerConfig, RolloutModelConfig, SynchronizerConfig, TrainerConfig
from trinity_data.config.replay import PriorityArgs, ReplayBufferConfig
from trinity_data.config.resources import ClusterConfig, ModelConfig
from trinity_data.config.run import RunConfig, StageConfig
from trinity_data.config.surroundings import (
    DataProcessorConfig,
    ExperiencePipelineConfig,
    LogConfig,
    MonitorArgs,
    MonitorConfig,
    OperatorConfig,
    ServiceConfig,
    TaskPipelineConfig,
)

__all__ = [
    "ALGORITHM_TYPES",
    "AlgorithmConfig",
    "BufferConfig",
    "ClusterConfig",
    "DataProcessorConfig",
    "ExperienceBufferConfig",
    "ExperiencePipelineConfig",
    "ExplorerConfig",
    "ExplorerInput",
    "FormatConfig",
    "LogConfig",
    "AlgorithmTraits",
    "ModelConfig",
    "MonitorArgs",
    "MonitorConfig",
    "OperatorConfig",
    "OptimizerConfig",
    "PriorityArgs",
    "ReplayBufferConfig",
    "RolloutArgs",
    "RolloutModelConfig",
    "RunConfig",
    "SampleStrategyArgs",
    "ServiceConfig",
    "StageConfig",
    "SynchronizerConfig",
    "TaskPipelineConfig",
    "TasksetConfig",
    "TrainerConfig",
    "TrainerInput",
    "load_pipeline_file",
]
