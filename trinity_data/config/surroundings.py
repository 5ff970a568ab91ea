"""The sections `data_processor`, `monitor`, `service` and `log`: operators, and what is seen of a run from outside."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field, SecretStr, field_validator

from trinity_data.config.section import Section, refused

_OPERATOR = re.compile(r"[A-Za-z_]\w*|[A-Za-z_][\w.]*:[A-Za-z_]\w*|[^:]*\.py:[A-Za-z_]\w*")


class OperatorConfig(Section):
    name: str
    """A registered operator, `package.module:Class`, or `./file.py:Class`."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Its keyword arguments."""

    @field_validator("name")
    @classmethod
    def _name_can_be_looked_up(cls, name: str) -> str:
        if _OPERATOR.fullmatch(name):
            return name
        raise refused(
            f"found {name!r}",
            "an operator's name is `registered_name`, `package.module:Class` or `./file.py:Class`",
            "",
        )


class TaskPipelineConfig(Section):
    operators: tuple[OperatorConfig, ...] = ()
    """Applied to tasks, in this order."""
    num_process: int = Field(default=4, ge=1)
    """Worker processes for operators that run on Ray."""

    not_yet: ClassVar[Mapping[str, object]] = {
        "config_path": None,
        "inputs": None,
        "output": None,
        "target_fields": None,
        "priority_weights": None,
        "top_k": -1,
    }


class ExperiencePipelineConfig(Section):
    operators: tuple[OperatorConfig, ...] = ()
    """Applied to the experiences of each finished group, in this order."""

    not_yet: ClassVar[Mapping[str, object]] = {
        "save_input": True,
        "input_save_path": None,
        "inputs": None,
        "output": None,
    }


class DataProcessorConfig(Section):
    task_pipeline: TaskPipelineConfig = TaskPipelineConfig()
    experience_pipeline: ExperiencePipelineConfig = ExperiencePipelineConfig()


class MonitorArgs(Section):
    base_url: str | None = None
    """Server (`wandb`); goes before WANDB_BASE_URL."""
    api_key: SecretStr | None = None
    """Key (`wandb`); goes before WANDB_API_KEY."""

    not_yet: ClassVar[Mapping[str, object]] = {"uri": None, "username": None, "password": None}


class MonitorConfig(Section):
    monitor_type: Literal["tensorboard", "wandb", "none"] = "tensorboard"
    """Where metrics go besides the run's own tables."""
    monitor_args: MonitorArgs = MonitorArgs()

    not_yet: ClassVar[Mapping[str, object]] = {"enable_ray_timeline": False, "detailed_stats": False}
    not_yet_values: ClassVar[Mapping[str, tuple[str, ...]]] = {"monitor_type": ("mlflow", "swanlab")}
    computed: ClassVar[Collection[str]] = ("cache_dir",)


class DataJuicerServiceConfig(Section):
    server_url: str | None = None
    """Address of a Data-Juicer service."""
    auto_start: bool = False
    """Start one."""
    port: int | None = Field(default=None, ge=1, le=65535)
    """Its port."""


class ServiceConfig(Section):
    data_juicer: DataJuicerServiceConfig | None = None
    """Read for the documents' sake: Data-Juicer's operators run in process and no service is asked."""


class LogConfig(Section):
    level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    """The least important lines to keep."""

    not_yet: ClassVar[Mapping[str, object]] = {"group_by_node": False}
    computed: ClassVar[Collection[str]] = ("save_dir",)
