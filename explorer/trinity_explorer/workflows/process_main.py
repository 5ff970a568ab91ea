"""The process that workflows and rewards of the user's run in:
`python -m trinity_explorer.workflows.process_main FD`.

Each rollout has a thread and an event loop of its own, so one that blocks stops itself alone. The policy is
asked through the run's process. Whatever a rollout raises is sent as its failure.
"""

from __future__ import annotations

import asyncio
import builtins
import ctypes
import io
import json
import os
import resource
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Iterator
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from trinity_data.errors import EngineError, RolloutError
from trinity_data.tokenizer import Messages, Tools
from trinity_explorer.chat import AuxiliaryModels, Reply
from trinity_explorer.rewards.reward import as_reward
from trinity_explorer.workflows import protocol
from trinity_explorer.workflows.registry import (
    AUXILIARY_PARAMETER,
    WorkflowSpec,
    build_workflow,
    check_workflow,
    takes_auxiliary_models,
)
from trinity_explorer.workflows.workflow import Workflow

MAX_ERROR = 2_000
MAX_TRACEBACK = 4_000
MAX_LINE = 4_000
PR_SET_PDEATHSIG = 1


class RemoteChat:
    """The policy, as a rollout of this process sees it, or one of the auxiliary models."""

    def __init__(self, line: Line, number: int, calls: Iterator[int], *, name: str = "") -> None:
        """`calls` numbers the questions of the rollout; `name` is that of an auxiliary model."""
        self.replies: list[Reply] = []
        self.auxiliary_models = AuxiliaryModels()
        self._line, self._number, self._calls, self._name = line, number, calls, name

    async def chat(self, messages: Messages, *, tools: Tools = (), **changes: Any) -> Reply:
        request = json_copy({"messages": list(messages), "tools": list(tools), "changes": changes})
        request["model"] = self._name
        answer = await self._line.ask(self._number, next(self._calls), request)
        if "error" in answer:
            raise (EngineError if answer["kind"] == "engine" else RolloutError)(answer["error"])
        reply = protocol.reply_from_message(answer["reply"], request["messages"], request["tools"])
        self.replies.append(reply)
        return reply


def json_copy(value: Any) -> Any:
    """As it will arrive. Raises RolloutError for what is not plain data."""
    try:
        return protocol.decode(protocol.encode(value)[protocol.LENGTH.size :])
    except (TypeError, ValueError, RecursionError) as error:
        raise RolloutError(f"model.chat was given what is no plain data: {error}") from error


