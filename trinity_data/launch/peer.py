"""What explorer and trainer in processes of their own tell each other, through the ledger of their run.

A process that starts later, or again, finds what was reported before.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from datetime import UTC, datetime
from typing import Any

from trinity_data.config.run import EXPLORER, TRAINER
from trinity_data.lease import Lease
from trinity_data.nodes import are_there
from trinity_data.probe import Probe
from trinity_data.progress import ALL_EXPLORED, claims_key, explored_key, stage_done_key, sync_key
from trinity_data.store.participants import DIED, KEY, load_records
from trinity_data.store.protocol import SharedStore
from trinity_data.store.types import Commit
from trinity_data.synchronizer import Synchronizer
from trinity_data.weights import Weights

# a wait for news is asked for again, so that a peer that is gone for good is no reason to wait without end
_WAIT_SECONDS = 20.0
TRAINED, PUBLISHED, LOADED = "trained", "published", "loaded"
STILL_TRAINING, REQUESTED = "still_training", "requested"


class LedgerPeer:
    """The other side of one stage: `tell_` writes what it is reported, `follow` reads what it tells."""

    def __init__(self, store: SharedStore, stage: str, *, explorer: str | None) -> None:
        """`explorer` is the name of this process's; None in the trainer's."""
        self.store, self.stage, self.explorer = store, stage, explorer
        self.other_explorers: Callable[[Mapping[str, Any]], None] = lambda reported: None
        """Gets the claims of steps and the participants, by their keys, whenever something has changed."""
        self._loaded: int | None = None

    def lease(self, work: str) -> Lease:
        """Of what one explorer of the stage does at a time."""
        assert self.store.place is not None
        return Lease(self.store, self.stage, work, self.store.place)

    async def tell_trained(self, step: int) -> None:
        await self._tell(TRAINED, step)

    async def tell_still_training(self) -> None:
        await self._tell(STILL_TRAINING, datetime.now(UTC).isoformat())

    async def tell_published(self, weights: Sequence[Weights]) -> None:
        await self._tell(PUBLISHED, [_dump(each) for each in weights])

    async def tell_all_explored(self, last_step: int | None) -> None:
        await self._tell(ALL_EXPLORED, last_step)

    async def tell_loaded(self, version: int) -> None:
        # most steps are explored with the version of the one before
        if version != self._loaded:
            # not waited for: a step begins here, and what this process writes next comes behind it
            self._submit(f"{LOADED}/{self.explorer}", version)
            self._loaded = version

    async def tell_requested(self, version: int) -> None:
        await self._tell(f"{REQUESTED}/{self.explorer}", version)

    async def follow(self, synchronizer: Synchronizer) -> None:
        """Passes on what the other side tells, until it is cancelled."""
        keys, below = (
            (*(key(self.stage) for key in (explored_key, stage_done_key, claims_key)), KEY),
            sync_key(self.stage),
        )
        seen: dict[str, Any] = {}
        while True:
            seen = await self.store.news(seen, keys, below, _WAIT_SECONDS)
            await self._pass_on(seen, synchronizer)

    async def _pass_on(self, reported: Mapping[str, Any], synchronizer: Synchronizer) -> None:
        def of(name: str) -> Any:
            return reported.get(sync_key(self.stage, name))

        explored = reported.get(explored_key(self.stage))
        records = load_records(reported.get(KEY))
        roles = {name.partition(":")[0] for name, record in records.items() if not record.ended}
        if self.explorer is not None:
            self.other_explorers(reported)
            await synchronizer.hear_trainer(
                trained=of(TRAINED),
                published=published_weights(of(PUBLISHED)),
                ended_at=reported.get(stage_done_key(self.stage)),
                still_training=of(STILL_TRAINING),
                explored=explored,
                takes_part=TRAINER in roles,
            )
            return
        ended = {name.partition(":")[2] for name, record in records.items() if record.ended}

        def of_each_explorer(name: str) -> list[int]:
            prefix = sync_key(self.stage, f"{name}/")
            return [
                value
                for key, value in reported.items()
                if key.startswith(prefix) and key.removeprefix(prefix) not in ended
            ]

        await synchronizer.hear_explorer(
            explored=explored,
            last_step=of(ALL_EXPLORED),
            requested=max(of_each_explorer(REQUESTED), default=-1),
            takes_part=EXPLORER in roles,
        )
        if loaded := of_each_explorer(LOADED):
            # of the first step that is not whole, which may pass to another explorer
            needed = synchronizer.required_version(synchronizer.explored + 1)
            await synchronizer.forget_weights(before=min(needed, *loaded))

    async def wait_loaded(self, version: int, *, seconds: float, rejoin_seconds: float = 0.0) -> bool:
        """Until every explorer that takes part has these weights; False after so many seconds. One that died
        may take part again within `rejoin_seconds`.
        """
        begun, seen = time.monotonic(), dict[str, Any]()
        loaded = sync_key(self.stage, f"{LOADED}/")
        while (left := begun + seconds - time.monotonic()) > 0:
            seen = await self.store.news(seen, (KEY,), loaded, min(left, _WAIT_SECONDS))
            away = DIED if time.monotonic() - begun < rejoin_seconds else ""
            records = load_records(seen.get(KEY))
            explorers = [name.partition(":")[2] for name, each in records.items() if each.ended in ("", away)]
            if all(seen.get(loaded + name, -1) >= version for name in explorers if name):
                return True
        return False

    async def _tell(self, name: str, value: Any) -> None:
        await asyncio.wrap_future(self._submit(name, value))

    def _submit(self, name: str, value: Any) -> Future[None]:
        return self.store.submit(Commit(progress={sync_key(self.stage, name): value}))


def published_weights(value: Any) -> list[Weights]:
    """Of what a trainer has reported, the versions that have not gone with the memory of its machine."""
    return [weights for weights in map(_load, value or ()) if are_there(weights)]


def _dump(weights: Weights) -> dict[str, Any]:
    probe = weights.probe
    values = None if probe is None else {"sequences": probe.sequences, "logprobs": probe.logprobs}
    return {"version": weights.version, "folder": weights.folder, "probe": values, "node": weights.node}


def _load(value: Mapping[str, Any]) -> Weights:
    probe = value["probe"]
    if probe is not None:
        sequences, logprobs = (tuple(map(tuple, probe[name])) for name in ("sequences", "logprobs"))
        probe = Probe(sequences, logprobs)
    return Weights(value["version"], value["folder"], probe, value["node"])
