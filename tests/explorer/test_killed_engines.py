"""Engines are killed while rollouts are under way: no row is lost, doubled or another one."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain, count, repeat
from pathlib import Path
from typing import Any

import pytest
import ray
from ray import cloudpickle

from tests.explorer.conftest import SAMPLING, Bench, put_tasks
from trinity_data.dataset.task import Task
from trinity_data.errors import EngineError
from trinity_data.placement import Places
from trinity_data.processes import this_process
from trinity_data.query.audit import audit
from trinity_data.restart_log import RestartLog
from trinity_data.restarts import RestartLimit
from trinity_data.status import Status
from trinity_data.store.store import Store
from trinity_data.store.types import Commit
from trinity_data.tokenizer import ChatTemplate
from trinity_data.weights import Weights
from trinity_explorer.chat import ChatModel
from trinity_explorer.engines.actor import EngineActor, RemoteEngine, remote_engine
from trinity_explorer.engines.engine import Completion, Request
from trinity_explorer.engines.fake import FakeEngine
from trinity_explorer.engines.pool import EnginePool

STEPS = 3
LIVES = ((3, 5), (4, 1))
"""Of each of two engines: at which of its calls each process is killed; the last one lives on."""
TIMES = ("started_at", "seconds")
PLACES = Places("engine", 1, num_gpus=0, strategy="SPREAD", max_seconds=None)


class SeededEngine(FakeEngine):
    """Answers with two tokens of the request's seed, and takes a while."""

    def __init__(self) -> None:
        super().__init__(script=lambda prompt, seed: "")

    async def generate(self, requests: Sequence[Request]) -> list[Completion]:
        await asyncio.sleep(0.03)
        answers = [[5 + each.sampling.seed % 100, 5 + each.sampling.seed % 97] for each in requests]
        return [Completion(answer, [-0.5, -0.25], "stop", self.model_version) for answer in answers]


class KilledActor(EngineActor):
    """kill -9 in the middle of one of its calls."""

    async def start(self) -> str:
        self.engine, self.num_calls = SeededEngine(), 0
        return this_process()

    async def generate(self, requests: Sequence[Request]) -> list[Completion]:
        self.num_calls += 1
        if self.num_calls == self.args["killed_at"]:
            await asyncio.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        return await super().generate(requests)


class SilentActor(EngineActor):
    """Never ready."""

    async def start(self) -> str:
        await asyncio.sleep(3600)
        return this_process()


class OddTokens:
    """Pays for an odd first token."""

    async def run(self, task: Task, model: ChatModel) -> float:
        reply = await model.chat(task.messages)
        return float(reply.completion.token_ids[0] % 2)


@pytest.fixture(scope="module", autouse=True)
def _workers_get_this_module() -> None:
    """Ray's workers cannot import it."""
    cloudpickle.register_pickle_by_value(sys.modules[__name__])


def killed_engine(lives: Sequence[int]) -> RemoteEngine:
    actor = ray.remote(KilledActor).options(num_cpus=0, max_concurrency=1000)
    ends = chain(lives, repeat(None))
    return RemoteEngine("fake", lambda: actor.remote("fake", "", {"killed_at": next(ends)}, None, ""), PLACES)


async def process_of(engine: RemoteEngine) -> int:
    return int(await engine.actor.__ray_call__.remote(lambda self: os.getpid()))


async def explore(bench: Bench, pool: EnginePool, folder: Path) -> None:
    explorer = bench.explorer(put_tasks(bench.store, 6 * STEPS), engines=pool)
    explorer.runner.workflow_for = lambda task: OddTokens()
    await pool.load_weights(Weights(0, str(folder)))
    for step in range(1, STEPS + 1):
        assert await explorer.explore_step(step)
    await pool.close()


def rows_of(store: Store, table: str = "experiences") -> list[dict[str, Any]]:
    """All of them in the order of their ids, without the times that they took."""
    rows = sorted(store.table(table).to_pylist(), key=lambda row: str(row["experience_id"]))
    return [{name: value for name, value in row.items() if name not in TIMES} for row in rows]


