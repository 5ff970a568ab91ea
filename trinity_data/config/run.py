"""The whole of a pipeline file: a run, and the resolved configuration of each of its stages.

Code that works for one stage takes its StageConfig, or a section of it, never the file.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, PrivateAttr, field_validator, model_validator

from trinity_data.config.algorithm import AlgorithmConfig
from trinity_data.config.base import KeyPath, Section, derived, refused
from trinity_data.config.buffer import BufferConfig, TasksetConfig
from trinity_data.config.cluster import ClusterConfig
from trinity_data.config.contracts import DEFAULT_CONTRACTS, ContractConfig
from trinity_data.config.data_processor import DataProcessorConfig
from trinity_data.config.explorer import ExplorerConfig, choose_engine_type
from trinity_data.config.log import LogConfig
from trinity_data.config.model import ModelConfig
from trinity_data.config.monitor import MonitorConfig
from trinity_data.config.secrets import without_secrets
from trinity_data.config.service import ServiceConfig
from trinity_data.config.synchronizer import SynchronizerConfig
from trinity_data.config.trainer import TrainerConfig
from trinity_data.config.yaml_file import YamlFile
from trinity_data.errors import StoreError

EXPLORER, TRAINER = "explorer", "trainer"
"""The parts of a run in processes of their own; that of an explorer ends with its name."""
SERVED = "served"
"""The task set of what agents outside ask."""
Mode = Literal["both", "colocate", "explore", "train", "bench", "serve"]
_STAND_IN = {"algorithm_type": "grpo"}
"""Of a stage that trains nothing; without effect."""
_FOLDER_NAME = re.compile(r"[\w][\w.+=@ -]*")


def _folder_name(name: str) -> str:
    if _FOLDER_NAME.fullmatch(name):
        return name
    raise refused(f"found {name!r}", "a folder is named after it: letters, digits, '_', '-', '.'", "")


class StageConfig(Section):
    """One stage with everything it inherits from the top of the file."""

    stage_name: str = derived("", "`algorithm_type`, or `bench`, in a file without `stages`")
    """Unique in the run; part of every row's key."""
    mode: Mode = "both"
    """`both`: explore and train. `colocate`: the same on the same GPUs, in turns. `explore`, `train`: one of
    the two, the other in a process of its own; `train` also on rows at rest. `serve`: as `explore`, of what
    agents outside ask an endpoint. `bench`: evaluate only, the model or every checkpoint of the run.
    """
    algorithm: AlgorithmConfig
    model: ModelConfig
    cluster: ClusterConfig = ClusterConfig()
    buffer: BufferConfig = BufferConfig()
    explorer: ExplorerConfig = ExplorerConfig()
    trainer: TrainerConfig = TrainerConfig()
    synchronizer: SynchronizerConfig = SynchronizerConfig()
    data_processor: DataProcessorConfig = DataProcessorConfig()
    contracts: tuple[ContractConfig, ...] = ()
    """What must hold for the rows of every step before they are trained; see
    [Contracts](../howto/contracts.md).
    """
    default_contracts: bool = True
    """Warn where the rewards of a step jump: `reward_drift`, unless `contracts` has one of this name."""

    _check_stage_name = field_validator("stage_name")(_folder_name)

    @model_validator(mode="before")
    @classmethod
    def _an_evaluation_needs_no_algorithm(cls, data: Any) -> Any:
        needs_none = isinstance(data, dict) and data.get("mode") == "bench" and not data.get("algorithm")
        return {**data, "algorithm": _STAND_IN} if needs_none else data

    @property
    def evaluates_only(self) -> bool:
        """Whether it makes no experiences and trains none."""
        return self.mode == "bench"

    @property
    def explores(self) -> bool:
        """Whether it makes experiences."""
        return self.mode in ("both", "colocate", "explore", "serve")

    @property
    def serves(self) -> bool:
        """Whether its experiences are what agents outside ask an endpoint; it has no tasks of its own."""
        return self.mode == "serve"

    @property
    def trains(self) -> bool:
        """Whether it has trainer processes."""
        return self.mode in ("both", "colocate", "train")

    @property
    def shares_gpus(self) -> bool:
        """Whether engines and ranks take turns on the same GPUs."""
        return self.mode == "colocate"

    @property
    def sends_weights(self) -> bool:
        """Whether the ranks hold the versions and send them to the engines, as `sync_method: nccl` asks."""
        return self.synchronizer.sync_method == "nccl" and self.unsent_because is None

    @property
    def unsent_because(self) -> str | None:
        """Why weights go through memory though `sync_method` is `nccl`; None where they do not."""
        engine_type = choose_engine_type(self.explorer.rollout_model.engine_type)
        num_engines, num_ranks = self.explorer.rollout_model.engine_num, self.trainer.world_size
        if self.mode not in ("both", "colocate"):
            return f"mode is {self.mode!r}; explorer and trainer are to be in one process"
        if engine_type != "vllm":
            return f"explorer.rollout_model.engine_type is {engine_type!r}, which reads files"
        if self.cluster.node_num > 1:
            return f"cluster.node_num is {self.cluster.node_num}; it works on one machine"
        if self.shares_gpus and os.environ.get("RAY_ADDRESS"):
            return (
                "mode is 'colocate' and RAY_ADDRESS is set; engines may be on another machine than the ranks"
            )
        if self.shares_gpus and self.cluster.num_gpus and num_engines > num_ranks:
            return (
                f"explorer.rollout_model.engine_num is {num_engines} and trainer.world_size {num_ranks}; "
                "each engine is to share its GPU with a rank"
            )
        return None

    @property
    def has_engines(self) -> bool:
        """Whether it generates, be it only to evaluate."""
        return self.mode != "train"

    @property
    def is_live(self) -> bool:
        """Whether its experiences are made while it runs, here or in another process."""
        buffer = self.buffer.trainer_input.experience_buffer
        # the value stands for nothing where neither the file nor a default has given it
        is_queue = "storage_type" in buffer.model_fields_set and buffer.storage_type == "queue"
        return self.explores or (self.mode == "train" and is_queue)

    @property
    def trains_stored(self) -> bool:
        """Whether it trains rows that are there before it begins."""
        return self.trains and not self.is_live

    @property
    def is_part(self) -> bool:
        """Whether explorer and trainer are processes of their own, each with a pipeline file."""
        return self.is_live and self.mode not in ("both", "colocate")

    @property
    def part(self) -> str:
        """Its name among the processes of a run: `explorer:<explorer.name>` or `trainer`; empty where one
        process does everything.
        """
        if not self.is_part:
            return ""
        return f"{EXPLORER}:{self.explorer.name}" if self.explores else TRAINER

    @property
    def explored_tasksets(self) -> list[TasksetConfig]:
        """The task sets that it explores to train on; none of a stage that explores nothing."""
        tasksets = self.buffer.explorer_input.train_tasksets() if self.explores else ()
        return [taskset for _, taskset in tasksets]

    def tried_tasksets(self) -> Iterator[tuple[KeyPath, TasksetConfig]]:
        """Those that it makes rollouts of, to train or to evaluate, each with its path."""
        if self.explores:
            yield from self.buffer.explorer_input.all_tasksets()
        elif self.has_engines:
            yield from self.buffer.explorer_input.eval_tasksets_with_paths()

    @property
    def all_contracts(self) -> tuple[ContractConfig, ...]:
        """Its own and the default ones."""
        own = {contract.name for contract in self.contracts}
        defaults = DEFAULT_CONTRACTS if self.default_contracts else ()
        return (*self.contracts, *(each for each in defaults if each.name not in own))


