"""The engines take newer weights before a step, or beside it where `sync_style` is `fully_async`."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.explorer.conftest import Bench, CountingEngine, put_tasks
from trinity_data.config import SynchronizerConfig
from trinity_data.errors import WeightsGoneError, WrongModelError
from trinity_data.status import Status
from trinity_data.store.store import Store
from trinity_data.synchronizer import Synchronizer
from trinity_data.weights import Weights
from trinity_explorer.engines.engine import Completion, Request
from trinity_explorer.engines.fake import FakeEngine
from trinity_explorer.engines.pool import EnginePool
from trinity_explorer.policy_weights import PolicyWeights
from trinity_operators.advantages import GrpoAdvantage


class PublishingEngine(CountingEngine):
    """Publishes version 1 when half of a step's twelve requests have come; refuses it where it is wrong."""

    synchronizer: Synchronizer
    is_wrong = loaded_during_answers = False

    async def generate(self, requests: Sequence[Request]) -> list[Completion]:
        completions = await super().generate(requests)
        if len(self.seeds) == 6:
            await self.synchronizer.publish(Weights(1, "nowhere"))
        await asyncio.sleep(0.001)
        return completions

    async def load_weights(self, weights: Weights, *, during: bool = False) -> None:
        if weights.version == 1 and self.is_wrong:
            raise WrongModelError("another model")
        self.loaded_during_answers = during
        await super().load_weights(weights, during=during)


def explore(bench: Bench, style: str) -> list[int]:
    """The versions that made the rows of the first step, in their order."""
    bench.operators, bench.engine_type = [GrpoAdvantage()], PublishingEngine
    synchronizer = Synchronizer(SynchronizerConfig.model_validate({"sync_style": style}))
    explorer = bench.explorer(put_tasks(bench.store, 60), synchronizer=synchronizer)
    synchronizer.published = {0: Weights(0, "nowhere")}
    bench.engine.synchronizer = synchronizer  # type: ignore[attr-defined]
    asyncio.run(explorer.explore(1, 1))
    return [row["model_version"] for row in bench.table("experiences")]


def test_engines_take_weights_in_the_middle_of_a_step_where_they_may(bench: Bench) -> None:
    versions = explore(bench, "fully_async")
    assert versions == sorted(versions) and set(versions) == {0, 1}
    assert len(versions) == 12
    assert bench.engine.loaded_during_answers  # type: ignore[attr-defined]


def test_weights_that_are_published_within_a_step_wait_for_the_next_one(bench: Bench) -> None:
    assert set(explore(bench, "trainer_driven")) == {0}
    assert bench.store.progress("explored/rl") == 1


def test_wrong_weights_in_the_middle_of_a_step_end_the_run(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PublishingEngine, "is_wrong", True)
    with pytest.raises(BaseExceptionGroup) as caught:
        explore(bench, "fully_async")
    assert caught.group_contains(WrongModelError, match="another model")
    assert [event["kind"] for event in bench.table("events")] == ["wrong_model"]


class FarEngine(FakeEngine):
    """Finds weights only where their folder is."""

    def __init__(self) -> None:
        super().__init__(script=lambda prompt, seed: "")
        self.num_tries = 0

    async def load_weights(self, weights: Weights, *, during: bool = False) -> None:
        self.num_tries += 1
        if not Path(weights.folder).is_dir():
            raise WeightsGoneError(f"{weights.folder} is gone")
        await super().load_weights(weights, during=during)


def test_weights_that_went_with_their_trainer_are_loaded_once_it_has_published_them_again(
    store: Store, tmp_path: Path
) -> None:
    engine, synchronizer = FarEngine(), Synchronizer(SynchronizerConfig(sync_timeout=60))
    weights = PolicyWeights(EnginePool([engine]), synchronizer, store=store, stage="rl", status=Status("run"))

    async def go() -> None:
        await synchronizer.publish(Weights(3, str(tmp_path / "before")))
        loading = asyncio.create_task(weights.load(3))
        while not engine.num_tries:
            await asyncio.sleep(0.01)
        (tmp_path / "again").mkdir()
        await synchronizer.publish(Weights(3, str(tmp_path / "again")))
        await loading

    asyncio.run(asyncio.wait_for(go(), 30))
    assert engine.model_version == 3 and weights.loaded is not None
    assert weights.loaded.folder == str(tmp_path / "again")


def test_weights_that_stay_away_end_the_wait_after_sync_timeout(store: Store, tmp_path: Path) -> None:
    synchronizer = Synchronizer(SynchronizerConfig(sync_timeout=0.1))
    weights = PolicyWeights(
        EnginePool([FarEngine()]), synchronizer, store=store, stage="rl", status=Status("run")
    )
    synchronizer.published[3] = Weights(3, str(tmp_path / "gone"))
    with pytest.raises(WeightsGoneError, match="gone is gone"):
        asyncio.run(asyncio.wait_for(weights.load(3), 30))
