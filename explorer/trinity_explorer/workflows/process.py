"""One process of a workflow, as the run sees it: rollouts go in, rewards or failures come out.

Whatever the process does, the run goes on: it is pinged, it is ended with all it started, and its messages
are checked.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Coroutine, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from trinity_data.dataset.task import Task
from trinity_data.errors import ConfigError, EngineError, RolloutError
from trinity_data.log_files import WORKFLOWS, in_role
from trinity_explorer.chat import ChatModel
from trinity_explorer.rewards.reward import Reward, as_reward
from trinity_explorer.workflows import protocol
from trinity_explorer.workflows.output import log_output
from trinity_explorer.workflows.registry import WorkflowSpec

log = logging.getLogger(__name__)

START_SECONDS = 300.0
PING_SECONDS = 1.0
SILENT_SECONDS = 10.0
"""Without a sign of life for so long, something holds the interpreter, and nothing else runs there."""
CANCEL_SECONDS = 2.0
"""A rollout that awaits something ends at once when it is cancelled;
one that did not by then blocks its thread.
"""
MAX_ERROR = 2_000


class ProcessLostError(Exception):
    """The process ended or had to be ended while rollouts ran in it; which of them caused it is not known."""


class WorkflowError(Exception):
    """What users' code raised, with its type; another attempt may end better."""

    def __init__(self, text: str, trace: str) -> None:
        super().__init__(text)
        self.traceback = trace


@dataclass(frozen=True)
class ProcessSettings:
    """What the processes of a run's workflows are given."""

    env: Mapping[str, str] = field(default_factory=dict)
    """Added to the run's own environment."""
    memory_bytes: int = 16 * 2**30
    """Most private memory of a process."""
    silent_seconds: float = SILENT_SECONDS


@dataclass
class _Rollout:
    model: ChatModel
    outcome: asyncio.Future[Reward]
    calls: set[asyncio.Task[Any]] = field(default_factory=set)


