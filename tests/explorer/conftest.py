"""A store, a tokenizer, tasks and the fake engine, as the explorer's tests need them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest

from trinity_data.config import (
    AlgorithmConfig,
    BufferConfig,
    ContractConfig,
    ExplorerConfig,
    ModelConfig,
    RolloutArgs,
    StageConfig,
    SynchronizerConfig,
    TasksetConfig,
)
from trinity_data.config.buffer import ExplorerInput
from trinity_data.dataset.task import Task
from trinity_data.reporter import Reporter
from trinity_data.schema import content_id, rows_to_table
from trinity_data.status import Status
from trinity_data.store.store import Store
from trinity_data.store.types import Commit, Place
from trinity_data.synchronizer import Synchronizer
from trinity_data.tokenizer import ChatTemplate, load_tokenizer
from trinity_data.weights import Weights
from trinity_explorer.curriculum.build import build_mixer
from trinity_explorer.engines.engine import Completion, Request, Sampling
from trinity_explorer.engines.fake import FakeEngine
from trinity_explorer.engines.pool import EnginePool
from trinity_explorer.evaluator import EvalSet, Evaluator
from trinity_explorer.explorer import Explorer
from trinity_explorer.rollout import RolloutRunner
from trinity_explorer.serve.steps import SessionRollouts
from trinity_explorer.steps import OwnSteps, SharedSteps
from trinity_explorer.workflows.registry import WorkflowSpec, build_workflow
from trinity_operators.advantages import GrpoAdvantage
from trinity_operators.base import Operator
from trinity_operators.experience_pipeline import ExperiencePipeline, ExperienceWriter
from trinity_operators.filters import RewardStdFilter

SUMS = TasksetConfig(name="sums", path="sums", repeat_times=4, rollout_args=RolloutArgs(max_tokens=32))
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
class ListedTasks:
    """The tasks of a list in their order, as a stream brings them."""

    tasks: list[Task]
    taken: int = 0

    async def next(self) -> Task | None:
        self.taken += 1
        return self.tasks[self.taken - 1] if self.taken <= len(self.tasks) else None


class CountingEngine(FakeEngine):
    """The fake engine; remembers the seeds it was asked with."""

    def __init__(self, tokenizer: Any, *, script: Callable[[str, int], str]) -> None:
        super().__init__(tokenizer, script=script)
        self.seeds: list[int] = []

    async def generate(self, requests: Sequence[Request]) -> list[Completion]:
        self.seeds += [request.sampling.seed for request in requests]
        return await super().generate(requests)


@dataclass(frozen=True)
class Conditions:
    """How a session asks about tasks, and which model."""

    digest: str = "digest"
    settings: str = "as it is"

    def model(self, weights: Weights) -> str:
        return self.digest

    def of_task(self, task: Task) -> Mapping[str, Any]:
        return {"settings": self.settings}

    def of_taskset(self, name: str) -> Mapping[str, Any]:
        return {"settings": self.settings}


def half_right(prompt: str, seed: int) -> str:
    """Right for an even seed: a group of four has both with probability 7/8."""
    first = int(prompt.split("What is ")[1].split(" ")[0])
    return f"#### {first + 1 if seed % 2 == 0 else -1}"


def put_tasks(store: Store, count: int, *, taskset: str = "sums") -> list[Task]:
    """Sums `i + 1`, in the store as a stream would have left them, with how easy two models find them."""
    tasks = []
    for i in range(count):
        prompt = f"What is {i} + 1?"
        messages = ({"role": "user", "content": prompt},)
        identifier = content_id(prompt) if taskset == "sums" else content_id(taskset, prompt)
        tasks.append(Task(identifier, taskset, prompt, messages, f"#### {i + 1}", "math_workflow", ""))
    rows = [
        vars(task)
        | {"messages": list(task.messages), "columns": "{}", "stage": "rl", "kept": True, "position": i}
        | {
            "scores": [
                ("weak", (i * 7 % count) / (2 * count)),
                ("strong", 0.5 + (i * 7 % count) / (2 * count)),
            ]
        }
        for i, task in enumerate(tasks)
    ]
    store.commit(Commit(tables={"tasks": rows_to_table("tasks", rows)}))
    return tasks


@dataclass
class RecordedMetrics:
    """A monitor that keeps what it is sent."""

    metrics: list[tuple[int, dict[str, float]]] = field(default_factory=list)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.metrics.append((step, dict(metrics)))

    def close(self) -> None: ...


@dataclass
class Bench:
    """Builds explorers over one store, as sessions of one run: four rollouts a task, two at a time."""

    store: Store
    tokenizer: Any
    template: ChatTemplate
    operators: list[Operator] = field(default_factory=lambda: [RewardStdFilter(), GrpoAdvantage()])
    contracts: Sequence[ContractConfig] = ()
    default_contracts: bool = False
    eval_sets: Sequence[EvalSet] = ()
    refill_rounds: int = 0
    more_of_explorer: Mapping[str, Any] = field(default_factory=dict)
    engine_type: type[CountingEngine] = CountingEngine
    batch_size: int = 3
    tasksets: Sequence[TasksetConfig] = (SUMS,)
    mix: Literal["weighted", "in_turn"] = "weighted"
    trained: int = 0
    status: Status = field(default_factory=lambda: Status("run"))
    monitor: RecordedMetrics = field(default_factory=RecordedMetrics)

    def explorer(
        self,
        tasks: list[Task],
        script: Callable[[str, int], str] = half_right,
        *,
        name: str = "explorer",
        synchronizer: Synchronizer | None = None,
        engines: EnginePool | None = None,
        place: Place | None = None,
    ) -> Explorer:
        """Without `engines` one fake engine answers; with a `place` it shares its stage with others."""
        stage = self.stage(name)
        self.engine = self.engine_type(self.tokenizer, script=script)
        workflow = build_workflow(WorkflowSpec("math_workflow"))
        runner = RolloutRunner(
            stage.explorer, engines or EnginePool([self.engine]), self.template, lambda task: workflow, seed=7
        )
        runner.made_elsewhere["served"] = SessionRollouts(self.template, self.store, "rl", None)
        reporter = Reporter(stage, self.store, self.status, self.monitor)
        explored = self.store.progress("explored/rl")
        synchronizer = synchronizer or Synchronizer(
            stage.synchronizer, trained=self.trained, explored=explored
        )
        # the fake engine takes any weights
        for version in range(20):
            synchronizer.published[version] = Weights(version, "nowhere")
        return Explorer(
            stage,
            store=self.store,
            runner=runner,
            tasks=build_mixer(
                stage,
                {
                    taskset.name: ListedTasks([task for task in tasks if task.taskset == taskset.name])
                    for taskset in self.tasksets
                },
                store=self.store,
                synchronizer=synchronizer,
                seed=7,
            ),
            writer=ExperienceWriter(self.store, ExperiencePipeline(self.operators, "rl"), explorer=name),
            evaluator=Evaluator(
                stage, self.eval_sets, store=self.store, runner=runner, reporter=reporter, first_step=1
            ),
            steps=OwnSteps(self.store, "rl", synchronizer, explorer=name)
            if place is None
            else SharedSteps(
                self.store,
                "rl",
                synchronizer,
                place,
                tasksets=["served", *(each.name for each in self.tasksets)],
            ),
            reporter=reporter,
        )

    def stage(self, name: str) -> StageConfig:
        # which stand here as they are filled in: one as itself
        one, several = (self.tasksets[0], ()) if len(self.tasksets) == 1 else (None, tuple(self.tasksets))
        explorer_input = ExplorerInput(taskset=one, tasksets=several, mix=self.mix)
        return StageConfig(
            stage_name="rl",
            algorithm=AlgorithmConfig(algorithm_type="grpo"),
            model=ModelConfig(model_path="x"),
            # without an end
            buffer=BufferConfig(batch_size=self.batch_size, total_steps=1000, explorer_input=explorer_input),
            contracts=tuple(self.contracts),
            default_contracts=self.default_contracts,
            explorer=ExplorerConfig(
                **{
                    "name": name,
                    "runner_per_model": 2,
                    "max_timeout": 5.0,
                    "max_retry_times": 0,
                    "refill_rounds": self.refill_rounds,
                    "eval_interval": 2,
                    **self.more_of_explorer,
                }
            ),
        )

    def table(self, name: str) -> list[dict[str, Any]]:
        return list(self.store.table(name).to_pylist())


@pytest.fixture
def bench(store: Store, tokenizer: Any, template: ChatTemplate) -> Bench:
    return Bench(store, tokenizer, template)


@pytest.fixture
def make_explorer(bench: Bench) -> Callable[..., Explorer]:
    """`make_explorer(name, synchronizer, place)`: explores three sums a step, keeps every row,
    is right for even seeds, and may be far ahead of the trainer.
    """
    tasks, far_ahead = put_tasks(bench.store, 60), SynchronizerConfig(sync_offset=99)
    bench.operators = [GrpoAdvantage()]

    def make(
        name: str = "explorer", synchronizer: Synchronizer | None = None, place: Place | None = None
    ) -> Explorer:
        # of another session
        bench.status = Status("run")
        synchronizer = synchronizer or Synchronizer(far_ahead)
        return bench.explorer(tasks, name=name, synchronizer=synchronizer, place=place)

    return make
