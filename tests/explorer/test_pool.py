"""Engines whose processes end are started again, with their weights, and nobody hears of it but the log."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.explorer.conftest import SAMPLING, Bench, put_tasks
from trinity_data.errors import EngineDiedError, EngineError, WrongModelError
from trinity_data.launch.live_view import render
from trinity_data.probe import Probe, ProbeBounds
from trinity_data.restart_log import RestartLog
from trinity_data.restarts import RestartLimit
from trinity_data.status import Status
from trinity_data.store.store import Store
from trinity_data.store.types import Commit
from trinity_data.tokenizer import ChatTemplate
from trinity_data.weights import Weights
from trinity_explorer.engine_model import EngineModel
from trinity_explorer.engines.actor import exit_detail
from trinity_explorer.engines.engine import Completion, Request
from trinity_explorer.engines.pool import EnginePool
from trinity_explorer.explorer import Explorer
from trinity_operators.endpoint import Answer

PROBE = Probe(((1, 2),), ((-1.0,),))


class MortalEngine:
    """Answers with the seed of the request. Ends where a test has it end."""

    name = "mortal"

    def __init__(self, *, start_fails: int = 0) -> None:
        self.start_fails = start_fails
        self.dies_in: list[str] = []
        """The calls that it dies in, each once."""
        self.may_start: asyncio.Event | None = None
        """Waited for before each start."""
        self.is_alive, self.num_starts, self.version, self.score_of = True, 0, -1, -1.0
        self.calls: list[str] = []

    async def _call(self, name: str, seconds: float = 0.0) -> None:
        self.calls.append(name)
        of_process = self.num_starts
        await asyncio.sleep(seconds)
        if name in self.dies_in:
            self.dies_in.remove(name)
            self.is_alive = False
        if not self.is_alive or of_process != self.num_starts:
            raise EngineDiedError("the mortal engine died: killed")

    async def start(self) -> None:
        self.calls.append("start")
        self.version = -1
        self.num_starts += 1
        if self.may_start is not None:
            await self.may_start.wait()
        if self.start_fails:
            self.start_fails -= 1
            raise EngineDiedError("no memory")
        self.is_alive = True

    async def generate(self, requests: Sequence[Request]) -> list[Completion]:
        await self._call("generate", 0.05)
        return [Completion([each.sampling.seed], [-1.0], "stop", self.version) for each in requests]

    async def load_weights(self, weights: Weights, *, during: bool = False) -> None:
        await self._call("load")
        self.version = weights.version

    async def sleep(self) -> None:
        await self._call("sleep")

    async def wake(self) -> None:
        await self._call("wake")

    async def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        await self._call("score")
        return [[self.score_of] * (len(sequence) - 1) for sequence in sequences]

    async def close(self) -> None:
        self.calls.append("close")


@pytest.fixture
def restart_log(store: Store) -> RestartLog:
    return RestartLog(store, Status("run", stage="rl", step=4), kind="engine")


def events_of(store: Store) -> list[dict[str, Any]]:
    """With those that were not waited for."""
    store.commit(Commit())
    return list(store.table("events").to_pylist())


def requests(*seeds: int) -> list[Request]:
    return [Request([1], replace(SAMPLING, seed=seed)) for seed in seeds]


def run(work: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    return asyncio.run(asyncio.wait_for(work(), 30))


def test_requests_of_a_dead_engine_are_answered_once_with_the_same_seeds_and_the_newest_weights(
    restart_log: RestartLog, store: Store, tmp_path: Path
) -> None:
    engine = MortalEngine()
    pool = EnginePool([engine], max_restarts=1, log=restart_log)

    async def go() -> list[list[Completion]]:
        await pool.load_weights(Weights(4, str(tmp_path)))
        engine.dies_in.append("generate")
        return await asyncio.gather(*(pool.generate(requests(*seeds)) for seeds in ((1, 2), (3,))))

    first, second = run(go)
    assert [each.token_ids for each in (*first, *second)] == [[1], [2], [3]]
    assert {each.model_version for each in (*first, *second)} == {4}
    # both calls were on it when it died, and one restart came of it
    assert engine.calls == ["load", "generate", "generate", "start", "load", "generate", "generate"]
    assert pool.usage().tokens == 3
    died, restarted = events_of(store)
    assert (died["kind"], died["stage"], died["step"]) == ("engine_died", "rl", 4)
    assert died["message"] == "engine_0: the mortal engine died: killed; 3 requests were under way"
    assert restarted["kind"] == "engine_restarted"
    text = r"engine_0: with the weights of version 4, \d+\.\d s after its oldest request was lost"
    assert re.fullmatch(text, restarted["message"])


def test_an_engine_that_ends_in_its_sleep_is_started_again_when_it_is_woken(
    restart_log: RestartLog, tmp_path: Path
) -> None:
    async def run() -> list[str]:
        engine = MortalEngine()
        pool = EnginePool([engine], max_restarts=1, log=restart_log)
        await pool.load_weights(Weights(3, str(tmp_path)))
        await pool.sleep()
        engine.is_alive = False
        assert pool.engines[0].restart is None  # its GPU is another's now
        await pool.wake()
        (answer,) = await pool.generate([Request([1], SAMPLING)])
        assert answer.model_version == 3
        return engine.calls

    assert asyncio.run(run()) == ["load", "sleep", "wake", "start", "load", "wake", "generate"]


def test_other_engines_go_on_meanwhile(restart_log: RestartLog) -> None:
    engines = [MortalEngine(), MortalEngine()]
    pool = EnginePool(engines, max_restarts=1, log=restart_log)

    async def go() -> None:
        engines[0].may_start = asyncio.Event()
        engines[0].dies_in.append("generate")
        first, second = await asyncio.gather(pool.generate(requests(1)), pool.generate(requests(2)))
        assert [first[0].token_ids, second[0].token_ids] == [[1], [2]]
        assert engines[0].calls == ["generate", "start"]
        assert engines[1].calls == ["generate", "generate"]
        assert list(restart_log.status.restarts) == ["engine_0"]
        engines[0].may_start.set()
        await pool.load_weights(Weights(1, "nowhere"))

    run(go)
    assert engines[0].calls == ["generate", "start", "load"]


def test_an_engine_that_dies_while_it_takes_weights_gets_them_in_its_next_life(
    restart_log: RestartLog, tmp_path: Path
) -> None:
    for call in ("load", "score"):
        engine = MortalEngine()
        engine.dies_in.append(call)
        pool = EnginePool([engine], bounds=ProbeBounds(0.1, 0.1), max_restarts=1, log=restart_log)
        run(lambda pool=pool: pool.load_weights(Weights(1, str(tmp_path), PROBE)))
        assert (engine.version, pool.model_version) == (1, 1)
        assert engine.calls[-3:] == ["start", "load", "score"]


def test_an_engine_that_comes_back_with_another_model_ends_the_run(
    restart_log: RestartLog, store: Store, tmp_path: Path
) -> None:
    engine = MortalEngine()
    pool = EnginePool([engine], bounds=ProbeBounds(0.1, 0.1), model="Tiny", max_restarts=5, log=restart_log)

    async def go() -> None:
        await pool.load_weights(Weights(1, str(tmp_path), PROBE))
        engine.dies_in.append("generate")
        engine.score_of = -2.0
        await pool.generate(requests(1))

    with pytest.raises(WrongModelError, match="Tiny at version 1, log-probs of 1 tokens off"):
        run(go)
    assert engine.calls.count("start") == 1
    *_, event = events_of(store)
    assert event["kind"] == "engine_died" and "allowed: 0.1 and 0.1" in event["message"]


def test_above_the_limit_the_error_names_engine_limit_and_cause(
    restart_log: RestartLog, store: Store
) -> None:
    engines = [MortalEngine(), MortalEngine(start_fails=9)]
    pool = EnginePool(engines, role="grader", max_restarts=2, log=restart_log)

    async def go() -> None:
        engines[1].dies_in.append("generate")
        await asyncio.gather(pool.generate(requests(1)), pool.generate(requests(2)))
        while True:
            await pool.generate(requests(3))

    with pytest.raises(EngineError) as caught:
        run(go)
    assert str(caught.value) == (
        "grader_1 ended once more than it is started again: cluster.max_restarts allows 2 restarts an "
        "hour; the last cause: no memory; remove it, or allow more restarts, and run the same command again, "
        "which goes on from the newest checkpoint"
    )
    assert [event["kind"] for event in events_of(store)] == ["engine_died"] * 3
    assert engines[1].calls == ["generate", "start", "start"]


def test_without_restarts_the_first_death_is_the_end(restart_log: RestartLog) -> None:
    engine = MortalEngine()
    engine.dies_in.append("generate")
    pool = EnginePool([engine], log=restart_log)
    with pytest.raises(
        EngineError, match="allows 0 restarts an hour; the last cause: the mortal engine died"
    ):
        run(lambda: pool.generate(requests(1)))
    assert engine.calls == ["generate"]


def test_an_engine_whose_weights_were_removed_waits_for_the_next(tmp_path: Path) -> None:
    folder = tmp_path / "version_1"
    folder.mkdir()
    engines = [MortalEngine(), MortalEngine()]
    pool = EnginePool(engines, max_restarts=1)

    async def go() -> list[str]:
        await pool.load_weights(Weights(1, str(folder)))
        folder.rmdir()
        engines[0].dies_in.append("generate")
        await pool.generate(requests(1))
        while pool.engines[0].restart is not None:
            await asyncio.sleep(0.01)
        await pool.generate(requests(2))
        await pool.load_weights(Weights(1, str(tmp_path)))
        return list(engines[0].calls)

    # the same version lies elsewhere in the next stage
    assert run(go) == ["load", "generate", "start", "load"]
    assert engines[1].calls == ["load", "generate", "generate"]


def test_an_engine_that_is_started_again_takes_neither_deadline_nor_attempt_of_a_rollout(
    bench: Bench, restart_log: RestartLog
) -> None:
    """A restart of 3 s, for rollouts of at most 1 s."""
    tasks = put_tasks(bench.store, 3)

    class SlowStart(MortalEngine):
        async def start(self) -> None:
            await asyncio.sleep(3)
            await super().start()

    async def go() -> Explorer:
        engine = SlowStart()
        engine.dies_in.append("generate")
        pool = EnginePool([engine], max_restarts=1, log=restart_log)
        explorer = bench.explorer(tasks, engines=pool)
        explorer.runner.timeout_seconds = 1.0
        assert await explorer.explore_step(1)
        return explorer

    run(go)
    rows = bench.table("experiences")
    assert len(rows) == 12
    assert {(row["error"], row["attempt"]) for row in rows} == {("", 0)}
    kinds = [event["kind"] for event in events_of(bench.store)]
    assert kinds[:2] == ["engine_died", "engine_restarted"]


def test_the_live_view_shows_what_was_started_again(restart_log: RestartLog) -> None:
    restart_log.died("engine_2", "the vllm engine died: killed\nby hand")
    console = Console(width=200)
    with console.capture() as shown:
        console.print(render(restart_log.status))
    assert "engine_2" in shown.get() and "died: the vllm engine died: killed" in shown.get()
    assert "by hand" not in shown.get()


def test_the_reason_of_a_death_is_the_detail_of_rays_error() -> None:
    text = (
        "The actor died unexpectedly before finishing this task.\n\tclass_name: EngineActor\n"
        "The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR "
        "Worker exit detail: Worker unexpectedly exits with a connection error code 2. End of file.\n"
    )
    assert exit_detail(text) == "Worker unexpectedly exits with a connection error code 2. End of file."
    assert exit_detail("The node died.\nmore") == "The node died."


def test_an_engine_that_is_killed_while_it_starts_for_the_first_time_is_started_again() -> None:
    engine = MortalEngine(start_fails=1)
    pool = EnginePool([engine], max_restarts=1)

    async def go() -> list[Completion]:
        await pool.engines[0].start()
        return await pool.generate(requests(1))

    assert run(go)[0].token_ids == [1]
    assert engine.calls == ["start", "start", "generate"]
    unlucky = EnginePool([MortalEngine(start_fails=2)], max_restarts=1)
    with pytest.raises(EngineError, match="allows 1 restarts an hour; the last cause: no memory"):
        run(lambda: unlucky.engines[0].start())


def test_a_model_that_scores_responses_gets_its_answer_from_an_engine_that_died(
    template: ChatTemplate, restart_log: RestartLog
) -> None:
    engine = MortalEngine()
    engine.dies_in.append("generate")
    pool = EnginePool([engine], role="grader", max_restarts=1, log=restart_log)

    async def go() -> Answer:
        model = EngineModel(pool, template)
        return await model.ask([{"role": "user", "content": "Good?"}], max_tokens=4, temperature=1.0)

    assert run(go).text == template.decode([0])
    assert engine.calls == ["generate", "start", "generate"]
    assert list(restart_log.status.restarts) == ["grader_0"]


def test_each_engine_has_a_limit_of_its_own() -> None:
    pool = EnginePool([MortalEngine(), MortalEngine()], max_restarts=3)
    assert [type(engine.limit) for engine in pool.engines] == [RestartLimit] * 2
    assert pool.engines[0].limit is not pool.engines[1].limit
