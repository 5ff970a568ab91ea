from __future__ import annotations

import asyncio
import contextlib
import time

import pytest

from trinity_data.errors import SyncError
from trinity_data.synchronizer import Synchronizer, SyncSchedule


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
    rule = SyncSchedule(first_step=5, interval=interval, offset=offset)
    assert [rule.needs(step) for step in range(5, 11)] == needs


@pytest.mark.parametrize(("interval", "offset"), [(1, 0), (1, 1), (3, 0), (3, 2), (2, 5)])
def test_the_versions_that_are_handed_over_are_those_that_steps_need(interval: int, offset: int) -> None:
    rule = SyncSchedule(first_step=5, interval=interval, offset=offset)
    needed = {rule.needs(step) for step in range(5, 40)}
    assert {version for version in range(3, max(needed) + 1) if rule.publishes_version(version)} == needed


def order_of(rule: SyncSchedule, last_step: int) -> list[str]:
    """What an explorer and a trainer do, each as soon as it may."""
    done: list[str] = []

    async def explore(pace: Synchronizer) -> None:
        for step in range(1, last_step + 1):
            await pace.wait_to_explore(step)
            done.append(f"e{step}")
            await pace.finished_exploring(step)
        await pace.no_more_steps(last_step)

    async def train(pace: Synchronizer) -> None:
        step = 1
        while await pace.wait_explored(step):
            await asyncio.sleep(0.01)
            done.append(f"t{step}")
            await pace.finished_training(step)
            step += 1

    async def go() -> None:
        pace = Synchronizer(rule, trained=0, explored=0)
        await asyncio.wait_for(asyncio.gather(explore(pace), train(pace)), 5)

    asyncio.run(go())
    return done


def test_on_policy_the_two_take_turns() -> None:
    assert order_of(SyncSchedule(1, 1, 0), 3) == ["e1", "t1", "e2", "t2", "e3", "t3"]


def test_one_step_ahead_the_explorer_goes_on_while_the_trainer_trains() -> None:
    assert order_of(SyncSchedule(1, 1, 1), 4) == ["e1", "e2", "t1", "e3", "t2", "e4", "t3", "t4"]


def test_an_interval_of_two_explores_two_steps_on_the_same_weights() -> None:
    assert order_of(SyncSchedule(1, 2, 0), 4) == ["e1", "e2", "t1", "t2", "e3", "e4", "t3", "t4"]


def test_who_waits_for_a_step_that_never_comes_is_told() -> None:
    async def go() -> bool:
        pace = Synchronizer(SyncSchedule(1, 1, 0), trained=0, explored=2)
        waiting = asyncio.create_task(pace.wait_explored(3))
        await asyncio.sleep(0)
        assert not waiting.done()
        await pace.no_more_steps(2)
        assert await pace.wait_explored(2)
        return await asyncio.wait_for(waiting, 5)

    assert asyncio.run(go()) is False


def test_a_full_buffer_holds_the_explorer_and_lets_the_trainer_go_on() -> None:
    waiting = ["too much"]

    async def run() -> list[bool]:
        pace = Synchronizer(
            SyncSchedule(1, 1, 0), trained=1, explored=1, excess=lambda through_step: waiting[0]
        )
        explorer = asyncio.create_task(pace.wait_for_room(9))
        assert await pace.wait_explored(2)  # step 2 was not explored
        assert not explorer.done()
        waiting[0] = ""
        trainer = asyncio.create_task(pace.wait_explored(3))
        await pace.finished_training(2)
        found = [await explorer]
        assert not trainer.done()
        await pace.finished_exploring(3)
        return [*found, await trainer]

    assert asyncio.run(run()) == [True, True]


def test_an_explorer_that_waits_for_room_ends_with_the_trainer() -> None:
    async def run() -> bool:
        pace = Synchronizer(
            SyncSchedule(1, 1, 0), trained=1, explored=1, excess=lambda through_step: "too much"
        )
        explorer = asyncio.create_task(pace.wait_for_room(2))
        await asyncio.sleep(0)
        assert not explorer.done()
        await pace.finished_training(2)
        return await explorer

    assert asyncio.run(run()) is False


def test_neither_side_waits_longer_for_the_other_than_it_is_told_to() -> None:
    async def run() -> list[str]:
        found = []
        pace = Synchronizer(SyncSchedule(1, 1, 0), trained=1, explored=1, timeout=0.05)
        for wait in (lambda: pace.wait_to_explore(3), lambda: pace.wait_explored(2)):
            with pytest.raises(SyncError) as caught:
                await wait()
            found.append(str(caught.value))
        full = Synchronizer(
            SyncSchedule(1, 1, 0), trained=1, explored=1, excess=lambda through: "9 rows wait", timeout=0.05
        )
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
        pace = Synchronizer(SyncSchedule(1, 1, 0), trained=0, explored=0, timeout=0.4)
        started = time.monotonic()
        with pytest.raises(SyncError):
            while True:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(pace.wait_explored(2), 0.05)
                if pace.explored == 0 and time.monotonic() - started > 0.2:
                    await pace.finished_exploring(1)
        return time.monotonic() - started

    assert asyncio.run(run()) >= 0.6