class WorkflowProcess:
    """A started process. Rollouts that are in it when it is lost raise ProcessLostError."""

    def __init__(self, spec: WorkflowSpec, settings: ProcessSettings, *, alone: bool) -> None:
        self.spec, self.settings, self.alone = spec, settings, alone
        self.draining = False
        """Whether it takes no more rollouts."""
        self.lost = ""
        """Why it is gone."""
        self._rollouts: dict[int, _Rollout] = {}
        self._abandoned: set[int] = set()
        self._last_number = 0
        self._heard_at = time.monotonic()
        self._background: set[asyncio.Task[Any]] = set()

    @property
    def num_running(self) -> int:
        return len(self._rollouts)

    @property
    def is_usable(self) -> bool:
        return not (self.draining or self.lost)

    @property
    def is_idle(self) -> bool:
        """Whether nothing runs in it, cancelled rollouts included."""
        return self.is_usable and not (self._rollouts or self._abandoned)

    async def start(self) -> None:
        """Returns when the workflow is built there. Raises ConfigError when it cannot be."""
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = _spawn(theirs, self.settings)
        assert self._process.stdout is not None
        printed = log_output(self._process.stdout, self.spec.label)
        _keep(self._background, in_role(WORKFLOWS, printed))
        self._reader, self._writer = await asyncio.open_connection(sock=ours)
        setup = {"parent": os.getpid(), "memory_bytes": self.settings.memory_bytes, "spec": vars(self.spec)}
        self._send(setup)
        try:
            async with asyncio.timeout(START_SECONDS):
                first = await self._receive()
        except TimeoutError:
            self.kill("")
            raise ConfigError(
                f"workflow {self.spec.label}: loading it took more than {START_SECONDS:g} s"
            ) from None
        except (OSError, ValueError, asyncio.IncompleteReadError):
            self.kill("")
            ended = _how_it_ended(self._process.wait())
            raise ConfigError(
                f"workflow {self.spec.label}: its process {ended} while it was loaded"
            ) from None
        except asyncio.CancelledError:
            self.kill("the run ended")
            raise
        if "refused" in first:
            self.kill("")
            raise ConfigError(str(first["refused"]))
        self._heard_at = time.monotonic()
        _keep(self._background, in_role(WORKFLOWS, self._listen()))
        _keep(self._background, self._watch())

    async def run(self, task: Task, model: ChatModel) -> Reward:
        """One rollout. When it is cancelled and goes on nevertheless, the process is draining."""
        if self.lost:
            raise ProcessLostError(self.lost)
        self._last_number += 1
        number = self._last_number
        rollout = _Rollout(model, asyncio.get_running_loop().create_future())
        self._rollouts[number] = rollout
        names = list(model.auxiliary_models)
        self._send({"run": number, "task": protocol.task_to_message(task), "auxiliary_models": names})
        try:
            return await rollout.outcome
        except asyncio.CancelledError:
            self._abandoned.add(number)
            if not self.lost:
                self._send({"cancel": number})
                _keep(self._background, self._drain_unless_ended(number))
            raise
        finally:
            self._rollouts.pop(number, None)
            for call in rollout.calls:
                call.cancel()
            self._end_if_idle()

    def kill(self, why: str) -> None:
        """Ends the process and all that it started."""
        if self.lost:
            return
        self.lost = why or "it was ended"
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        for rollout in self._rollouts.values():
            if not rollout.outcome.done():
                rollout.outcome.set_exception(ProcessLostError(self.lost))
        if hasattr(self, "_writer"):
            self._writer.close()

    async def close(self) -> None:
        """Ends the process and waits for its end."""
        self.kill("the run ended")
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        await asyncio.to_thread(self._process.wait)

    async def _drain_unless_ended(self, number: int) -> None:
        await asyncio.sleep(CANCEL_SECONDS)
        if number in self._abandoned:
            self.draining = True
            self._end_if_idle()

    def _end_if_idle(self) -> None:
        if self.draining and not self._rollouts:
            self.kill("a rollout blocked it beyond its deadline")

    def _send(self, message: protocol.Message) -> None:
        self._writer.write(protocol.encode(message))

    async def _receive(self) -> protocol.Message:
        (size,) = protocol.LENGTH.unpack(await self._reader.readexactly(protocol.LENGTH.size))
        if size > protocol.MAX_BYTES:
            raise ValueError(f"a message of {size} bytes")
        return protocol.decode(await self._reader.readexactly(size))

    async def _listen(self) -> None:
        try:
            while True:
                self._take(await self._receive())
        except (asyncio.IncompleteReadError, ConnectionError):
            with suppress(subprocess.TimeoutExpired):
                self.kill(f"it {_how_it_ended(await asyncio.to_thread(self._process.wait, 1.0))}")
            self.kill("it closed its connection")
        except Exception as error:  # the boundary to what a process of users' code says
            self.kill(f"it said what cannot be read: {type(error).__name__}: {error}")

    def _take(self, message: protocol.Message) -> None:
        self._heard_at = time.monotonic()
        if "chat" in message:
            rollout = self._rollouts.get(message["chat"])
            if rollout is not None:
                _keep(rollout.calls, self._chat(rollout.model, message))
        elif "end" in message:
            self._abandoned.discard(message["end"])
            rollout = self._rollouts.get(message["end"])
            if "spoiled" in message:
                self.kill(f"{message['spoiled']} was changed, which all rollouts of a process share")
            elif rollout is None or rollout.outcome.done():
                return
            elif "reward" in message:
                try:
                    rollout.outcome.set_result(as_reward(Reward(**message["reward"]), "the workflow"))
                except RolloutError as error:
                    rollout.outcome.set_exception(error)
            else:
                text, trace = str(message["error"])[:MAX_ERROR], str(message["traceback"])
                log.debug("%s: a rollout failed: %s", self.spec.label, trace)
                final = message["kind"] == "final"
                rollout.outcome.set_exception(RolloutError(text) if final else WorkflowError(text, trace))

    async def _chat(self, model: ChatModel, message: protocol.Message) -> None:
        """Asks the policy, or the auxiliary model that the message names, for a rollout.

        What goes wrong is the rollout's to hear; a dead engine ends the run.
        """
        answer: protocol.Message = {"answer": message["chat"], "call": message["call"]}
        try:
            asked = model.auxiliary_models[message["model"]] if message["model"] else model
            reply = await asked.chat(message["messages"], tools=message["tools"], **message["changes"])
            answer["reply"] = protocol.reply_to_message(reply)
        except EngineError as error:
            rollout = self._rollouts.get(message["chat"])
            if rollout is not None and not rollout.outcome.done():
                rollout.outcome.set_exception(error)
            answer |= {"error": str(error), "kind": "engine"}
        except Exception as error:  # the boundary to what a workflow asks for
            final = isinstance(error, RolloutError)
            answer |= {"error": str(error) if final else f"{type(error).__name__}: {error}", "kind": "final"}
        if not self.lost:
            self._send(answer)

    async def _watch(self) -> None:
        """A process that gives no sign of life is lost; not one with a single rollout,
        whose deadline will end it.
        """
        while not self.lost:
            self._send({"ping": 0})
            await asyncio.sleep(PING_SECONDS)
            silent = time.monotonic() - self._heard_at
            if silent > self.settings.silent_seconds and not self.alone:
                self.kill(f"it gave no sign of life for {silent:.0f} s")


def _keep(tasks: set[asyncio.Task[Any]], work: Coroutine[Any, Any, Any]) -> None:
    """Begins the work as a task that is among `tasks` until it ends: the loop alone would forget it."""
    task = asyncio.get_running_loop().create_task(work)
    tasks.add(task)
    task.add_done_callback(tasks.discard)


def _spawn(theirs: socket.socket, settings: ProcessSettings) -> subprocess.Popen[bytes]:
    module = "trinity_explorer.workflows.process_main"
    return subprocess.Popen(
        [sys.executable, "-P", "-m", module, f"{theirs.fileno()}"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, **settings.env},
        pass_fds=[theirs.fileno()],
        start_new_session=True,
    )


def _how_it_ended(returncode: int) -> str:
    if returncode >= 0:
        return f"ended with exit code {returncode}"
    try:
        return f"was ended by {signal.Signals(-returncode).name}"
    except ValueError:
        return f"was ended by signal {-returncode}"
