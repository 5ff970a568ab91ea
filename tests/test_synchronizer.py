from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from trinity_data.config import SynchronizerConfig
from trinity_data.errors import SyncError
from trinity_data.synchronizer import PendingLimit, Synchronizer
from trinity_data.weights import WeightFolders, Weights


@dataclass
class Excess:
    """A limit that is exceeded by what it says."""

    text: str

    def excess(self, through_step: int) -> str:
        return self.text


def synchronizer(
    interval: int = 1, offset: int = 0, *, timeout: float = 60, limit: PendingLimit | None = None, **more: Any
) -> Synchronizer:
    config = SynchronizerConfig(sync_interval=interval, sync_offset=offset, sync_timeout=timeout)
    return Synchronizer(config, limit=limit, **more)


@pytest.mark.parametrize(
    ("interval", "offset", "needs"),
    [
        (1, 0, [4, 5, 6, 7, 8, 9]),  # strictly on-policy
        (1, 1, [4, 4, 5, 6, 7, 8]),  # one step ahead
        (2, 0, [4, 4, 6, 6, 8, 8]),  # weights every second step
        (2, 1, [4, 4, 5, 5, 7, 7]),
        (3, 2, [4, 4, 4, 5, 5, 5]),
        (1, 99, [4, 4, 4, 4, 4, 4]),
    ],
)
def test_the_rule_names_the_step_that_must_be_trained_first(
    interval: int, offset: int, needs: list[int]
) -> None:
    rule = synchronizer(interval, offset, first_step=5)
    assert [rule.required_version(step) for step in range(5, 11)] == needs


@pytest.mark.parametrize(("interval", "offset"), [(1, 0), (1, 1), (3, 0), (3, 2), (2, 5)])
def test_the_versions_that_are_published_are_those_that_steps_need(
    interval: int, offset: int, tmp_path: Path
) -> None:
    rule = synchronizer(interval, offset, first_step=5, folders=WeightFolders(tmp_path, "checkpoint"))
    needed = {rule.required_version(step) for step in range(5, 40)}
    assert {version for version in range(3, max(needed) + 1) if rule.publishes_version(version)} == needed


def order_of(sync: Synchronizer, last_step: int) -> list[str]:
    """What an explorer and a trainer do, each as soon as it may."""
    done: list[str] = []

    async def explore(sync: Synchronizer) -> None:
        for step in range(1, last_step + 1):
            await sync.wait_to_explore(step)
            done.append(f"e{step}")
            await sync.finished_exploring(step)
        await sync.no_more_steps(last_step)

    async def train(sync: Synchronizer) -> None:
        step = 1
        while await sync.wait_explored(step):
            await asyncio.sleep(0.01)
            done.append(f"t{step}")
            await sync.finished_training(step)
            step += 1

    async def go() -> None:
        await asyncio.wait_for(asyncio.gather(explore(sync), train(sync)), 5)

    asyncio.run(go())
    return done


def test_on_policy_the_two_take_turns() -> None:
    assert order_of(synchronizer(1, 0), 3) == ["e1", "t1", "e2", "t2", "e3", "t3"]


def test_one_step_ahead_the_explorer_goes_on_while_the_trainer_trains() -> None:
    assert order_of(synchronizer(1, 1), 4) == ["e1", "e2", "t1", "e3", "t2", "e4", "t3", "t4"]


def test_an_interval_of_two_explores_two_steps_on_the_same_weights() -> None:
    assert order_of(synchronizer(2, 0), 4) == ["e1", "e2", "t1", "t2", "e3", "e4", "t3", "t4"]


def test_a_wait_for_a_step_that_is_never_explored_ends() -> None:
    async def go() -> bool:
        sync = synchronizer(trained=0, explored=2)
        waiting = asyncio.create_task(sync.wait_explored(3))
        await asyncio.sleep(0)
        assert not waiting.done()
        await sync.no_more_steps(2)
        assert await sync.wait_explored(2)
        return await asyncio.wait_for(waiting, 5)

    assert asyncio.run(go()) is False


