"""The section `monitor`: where metrics go."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import SecretStr, model_validator

from trinity_data.config.base import Section, refused


class MonitorArgs(Section):
    base_url: str | None = None
    """Server (`wandb`); takes precedence over WANDB_BASE_URL."""
    api_key: SecretStr | None = None
    """Key (`wandb`); takes precedence over WANDB_API_KEY."""


class MonitorConfig(Section):
    monitor_type: Literal["tensorboard", "wandb", "none"] = "tensorboard"
    """Where metrics go besides the run's own tables."""
    monitor_args: MonitorArgs = MonitorArgs()

    @model_validator(mode="after")
    def _only_wandb_takes_arguments(self) -> Self:
        if self.monitor_args.model_fields_set and self.monitor_type != "wandb":
            keys = ", ".join(sorted(self.monitor_args.model_fields_set))
            raise refused(
                f"monitor_args ({keys}) has no effect with {self.monitor_type!r}",
                "only wandb takes it",
                "remove it",
            )
        return self
