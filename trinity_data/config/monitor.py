"""The section `monitor`: where metrics go."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import SecretStr, model_validator

from trinity_data.config.base import Section, refused

MonitorType = Literal["tensorboard", "wandb", "mlflow", "none"]
_ARGUMENTS: dict[MonitorType, tuple[str, ...]] = {
    "wandb": ("base_url", "api_key"),
    "mlflow": ("uri", "username", "password"),
}
"""Keys of `monitor_args` by monitor; the others take none."""


class MonitorArgs(Section):
    base_url: str | None = None
    """Server (`wandb`); takes precedence over WANDB_BASE_URL."""
    api_key: SecretStr | None = None
    """Key (`wandb`); takes precedence over WANDB_API_KEY."""
    uri: str | None = None
    """Server (`mlflow`); takes precedence over MLFLOW_TRACKING_URI; without both `http://localhost:5000`."""
    username: str | None = None
    """User (`mlflow`); takes precedence over MLFLOW_TRACKING_USERNAME."""
    password: SecretStr | None = None
    """Password (`mlflow`); takes precedence over MLFLOW_TRACKING_PASSWORD."""


class MonitorConfig(Section):
    monitor_type: MonitorType = "tensorboard"
    """Where metrics go besides the run's own tables."""
    monitor_args: MonitorArgs = MonitorArgs()
    detailed_stats: bool = False
    """Smallest, largest and standard deviation beside the means of batches and evaluations."""
    enable_ray_timeline: bool = False
    """Write what Ray's workers did, and when, to `monitor/timeline.json` at the end of each stage."""

    @model_validator(mode="after")
    def _arguments_are_of_the_monitor(self) -> Self:
        allowed = _ARGUMENTS.get(self.monitor_type, ())
        if others := sorted(self.monitor_args.model_fields_set - set(allowed)):
            takers = [name for name, keys in _ARGUMENTS.items() if set(others) & set(keys)]
            raise refused(
                f"monitor_args ({', '.join(others)}) has no effect with {self.monitor_type!r}",
                f"only {' and '.join(takers)} {'takes' if len(takers) == 1 else 'take'} "
                f"{'it' if len(others) == 1 else 'them'}",
                "remove it" if len(others) == 1 else "remove them",
            )
        return self