def test_a_full_buffer_holds_the_explorer_and_lets_the_trainer_go_on() -> None:
    limit = Excess("too much")

    async def run() -> list[bool]:
        sync = synchronizer(trained=1, explored=1, limit=limit)
        explorer = asyncio.create_task(sync.wait_for_room(9))
        assert await sync.wait_explored(2)  # step 2 was not explored
        await asyncio.sleep(0)
        assert not explorer.done()
        assert sync.waits == {
            "explorer": "the explorer waits for the trainer to take rows (too much); it has finished step 1"
        }
        limit.text = ""
        trainer = asyncio.create_task(sync.wait_explored(3))
        await sync.finished_training(2)
        found = [await explorer]
        assert not trainer.done()
        await sync.finished_exploring(3)
        found.append(await trainer)
        assert sync.waits == {}
        return found

    assert asyncio.run(run()) == [True, True]


def test_an_explorer_that_waits_for_room_ends_with_the_trainer() -> None:
    async def run() -> bool:
        sync = synchronizer(trained=1, explored=1, limit=Excess("too much"))
        explorer = asyncio.create_task(sync.wait_for_room(2))
        await asyncio.sleep(0)
        assert not explorer.done()
        await sync.finished_training(2)
        return await explorer

    assert asyncio.run(run()) is False


def test_neither_side_waits_longer_for_the_other_than_sync_timeout() -> None:
    async def run() -> list[str]:
        found = []
        sync = synchronizer(trained=1, explored=1, timeout=0.05)
        for wait in (lambda: sync.wait_to_explore(3), lambda: sync.wait_explored(2)):
            with pytest.raises(SyncError) as caught:
                await wait()
            found.append(str(caught.value))
        full = synchronizer(trained=1, explored=1, limit=Excess("9 rows wait"), timeout=0.05)
        with pytest.raises(SyncError) as caught:
            await full.wait_for_room(None)
        return [*found, str(caught.value)]

    explorer, trainer, full = asyncio.run(run())
    assert explorer.startswith(
        "the explorer has waited 0.05 seconds (synchronizer.sync_timeout) for the trainer to finish step 2, "
        "without which step 3 is not explored; it has finished 1; give synchronizer.sync_timeout more seconds"
    )
    assert (
        "the trainer has waited" in trainer
        and "for the explorer to finish step 2; it has finished 1" in trainer
    )
    assert "for the trainer to take rows (9 rows wait); it has finished step 1" in full


def test_a_wait_that_is_begun_again_counts_from_its_beginning_and_a_finished_step_begins_a_new_one() -> None:
    async def run() -> float:
        sync = synchronizer(trained=0, explored=0, timeout=0.4)
        started = time.monotonic()
        with pytest.raises(SyncError):
            while True:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(sync.wait_explored(2), 0.05)
                if sync.explored == 0 and time.monotonic() - started > 0.2:
                    await sync.finished_exploring(1)
        return time.monotonic() - started

    assert asyncio.run(run()) >= 0.6


@pytest.mark.parametrize("is_elsewhere", [False, True])
def test_a_trainer_whose_workers_start_again_leaves_the_explorer_its_whole_time(is_elsewhere: bool) -> None:
    async def run() -> float:
        sync = synchronizer(trained=0, explored=0, timeout=0.4)
        started = time.monotonic()
        waiting = asyncio.create_task(sync.wait_to_explore(2))
        await asyncio.sleep(0.2)
        if is_elsewhere:
            await sync.hear_trainer(trained=0, published=[], ended_at=None, still_training="12:00")
        else:
            await sync.still_training()
        with pytest.raises(SyncError):
            await waiting
        return time.monotonic() - started

    assert asyncio.run(run()) >= 0.6


def test_published_weights_are_handed_over_and_older_ones_removed_once_loaded(
    tmp_path: Path,
) -> None:
    folders = WeightFolders(tmp_path, "checkpoint")
    sync = synchronizer(folders=folders)
    for version in (4, 5):
        folders.path(version).mkdir()
        asyncio.run(sync.publish(Weights(version, str(folders.path(version)))))
    # version 3 could not be made again after a restart
    assert [sync.weights_of(version).version for version in (3, 4, 5)] == [4, 4, 5]
    asyncio.run(sync.finished_loading(5))
    assert [folder.name for folder in folders.root.iterdir()] == ["version_5"]


def test_without_folders_no_version_is_published() -> None:
    assert not any(synchronizer().publishes_version(version) for version in range(5))


def test_a_wait_for_a_trained_step_ends_with_that_step() -> None:
    async def run() -> bool:
        sync = synchronizer()
        waiting = asyncio.create_task(sync.wait_trained(2))
        await sync.finished_training(1)
        await asyncio.sleep(0)
        too_early = waiting.done()
        await sync.finished_training(2)
        await asyncio.wait_for(waiting, 5)
        return too_early

    assert asyncio.run(run()) is False
