"""All ranks of the trainer as one: what goes to them and what comes back.

Each is a Ray actor, and all are called together. A worker that dies, hangs or fails takes the others with it,
because they would wait for it without end. Imports no torch, which only the workers need.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import ray
from ray.exceptions import RayActorError, RayTaskError

from trinity_data.atomic import replace_folder
from trinity_data.config.run import TRAINER
from trinity_data.errors import TrainerError, TrinityError, WorkerDiedError
from trinity_data.log_files import LogFiles
from trinity_data.placement import WORKER_SHARE, Node, Places
from trinity_data.probe import Probe, TokenSequences
from trinity_data.processes import end_with_raylet
from trinity_data.restarts import RestartLimit
from trinity_data.schema import TABLES
from trinity_data.scratch import ScratchFolder
from trinity_data.weight_sending import SendingGroup
from trinity_trainer.metrics import StepResult
from trinity_trainer.stage_spec import StageSpec

if TYPE_CHECKING:
    from trinity_trainer.meeting import Meeting

# a worker may report the end of its connection before Ray reports the death of the process at its other end
SECONDS_UNTIL_A_DEATH_IS_KNOWN = 10.0
RAY_NAMES = ("class_name:", "actor_id:", "namespace:")


class WorkerActor:
    """What runs in the Ray actor: the worker is built there, so that only there torch is imported."""

    def __init__(self, rank: int, world_size: int, logs: LogFiles | None) -> None:
        end_with_raylet()
        if logs is not None:
            logs.take_over(f"{TRAINER}_rank_{rank}")
        from trinity_trainer.worker import TrainWorker  # takes seconds

        self.rank, self.world_size, self.build = rank, world_size, TrainWorker

    def node(self) -> Node:
        """Where it runs."""
        return Node.this()

    def offer_meeting(self, file: Path, starter: Node, *nodes: Node) -> Meeting:
        """Of the first worker: where all of them meet, which are on `nodes`."""
        from trinity_trainer.meeting import offer

        meeting, self.meeting_store = offer(file, starter, nodes)
        return meeting

    def meet(self, meeting: Meeting) -> None:
        """Builds the worker, together with the others."""
        from trinity_trainer.meeting import meet

        store = meet(meeting, Node.this(), self.world_size)
        self.worker = self.build(self.rank, self.world_size, store)

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.worker, method)(*args, **kwargs)


@dataclass(frozen=True)
class StartedWorkers:
    """Workers on their way: each is there once its place is, and its answer in `met`."""

    actors: Sequence[Any] = ()
    met: Sequence[Any] = ()
    places: Places | None = None


class WorkerGroup:
    """Started with `start_trainer`.

    Every call raises WorkerDiedError where a worker ended by itself or gives no answer for `max_seconds`, and
    TrainerError where one raised; all are killed then. After a death, `start_again` starts others.
    """

    def __init__(self, start: Callable[[Path], StartedWorkers], restarts: RestartLimit) -> None:
        """`start` starts all workers, which may meet in the folder that it gets."""
        self._start, self.restarts = start, restarts
        self.max_seconds: float | None = None
        self.where: list[str] = []
        """For people, by rank."""
        self.nodes: list[str] = []
        """Of Ray's, by rank."""
        self.turn = asyncio.Lock()
        """Held for each call, and by those who send weights, until the engines have them too."""
        self._start_workers()

    def _start_workers(self) -> None:
        self._meeting = ScratchFolder(Path(tempfile.gettempdir()))
        self._started = self._start(self._meeting.path)
        self._error: TrainerError | None = None
        self.held: set[int] = set()
        """Versions that can be sent."""

    @property
    def have_failed(self) -> bool:
        """They answer nothing until they are started again."""
        return self._error is not None

    @property
    def workers(self) -> Sequence[Any]:
        """The actors, by rank."""
        return self._started.actors

    async def start_again(self) -> None:
        """New processes in the place of all workers, with the run's model."""
        self.kill()
        self._start_workers()
        await self.load_model(self.model_path)

    async def load_model(self, model_path: str) -> None:
        """The policy as it is at the start of the run; returns when all workers have it.

        PlacementError where the cluster has no room for them.
        """
        self.model_path = model_path
        if self._started.places is not None:
            await self._started.places.wait()
        await self._answers("start", self._started.met)
        await self._all("load_model", model_path)
        self.where, self.nodes = await self._all("where"), await self._all("node")

    async def start_stage(self, spec: StageSpec, *, reference_path: str) -> None:
        self.held.clear()
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
        self, folder: Path, *, dtype: str = "float32", sequences: TokenSequences = ()
    ) -> tuple[int, Probe | None]:
        """Writes the weights, as `dtype`, for the engines into a folder that the caller renames.

        Returns the number of bytes, and the log-probs that the weights give to `sequences`.
        """
        written = await self._all("write_weights", str(folder), dtype, sequences)
        return _bytes_and_probe(written, sequences)

    async def keep_weights(
        self,
        version: int,
        *,
        dtype: str,
        sequences: TokenSequences = (),
        forget_before: int = 0,
        in_main_memory: bool = False,
    ) -> tuple[int, Probe | None]:
        """Holds the weights, as `dtype`, to be sent as `version`, and no longer those before another; on the
        workers' GPUs or in main memory.

        Returns what `write_weights` does.
        """
        kept = await self._all(
            "keep_weights",
            version,
            dtype,
            sequences,
            forget_before=forget_before,
            in_main_memory=in_main_memory,
        )
        self.held = {each for each in self.held if each >= forget_before} | {version}
        return _bytes_and_probe(kept, sequences)

    async def offer_group(self, version: int, num_workers: int, max_buffer: int | None) -> SendingGroup:
        """With so many workers of engines, for a send of a version that is held, and later ones. Each rank
        has a buffer of at most `max_buffer` bytes; without, the first one broadcasts. Called in a turn.
        """
        offers: list[SendingGroup] = await self._in_turn("offer_group", version, num_workers, max_buffer)
        return replace(offers[0], buffers=tuple(buffer for each in offers for buffer in each.buffers))

    async def send_weights(self, version: int, group: SendingGroup) -> str:
        """Why the other members of the group did not get them; empty where they did. Called in a turn."""
        failures: list[str] = await self._in_turn("send_weights", version, group)
        return next(filter(None, failures), "")

    async def save(self, folder: Path, extra: Mapping[str, Any], *, with_huggingface: bool) -> None:
        """A full checkpoint that appears whole."""
        with replace_folder(folder) as partial:
            await self._all("save", str(partial), dict(extra), with_huggingface=with_huggingface)

    async def load(self, folder: Path, *, with_optimizer: bool) -> None:
        await self._all("load", str(folder), with_optimizer=with_optimizer)

    async def sleep(self) -> None:
        """Moves what the workers have on GPUs to the memory of the machine."""
        await self._all("move_to", "cpu")

    async def wake(self) -> None:
        """Moves it back."""
        await self._all("move_to", None)

    async def _all(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        async with self.turn:
            return await self._in_turn(method, *args, **kwargs)

    async def _in_turn(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        if self._error is not None:
            raise self._error
        return await self._answers(
            method, [worker.call.remote(method, *args, **kwargs) for worker in self.workers]
        )

    async def _answers(self, method: str, references: Iterable[Any]) -> list[Any]:
        answers = [
            asyncio.ensure_future(_answer(rank, reference, method))
            for rank, reference in enumerate(references)
        ]
        try:
            async with asyncio.timeout(self.max_seconds):
                return await asyncio.gather(*answers)
        except TimeoutError:
            ranks = ", ".join(str(rank) for rank, answer in enumerate(answers) if answer.cancelled())
            self._error = WorkerDiedError(
                f"a rank of the trainer gave no answer during {method} for {self.max_seconds:g} seconds: "
                f"rank {ranks}"
            )
        except TrainerError as error:
            self._error = (await _death(answers) if _may_follow_a_death(error) else None) or error
        self.kill()
        raise self._error

    def kill(self) -> None:
        for worker in self.workers:
            ray.kill(worker)
        if self._started.places is not None:
            self._started.places.remove()
        self._meeting.close()


def _bytes_and_probe(
    answers: Sequence[tuple[int, list[list[float]]]], sequences: TokenSequences
) -> tuple[int, Probe | None]:
    num_bytes, logprobs = answers[0]
    return num_bytes, Probe(sequences, tuple(map(tuple, logprobs))) if sequences else None


async def _answer(rank: int, reference: Any, method: str) -> Any:
    try:
        return await reference
    except RayActorError as error:
        # without Ray's own names, and its list of possible causes
        lines = map(str.strip, str(error).partition("Some common causes")[0].splitlines())
        reason = " ".join(line for line in lines if not line.startswith(RAY_NAMES))
        if error.actor_init_failed:
            raise TrainerError(f"a rank of the trainer cannot start: rank {rank}: {reason}") from error
        raise WorkerDiedError(f"a rank of the trainer died during {method}: rank {rank}: {reason}") from error
    except RayTaskError as error:
        raise TrainerError(f"a rank of the trainer failed in {method}: {error.cause or error}") from error


def _may_follow_a_death(error: TrainerError) -> bool:
    """Whether a worker raises such an error when it loses another one."""
    cause = error.__cause__
    if isinstance(cause, RayTaskError):
        return isinstance(cause.cause, RuntimeError) and not isinstance(cause.cause, TrinityError)
    return not isinstance(error, WorkerDiedError)


async def _death(answers: Iterable[asyncio.Future[Any]]) -> WorkerDiedError | None:
    """The first death among the answers; None where there is none within some seconds."""
    with suppress(TimeoutError):
        for answer in asyncio.as_completed(answers, timeout=SECONDS_UNTIL_A_DEATH_IS_KNOWN):
            try:
                await answer
            except WorkerDiedError as error:
                return error
            except TrainerError:
                continue
    return None


def start_trainer(
    *,
    world_size: int,
    num_gpus: int,
    shares_gpus: bool = False,
    env: Mapping[str, str] | None = None,
    max_restarts: int = 0,
    max_seconds_for_room: float | None = None,
    logs: LogFiles | None = None,
) -> WorkerGroup:
    """Starts the workers, which takes seconds and is not waited for. `env` is what they do not inherit.

    `max_seconds_for_room` as `max_seconds` of `Places`. Without `logs` Ray keeps what they print.
    """
    # Ray keeps processes ready for actors that ask for no environment of their own
    environment = {"runtime_env": {"env_vars": dict(env)}} if env else {}
    actor = ray.remote(WorkerActor)

    def start(meeting: Path) -> StartedWorkers:
        places = Places(
            "rank of the trainer (trainer.world_size)",
            world_size,
            num_gpus=(WORKER_SHARE if shares_gpus else 1) if num_gpus else 0,
            strategy="PACK",
            max_seconds=max_seconds_for_room,
        )
        actors = [
            actor.options(**environment, **places.options(rank)).remote(rank, world_size, logs)
            for rank in range(world_size)
        ]
        nodes = [each.node.remote() for each in actors]
        point = actors[0].offer_meeting.remote(meeting / "workers", Node.this(), *nodes)
        return StartedWorkers(actors, [each.meet.remote(point) for each in actors], places)

    return WorkerGroup(start, RestartLimit(max_restarts))


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
