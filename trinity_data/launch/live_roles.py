"""What the live view shows of each part of a run: its process, the version of its model, and its queue."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from trinity_data.claims import steps_by_explorer
from trinity_data.config import StageConfig
from trinity_data.config.run import TRAINER
from trinity_data.launch.compute import StageEngines
from trinity_data.processes import this_process
from trinity_data.progress import CLAIMS
from trinity_data.status import Role, Status
from trinity_data.store.participants import KEY, Record, load_records
from trinity_data.store.protocol import ReadableStore
from trinity_data.synchronizer import Synchronizer
from trinity_explorer.engines.pool import EnginePool
from trinity_trainer.worker_group import WorkerGroup

_LOOK_SECONDS = 2.0


@contextmanager
def explorer_roles(
    status: Status, stage: StageConfig, engines: StageEngines, synchronizer: Synchronizer
) -> Iterator[None]:
    """The explorer and its engines, until the block ends."""
    status.waits = synchronizer.waits

    def explorer() -> Role:
        under_way = status.rollouts_total - status.rollouts_done
        return Role(this_process(), status.engine_version, f"{under_way} rollouts")

    pools = {"engine": engines.rollout, **{f"auxiliary_{name}": p for name, p in engines.auxiliary.items()}}
    roles = {stage.explorer.name: explorer} | {
        f"{stage.explorer.name}_{name}_{number}": partial(_engine, pool, number)
        for name, pool in pools.items()
        for number in range(len(pool.engines))
    }
    status.roles |= roles
    try:
        yield
    finally:
        for name in roles:
            status.roles.pop(name, None)


def _engine(pool: EnginePool, number: int) -> Role:
    engine = pool.engines[number]
    version = engine.version if engine.version >= 0 else None
    return Role(engine.where, version, f"{engine.num_requests} requests")


def show_trainer(status: Status, ranks: WorkerGroup, synchronizer: Synchronizer) -> None:
    """The trainer and its ranks, from now on."""

    def trainer() -> Role:
        ahead = max(0, synchronizer.explored - status.step)
        return Role(this_process(), status.trained_version, f"{ahead} explored steps")

    status.waits = synchronizer.waits
    status.roles[TRAINER] = trainer
    for name in [name for name in status.roles if name.startswith(f"{TRAINER}_rank_")]:
        del status.roles[name]
    for rank in range(len(ranks.workers)):
        status.roles[f"{TRAINER}_rank_{rank}"] = partial(_rank, ranks, rank)


def _rank(ranks: WorkerGroup, rank: int) -> Role:
    return Role(ranks.where[rank])


async def show_participants(status: Status, store: ReadableStore, own: str) -> None:
    """Keeps the other processes of the run in the view, each explorer with its steps; `own` is this one's
    name among them.
    """
    while True:
        value, claims = await asyncio.gather(
            asyncio.to_thread(store.progress, KEY), asyncio.to_thread(store.progress_below, f"{CLAIMS}/")
        )
        steps, records = steps_by_explorer(claims), load_records(value).items()
        others = {
            name: partial(_participant, each, steps.get(name, ())) for name, each in records if name != own
        }
        status.roles |= others
        await asyncio.sleep(_LOOK_SECONDS)


def _participant(record: Record, steps: Sequence[int]) -> Role:
    queue = f"step {', '.join(map(str, steps))}" if steps and not record.ended else record.ended
    return Role(f"{record.participant}", None, queue)
