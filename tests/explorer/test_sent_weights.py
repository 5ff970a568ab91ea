"""Engines whose weights the ranks hold: all get a version at once, and who misses it gets it alone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.explorer.test_pool import MortalEngine, requests, run
from trinity_data.config import SynchronizerConfig
from trinity_data.errors import WeightsGoneError
from trinity_data.status import Status
from trinity_data.store.store import Store
from trinity_data.synchronizer import Synchronizer
from trinity_data.weight_sending import Receiver, SendingGroup
from trinity_data.weights import HeldVersions, Weights
from trinity_explorer.engines.pool import EnginePool
from trinity_explorer.policy_weights import PolicyWeights

GROUP = SendingGroup("127.0.0.1", 1, 3, ())


class ReceivingEngine(MortalEngine):
    num_workers = 1

    @property
    def process(self) -> object:
        return self.num_starts

    async def become_idle(self) -> None:
        await self._call("become_idle")

    async def receive_weights(
        self, version: int, group: SendingGroup, first_member: int, *, during: bool
    ) -> None:
        await self._call("receive")
        self.version = version


class Ranks:
    """Send the versions that they hold, to all receivers or to none."""

    def __init__(self, *held: int) -> None:
        self.held = set(held)
        self.sent: list[tuple[int, int]] = []
        """Versions, and the number of engines."""
        self.when_lost: Callable[[], None] = lambda: None

    async def send(self, weights: Weights, receivers: Sequence[Receiver], *, during: bool) -> None:
        if weights.version not in self.held:
            self.when_lost()
            raise WeightsGoneError(f"version {weights.version}")
        self.sent.append((weights.version, len(receivers)))
        calls = (each.receive_weights(weights.version, GROUP, 1, during=during) for each in receivers)
        results = await asyncio.gather(*calls, return_exceptions=True)
        for error in results:
            if error is not None:
                raise error


def pool_of(ranks: Ranks, *engines: ReceivingEngine) -> EnginePool:
    pool = EnginePool(engines, max_restarts=2)
    pool.sender = ranks
    return pool


def test_all_engines_get_a_version_in_one_send() -> None:
    ranks, engines = Ranks(1, 2), [ReceivingEngine(), ReceivingEngine()]
    pool = pool_of(ranks, *engines)

    async def go() -> None:
        for version in (1, 2, 2):
            await pool.load_weights(Weights(version, ""))

    run(go)
    assert ranks.sent == [(1, 2), (2, 2)]
    assert [engine.version for engine in engines] == [2, 2] and pool.model_version == 2


def test_an_engine_that_dies_in_a_send_gets_the_version_when_it_is_back_and_the_other_one_alone() -> None:
    ranks, engines = Ranks(1), [ReceivingEngine(), ReceivingEngine()]
    pool = pool_of(ranks, *engines)
    engines[0].dies_in.append("receive")

    async def go() -> list[int]:
        await pool.load_weights(Weights(1, ""))
        return [(await pool.generate(requests(1), preferred=each))[0].model_version for each in (0, 1)]

    assert run(go) == [1, 1]
    assert engines[0].num_starts == 1 and engines[1].num_starts == 0
    assert ranks.sent[0] == (1, 2) and set(ranks.sent[1:]) == {(1, 1)}


def test_an_engine_that_is_started_again_gets_the_newest_version_from_the_ranks() -> None:
    ranks, engine = Ranks(1, 2), ReceivingEngine()
    pool = pool_of(ranks, engine)

    async def go() -> int:
        await pool.load_weights(Weights(2, ""))
        engine.dies_in.append("generate")
        return (await pool.generate(requests(1)))[0].model_version

    assert run(go) == 2
    assert ranks.sent == [(2, 1), (2, 1)]


def test_a_version_that_the_ranks_have_lost_is_replaced_by_the_next_that_is_published(
    store: Store, tmp_path: Path
) -> None:
    ranks, engine = Ranks(3), ReceivingEngine()
    synchronizer = Synchronizer(SynchronizerConfig(), folders=HeldVersions())
    synchronizer.published = {2: Weights(2, "")}
    policy = PolicyWeights(
        pool_of(ranks, engine), synchronizer, store=store, stage="rl", status=Status("run")
    )

    def publish_others() -> None:
        """As the trainer does when its workers were started again."""
        synchronizer.published = {3: Weights(3, "")}

    ranks.when_lost = publish_others
    run(lambda: policy.load(2))
    assert policy.loaded == Weights(3, "") and engine.version == 3
