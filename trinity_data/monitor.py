"""Where a stage's metrics go: TensorBoard files, Weights & Biases, MLflow, or nowhere.

Each stage is one experiment, `<name>-<stage_name>`, on the step axis of the whole run. Where explorer and
trainer are processes of their own, both write into it: its id follows from project and name, and a process
that joins or comes back removes nothing.
"""

from __future__ import annotations

import logging
import math
import os
import re
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from filelock import FileLock

from trinity_data.config import MonitorConfig
from trinity_data.config.run import TRAINER
from trinity_data.errors import ConfigError

log = logging.getLogger(__name__)

MLFLOW_URI = "http://localhost:5000"
_MLFLOW_SETTINGS = {
    # with 2, 4 and 8 seconds between them; its own number of retries takes four minutes
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "3",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    # lines of its own in the middle of the live view
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
}
"""The user's environment takes precedence."""
_MLFLOW_TAG = "trinity_data.experiment"
_NOT_IN_MLFLOW_NAMES = re.compile(r"[^A-Za-z0-9_\-. /]")
_CLOSE_SECONDS = 30.0


class Monitor(Protocol):
    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...
    def close(self) -> None: ...


class NoMonitor:
    """The store has every number anyway."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        del step, metrics

    def close(self) -> None: ...


class TensorBoardMonitor:
    """Event files written without torch or TensorFlow; each process adds one of its own to the folder."""

    def __init__(self, folder: Path) -> None:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        folder.mkdir(parents=True, exist_ok=True)
        self.writer = EventFileWriter(str(folder))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=name, simple_value=value) for name, value in _finite(metrics).items()]
        self.writer.add_event(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))
        # a process that is killed loses nothing
        self.writer.flush()

    def close(self) -> None:
        self.writer.close()


class WandbMonitor:
    """Offline where there is no key; resumed under the same id. A part of a stage joins the run of that id,
    in W&B's shared mode; the trainer says when it has ended.
    """

    def __init__(
        self,
        config: MonitorConfig,
        *,
        project: str,
        name: str,
        group: str | None,
        folder: Path,
        part: str,
    ) -> None:
        import wandb

        args = config.monitor_args
        if args.base_url:
            os.environ["WANDB_BASE_URL"] = args.base_url
        if args.api_key:
            os.environ["WANDB_API_KEY"] = args.api_key.get_secret_value()
        mode: Any = os.environ.get("WANDB_MODE") or (
            "online" if os.environ.get("WANDB_API_KEY") else "offline"
        )
        # about twenty lines a command, in the middle of its own
        settings: dict[str, Any] = {} if "WANDB_SILENT" in os.environ else {"silent": True}
        if part and mode == "online":
            mode, ends = "shared", part == TRAINER
            settings |= {"x_label": part, "x_primary": ends, "x_update_finish_state": ends}
        folder.mkdir(parents=True, exist_ok=True)
        try:
            self.run = wandb.init(
                project=project,
                name=name,
                group=group,
                id=f"{project}-{name}",
                dir=str(folder),
                mode=mode,
                resume=None if mode == "shared" else "allow",
                settings=wandb.Settings(**settings),
            )
        except wandb.errors.Error as error:
            raise ConfigError(
                f"monitor.monitor_type: 'wandb' cannot begin: {error}; check the key and the server, "
                "or set WANDB_MODE=offline"
            ) from error
        if self.run.settings.mode == "offline":
            where = Path(self.run.settings.sync_dir)
            log.info("metrics go to %s; `wandb sync` with this folder sends them to W&B", where)
        else:
            log.info("metrics go to %s", self.run.url)
        # wandb drops what comes with a lower number than its own step, as a late evaluation does
        self.run.define_metric("*", step_metric="step")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.run.log({"step": step, **_finite(metrics)})

    def close(self) -> None:
        self.run.finish()


class MlflowMonitor:
    """A run of the experiment `project`. It is sent to beside the work, and a server that does not answer
    costs a warning for each step.
    """

    def __init__(self, config: MonitorConfig, *, project: str, name: str, folder: Path, part: str) -> None:
        args, password = config.monitor_args, config.monitor_args.password
        given = {
            "MLFLOW_TRACKING_USERNAME": args.username,
            "MLFLOW_TRACKING_PASSWORD": password and password.get_secret_value(),
        }
        os.environ.update({key: value for key, value in given.items() if value})
        for key, value in _MLFLOW_SETTINGS.items():
            os.environ.setdefault(key, value)
        # reads the environment
        from mlflow import MlflowClient
        from mlflow.exceptions import MlflowException

        self.uri = args.uri or os.environ.get("MLFLOW_TRACKING_URI") or MLFLOW_URI
        self.ends = part in ("", TRAINER)
        folder.mkdir(parents=True, exist_ok=True)
        try:
            self.client = MlflowClient(tracking_uri=self.uri)
            with FileLock(folder / "mlflow.lock"):
                self.run_id = _mlflow_run(self.client, project, name)
        except MlflowException as error:
            raise ConfigError(
                f"monitor.monitor_args.uri: MLflow at {self.uri} cannot be used: {error}; start it with "
                "`mlflow server`, check uri, username and password, or take another monitor_type"
            ) from error
        self._sender, self._sending = ThreadPoolExecutor(1, "mlflow"), set[Future[None]]()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        sent = [
            Metric(_NOT_IN_MLFLOW_NAMES.sub("_", name), value, now, step)
            for name, value in _finite(metrics).items()
        ]
        sending = self._sender.submit(self.client.log_batch, self.run_id, sent)
        self._sending = {each for each in self._sending if not each.done()} | {sending}
        sending.add_done_callback(partial(self._warn, step))

    def _warn(self, step: int, sent: Future[None]) -> None:
        if not sent.cancelled() and (error := sent.exception()) is not None:
            log.warning(
                "the metrics of step %d did not reach MLflow at %s (%s); the store has them",
                step,
                self.uri,
                error,
            )

    def close(self) -> None:
        if self.ends:
            self._sending.add(self._sender.submit(self.client.set_terminated, self.run_id))
        left = wait(self._sending, _CLOSE_SECONDS).not_done
        self._sender.shutdown(wait=False, cancel_futures=True)
        if left:
            log.warning(
                "MLflow at %s did not answer for %g s; it lacks the metrics of the last steps",
                self.uri,
                _CLOSE_SECONDS,
            )


def _mlflow_run(client: Any, project: str, name: str) -> str:
    """The id of the run that goes by this project and name; made where there is none."""
    experiment = client.get_experiment_by_name(project)
    experiment_id = client.create_experiment(project) if experiment is None else experiment.experiment_id
    mark = f"{project}/{name}"
    runs = client.search_runs(
        [experiment_id], filter_string=f"tags.`{_MLFLOW_TAG}` = '{mark}'", order_by=["start_time"]
    )
    if not runs:
        return str(client.create_run(experiment_id, run_name=name, tags={_MLFLOW_TAG: mark}).info.run_id)
    client.update_run(runs[0].info.run_id, status="RUNNING")
    return str(runs[0].info.run_id)


def build_monitor(
    config: MonitorConfig,
    *,
    project: str,
    name: str,
    stage: str | None,
    job_dir: Path,
    part: str = "",
) -> Monitor:
    """The monitor that the pipeline file names, for one of its stages; `stage` is None without `stages`.

    `part` is that of the run where other processes have the others. Raises ConfigError where the monitor's
    server cannot be used.
    """
    folder = job_dir / "monitor"
    experiment = name if stage is None else f"{name}-{stage}"
    match config.monitor_type:
        case "tensorboard":
            events = folder / "tensorboard"
            return TensorBoardMonitor(events if stage is None else events / experiment)
        case "wandb":
            group = None if stage is None else name
            # offline runs that begin in the same second would share a file
            own = folder / part.replace(":", "_")
            return WandbMonitor(config, project=project, name=experiment, group=group, folder=own, part=part)
        case "mlflow":
            return MlflowMonitor(config, project=project, name=experiment, folder=folder, part=part)
        case "none":
            return NoMonitor()


def _finite(metrics: Mapping[str, float]) -> dict[str, float]:
    return {name: float(value) for name, value in metrics.items() if math.isfinite(value)}
