"""A store, a tokenizer, tasks and the fake engine, as the explorer's tests need them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from trinity_data.dataset.task import Task
from trinity_data.schema import content_id, rows_to_table
from trinity_data.status import Status
from trinity_data.store.store import Store
from trinity_data.store.types import Commit
from trinity_data.synchronizer import Synchronizer, SyncSchedule
from trinity_data.tokenizer import ChatTemplate, load_tokenizer
from trinity_data.weights import WeightFolders, Weights
from trinity_explorer.engines.engine import Sampling
from trinity_explorer.engines.fake import FakeEngine
from trinity_explorer.engines.pool import EnginePool
from trinity_explorer.evaluator import Evaluator
from trinity_explorer.explorer import Explorer, ExploreSettings
from trinity_explorer.rollout import Limits
from trinity_explorer.task_sampler import TaskSampler
from trinity_explorer.workflows.registry import WorkflowSpec, build_workflow
from trinity_operators.advantages import GrpoAdvantage

SAMPLING = Sampling(temperature=1.0, top_p=1.0, top_k=-1, min_tokens=0, max_tokens=32, seed=0)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened = Store.create_or_open(tmp_path / "store")
    yield opened
    opened.close()


@pytest.fixture(scope="session")
def tokenizer(tiny_model: Path) -> Any:
    return load_tokenizer(str(tiny_model))


@pytest.fixture
def template(tokenizer: Any) -> ChatTemplate:
    return ChatTemplate(tokenizer, None, max_prompt_tokens=128, truncate=False)


@pytest.fixture
def sampling() -> Sampling:
    return SAMPLING


@pytest.fixture
def task() -> Task:
    messages = ({"role": "user", "content": "What is 3 + 4?"},)
    return Task("t", "sums", "What is 3 + 4?", messages, "#### 7", "math_workflow", "")


@dataclass
class Sums:
    """Tasks `i + 1` in their order."""

    tasks: list[Task]
    taken: int = 0

    async def next(self) -> Task | None:
        self.taken += 1
        return self.tasks[self.taken - 1] if self.taken <= len(self.tasks) else None


@pytest.fixture
def make_explorer(
    store: Store, tokenizer: Any, template: ChatTemplate, tmp_path: Path
) -> Callable[..., Explorer]:
    """`make_explorer(name, pace)`: tries three sums four times a step, keeps every row,
    and is right for even seeds.
    """
    tasks = []
    for i in range(60):
        prompt = f"What is {i} + 1?"
        messages = ({"role": "user", "content": prompt},)
        tasks.append(Task(content_id(prompt), "sums", prompt, messages, f"#### {i + 1}", "math_workflow", ""))
    stored = {"columns": "{}", "stage": "rl", "kept": True}
    rows = [vars(task) | {"messages": list(task.messages)} | stored for task in tasks]
    store.commit(Commit(tables={"tasks": rows_to_table("tasks", rows)}))
    workflow = build_workflow(WorkflowSpec("math_workflow"))

    def script(prompt: str, seed: int) -> str:
        first = int(prompt.split("What is ")[1].split(" ")[0])
        return f"#### {first + 1 if seed % 2 == 0 else -1}"

    def make(name: str = "explorer", pace: Synchronizer | None = None) -> Explorer:
        pool, status, limits = (
            EnginePool([FakeEngine(tokenizer, script=script)]),
            Status("run"),
            Limits(5.0, 0),
        )
        evaluator = Evaluator(
            [], stage="rl", store=store, engines=pool, template=template, workflow_for=lambda task: workflow,
            limits=limits, first_step=1, interval=None, on_startup=False, on_result=lambda step,
            metrics: None, status=status,
        )  # fmt: skip
        return Explorer(
            ExploreSettings(
                explorer=name, stage="rl", batch_size=3, repeat_times=4, refill_rounds=0, concurrency=2,
                limits=limits, sampling=SAMPLING, seed=7,
            ),
            store=store, engines=pool, template=template,
            tasks=TaskSampler(Sums(tasks), num_epochs=None, seed=7), operators=[GrpoAdvantage()],
            workflow_for=lambda task: workflow, evaluator=evaluator,
            pace=pace or Synchronizer(SyncSchedule(1, 1, 99), trained=0, explored=0),
            weights_of=lambda version: Weights(version, "nowhere"),
            folders=WeightFolders(tmp_path, "checkpoint"), status=status,
        )  # fmt: skip

    return make
