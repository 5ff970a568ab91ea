"""How many rollouts run on each engine, whoever runs them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import pytest

from tests.explorer.conftest import SAMPLING, Bench, CountingEngine, put_tasks
from trinity_explorer.engines.engine import Completion, Request
from trinity_explorer.engines.pool import EnginePool
from trinity_explorer.evaluator import EvalSet
from trinity_explorer.explorer import Explorer
from trinity_explorer.slots import EngineSlots, RolloutEngines


class Measured(CountingEngine):
    """Takes a while, and knows the most requests that it had at the same time, and their prompts."""

    def __init__(self, tokenizer: Any) -> None:
        super().__init__(tokenizer, script=lambda prompt, seed: "#### 1")
        self.running = self.most = 0
        self.prompts = list[tuple[int, ...]]()

    async def generate(self, requests: Sequence[Request]) -> list[Completion]:
        self.prompts += [tuple(request.prompt_token_ids) for request in requests]
        self.running += len(requests)
        self.most = max(self.most, self.running)
        await asyncio.sleep(0.002)
        self.running -= len(requests)
        return await super().generate(requests)


def explorer_on(bench: Bench, engines: Sequence[Measured], tasks: Any) -> Explorer:
    """With two slots an engine."""
    explorer = bench.explorer(tasks)
    pool, runner = EnginePool(engines), explorer.runner
    runner.engines = explorer.engines = pool
    runner.slots = EngineSlots(pool, runner.slots.per_engine)
    explorer.evaluator.engines = RolloutEngines(runner.slots, on_one_engine=False)
    return explorer


def test_no_engine_has_more_rollouts_than_its_slots_in_a_step_its_refills_and_an_evaluation(
    bench: Bench,
) -> None:
    tasks = put_tasks(bench.store, 30)
    bench.refill_rounds = 1
    bench.eval_sets = [EvalSet("held_out", tasks[:9], SAMPLING, 2)]
    engines = [Measured(bench.tokenizer) for _ in range(3)]

    async def go() -> None:
        explorer = explorer_on(bench, engines, tasks)
        await explorer.evaluator.evaluate(0)
        assert [engine.most for engine in engines] == [2, 2, 2]
        # no reward differs in a group, so that all are filtered away and three more are asked for
        await explorer.explore_step(1)

    asyncio.run(go())
    assert [engine.most for engine in engines] == [2, 2, 2]
    assert len(bench.table("evals")) == 18
    assert len(bench.table("experiences")) == 6 * 4


def test_the_rollouts_of_a_group_share_an_engine_while_it_has_room(bench: Bench) -> None:
    tasks, engines = put_tasks(bench.store, 2), [Measured(bench.tokenizer) for _ in range(2)]
    bench.batch_size = 2

    async def go() -> None:
        explorer = explorer_on(bench, engines, tasks)
        explorer.runner.slots = EngineSlots(explorer.engines, 4)
        await explorer.explore_step(1)

    asyncio.run(go())
    # a group of four each
    assert [len(engine.prompts) for engine in engines] == [4, 4]
    assert [len(set(engine.prompts)) for engine in engines] == [1, 1]


def test_rollouts_that_do_not_belong_together_go_where_the_fewest_are(bench: Bench) -> None:
    engines = [Measured(bench.tokenizer) for _ in range(3)]

    async def go() -> list[int]:
        slots = EngineSlots(EnginePool(engines), 4)
        rollouts = RolloutEngines(slots, on_one_engine=False)
        with ExitStack() as stack:
            for _ in range(7):
                stack.enter_context(await rollouts.slot())
            running = list(slots.running)
        assert slots.running == [0, 0, 0]
        return running

    assert asyncio.run(go()) == [3, 2, 2]


def test_a_slot_is_free_again_when_its_rollout_fails_or_is_cancelled(bench: Bench) -> None:
    async def go() -> None:
        slots = EngineSlots(EnginePool([Measured(bench.tokenizer)]), 1)
        rollouts = RolloutEngines(slots, on_one_engine=True)

        async def run(error: Exception | None) -> None:
            with await rollouts.slot():
                if error is not None:
                    raise error
                await asyncio.sleep(9)

        with pytest.raises(ValueError, match="of the rollout"):
            await run(ValueError("of the rollout"))
        running = asyncio.create_task(run(None))
        waiting = asyncio.create_task(run(None))
        await asyncio.sleep(0)
        assert (slots.running, slots.free.locked()) == ([1], True)
        waiting.cancel()
        running.cancel()
        await asyncio.wait([running, waiting])
        assert (slots.running, slots.free.locked()) == ([0], False)

    asyncio.run(go())
