from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator
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


@pytest.mark.slow
def test_wandb_keeps_the_step_of_a_late_evaluation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monitor = build_monitor(
        MonitorConfig(monitor_type="wandb"), project="p", name="n", stage=None, job_dir=tmp_path
    )
    monitor.log(1, {"reward/mean": 0.25})
    monitor.log(2, {"reward/mean": 0.5})
    monitor.log(1, {"eval/held_out/accuracy": 0.75})
    monitor.log(3, {"reward/mean": 1.0})
    monitor.close()
    (file,) = (tmp_path / "monitor" / "wandb").glob("offline-run-*/run-p-n.wandb")
    rows = [{key: value for key, value in row.items() if key[0] != "_"} for row in wandb_history(file)]
    assert rows == [
        {"step": 1, "reward/mean": 0.25},
        {"step": 2, "reward/mean": 0.5},
        {"step": 1, "eval/held_out/accuracy": 0.75},
        {"step": 3, "reward/mean": 1.0},
    ]


def wandb_history(file: Path) -> Iterator[dict[str, float]]:
    """The logged rows of an offline run of less than 32 KiB: a LevelDB log of one block."""
    from wandb.proto import wandb_internal_pb2

    data, position = file.read_bytes(), 7
    while position < len(data):
        _, size, _ = struct.unpack_from("<IHB", data, position)
        record = wandb_internal_pb2.Record.FromString(data[position + 7 : position + 7 + size])
        position += 7 + size
        if record.WhichOneof("record_type") == "history":
            yield {
                item.key or "/".join(item.nested_key): json.loads(item.value_json)
                for item in record.history.item
            }
