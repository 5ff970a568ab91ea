"""The processes that users' workflows and rewards run in, and what happens when one ends.

When a process is lost, each of the rollouts that ran in it runs again, alone in a process:
the one that caused the loss fails, and the others do not.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import TracebackType

from trinity_data.dataset.task import Task
from trinity_data.errors import RolloutError
from trinity_explorer.chat import ChatModel
from trinity_explorer.rewards.reward import Reward
from trinity_explorer.workflows.process import ProcessLostError, ProcessSettings, WorkflowProcess
from trinity_explorer.workflows.registry import WorkflowSpec, build_workflow
from trinity_explorer.workflows.workflow import Workflow

MAX_PROCESSES = 4


class PooledWorkflow:
    """A workflow that runs in processes of its own."""

    def __init__(self, spec: WorkflowSpec, settings: ProcessSettings) -> None:
        self.spec, self.settings = spec, settings
        self.num_processes = max(1, min(MAX_PROCESSES, (os.cpu_count() or 1) // 2))
        self._shared: list[WorkflowProcess] = []
        """Each for many rollouts."""
        self._alone: list[WorkflowProcess] = []
        """Idle ones, each for one rollout."""
        self._all: list[WorkflowProcess] = []
        self._starting = asyncio.Lock()
        # as many as can be started at a time: where every rollout ends its process, each costs a start
        self._places_alone = asyncio.Semaphore(os.cpu_count() or 1)

    async def ready(self) -> None:
        """Returns when there are processes. Raises ConfigError when the workflow cannot be built."""
        if sum(process.is_usable for process in self._shared) >= self.num_processes:
            return
        async with self._starting:
            self._shared = [process for process in self._shared if process.is_usable]
            missing = self.num_processes - len(self._shared)
            self._shared += await asyncio.gather(*(self._start(alone=False) for _ in range(missing)))

    async def run(self, task: Task, model: ChatModel) -> Reward:
        """One rollout beside others. Raises ProcessLostError when their process is lost."""
        await self.ready()
        usable = [process for process in self._shared if process.is_usable]
        if not usable:
            raise ProcessLostError("its process is gone")
        return await min(usable, key=lambda process: process.num_running).run(task, model)

    @asynccontextmanager
    async def alone(self) -> AsyncIterator[Workflow]:
        """A place where nothing else runs, so that the end of its process is the rollout's own doing."""
        async with self._places_alone:
            process = self._alone.pop() if self._alone else await self._start(alone=True)
            try:
                yield _Alone(process)
            finally:
                if process.is_idle:
                    self._alone.append(process)
                else:
                    process.kill("a rollout blocked it beyond its deadline")

    async def close(self) -> None:
        await asyncio.gather(*(process.close() for process in self._all))

    async def _start(self, *, alone: bool) -> WorkflowProcess:
        # those that are gone are forgotten once they were waited for
        gone = [process for process in self._all if process.lost]
        self._all = [process for process in self._all if not process.lost]
        await asyncio.gather(*(process.close() for process in gone))
        process = WorkflowProcess(self.spec, self.settings, alone=alone)
        self._all.append(process)
        await process.start()
        return process


class _Alone:
    """The one rollout of a process."""

    def __init__(self, process: WorkflowProcess) -> None:
        self.process = process

    async def run(self, task: Task, model: ChatModel) -> Reward:
        try:
            return await self.process.run(task, model)
        except ProcessLostError as lost:
            raise RolloutError(f"the process of {self.process.spec.label}: {lost}") from None


class WorkflowPool:
    """The workflows of a stage by what they are built from: our pure ones in this process,
    all others in their own.
    """

    def __init__(self, settings: ProcessSettings) -> None:
        self.settings = settings
        self._built: dict[str, Workflow] = {}

    def get(self, spec: WorkflowSpec) -> Workflow:
        """Raises ConfigError for a pure workflow whose arguments do not fit.

        Others tell it when they start.
        """
        key = json.dumps(vars(spec), sort_keys=True, default=str)
        if key not in self._built:
            self._built[key] = build_workflow(spec) if spec.is_pure else PooledWorkflow(spec, self.settings)
        return self._built[key]

    async def start(self) -> None:
        """Starts the processes of those that were asked for so far."""
        await asyncio.gather(*(pooled.ready() for pooled in self._pooled()))

    def _pooled(self) -> list[PooledWorkflow]:
        return [workflow for workflow in self._built.values() if isinstance(workflow, PooledWorkflow)]

    async def __aenter__(self) -> WorkflowPool:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.gather(*(pooled.close() for pooled in self._pooled()))
