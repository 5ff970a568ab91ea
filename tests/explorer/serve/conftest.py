"""An endpoint over a store, with the fake engine behind it and an HTTP client before it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from aiohttp.test_utils import TestClient, TestServer

from tests.explorer.conftest import RecordedMetrics
from trinity_data.config import (
    AlgorithmConfig,
    BufferConfig,
    ExplorerConfig,
    ModelConfig,
    StageConfig,
    SynchronizerConfig,
)
from trinity_data.reporter import Reporter
from trinity_data.status import Status
from trinity_data.store.store import Store
from trinity_data.store.types import Place
from trinity_data.synchronizer import Synchronizer
from trinity_data.tokenizer import ChatTemplate
from trinity_data.weights import Weights
from trinity_explorer.engines.fake import FakeEngine
from trinity_explorer.engines.pool import EnginePool
from trinity_explorer.evaluator import Evaluator
from trinity_explorer.explorer import Explorer
from trinity_explorer.rollout import RolloutRunner
from trinity_explorer.serve.server import Endpoint
from trinity_explorer.serve.sessions import Sessions
from trinity_explorer.serve.steps import SessionRollouts, SessionSampler
from trinity_explorer.steps import OwnSteps, SharedSteps
from trinity_operators.advantages import GrpoAdvantage
from trinity_operators.base import Operator
from trinity_operators.experience_pipeline import ExperiencePipeline, ExperienceWriter

TOKEN = "a token of the tests"
MODEL = "tiny"
QUESTION = {"role": "user", "content": "What is 3 + 4?"}
Answer = tuple[int, Any]
"""Status and body."""


def echo(prompt: str, seed: int) -> str:
    """The seed, so that answers differ as the seeds do."""
    return f"seed {seed}"


@dataclass
class Agent:
    """What an agent does over HTTP."""

    http: TestClient[Any, Any]

    async def post(self, path: str, body: Any, token: str = TOKEN) -> Answer:
        headers = {"Authorization": f"Bearer {token}"}
        async with self.http.post(path, json=body, headers=headers) as response:
            return response.status, await response.json()

    async def get(self, path: str) -> Answer:
        async with self.http.get(path, headers={"Authorization": f"Bearer {TOKEN}"}) as response:
            is_json = response.content_type == "application/json"
            return response.status, await (response.json() if is_json else response.text())

    async def chat(
        self, session: str, *messages: Mapping[str, Any], task: str = "", **options: Any
    ) -> Answer:
        path = (f"/tasks/{task}" if task else "") + f"/sessions/{session}/v1/chat/completions"
        body = {"model": MODEL, "messages": list(messages) or [QUESTION], **options}
        return await self.post(path, body)

    async def reward(self, session: str, reward: float, **more: Any) -> Answer:
        return await self.post("/v1/feedback", {"session_id": session, "reward": reward, **more})


@dataclass
class Serve:
    """Sessions and explorers over one store, as those of one run."""

    store: Store
    tokenizer: Any
    template: ChatTemplate
    script: Callable[[str, int], str] = echo
    operators: Sequence[Operator] = field(default_factory=lambda: [GrpoAdvantage()])
    repeat_times: int = 2
    batch_size: int = 1
    session_timeout: float = 1000.0
    reporter: Reporter | None = None

    def sessions(self) -> Sessions:
        """With engines that have their first weights."""
        stage = self.stage()
        engines = EnginePool([FakeEngine(self.tokenizer, script=self.script)])
        engines.model_version = 0
        runner = RolloutRunner(stage.explorer, engines, self.template, _no_workflow, seed=7)
        sessions = Sessions(stage, self.store, runner)
        sessions.resume()
        return sessions

    def stage(self) -> StageConfig:
        return StageConfig(
            stage_name="rl",
            mode="serve",
            algorithm=AlgorithmConfig(algorithm_type="grpo", repeat_times=self.repeat_times),
            model=ModelConfig(model_path=MODEL, max_response_tokens=32),
            buffer=BufferConfig(batch_size=self.batch_size, total_steps=1000),
            default_contracts=False,
            explorer=ExplorerConfig(session_timeout=self.session_timeout),
            synchronizer=SynchronizerConfig(sync_offset=99),
        )

    def explorer(self, sessions: Sessions, *, place: Place | None = None) -> Explorer:
        """With a `place` it shares its stage with others."""
        stage, runner = self.stage(), sessions.runner
        runner.made_elsewhere["served"] = SessionRollouts(runner.template, self.store, "rl", sessions)
        reporter = Reporter(stage, self.store, Status("run"), RecordedMetrics())
        synchronizer = Synchronizer(stage.synchronizer, explored=self.store.progress("explored/rl"))
        synchronizer.published[0] = Weights(0, "nowhere")
        pipeline = ExperiencePipeline(self.operators, "rl")
        steps = (
            OwnSteps(self.store, "rl", synchronizer, explorer="explorer")
            if place is None
            else SharedSteps(self.store, "rl", synchronizer, place, tasksets=["served"])
        )
        return Explorer(
            stage,
            store=self.store,
            runner=runner,
            tasks=SessionSampler(sessions, steps),
            writer=ExperienceWriter(self.store, pipeline, explorer="explorer"),
            evaluator=Evaluator(stage, (), store=self.store, runner=runner, reporter=reporter, first_step=1),
            steps=steps,
            reporter=reporter,
        )

    @asynccontextmanager
    async def agent(self, sessions: Sessions) -> AsyncIterator[Agent]:
        """A client of a server of these sessions."""
        app = Endpoint(sessions, model=MODEL, token=TOKEN).app()
        async with TestClient(TestServer(app)) as http:
            yield Agent(http)

    async def explored(self, sessions: Sessions, *, first: int, last: int) -> None:
        """Explores steps to their end."""
        await self.explorer(sessions).explore(first, last)

    def table(self, name: str) -> list[dict[str, Any]]:
        return list(self.store.table(name).to_pylist())

    def ledger_keys(self) -> list[str]:
        """Of what the ledger has of sessions."""
        return [key.removeprefix("served/rl/explorer/") for key in self.store.progress_below("served/")]


def _no_workflow(task: Any) -> Any:
    raise AssertionError("sessions have no workflow")


@pytest.fixture
def serve(store: Store, tokenizer: Any, template: ChatTemplate) -> Serve:
    return Serve(store, tokenizer, template)
