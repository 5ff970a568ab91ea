"""How the processes of a run use the machine: threads, memory, and how often Python looks for garbage."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import socket
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

# Without these, every step gives its large tensors back to the system and faults them in again, which on a
# virtual machine was seen to take half of the processors' time. One arena, because the others give back
# whatever is above 64 MB.
KEEP_MEMORY = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": "4000000000",
    "MALLOC_TRIM_THRESHOLD_": "4000000000",
}

_PR_SET_PDEATHSIG = 1  # of linux/prctl.h


def compute_environment(num_processes: int) -> dict[str, str]:
    """For each of the ranks and engines that compute at the same time.

    The user's own environment takes precedence. Where their threads compete for the cores,
    each of them was seen to be several times slower.
    """
    threads = max(1, (os.cpu_count() or 1) // num_processes)
    chosen = KEEP_MEMORY | {"OMP_NUM_THREADS": f"{threads}", "TOKENIZERS_PARALLELISM": "false"}
    return {name: os.environ.get(name, value) for name, value in chosen.items()}


@contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """The variables for this process and those it starts, until the block ends."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def relaxed_gc() -> Iterator[None]:
    """Rows are many small objects without cycles.

    Looking through them for cycles halves the rate of rollouts.
    """
    before = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(100_000, 20, 100)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()


def end_with_raylet() -> None:
    """Lets the kernel end this process, a Ray worker, when its raylet dies:
    what a killed one leaves would never end.
    """
    if sys.platform == "linux" and os.environ.get("RAY_RAYLET_PID") == f"{os.getppid()}":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def this_process() -> str:
    """For people."""
    return f"process {os.getpid()} on {socket.gethostname()}"


def machine_id() -> str:
    """Of the machine since its start, as its processes see each other: those with one id share process ids
    and memory.
    """
    return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()}/{os.readlink('/proc/self/ns/pid')}"


def start_of(pid: int) -> int | None:
    """When a process of this machine was started, in ticks; None of one that has ended.

    Ids are used again; an id and its start are not.
    """
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if state in "ZX" else int(fields[18])


def descendants(pid: int) -> list[int]:
    """Processes that `pid` started, and those that they did, parents first."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        # processes come and go while the list is read
        with suppress(OSError, ValueError):
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(folder.name))
    processes = list(children.get(pid, []))
    for process in processes:
        processes += children.get(process, [])
    return processes


def kill_descendants(pid: int) -> None:
    """Ends them without asking; they have no say in it."""
    for process in descendants(pid):
        with suppress(ProcessLookupError, PermissionError):
            os.kill(process, signal.SIGKILL)
