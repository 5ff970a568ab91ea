from __future__ import annotations

import asyncio
from pathlib import Path

from trinity_data.claims import Claims
from trinity_data.config import StageConfig, SynchronizerConfig, load_pipeline_file
from trinity_data.launch.compute import StageEngines
from trinity_data.launch.live_roles import explorer_roles, show_participants
from trinity_data.processes import this_process
from trinity_data.progress import claims_key
from trinity_data.status import Role, Status
from trinity_data.store.participants import Participant, Participants
from trinity_data.store.store import Store
from trinity_data.store.types import Commit
from trinity_data.synchronizer import Synchronizer
from trinity_data.weights import Weights
from trinity_explorer.engines.engine import Request, Sampling
from trinity_explorer.engines.fake import FakeEngine
from trinity_explorer.engines.pool import EnginePool

REQUEST = Request([65], Sampling(temperature=1.0, top_p=1.0, top_k=-1, min_tokens=1, max_tokens=4, seed=0))


def engine() -> FakeEngine:
    return FakeEngine(script=lambda prompt, seed: "B", delay_seconds=0.05)


def stage() -> StageConfig:
    config = load_pipeline_file(Path(__file__).parents[2] / "pipelines" / "gsm8k.yaml")
    return config.stages[-1]


def test_the_explorer_and_its_engines_are_roles_while_it_explores() -> None:
    rollout, judge = (EnginePool([engine() for _ in range(number)]) for number in (2, 1))
    status = Status("run", rollouts_done=3, rollouts_total=8, engine_version=4)
    here = this_process()

    async def look() -> dict[str, Role]:
        await rollout.load_weights(Weights(4, "unused"))
        asking = asyncio.create_task(rollout.generate([REQUEST, REQUEST], preferred=1))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        roles = {name: ask() for name, ask in status.roles.items()}
        await asking
        return roles

    synchronizer = Synchronizer(SynchronizerConfig())
    with explorer_roles(status, stage(), StageEngines(rollout, {"judge": judge}), synchronizer):
        assert asyncio.run(look()) == {
            "explorer": Role(here, 4, "5 rollouts"),
            "explorer_engine_0": Role(here, 4, "0 requests"),
            "explorer_engine_1": Role(here, 4, "2 requests"),
            "explorer_auxiliary_judge_0": Role(here, None, "0 requests"),
        }
    assert status.roles == {}


def test_a_process_elsewhere_is_a_role_until_the_view_ends(store: Store) -> None:
    status, participants = Status("run"), Participants(store)
    participants.join(Participant.this_process("trainer"))
    place = participants.join(Participant("explorer:left", "node2", "another machine", 7, 1))

    async def look() -> dict[str, Role]:
        showing = asyncio.create_task(show_participants(status, store, "trainer"))
        while not status.roles:
            await asyncio.sleep(0.01)
        showing.cancel()
        return {name: ask() for name, ask in status.roles.items()}

    assert asyncio.run(look()) == {"explorer:left": Role("process 7 on node2")}
    claims = Claims(1).begin(1, place).begin(2, place)
    store.commit(Commit(progress={claims_key("rl"): claims.dump()}))
    status.roles.clear()
    assert asyncio.run(look()) == {"explorer:left": Role("process 7 on node2", None, "step 1, 2")}
    participants.leave(place)
    status.roles.clear()
    assert asyncio.run(look()) == {"explorer:left": Role("process 7 on node2", None, "left")}
