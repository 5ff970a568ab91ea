"""Where a stage's metrics go: TensorBoard files, Weights & Biases, or nowhere.

Each stage is an experiment of its own, `<name>-<stage_name>`,
and goes on with the steps of the one before.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from trinity_data.config import MonitorConfig


class Monitor(Protocol):
    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...
    def close(self) -> None: ...


class NoMonitor:
    """The store has every number anyway."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        del step, metrics

    def close(self) -> None: ...


class TensorBoardMonitor:
    """Event files written without torch or TensorFlow."""

    def __init__(self, folder: Path) -> None:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        folder.mkdir(parents=True, exist_ok=True)
        self.writer = EventFileWriter(str(folder))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=name, simple_value=value) for name, value in _finite(metrics).items()]
        self.writer.add_event(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))

    def close(self) -> None:
        self.writer.close()


class WandbMonitor:
    """Offline where there is no key; resumed under the same id."""

    def __init__(
        self, config: MonitorConfig, *, project: str, name: str, group: str | None, folder: Path
    ) -> None:
        import wandb

        args = config.monitor_args
        if args.base_url:
            os.environ["WANDB_BASE_URL"] = args.base_url
        if args.api_key:
            os.environ["WANDB_API_KEY"] = args.api_key.get_secret_value()
        mode: Any = None if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_MODE") else "offline"
        folder.mkdir(parents=True, exist_ok=True)
        self.run = wandb.init(
            project=project,
            name=name,
            group=group,
            id=f"{project}-{name}",
            dir=str(folder),
            mode=mode,
            resume="allow",
        )
        # wandb drops what comes with a lower number than its own step, as a late evaluation does
        self.run.define_metric("*", step_metric="step")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.run.log({"step": step, **_finite(metrics)})

    def close(self) -> None:
        self.run.finish()


def build_monitor(
    config: MonitorConfig, *, project: str, name: str, stage: str | None, job_dir: Path
) -> Monitor:
    """The monitor that the pipeline file names, for one of its stages; `stage` is None without `stages`."""
    folder = job_dir / "monitor"
    experiment = name if stage is None else f"{name}-{stage}"
    if config.monitor_type == "tensorboard":
        events = folder / "tensorboard"
        return TensorBoardMonitor(events if stage is None else events / experiment)
    if config.monitor_type == "wandb":
        group = None if stage is None else name
        return WandbMonitor(config, project=project, name=experiment, group=group, folder=folder)
    return NoMonitor()


def _finite(metrics: Mapping[str, float]) -> dict[str, float]:
    return {name: float(value) for name, value in metrics.items() if math.isfinite(value)}
