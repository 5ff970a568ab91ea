"""All FSDP workers of the trainer as one: what goes to them and what comes back.

Each is a Ray actor, and all are called together. A worker that dies takes the others with it, because they
would wait for it without end. Imports no torch, which only the workers need.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import ray
from ray.exceptions import RayActorError, RayTaskError

from trinity_data.atomic import replace_folder
from trinity_data.errors import TrainerError
from trinity_data.probe import Probe, TokenSequences
from trinity_data.processes import end_with_raylet
from trinity_data.schema import TABLES
from trinity_data.scratch import ScratchFolder
from trinity_trainer.metrics import StepResult
from trinity_trainer.stage_spec import StageSpec


class WorkerActor:
    """What runs in the Ray actor: the worker is built there, so that only there torch is imported."""

    def __init__(self, rank: int, world_size: int, meeting_file: str) -> None:
        end_with_raylet()
        from trinity_trainer.worker import TrainWorker

        self.worker = TrainWorker(rank, world_size, meeting_file)

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.worker, method)(*args, **kwargs)


class WorkerGroup:
    """Started with `start_trainer`."""

    def __init__(self, workers: list[Any], meeting: ScratchFolder) -> None:
        self.workers, self._meeting = workers, meeting

    async def load_model(self, model_path: str) -> None:
        """The policy as it is at the start of the run; returns when all workers have it."""
        await self._all("load_model", model_path)

    async def start_stage(self, spec: StageSpec, *, reference_path: str) -> None:
        await self._all("start_stage", spec, reference_path=reference_path)

    async def change_settings(self, spec: StageSpec, *, reference_path: str) -> None:
        await self._all("change_settings", spec, reference_path=reference_path)

    async def train_step(self, batch: pa.Table) -> tuple[dict[str, float], pa.Table]:
        """Metrics of the step, and what it did to each row as columns of `batches`
        in the order of the batch.
        """
        results: list[StepResult] = await self._all("train_step", ray.put(batch))
        return results[0].metrics, _batch_columns(batch, results)

    async def write_weights(
        self, folder: Path, *, sequences: TokenSequences = ()
    ) -> tuple[int, Probe | None]:
        """Writes the weights for the engines into a folder that the caller renames.

        Returns the number of bytes, and the log-probs that the weights give to `sequences`.
        """
        num_bytes, logprobs = (await self._all("write_weights", str(folder), sequences))[0]
        return int(num_bytes), Probe(sequences, tuple(map(tuple, logprobs))) if sequences else None

    async def save(self, folder: Path, extra: Mapping[str, Any], *, with_huggingface: bool) -> None:
        """A full checkpoint that appears whole."""
        with replace_folder(folder) as partial:
            await self._all("save", str(partial), dict(extra), with_huggingface=with_huggingface)

    async def load(self, folder: Path, *, with_optimizer: bool) -> None:
        await self._all("load", str(folder), with_optimizer=with_optimizer)

    async def _all(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        references = [worker.call.remote(method, *args, **kwargs) for worker in self.workers]
        try:
            return [await reference for reference in references]
        except RayActorError as error:
            self.kill()
            raise TrainerError(f"a trainer worker died during {method}: {error}") from error
        except RayTaskError as error:
            self.kill()
            raise TrainerError(f"a trainer worker failed in {method}: {error.cause or error}") from error

    def kill(self) -> None:
        for worker in self.workers:
            ray.kill(worker)
        self._meeting.close()


def start_trainer(*, world_size: int, num_gpus: int, env: Mapping[str, str] | None = None) -> WorkerGroup:
    """Starts the workers, which takes seconds and is not waited for. `env` is what they do not inherit."""
    # workers find each other by a file of this user's:
    # torch's store on a port listens on every interface, to everybody
    meeting = ScratchFolder(Path(tempfile.gettempdir()))
    # Ray keeps processes ready for actors that ask for no environment of their own
    options = {"num_cpus": 0, "num_gpus": 1 if num_gpus else 0} | (
        {"runtime_env": {"env_vars": dict(env)}} if env else {}
    )
    actor = ray.remote(WorkerActor).options(**options)
    file = str(meeting.path / "workers")
    return WorkerGroup([actor.remote(rank, world_size, file) for rank in range(world_size)], meeting)


def _batch_columns(batch: pa.Table, results: list[StepResult]) -> pa.Table:
    """Columns of `batches`, in the order of the batch: each worker reports on its own rows."""
    rows = [row for result in results for row in result.rows]
    order = sorted(range(len(rows)), key=rows.__getitem__)
    schema = TABLES["batches"]

    def column(name: str, parts: Iterable[Sequence[Any]]) -> pa.Array[Any]:
        values = [value for part in parts for value in part]
        kind = schema.field(name).type
        array: pa.Array[Any] = pa.array([values[place] if values else None for place in order], kind)
        return array

    return pa.table(
        {
            "experience_id": batch["experience_id"],
            "advantage": batch["advantage"],
            "importance_weight": column("importance_weight", (each.importance_weights for each in results)),
            "clipped": column("clipped", (each.clipped for each in results)),
            "loss_share": column("loss_share", (each.loss_shares for each in results)),
            "logprobs": column("logprobs", (each.logprobs for each in results)),
            "ref_logprobs": column("ref_logprobs", (each.ref_logprobs for each in results)),
        }
    )