class Line:
    """The connection to the run. A copy of this process that was forked off is silent."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection: socket.socket | None = connection
        self._lock = threading.Lock()
        self._waiting: dict[
            tuple[int, int], tuple[asyncio.AbstractEventLoop, asyncio.Queue[protocol.Message]]
        ] = {}
        os.register_at_fork(after_in_child=partial(setattr, self, "_connection", None))

    def send(self, message: protocol.Message) -> None:
        if self._connection is None:
            os._exit(0)
        data = protocol.encode(message)
        with self._lock:
            self._connection.sendall(data)

    def receive(self) -> protocol.Message | None:
        """The next message, or None when the run is gone."""
        head = self._exactly(protocol.LENGTH.size)
        body = self._exactly(protocol.LENGTH.unpack(head)[0]) if head else None
        return None if body is None else protocol.decode(body)

    def requests(self) -> Iterator[protocol.Message]:
        """Rollouts to begin and to cancel, until the run is gone; answers go to the rollouts that wait."""
        while (message := self.receive()) is not None:
            if "answer" in message:
                self.answer(message)
            elif "ping" in message:
                self.send({"pong": message["ping"]})
            else:
                yield message

    def _exactly(self, size: int) -> bytes | None:
        data = bytearray()
        while len(data) < size:
            assert self._connection is not None
            block = self._connection.recv(min(size - len(data), 2**20))
            if not block:
                return None
            data += block
        return bytes(data)

    async def ask(self, number: int, call: int, request: protocol.Message) -> protocol.Message:
        answers: asyncio.Queue[protocol.Message] = asyncio.Queue()
        self._waiting[number, call] = (asyncio.get_running_loop(), answers)
        try:
            self.send({"chat": number, "call": call} | request)
            return await answers.get()
        finally:
            self._waiting.pop((number, call), None)

    def answer(self, message: protocol.Message) -> None:
        """Hands an answer to the rollout that waits for it, if it still does."""
        if (waiting := self._waiting.get((message["answer"], message["call"]))) is not None:
            loop, answers = waiting
            _call_in(loop, answers.put_nowait, message)


def _call_in(loop: asyncio.AbstractEventLoop, *call: Any) -> None:
    try:
        loop.call_soon_threadsafe(*call)
    except RuntimeError:  # the rollout ended in the meantime
        return


class Lines(io.TextIOBase):
    """The standard output, by whole lines: those of threads that print at the same time are not torn."""

    def __init__(self) -> None:
        self._unfinished = threading.local()

    def write(self, text: str) -> int:
        lines, newline, last_line = (getattr(self._unfinished, "text", "") + text).rpartition("\n")
        self._unfinished.text = last_line
        if newline:
            self._print(f"{lines}\n")
        elif len(last_line) > MAX_LINE:
            self._unfinished.text = ""
            self._print(last_line)
        return len(text)

    def _print(self, text: str) -> None:
        data = text.encode("utf-8", "replace")
        while data:
            data = data[os.write(1, data) :]


class Rollouts:
    """The rollouts that run in this process."""

    def __init__(self, workflow: Workflow, name: str, line: Line) -> None:
        self.workflow, self.name, self.line = workflow, name, line
        self._running: dict[int, tuple[asyncio.AbstractEventLoop, asyncio.Future[Any]]] = {}
        self._takes_models = takes_auxiliary_models(workflow.run)
        self._shared = _shared_state()
        self._directory = os.getcwd()

    def begin(self, message: protocol.Message) -> None:
        threading.Thread(target=self._run, args=(message,), daemon=True).start()

    def cancel(self, number: int) -> None:
        """A rollout that awaits something ends; one that blocks does not notice."""
        if (running := self._running.get(number)) is not None:
            _call_in(running[0], running[1].cancel)

    def _run(self, message: protocol.Message) -> None:
        number, loop = message["run"], asyncio.new_event_loop()
        outcome: protocol.Message
        try:
            task, calls = protocol.task_from_message(message["task"]), count(1)
            model = RemoteChat(self.line, number, calls)
            for name in message["auxiliary_models"]:
                model.auxiliary_models[name] = RemoteChat(self.line, number, calls, name=name)
            more = {AUXILIARY_PARAMETER: model.auxiliary_models} if self._takes_models else {}
            rollout = asyncio.ensure_future(self.workflow.run(task, model, **more), loop=loop)
            self._running[number] = (loop, rollout)
            reward = as_reward(loop.run_until_complete(rollout), f"the workflow {self.name!r}")
            outcome = {"reward": protocol.reward_to_message(reward)}
        # the boundary to users' code; SystemExit and KeyboardInterrupt are its errors too
        except BaseException as error:
            final = isinstance(error, RolloutError | EngineError)
            text = str(error) if final else f"{type(error).__name__}: {error}"
            trace = "".join(traceback.format_exception(error))
            outcome = {"error": text[:MAX_ERROR], "kind": "final" if final else "other"}
            outcome["traceback"] = trace[-MAX_TRACEBACK:]
        self._running.pop(number, None)
        if changed := self._changed():
            outcome = {"spoiled": changed}
        self.line.send({"end": number} | outcome)
        loop.close()

    def _changed(self) -> str:
        """What rollouts share and one of them changed."""
        if os.getcwd() != self._directory:
            os.chdir(self._directory)
            return "the working directory"
        now = _shared_state()
        return next((name for name, value in self._shared.items() if now.get(name) is not value), "")


def _shared_state() -> dict[str, object]:
    """What every rollout of a process uses."""
    modules = (builtins, json, os, sys)
    skipped = ("sys.last_", "sys.ps", "builtins._")
    state = {
        f"{m.__name__}.{key}": value for m in modules for key, value in vars(m).items() if callable(value)
    }
    return {name: value for name, value in state.items() if not name.startswith(skipped)}


def main() -> None:
    """Serves until the run hangs up; then this process and all it started end."""
    connection = socket.socket(fileno=int(sys.argv[1]))
    line = Line(connection)
    setup = line.receive()
    if setup is None:
        return
    _prepare_process(setup)
    spec = WorkflowSpec(**setup["spec"])
    _make_siblings_importable(spec)
    try:
        workflow = build_workflow(spec)
    except BaseException as error:  # the boundary to users' code, which may also exit
        line.send({"refused": str(error) or type(error).__name__})
        return
    rollouts = Rollouts(workflow, spec.workflow, line)
    line.send({"ready": os.getpid()})
    for request in line.requests():
        if "run" in request:
            rollouts.begin(request)
        else:
            rollouts.cancel(request["cancel"])
    os.killpg(0, signal.SIGKILL)


def check() -> None:
    """Reads specs from the standard input and writes what is wrong with each, as JSON."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    problems: list[list[tuple[str, str]]] = []
    for query in json.load(sys.stdin):
        spec = WorkflowSpec(**query["spec"])
        _make_siblings_importable(spec)
        problems.append(check_workflow(spec, query["columns"]))
    json.dump(problems, out)
    out.flush()
    # without waiting for threads or exit handlers that the checked code made
    os._exit(0)


def _prepare_process(setup: protocol.Message) -> None:
    # ended by the kernel if the run is killed; the run may have ended before this was asked for
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != setup["parent"]:
        os._exit(0)
    # the run decides when this process ends
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    memory = setup["memory_bytes"]
    resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    sys.stdout = sys.stderr = Lines()


def _make_siblings_importable(spec: WorkflowSpec) -> None:
    """Files beside a `./file.py` can be imported by name, as they can when it is run as a script."""
    for name in (spec.workflow, spec.reward_fn):
        where = name.rpartition(":")[0]
        if where.endswith(".py"):
            for folder in (Path.cwd(), Path(spec.base_dir)):
                path = str((folder / where).resolve().parent)
                if path not in sys.path:
                    sys.path.insert(0, path)


if __name__ == "__main__":
    check() if sys.argv[1] == "--check" else main()
