"""Explorer and trainer in processes of their own agree on steps and versions through the ledger."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import ray

from trinity_data.config import SynchronizerConfig
from trinity_data.launch.peer import LedgerPeer
from trinity_data.launch.stage import following
from trinity_data.probe import Probe
from trinity_data.progress import explored_key, stage_done_key
from trinity_data.store.participants import KEY, Participant, Record
from trinity_data.store.remote import RemoteStore, start_store
from trinity_data.store.types import Commit
from trinity_data.synchronizer import Synchronizer
from trinity_data.weights import WeightFolders, Weights

pytestmark = pytest.mark.usefixtures("ray_session")

PROBE = Probe(((1, 2, 3),), ((-0.5, -1.25),))


@pytest.fixture
def store(tmp_path: Path) -> Iterator[RemoteStore]:
    actor: Any = start_store(tmp_path / "store")
    yield RemoteStore(actor, tmp_path / "store")
    ray.kill(actor)


async def explore(store: RemoteStore, config: SynchronizerConfig, num_steps: int) -> list[int]:
    """The versions that the steps were explored with."""
    peer = LedgerPeer(store, "rl", explorer="explorer")
    # no limit of `fixed`
    synchronizer, versions = Synchronizer(config, peer=peer, max_staleness=2), list[int]()
    synchronizer.published[0] = Weights(0, "base")
    async with following(peer, synchronizer):
        for step in range(1, num_steps + 1):
            if not await synchronizer.wait_to_explore(step):
                break
            loaded = versions[-1] if versions else -1
            weights = synchronizer.weights_of(synchronizer.version_to_load(step, loaded=loaded))
            assert weights.version == 0 or weights.probe == PROBE
            versions.append(weights.version)
            await synchronizer.finished_loading(weights.version)
            await asyncio.to_thread(store.commit, Commit(progress={explored_key("rl"): step}))
            await synchronizer.finished_exploring(step)
        await synchronizer.no_more_steps(len(versions))
        await asyncio.to_thread(store.commit, Commit())
    return versions


async def train(store: RemoteStore, config: SynchronizerConfig, folder: Path, most: int) -> list[int]:
    """Its steps; ends after `most`, or with the explorer."""
    peer, folders, steps = LedgerPeer(store, "rl", explorer=None), WeightFolders(folder, "checkpoint"), []
    synchronizer = Synchronizer(config, peer=peer, folders=folders)

    async def publish(version: int) -> None:
        folders.path(version).mkdir()
        await synchronizer.publish(Weights(version, str(folders.path(version)), PROBE))

    async with following(peer, synchronizer):
        while len(steps) < most and await synchronizer.answer_requests(
            synchronizer.wait_explored(step := len(steps) + 1), publish
        ):
            steps.append(step)
            if synchronizer.publishes_version(step):
                await publish(step)
            await synchronizer.finished_training(step)
    store.commit(Commit(progress={stage_done_key("rl"): len(steps)}))
    return steps


@pytest.mark.parametrize(
    ("interval", "offset", "versions"),
    [(1, 0, [0, 1, 2, 3, 4, 5]), (1, 1, [0, 0, 1, 2, 3, 4]), (3, 0, [0, 0, 0, 3, 3, 3])],
)
def test_steps_are_explored_with_the_versions_of_one_process(
    store: RemoteStore, tmp_path: Path, interval: int, offset: int, versions: list[int]
) -> None:
    config = SynchronizerConfig(sync_interval=interval, sync_offset=offset, sync_timeout=60)

    async def both() -> list[list[int]]:
        return await asyncio.gather(explore(store, config, 6), train(store, config, tmp_path, 99))

    assert asyncio.run(both()) == [versions, [1, 2, 3, 4, 5, 6]]
    left = sorted(int(each.name.removeprefix("version_")) for each in (tmp_path / "weights").iterdir())
    # those that no engine needs are gone
    assert min(left) >= versions[-1] - 2


def test_an_explorer_ends_where_its_trainer_has_ended(store: RemoteStore, tmp_path: Path) -> None:
    config = SynchronizerConfig(sync_timeout=60)

    async def both() -> list[list[int]]:
        return await asyncio.gather(explore(store, config, 99), train(store, config, tmp_path, 3))

    explored, trained = asyncio.run(both())
    assert trained == [1, 2, 3] and explored[:3] == [0, 1, 2] and len(explored) <= 4


def test_who_starts_later_finds_what_was_reported(store: RemoteStore, tmp_path: Path) -> None:
    config = SynchronizerConfig(sync_interval=4, sync_timeout=60)
    assert asyncio.run(explore(store, config, 4)) == [0, 0, 0, 0]
    assert asyncio.run(train(store, config, tmp_path, 99)) == [1, 2, 3, 4]


def test_a_command_says_what_it_waits_for_once_a_wait(
    store: RemoteStore, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "trinity_data")

    async def wait(peer: LedgerPeer | None) -> dict[str, str]:
        trainer = Synchronizer(SynchronizerConfig(sync_timeout=60), peer=peer)
        trainer.silent_seconds = 0.0
        waiting = asyncio.create_task(trainer.wait_explored(2))
        for _ in range(3):
            await trainer.still_training()
            await asyncio.sleep(0)
        waits = dict(trainer.waits)
        await trainer.finished_exploring(2)
        assert await waiting and trainer.waits == {}
        return waits

    waits = {"trainer": "the trainer waits for the explorer to finish step 2; it has finished 0"}
    assert asyncio.run(wait(LedgerPeer(store, "rl", explorer=None))) == waits
    assert caplog.messages == [f"{waits['trainer']}; at most 60 s (synchronizer.sync_timeout)"]
    # the log of one command has the steps of both
    assert asyncio.run(wait(None)) == waits and len(caplog.messages) == 1


def test_a_wait_says_that_the_other_command_does_not_take_part(store: RemoteStore) -> None:
    async def wait() -> None:
        peer = LedgerPeer(store, "rl", explorer="explorer")
        explorer = Synchronizer(SynchronizerConfig(sync_timeout=60), peer=peer)

        async def says(end: str) -> None:
            while not explorer.waits.get("explorer", "").endswith(end):
                await asyncio.sleep(0.01)

        async with following(peer, explorer):
            waiting = asyncio.create_task(explorer.wait_to_explore(2))
            await asyncio.wait_for(says("it has finished 0; no trainer takes part in the run now"), 40)
            await store._actor.join.remote(Participant.this_process("trainer"))
            await asyncio.wait_for(says("it has finished 0"), 40)
            waiting.cancel()

    asyncio.run(wait())


class Hearing(Synchronizer):
    """Notes when it hears of a trainer at work."""

    def __init__(self, config: SynchronizerConfig) -> None:
        super().__init__(config)
        self.heard: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def hear_trainer(self, *, still_training: str | None = None, **settings: Any) -> None:
        if still_training is not None:
            self.heard.set_result(still_training)
        await super().hear_trainer(still_training=still_training, **settings)


def test_an_explorer_elsewhere_hears_that_the_workers_of_the_trainer_start_again(store: RemoteStore) -> None:
    async def run() -> str:
        explorer = Hearing(SynchronizerConfig())
        trainer = Synchronizer(SynchronizerConfig(), peer=LedgerPeer(store, "rl", explorer=None))
        async with following(LedgerPeer(store, "rl", explorer="explorer"), explorer):
            await trainer.still_training()
            return await asyncio.wait_for(explorer.heard, 60)

    assert asyncio.run(run()).startswith("20")


def test_the_trainer_publishes_what_an_explorer_elsewhere_requests(
    store: RemoteStore, tmp_path: Path
) -> None:
    config = SynchronizerConfig(sync_style="explorer_driven", explorer_sync_interval=3, sync_timeout=60)

    async def both() -> list[list[int]]:
        return await asyncio.gather(explore(store, config, 9), train(store, config, tmp_path, 99))

    versions, trained = asyncio.run(both())
    # the last of three steps may be two versions stale
    assert versions == [0, 0, 0, 3, 3, 3, 6, 6, 6] and trained == list(range(1, 10))
    assert {each.name for each in (tmp_path / "weights").iterdir()} <= {"version_3", "version_6"}


def test_a_trainer_that_ends_waits_until_explorers_have_its_last_weights_or_have_ended(
    store: RemoteStore,
) -> None:
    def note(**explorers: str) -> None:
        participants = {f"explorer:{name}": ended for name, ended in explorers.items()}
        records = {
            name: asdict(Record(Participant.this_process(name), 1, "2026-01-01", ended))
            for name, ended in participants.items()
        }
        store.commit(Commit(progress={KEY: records}))

    async def run() -> bool:
        trainer = LedgerPeer(store, "rl", explorer=None)
        note(first="", second="", third="left")
        assert not await trainer.wait_loaded(4, seconds=0.2)
        waiting = asyncio.create_task(trainer.wait_loaded(4, seconds=60))
        await LedgerPeer(store, "rl", explorer="first").tell_loaded(4)
        await LedgerPeer(store, "rl", explorer="second").tell_loaded(3)
        assert not waiting.done()
        note(first="", second="died", third="left")
        # that one may take part again
        assert not await trainer.wait_loaded(4, seconds=0.2, rejoin_seconds=60)
        return await waiting

    assert asyncio.run(run())
