"""Several explorers of one stage: each step and each task is one explorer's, and what one of them leaves is
finished by another.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.explorer.conftest import Bench, put_tasks
from tests.noting_store import NotingStore
from trinity_data.claims import Claims
from trinity_data.config import OverRolloutConfig, SynchronizerConfig
from trinity_data.progress import ALL_EXPLORED, claims_key, explored_key, sync_key
from trinity_data.query.audit import audit
from trinity_data.store.participants import Participant, Participants
from trinity_data.store.store import Store
from trinity_data.store.types import Place
from trinity_data.synchronizer import Synchronizer
from trinity_explorer.explorer import Explorer
from trinity_explorer.steps import SharedSteps
from trinity_operators.advantages import GrpoAdvantage

STEPS, ROWS_A_STEP, TASKS_A_STEP = 6, 12, 3
MakeExplorer = Callable[..., Explorer]


@pytest.fixture
def participants(store: Store) -> Participants:
    return Participants(store)


def joined(participants: Participants, name: str) -> Place:
    """As one on another machine, which does not end with this process."""
    return participants.join(Participant(f"explorer:{name}", "node2", "another machine", 7, 1))


@asynccontextmanager
async def hearing(explorer: Explorer) -> AsyncIterator[None]:
    """Tells the explorer what others write, as its peer does."""
    steps = explorer.steps
    assert isinstance(steps, SharedSteps)

    async def tell() -> None:
        while True:
            steps.hear({key: explorer.store.progress(key) for key in steps.heard_keys})
            explored = explorer.store.progress(explored_key("rl"))
            await explorer.synchronizer.hear_trainer(
                trained=None, published=(), ended_at=None, explored=explored
            )
            await asyncio.sleep(0.005)

    async with asyncio.TaskGroup() as tasks:
        telling = tasks.create_task(tell())
        yield
        telling.cancel()


def hold_a_group(explorer: Explorer, until: asyncio.Event | None = None) -> None:
    """Of the first step, so that it does not end; or not before the event."""
    run, released = explorer.groups.runner.run, until or asyncio.Event()

    async def late(*args: object, **options: object) -> object:
        if args[0].group_id == "a/rl/0000001/00002":  # type: ignore[attr-defined]
            await released.wait()
        return await run(*args, **options)  # type: ignore[arg-type]

    explorer.groups.runner.run = late  # type: ignore[method-assign]


async def explore(explorer: Explorer, last_step: int | None = STEPS) -> None:
    async with hearing(explorer):
        await explorer.explore(explorer.synchronizer.explored + 1, last_step)


def check_rows(store: Store, steps: int) -> dict[int, set[str]]:
    """Each task was tried once, and every step is whole; returns the explorers of each step."""
    groups, rows = store.table("groups").to_pylist(), store.table("experiences").to_pylist()
    assert len({row["task_id"] for row in groups}) == len(groups) == steps * TASKS_A_STEP
    assert len({row["experience_id"] for row in rows}) == len(rows) == steps * ROWS_A_STEP
    assert Counter(row["step"] for row in rows) == dict.fromkeys(range(1, steps + 1), ROWS_A_STEP)
    assert store.progress(explored_key("rl")) == steps
    assert audit(store.root.parent).problems == []
    by_step = Counter((row["step"], row["explorer"]) for row in rows)
    return {step: {name for at, name in by_step if at == step} for step in range(1, steps + 1)}


def test_steps_and_tasks_of_two_explorers_are_one_order(
    store: Store, participants: Participants, make_explorer: MakeExplorer
) -> None:
    async def side_by_side() -> None:
        async with asyncio.TaskGroup() as both:
            for name in ("explorer", "explorer_new"):
                explorer = make_explorer(name, place=joined(participants, name))
                both.create_task(explore(explorer))

    asyncio.run(side_by_side())
    explorers = check_rows(store, STEPS)
    assert set.union(*explorers.values()) == {"explorer", "explorer_new"}
    assert all(len(names) == 1 for names in explorers.values())
    assert store.progress(sync_key("rl", ALL_EXPLORED)) == STEPS
    # the tasks come in the order of the set, step by step
    order = {task["task_id"]: task["position"] for task in store.table("tasks").to_pylist()}
    groups = sorted(
        (row["step"], row["position"], order[row["task_id"]]) for row in store.table("groups").to_pylist()
    )
    assert [position for _, _, position in groups] == list(range(STEPS * TASKS_A_STEP))


def test_the_last_of_two_says_that_all_is_explored_when_the_tasks_are_used_up(
    store: Store, participants: Participants, make_explorer: MakeExplorer
) -> None:
    async def side_by_side() -> None:
        async with asyncio.TaskGroup() as both:
            for name in ("a", "b"):
                explorer = make_explorer(name, place=joined(participants, name))
                explorer.tasks.samplers["sums"].num_epochs = 1
                both.create_task(explore(explorer, None))

    asyncio.run(side_by_side())
    check_rows(store, 20)
    assert store.progress(sync_key("rl", ALL_EXPLORED)) == 20


def test_an_explorer_that_waits_for_weights_goes_on_with_what_another_has_left(
    store: Store, participants: Participants, make_explorer: MakeExplorer
) -> None:
    """Weights are taken over after two steps: one explorer waits for them, while the other has step 2."""

    async def first_goes() -> None:
        strict = SynchronizerConfig(sync_interval=2, sync_timeout=60)
        places = {name: joined(participants, name) for name in ("a", "b")}
        first, second = (make_explorer(name, Synchronizer(strict), place) for name, place in places.items())
        hold_a_group(first)
        leaves = asyncio.create_task(explore(first, 2))
        while len(store.table("groups")) < TASKS_A_STEP:
            await asyncio.sleep(0.01)
        goes_on = asyncio.create_task(explore(second, 2))
        # step 2 is whole, step 1 is not
        while store.progress(explored_key("rl")) != 0:
            await asyncio.sleep(0.01)
        leaves.cancel()
        await asyncio.gather(leaves, return_exceptions=True)
        participants.leave(places["a"])
        await asyncio.wait_for(goes_on, 60)

    asyncio.run(first_goes())
    assert check_rows(store, 2) == {1: {"a", "b"}, 2: {"b"}}
    (event,) = [row for row in store.table("events").to_pylist() if row["kind"] == "handed_on"]
    assert (event["step"], event["message"]) == (1, "explorer:a had begun it; explorer:b goes on with it")
    counts = [row for row in store.table("operators").to_pylist() if row["pipeline"] == "experience"]
    assert {(row["step"], row["rows_in"]) for row in counts} == {(1, ROWS_A_STEP), (2, ROWS_A_STEP)}


def claims_of(store: Store) -> Claims:
    value = store.progress(claims_key("rl"))
    return Claims(1) if value is None else Claims.load(value)


def rows_counted(store: Store) -> Counter[int]:
    """Rows that the experience operators have counted, by step."""
    counted = Counter[int]()
    for row in store.table("operators").to_pylist():
        counted[row["step"]] += row["rows_in"]
    return counted


@pytest.fixture
def ends_early(bench: Bench) -> None:
    """Two of the three groups of a step are enough."""
    bench.more_of_explorer = {
        "over_rollout": OverRolloutConfig(ratio=0.34, wait_after_min=0.0),
        "max_timeout": 100.0,
        "runner_per_model": 64,
    }


@pytest.mark.usefixtures("ends_early")
@pytest.mark.parametrize("comes_back", [False, True])
def test_a_late_group_of_an_explorer_that_is_gone_is_made_by_the_next(
    store: Store, participants: Participants, make_explorer: MakeExplorer, comes_back: bool
) -> None:
    async def one_goes() -> None:
        place = joined(participants, "a")
        first = make_explorer("a", place=place)
        hold_a_group(first)
        leaves = asyncio.create_task(explore(first, 2))
        # step 2 is the last one, and waits for the late group of step 1
        while 2 not in claims_of(store).open or store.progress(explored_key("rl")) != 1:
            await asyncio.sleep(0.002)
        assert list(claims_of(store).late) == ["a/rl/0000001/00002"]
        leaves.cancel()
        await asyncio.gather(leaves, return_exceptions=True)
        participants.leave(place)
        name = "a" if comes_back else "b"
        far_ahead = Synchronizer(SynchronizerConfig(sync_offset=99), explored=1)
        await explore(make_explorer(name, far_ahead, joined(participants, name)), 2)

    asyncio.run(one_goes())
    check_rows(store, 2)
    assert rows_counted(store) == dict.fromkeys((1, 2), ROWS_A_STEP)
    assert len(store.table("outcomes")) == 2 * ROWS_A_STEP and not claims_of(store).late
    messages = [row["message"] for row in store.table("events").to_pylist() if row["kind"] == "handed_on"]
    late = "explorer:a had begun 1 late groups; explorer:b goes on with them"
    assert (late in messages) != comes_back


@pytest.mark.usefixtures("ends_early")
def test_the_last_step_waits_for_late_groups_of_all(
    store: Store, participants: Participants, make_explorer: MakeExplorer
) -> None:
    async def side_by_side() -> None:
        released, places = asyncio.Event(), {name: joined(participants, name) for name in "ab"}
        explorers = [make_explorer(name, place=place) for name, place in places.items()]
        hold_a_group(explorers[0], released)
        async with asyncio.TaskGroup() as both:
            first = both.create_task(explore(explorers[0]))
            while not claims_of(store).late:
                await asyncio.sleep(0.002)
            both.create_task(explore(explorers[1]))
            while store.progress(explored_key("rl")) != STEPS - 1:
                await asyncio.sleep(0.002)
            while list(claims_of(store).open) != [STEPS]:
                await asyncio.sleep(0.002)
            assert not first.done()
            released.set()

    asyncio.run(side_by_side())
    check_rows(store, STEPS)
    assert rows_counted(store) == dict.fromkeys(range(1, STEPS + 1), ROWS_A_STEP)
    assert not claims_of(store).late and store.progress(sync_key("rl", ALL_EXPLORED)) == STEPS


@pytest.mark.usefixtures("ends_early")
def test_an_explorer_that_waits_for_weights_says_that_its_late_group_is_whole(
    store: Store, participants: Participants, make_explorer: MakeExplorer
) -> None:
    async def side_by_side() -> None:
        released, places = asyncio.Event(), {name: joined(participants, name) for name in "ab"}
        # without a trainer it begins no second step
        first = make_explorer("a", Synchronizer(SynchronizerConfig(sync_timeout=600)), places["a"])
        hold_a_group(first, released)
        exploring = asyncio.create_task(explore(first, None))
        while not claims_of(store).late:
            await asyncio.sleep(0.002)
        ends = asyncio.create_task(explore(make_explorer("b", place=places["b"]), 2))
        while 2 not in claims_of(store).open:
            await asyncio.sleep(0.002)
        released.set()
        await asyncio.wait_for(ends, 100)
        exploring.cancel()
        await asyncio.gather(exploring, return_exceptions=True)

    asyncio.run(side_by_side())
    assert check_rows(store, 2) == {1: {"a"}, 2: {"b"}}
    assert not claims_of(store).late


def test_an_explorer_that_comes_back_goes_on_with_its_own_step(
    store: Store, participants: Participants, make_explorer: MakeExplorer
) -> None:
    async def killed_and_again() -> None:
        explorer = make_explorer("a", place=joined(participants, "a"))
        exploring = asyncio.create_task(explore(explorer))
        while len(store.table("experiences")) < ROWS_A_STEP // 2:
            await asyncio.sleep(0.002)
        exploring.cancel()
        await asyncio.gather(exploring, return_exceptions=True)
        participants.leave(Place("explorer:a", 1))
        explored = store.progress(explored_key("rl"))
        far_ahead = Synchronizer(SynchronizerConfig(sync_offset=99), explored=explored)
        await explore(make_explorer("a", far_ahead, joined(participants, "a")))

    asyncio.run(killed_and_again())
    assert set.union(*check_rows(store, STEPS).values()) == {"a"}
    assert not [row for row in store.table("events").to_pylist() if row["kind"] == "handed_on"]


def test_a_step_that_goes_on_reads_no_whole_table(bench: Bench, tmp_path: Path) -> None:
    store = bench.store = NotingStore.open(tmp_path / "noted" / "store")
    tasks, participants = put_tasks(store, 12), Participants(store)
    far_ahead, bench.operators = SynchronizerConfig(sync_offset=99), [GrpoAdvantage()]

    async def explore_in(session: int, last_step: int) -> Counter[str]:
        """Returns how often each table was read whole; its place is given up then."""
        place = joined(participants, "a")
        assert place.epoch == session
        synchronizer = Synchronizer(far_ahead, explored=store.progress(explored_key("rl")))
        explorer = bench.explorer(tasks, name="a", synchronizer=synchronizer, place=place)
        if session == 1:
            hold_a_group(explorer)
        store.whole_tables.clear()
        try:
            await explore(explorer, last_step)
        finally:
            participants.leave(place)
        return Counter(store.whole_tables)

    async def killed_and_again() -> tuple[Counter[str], Counter[str]]:
        exploring = asyncio.create_task(explore_in(1, 3))
        while not store.table("experiences"):
            await asyncio.sleep(0.01)
        exploring.cancel()
        await asyncio.gather(exploring, return_exceptions=True)
        assert Claims.load(store.progress(claims_key("rl"))).open
        return await explore_in(2, 3), await explore_in(3, 4)

    with_a_step_of_before, with_none = asyncio.run(killed_and_again())
    check_rows(store, 4)
    assert with_a_step_of_before == with_none
