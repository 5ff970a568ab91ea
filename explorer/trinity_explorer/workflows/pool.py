"""The processes that users' workflows and rewards run in, and who answers for the end of one.

When a process is lost, all rollouts that ran in it are tried again, each alone in a process:
the guilty one is found, and the others are not hurt.
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
from trinity_explorer.reply import ChatModel
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
        self._hosts: list[WorkflowProcess] = []
        self._alone: list[WorkflowProcess] = []
        """Idle ones, for a rollout alone."""
        self._all: list[WorkflowProcess] = []
        self._starting = asyncio.Lock()
        # as many as can be started at a time: where every rollout ends its process, each costs a start
        self._places_alone = asyncio.Semaphore(os.cpu_count() or 1)

    async def ready(self) -> None:
        """Returns when there are processes. Raises ConfigError when the workflow cannot be built."""
        if sum(host.is_usable for host in self._hosts) >= self.num_processes:
            return
        async with self._starting:
            self._hosts = [host for host in self._hosts if host.is_usable]
            missing = self.num_processes - len(self._hosts)
            self._hosts += await asyncio.gather(*(self._start(alone=False) for _ in range(missing)))

    async def run(self, task: Task, model: ChatModel) -> Reward:
        """One rollout beside others. Raises ProcessLostError when their process is lost."""
        await self.ready()
        usable = [host for host in self._hosts if host.is_usable]
        if not usable:
            raise ProcessLostError("its process is gone")
        return await min(usable, key=lambda host: host.num_running).run(task, model)

    @asynccontextmanager
    async def alone(self) -> AsyncIterator[Workflow]:
        """A place where nothing else runs, so that the end of its process is the rollout's own doing."""
        async with self._places_alone:
            host = self._alone.pop() if self._alone else await self._start(alone=True)
            try:
                yield _Alone(host)
            finally:
                if host.is_idle:
                    self._alone.append(host)
                else:
                    host.kill("a rollout blocked it beyond its deadline")

    async def close(self) -> None:
        await asyncio.gather(*(host.close() for host in self._all))

    async def _start(self, *, alone: bool) -> WorkflowProcess:
        # those that are gone are forgotten once they were waited for
        gone = [host for host in self._all if host.lost]
        self._all = [host for host in self._all if not host.lost]
        await asyncio.gather(*(host.close() for host in gone))
        host = WorkflowProcess(self.spec, self.settings, alone=alone)
        self._all.append(host)
        await host.start()
        return host


class _Alone:
    """The one rollout of a process."""

    def __init__(self, host: WorkflowProcess) -> None:
        self.host = host

    async def run(self, task: Task, model: ChatModel) -> Reward:
        try:
            return await self.host.run(task, model)
        except ProcessLostError as lost:
            raise RolloutError(f"the process of {self.host.spec.label}: {lost}") from None


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
        await asyncio.gather(*(hosted.ready() for hosted in self._hosted()))

    def _hosted(self) -> list[PooledWorkflow]:
        return [workflow for workflow in self._built.values() if isinstance(workflow, PooledWorkflow)]

    async def __aenter__(self) -> WorkflowPool:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.gather(*(hosted.close() for hosted in self._hosted()))
