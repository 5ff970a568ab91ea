"""Which operator a worker process is at, kept on file, so that it is known when the process has ended.

A file costs a microsecond; a message to another process would cost more than most operators do.
"""

from __future__ import annotations

import json
import mmap
import os
import signal
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from trinity_data.nodes import ray_folder
from trinity_data.processes import end_with_raylet

_BYTES = 4096
TIMED_OUT = "did not end within `operator_timeout`"


@dataclass(frozen=True)
class WorkerNote:
    """Where a worker keeps what it is at."""

    node_id: str
    pid: int
    path: Path


class AtWork:
    """Called with a description before each operator, since it may be the last that this process does, and
    with "" behind the last. The kernel ends the process when the operator's time is up: no thread of ours
    could, while an operator holds Python's lock.
    """

    def __init__(self, timeout_seconds: float) -> None:
        self.timeout_seconds = timeout_seconds
        file, path = tempfile.mkstemp(prefix="trinity-at-work-", dir=ray_folder())
        os.truncate(file, _BYTES)
        self._memory = mmap.mmap(file, _BYTES)
        os.close(file)
        self.note = WorkerNote(ray.get_runtime_context().get_node_id(), os.getpid(), Path(path))
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
        self("")

    def __call__(self, operator: str) -> None:
        text = json.dumps([operator[: _BYTES // 8], time.monotonic()])
        self._memory[:] = text.encode().ljust(_BYTES)
        signal.setitimer(signal.ITIMER_REAL, self.timeout_seconds if operator else 0)

    def close(self) -> None:
        self("")
        self._memory.close()
        self.note.path.unlink(missing_ok=True)


class WorkerNotes:
    """A Ray actor that knows where each worker keeps what it is at."""

    def __init__(self) -> None:
        end_with_raylet()
        self.worker_notes = list[WorkerNote]()

    def register(self, note: WorkerNote) -> None:
        self.worker_notes.append(note)

    def notes(self) -> list[WorkerNote]:
        return self.worker_notes


def ended_at_work(notes: Sequence[WorkerNote]) -> tuple[str, float]:
    """The operator that was at work in a process that has ended, or "", and for how many seconds."""
    for note in notes:
        operator, seconds = _read(note)
        if operator:
            return operator, seconds
    return "", 0.0


def describe_end(notes: Sequence[WorkerNote], limit: float) -> str:
    """How a process with one of these notes ended, and at which operator; empty where none did.

    `limit` is the `operator_timeout`, in seconds.
    """
    operator, seconds = ended_at_work(notes)
    if not operator:
        return ""
    if seconds >= limit:
        return f"{operator}, {TIMED_OUT}, {limit:g} s"
    return f"{operator}, ended its process or was killed"


def _read(note: WorkerNote) -> tuple[str, float]:
    if note.node_id == ray.get_runtime_context().get_node_id():
        return _of_ended_process(note)
    there = NodeAffinitySchedulingStrategy(note.node_id, soft=False)
    task = ray.remote(num_cpus=0)(_of_ended_process).options(scheduling_strategy=there)
    try:
        result: tuple[str, float] = ray.get(task.remote(note), timeout=10)
    except RayError:  # the machine is gone as well
        return "", 0.0
    return result


def _of_ended_process(note: WorkerNote) -> tuple[str, float]:
    """What runs on the worker's machine."""
    try:
        if not _has_ended(note.pid):
            return "", 0.0
        operator, since = json.loads(note.path.read_bytes())
        note.path.unlink()
    except (OSError, ValueError):
        return "", 0.0
    return operator, time.monotonic() - since


def _has_ended(pid: int) -> bool:
    """Also of a process that nobody has waited for yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True
