"""The pipeline file: what may stand in it, and how it is read. Nothing heavy is imported here."""

from __future__ import annotations

from trinity_data.config.algorithm import (
    AlgorithmConfig,
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
from trinity_data.config.cluster import ClusterConfig
from trinity_data.config.contracts import ContractConfig
from trinity_data.config.data_processor import (
    DataProcessorConfig,
    ExperiencePipelineConfig,
    OperatorConfig,
    TaskPipelineConfig,
)
from trinity_data.config.explorer import (
    AuxiliaryModelConfig,
    DynamicTimeoutConfig,
    EngineConfig,
    ExplorerConfig,
    OverRolloutConfig,
    RolloutModelConfig,
    engines_of,
)
from trinity_data.config.loading import load_pipeline_file
from trinity_data.config.log import LogConfig
from trinity_data.config.model import ModelConfig
from trinity_data.config.monitor import MonitorArgs, MonitorConfig
from trinity_data.config.replay import PriorityArgs, ReplayBufferConfig
from trinity_data.config.run import RunConfig, StageConfig
from trinity_data.config.selection import CurriculumConfig, SelectorArgs, TaskSelectorConfig
from trinity_data.config.service import ServiceConfig
from trinity_data.config.synchronizer import SynchronizerConfig
from trinity_data.config.trainer import TrainerConfig

__all__ = [
    "AlgorithmConfig",
    "AuxiliaryModelConfig",
    "BufferConfig",
    "ClusterConfig",
    "ContractConfig",
    "CurriculumConfig",
    "DataProcessorConfig",
    "DynamicTimeoutConfig",
    "EngineConfig",
    "ExperienceBufferConfig",
    "ExperiencePipelineConfig",
    "ExplorerConfig",
    "ExplorerInput",
    "FormatConfig",
    "LogConfig",
    "ModelConfig",
    "MonitorArgs",
    "MonitorConfig",
    "OperatorConfig",
    "OptimizerConfig",
    "OverRolloutConfig",
    "PriorityArgs",
    "ReplayBufferConfig",
    "RolloutArgs",
    "RolloutModelConfig",
    "RunConfig",
    "SampleStrategyArgs",
    "SelectorArgs",
    "ServiceConfig",
    "StageConfig",
    "SynchronizerConfig",
    "TaskPipelineConfig",
    "TaskSelectorConfig",
    "TasksetConfig",
    "TrainerConfig",
    "TrainerInput",
    "engines_of",
    "load_pipeline_file",
]
