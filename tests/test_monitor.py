from __future__ import annotations

import json
import math
import os
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from trinity_data.config import MonitorConfig
from trinity_data.errors import ConfigError
from trinity_data.monitor import NoMonitor, TensorBoardMonitor, build_monitor

PARTS = ("explorer:explorer", "trainer")


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


def test_explorer_and_trainer_apart_are_one_run_of_tensorboard(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_multiplexer import EventMultiplexer

    config = MonitorConfig(monitor_type="tensorboard")
    explorer, trainer = (
        build_monitor(config, project="p", name="n", stage=None, job_dir=tmp_path, part=part)
        for part in PARTS
    )
    explorer.log(1, {"rollout/number": 8.0})
    trainer.log(1, {"reward/mean": 0.5})
    explorer.log(2, {"rollout/number": 9.0})
    # neither was closed: both may be killed
    shown = EventMultiplexer().AddRunsFromDirectory(str(tmp_path / "monitor" / "tensorboard")).Reload()
    assert list(shown.Runs()) == ["."]
    numbers = {
        tag: [(e.step, e.value) for e in shown.Scalars(".", tag)] for tag in ("rollout/number", "reward/mean")
    }
    assert numbers == {"rollout/number": [(1, 8.0), (2, 9.0)], "reward/mean": [(1, 0.5)]}
    explorer.close()
    trainer.close()


@pytest.fixture
def mlflow_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MonitorConfig:
    """Of a store in files: a server's needs the package mlflow as a whole."""
    pytest.importorskip("mlflow", reason="needs `pip install 'trinity-data[mlflow]'`")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    args = {"uri": f"file://{tmp_path / 'store'}"}
    return MonitorConfig.model_validate({"monitor_type": "mlflow", "monitor_args": args})


def test_explorer_and_trainer_apart_are_one_run_of_mlflow(
    tmp_path: Path, mlflow_config: MonitorConfig
) -> None:
    from mlflow import MlflowClient

    def log(part: str, step: int, metrics: dict[str, float]) -> str:
        monitor = build_monitor(
            mlflow_config, project="p", name="n", stage="rft", job_dir=tmp_path, part=part
        )
        monitor.log(step, metrics)
        monitor.close()
        client = MlflowClient(tracking_uri=mlflow_config.monitor_args.uri)
        experiment = client.get_experiment_by_name("p")
        assert experiment is not None
        (run,) = client.search_runs([experiment.experiment_id])
        assert run.info.run_name == "n-rft"
        metric = next(iter(metrics)).replace("#", "_")
        history = client.get_metric_history(run.info.run_id, metric)
        return f"{run.info.status} {[(each.step, each.value) for each in history]}"

    assert log("explorer:explorer", 1, {"operator/a#2/rows": 8.0}) == "RUNNING [(1, 8.0)]"
    assert log("trainer", 1, {"reward/mean": 0.5, "actor/loss": math.nan}) == "FINISHED [(1, 0.5)]"
    # a run that goes on is running again
    assert log("explorer:explorer", 2, {"operator/a#2/rows": 9.0}) == "RUNNING [(1, 8.0), (2, 9.0)]"
    assert log("", 2, {"reward/mean": 1.0}) == "FINISHED [(1, 0.5), (2, 1.0)]"


def test_steps_that_mlflow_does_not_take_cost_a_warning_each(
    tmp_path: Path, mlflow_config: MonitorConfig, caplog: pytest.LogCaptureFixture
) -> None:
    monitor = build_monitor(mlflow_config, project="p", name="n", stage=None, job_dir=tmp_path)
    shutil.rmtree(tmp_path / "store")
    monitor.log(7, {"reward/mean": 0.5})
    monitor.close()
    said = [record.getMessage() for record in caplog.records if record.name == "trinity_data.monitor"]
    assert len(said) == 1 and said[0].startswith("the metrics of step 7 did not reach MLflow at file://")


def test_a_server_of_mlflow_that_does_not_answer_is_said_before_the_stage(
    tmp_path: Path, mlflow_config: MonitorConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    args = {"uri": "http://127.0.0.1:9", "username": "me", "password": "a-password"}
    config = MonitorConfig.model_validate({"monitor_type": "mlflow", "monitor_args": args})
    for name in ("MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD"):
        monkeypatch.setenv(name, "of the environment")
    with pytest.raises(
        ConfigError, match=r"monitor\.monitor_args\.uri: MLflow at http://127\.0\.0\.1:9 cannot be used"
    ):
        build_monitor(config, project="p", name="n", stage=None, job_dir=tmp_path)
    assert os.environ["MLFLOW_TRACKING_USERNAME"] == "me"
    assert os.environ["MLFLOW_TRACKING_PASSWORD"] == "a-password"


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
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    stage: str | None,
    run: str,
) -> None:
    caplog.set_level("INFO", "trinity_data")
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_SILENT"):
        monkeypatch.delenv(name, raising=False)
    monitor = build_monitor(
        MonitorConfig(monitor_type="wandb"), project="p", name="n", stage=stage, job_dir=tmp_path
    )
    monitor.log(1, {"reward/mean": 0.5, "actor/loss": math.inf})
    monitor.close()
    (file,) = (tmp_path / "monitor" / "wandb").glob(f"offline-run-*/run-{run}.wandb")
    (line,) = [each.getMessage() for each in caplog.records if each.name == "trinity_data.monitor"]
    assert line.startswith(f"metrics go to {file.parent}; `wandb sync`")
    assert capfd.readouterr() == ("", "")


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