def test_kills_at_any_time_leave_the_rows_of_a_run_without_them(
    ray_session: None, bench: Bench, tmp_path: Path, tokenizer: Any, template: ChatTemplate
) -> None:
    other = Bench(Store.create_or_open(tmp_path / "other"), tokenizer, template)
    bench.batch_size = other.batch_size = 6
    log = RestartLog(bench.store, bench.status, kind="engine")

    async def with_kills() -> None:
        engines = [killed_engine(lives) for lives in LIVES]
        await asyncio.gather(*(engine.start() for engine in engines))
        pool = EnginePool(engines, log=log)
        for engine in pool.engines:
            # an hour passes between any two restarts, so that none waits
            engine.limit = RestartLimit(1, now=count(step=3600).__next__)
        await explore(bench, pool, tmp_path)

    asyncio.run(asyncio.wait_for(with_kills(), 120))
    asyncio.run(explore(other, EnginePool([SeededEngine()]), tmp_path))
    rows = rows_of(bench.store)
    assert len({row["experience_id"] for row in rows}) == len(rows) == 6 * STEPS * 4
    assert {row["reward"] for row in rows} == {0.0, 1.0}
    assert rows == rows_of(other.store)
    assert rows_of(bench.store, "outcomes") == rows_of(other.store, "outcomes")
    kinds = [event["kind"] for event in bench.table("events")]
    # the steps make more calls than the processes that are killed get
    assert kinds.count("engine_died") >= 2
    bench.store.seal()
    report = audit(bench.store.root)
    assert report.ok, report
    other.store.close()


@pytest.mark.parametrize(
    ("number", "max_silence", "reason"),
    [
        (signal.SIGKILL, None, "the transformers engine died: "),
        pytest.param(
            signal.SIGSTOP,
            10,
            "the transformers engine hung: it gave no sign of life for 10 seconds",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_the_real_engine_answers_as_if_it_had_not_been_killed_or_stopped(
    ray_session: None,
    store: Store,
    tiny_model: Path,
    number: signal.Signals,
    max_silence: float | None,
    reason: str,
) -> None:
    """`transformers`, which draws each request's tokens from the request's seed."""
    args = {"dtype": "float32", "max_num_seqs": None}
    asked = [Request([5, 6, 7 + n], replace(SAMPLING, seed=n, max_tokens=60)) for n in range(8)]

    async def go() -> tuple[list[Completion], list[Completion]]:
        engine = remote_engine(
            "transformers", str(tiny_model), args,
            places=PLACES, number=0, env={}, logs=None, role="", max_silence=max_silence,
        )  # fmt: skip
        await engine.start()
        pool = EnginePool([engine], max_restarts=1, log=RestartLog(store, Status("run"), kind="engine"))
        await pool.load_weights(Weights(3, str(tiny_model)))
        process = await process_of(engine)
        before = await pool.generate(asked)

        async def kill() -> None:
            await asyncio.sleep(0.05)
            os.kill(process, number)

        after, _ = await asyncio.gather(pool.generate(asked), kill())
        assert await process_of(engine) != process
        await pool.close()
        return before, after

    before, after = asyncio.run(asyncio.wait_for(go(), 200))
    assert tokens(before) == tokens(after) and len(set(map(tuple, tokens(after)))) == len(asked)
    assert {each.model_version for each in after} == {3}
    store.commit(Commit())  # after the events
    died, again = store.table("events").to_pylist()
    assert (died["kind"], again["kind"]) == ("engine_died", "engine_restarted")
    assert died["message"].startswith(f"engine_0: {reason}")


def tokens(completions: Sequence[Completion]) -> list[list[int]]:
    return [each.token_ids for each in completions]


def test_an_engine_that_is_not_ready_in_time_at_its_first_start_is_an_error_that_says_what_to_do(
    ray_session: None,
) -> None:
    actor = ray.remote(SilentActor).options(num_cpus=0, max_concurrency=1000)
    engine = RemoteEngine("vllm", lambda: actor.remote("vllm", "", {}, None, ""), PLACES, max_start_seconds=2)
    pool = EnginePool([engine], max_restarts=5)

    async def go() -> None:
        (only,) = pool.engines
        try:
            await only.start()
        finally:
            ray.kill(engine.actor)

    with pytest.raises(
        EngineError, match=r"the vllm engine did not start within 2 s \(synchronizer.sync_time"
    ):
        asyncio.run(asyncio.wait_for(go(), 60))