class RunConfig(Section):
    """A pipeline file, resolved."""

    project: str = "trinity-data"
    """First folder under `checkpoint_root_dir`."""
    name: str = "run"
    """Second folder: the run's."""
    mode: Mode = "both"
    """Mode of stages that give none."""
    checkpoint_root_dir: Path = Field(default=Path("checkpoints"), validate_default=True)
    """Where runs are kept; relative to the working directory."""
    continue_from_checkpoint: bool = True
    """Resume the run of this name if there is one; false starts `<name>_<timestamp>`."""
    seed: int = Field(default=0, ge=0, lt=2**32)
    """Everything drawn at random follows from it."""
    ray_namespace: str | None = derived(None, "`<project>/<name>`", min_length=1)
    """Namespace of the run's actors in Ray."""
    monitor: MonitorConfig = MonitorConfig()
    service: ServiceConfig = ServiceConfig()
    log: LogConfig = LogConfig()
    stages: tuple[StageConfig, ...]
    """Run one after another, each on the weights of the one before."""

    _file: YamlFile = PrivateAttr()
    _notes: tuple[str, ...] = PrivateAttr(default=())

    _check_names = field_validator("project", "name")(_folder_name)

    @field_validator("checkpoint_root_dir")
    @classmethod
    def _root_is_absolute(cls, root: Path) -> Path:
        return root.expanduser().absolute()

    @property
    def job_dir(self) -> Path:
        """The run's own folder."""
        return self.checkpoint_root_dir / self.project / self.name

    @property
    def num_gpus(self) -> int:
        """The most GPUs that a stage may use."""
        return max(stage.cluster.num_gpus for stage in self.stages)

    @property
    def sync_timeout(self) -> float:
        """The most seconds that a stage waits for another process."""
        return max(stage.synchronizer.sync_timeout for stage in self.stages)

    def numbered_stages(self) -> Iterator[tuple[int | None, StageConfig]]:
        """Stages with their number in the file; None in a file without `stages`."""
        for index, stage in enumerate(self.stages):
            yield (index if self.has_named_stages else None), stage

    @property
    def part(self) -> str:
        """Its name among the processes of the run; empty where one process does everything."""
        return self.stages[0].part

    @property
    def file(self) -> Path:
        """The pipeline file it was read from."""
        return self._file.file.absolute()

    @property
    def has_named_stages(self) -> bool:
        """Whether the file has `stages`."""
        return bool(self._file.data.get("stages"))

    @property
    def yaml_file(self) -> YamlFile:
        """The data and lines that it was read from, for messages about it."""
        return self._file

    def public_dump(self) -> dict[str, Any]:
        """Everything as plain data that may be written to a file: secrets are masked."""
        dump: dict[str, Any] = without_secrets(self.model_dump(mode="json"), self._file.secrets)
        return dump

    @property
    def notes(self) -> tuple[str, ...]:
        """What a person should know although the file can be run; one line each."""
        return self._notes


def recorded_run(folder: Path) -> RunConfig:
    """The configuration that a job folder was last started with.

    Raises StoreError where the folder holds none that can be read.
    """
    try:
        return RunConfig.model_validate_json((folder / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise StoreError(f"{folder}: config.json cannot be read ({type(error).__name__})") from error


RUN_KEYS = tuple(RunConfig.model_fields)
INHERITED_KEYS = tuple(key for key in StageConfig.model_fields if key != "stage_name")
"""Keys of a stage that may stand at the top of the file, for all stages."""
FILE_KEYS = (*RUN_KEYS, *(key for key in INHERITED_KEYS if key not in RUN_KEYS))
