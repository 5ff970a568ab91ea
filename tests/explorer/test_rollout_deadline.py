"""The deadline of a rollout: its own timeout, and nobody else's cancellation."""

from __future__ import annotations

import asyncio

import pytest

from trinity_explorer.rollout_deadline import RolloutDeadline


async def sleep_under(seconds: float, sleep: float) -> str:
    deadline = RolloutDeadline(seconds)
    try:
        with deadline:
            await asyncio.sleep(sleep)
    except TimeoutError:
        return f"{seconds:g}: {deadline.expired}"
    return f"{seconds:g}: done"


def test_each_of_many_rollouts_has_its_own_deadline() -> None:
    async def run() -> list[str]:
        # the shorter ones come after the timer was set for the longest, and one ends before it
        return await asyncio.gather(
            *(sleep_under(s, t) for s, t in ((0.3, 9), (0.1, 9), (0.2, 9), (9, 0.05)))
        )

    assert asyncio.run(run()) == ["0.3: True", "0.1: True", "0.2: True", "9: done"]


def test_a_cancellation_from_outside_stays_one() -> None:
    async def run() -> None:
        task = asyncio.create_task(sleep_under(9, 9))
        await asyncio.sleep(0)
        task.cancel()
        await task

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(run())


def test_the_task_goes_on_after_its_deadline_as_if_it_was_never_cancelled() -> None:
    async def run() -> tuple[str, int]:
        said = await sleep_under(0.05, 9)
        await asyncio.sleep(0)
        task = asyncio.current_task()
        assert task is not None
        return said, task.cancelling()

    assert asyncio.run(run()) == ("0.05: True", 0)


def test_a_deadline_entered_again_has_the_time_that_is_left() -> None:
    async def run() -> bool:
        deadline = RolloutDeadline(0.2)
        with deadline:
            await asyncio.sleep(0.15)
        # waiting for a process is left out, so that it takes nothing of the rest
        await deadline.leave_out(lambda: asyncio.sleep(0.2))
        with pytest.raises(TimeoutError), deadline:
            await asyncio.sleep(9)
        return deadline.expired

    assert asyncio.run(run())


def test_what_engines_lose_does_not_count() -> None:
    async def run() -> tuple[float, float]:
        loop = asyncio.get_running_loop()
        began, lost = loop.time(), [3.0]

        def lost_seconds() -> float:
            # before the rollout 3 s; an engine is down from its beginning on, for 0.4 s
            return lost[0] + min(loop.time() - began, 0.4)

        deadline = RolloutDeadline(0.1, lost_seconds)
        with pytest.raises(TimeoutError), deadline:
            await asyncio.sleep(9)
        return loop.time() - began, deadline.seconds

    took, seconds = asyncio.run(run())
    assert took >= 0.4 + seconds
