from __future__ import annotations

import math
from pathlib import Path

import pytest

from trinity_data.config import MonitorConfig
from trinity_data.monitor import NoMonitor, TensorBoardMonitor, build_monitor


def test_tensorboard_reads_back_every_finite_number(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monitor = build_monitor(
        MonitorConfig(monitor_type="tensorboard"), project="p", name="n", stage=None, job_dir=tmp_path
    )
    assert isinstance(monitor, TensorBoardMonitor)
    monitor.log(1, {"reward/mean": 0.25, "actor/loss": math.nan})
    monitor.log(4, {"reward/mean": 0.75, "actor/loss": -1.5})
    monitor.close()
    events = EventAccumulator(str(tmp_path / "monitor" / "tensorboard"))
    events.Reload()
    read = {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    assert read == {"reward/mean": [(1, 0.25), (4, 0.75)], "actor/loss": [(4, -1.5)]}


def test_a_named_stage_is_an_experiment_of_its_own(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_multiplexer import EventMultiplexer

    config = MonitorConfig(monitor_type="tensorboard")
    for stage, step in (("warmup", 2), ("rft", 3), ("rft", 4)):
        monitor = build_monitor(config, project="p", name="n", stage=stage, job_dir=tmp_path)
        monitor.log(step, {"reward/mean": 0.5})
        monitor.close()
    shown = EventMultiplexer().AddRunsFromDirectory(str(tmp_path / "monitor" / "tensorboard")).Reload()
    steps = {name: [e.step for e in shown.Scalars(name, "reward/mean")] for name in shown.Runs()}
    assert steps == {"n-warmup": [2], "n-rft": [3, 4]}


def test_no_monitor_writes_nothing(tmp_path: Path) -> None:
    monitor = build_monitor(
        MonitorConfig(monitor_type="none"), project="p", name="n", stage=None, job_dir=tmp_path
    )
    assert isinstance(monitor, NoMonitor)
    monitor.log(1, {"x": 1.0})
    monitor.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "run"), [(None, "p-n"), ("rft", "p-n-rft")])
def test_wandb_runs_offline_without_a_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str | None, run: str
) -> None:
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monitor = build_monitor(
        MonitorConfig(monitor_type="wandb"), project="p", name="n", stage=stage, job_dir=tmp_path
    )
    monitor.log(1, {"reward/mean": 0.5, "actor/loss": math.inf})
    monitor.close()
    assert list((tmp_path / "monitor" / "wandb").glob(f"offline-run-*/run-{run}.wandb"))
