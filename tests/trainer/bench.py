"""What tests of the train loop need: a real store, a trainer on real ranks, batches from a list."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trinity_data.config import (
    AlgorithmConfig,
    BufferConfig,
    ModelConfig,
    OptimizerConfig,
    StageConfig,
    SynchronizerConfig,
    TrainerConfig,
)
from trinity_data.dataset.reader import DatasetSpec
from trinity_data.reporter import Reporter
from trinity_data.schema import experience_id, rows_to_table
from trinity_data.shutdown import Shutdown
from trinity_data.stage_inputs import StageInputs
from trinity_data.status import Status
from trinity_data.store.store import Store
from trinity_data.store.types import Commit, State
from trinity_data.synchronizer import Synchronizer
from trinity_data.weights import HeldVersions, WeightFolders
from trinity_trainer.stage_spec import ConfigurationHistory, StageSpecs
from trinity_trainer.trainer import Trainer
from trinity_trainer.worker_group import WorkerGroup

if TYPE_CHECKING:
    from tests.trainer.conftest import Ranks

ROWS_A_STEP = 4


@dataclass
class ListedBatches:
    """The pending rows of each step, up to `last`."""

    store: Store
    last: int

    async def next(self, step: int) -> list[str] | None:
        return None if step > self.last else self.store.pending("sft", through_step=step)


@dataclass
class RecordedMetrics:
    """A monitor that keeps the metrics of each step."""

    metrics: dict[int, Mapping[str, float]] = field(default_factory=dict)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.metrics[step] = {name.removeprefix("actor/"): value for name, value in metrics.items()}

    def close(self) -> None: ...


class RecordingSynchronizer(Synchronizer):
    """Remembers the steps that the trainer said were finished."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.finished: list[int] = []

    async def finished_training(self, step: int) -> None:
        self.finished.append(step)
        await super().finished_training(step)


class OneConfiguration:
    """The history of a run that never had another configuration."""

    current = "0"

    def stage_at(self, stage: str, step: int) -> StageConfig | None:
        return None


@dataclass
class Bench:
    ranks: Ranks
    job_dir: Path
    store: Store
    world_size: int = 1
    status: Status = field(default_factory=lambda: Status("run"))
    monitor: RecordedMetrics = field(default_factory=RecordedMetrics)

    @property
    def group(self) -> WorkerGroup:
        return self.ranks.groups[self.world_size]

    @property
    def metrics(self) -> dict[int, Mapping[str, float]]:
        return self.monitor.metrics

    def stage(self, *, rate: float = 1e-3, **settings: Any) -> StageConfig:
        algorithm = AlgorithmConfig(
            algorithm_type="sft", repeat_times=1, kl_loss_fn="none", optimizer=OptimizerConfig(lr=rate)
        )
        chosen = {"max_token_len_per_gpu": 200, "grad_clip": 1.0, "save_hf_checkpoint": "never"} | settings
        return StageConfig(
            stage_name="sft",
            mode="train",
            algorithm=algorithm,
            model=ModelConfig(model_path=str(self.ranks.model), max_response_tokens=128),
            buffer=BufferConfig(total_steps=10),
            trainer=TrainerConfig(**chosen),
        )

    def trainer(
        self,
        *,
        last: int = 99,
        publish_interval: int = 0,
        explored: int = 0,
        history: ConfigurationHistory | None = None,
        holds_versions: bool = False,
        **settings: Any,
    ) -> Trainer:
        stage = self.stage(**settings)
        folders = HeldVersions() if holds_versions else WeightFolders(self.job_dir, "checkpoint")
        self.synchronizer = RecordingSynchronizer(
            SynchronizerConfig(sync_interval=publish_interval or 1),
            explored=explored,
            folders=folders if publish_interval else None,
        )
        inputs = StageInputs(
            str(self.ranks.model), None, 0, Path(), source_of=lambda config: DatasetSpec("", None, "", None)
        )
        return Trainer(
            stage,
            store=self.store,
            ranks=self.group,
            specs=StageSpecs(
                stage, inputs, history or OneConfiguration(), first_step=1, job_dir=self.job_dir
            ),
            batches=ListedBatches(self.store, last),
            synchronizer=self.synchronizer,
            reporter=Reporter(stage, self.store, self.status, self.monitor),
            stop=Shutdown(),
        )

    def checkpoints(self) -> list[str]:
        return sorted(folder.name for folder in self.job_dir.glob("global_step_*"))

    def huggingface(self) -> list[str]:
        return [
            name for name in self.checkpoints() if (self.job_dir / name / "actor" / "huggingface").exists()
        ]


def put_rows(store: Store, num_steps: int, *, skip: int | None = None, masked: bool = False) -> None:
    """Rows 0 to 3 of each step, of rewards 0, 1, 2, 3; none for the step `skip`.

    Without a token to train if `masked`.
    """
    for step in (s for s in range(1, num_steps + 1) if s != skip):
        rows: list[dict[str, object]] = [
            {
                "experience_id": experience_id(f"data/sft/{step:07d}/{i:05d}", 0), "stage": "sft",
                "step": step, "position": i, "rollout": 0, "turn": 0, "token_ids": [5, 6, step, 7 + i, 9],
                "prompt_length": 2, "response_length": 3, "logprobs": [], "action_mask": [not masked] * 3,
                "temperature": 1.0, "truncated": "response" if i == 0 else "", "error": "",
                "reward": float(i),
            }
            for i in range(ROWS_A_STEP)
        ]  # fmt: skip
        states = [(str(row["experience_id"]), State.PENDING) for row in rows]
        store.commit(Commit(tables={"experiences": rows_to_table("experiences", rows)}, states=states))


def weights_digest(bench: Bench, name: str) -> str:
    bench.ranks.run(bench.group.write_weights(bench.job_dir / name))
    return hashlib.sha256((bench.job_dir / name / "model.safetensors").read_bytes()).hexdigest()
