"""What runs first in the process of code that a model wrote, before the code; started by run_code.py.

Three processes: this one stays outside of the namespaces that it asks for; its child is their first process,
watches, and ends with all that is in them; the grandchild runs the code. Imports only what Python brings.
"""

from __future__ import annotations

import ctypes
import os
import resource
import runpy
import signal
import sys
from collections.abc import Callable
from contextlib import suppress

CODE = "code.py"
# of sched.h
NEW_MOUNTS, NEW_IPC, NEW_USER = 0x20000, 0x8000000, 0x10000000
NEW_PROCESSES, NEW_NETWORK = 0x20000000, 0x40000000
NETWORK, FILES, PROCESSES = "network", "files", "processes"
# the most that is allowed is taken
WAYS = (
    (NEW_USER | NEW_NETWORK | NEW_PROCESSES | NEW_MOUNTS | NEW_IPC, {NETWORK, FILES, PROCESSES}),
    (NEW_USER | NEW_NETWORK, {NETWORK}),
)
_DIES_WITH_PARENT, _NO_NEW_PRIVILEGES = 1, 38
_PRIVATE, _RECURSIVE = 1 << 18, 1 << 14
_SET_ATTRIBUTES, _OF_ALL_BELOW, _AT_WORKING_DIRECTORY = 442, 0x8000, -100
_READ_ONLY, _NO_SETUID, _NO_DEVICES = 1, 2, 4
_CAPABILITIES_V3 = 0x20080522
_WATCHED_EVERY = 0.02
"""Seconds."""

libc = ctypes.CDLL(None, use_errno=True)


class _MountAttributes(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("set", "clear", "propagation", "user")]


def main(report: int, seconds: int, memory: int, file_bytes: int, folder_bytes: int, processes: int) -> None:
    """Runs `code.py` of the working directory; `report` is a pipe that gets the protections there are."""
    with open(CODE, encoding="utf-8") as file:
        code = file.read()
    libc.prctl(_DIES_WITH_PARENT, signal.SIGKILL)
    protections = _separate()
    if FILES in protections and not _only_this_folder(code, folder_bytes):
        protections.discard(FILES)
    # a comma alone where there is none, since a process that was stopped before says nothing
    os.write(report, (",".join(sorted(protections)) or ",").encode())
    os.close(report)

    def limits() -> None:
        _limit(resource.RLIMIT_CPU, seconds)
        _limit(resource.RLIMIT_AS, memory)
        _limit(resource.RLIMIT_FSIZE, file_bytes)
        _limit(resource.RLIMIT_CORE, 0)
        _limit(resource.RLIMIT_NOFILE, 64)
        if PROCESSES in protections:  # it counts those of the namespace, and not all of the user's
            _limit(resource.RLIMIT_NPROC, processes)

    if PROCESSES not in protections:
        limits()
        _run_code()
    _end_as(_first_process(limits, memory, processes))


def _separate() -> set[str]:
    user, group = os.getuid(), os.getgid()
    for flags, protections in WAYS:
        if libc.unshare(flags) == 0:
            for name, line in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"),
                               ("gid_map", f"{group} {group} 1")):  # fmt: skip
                with suppress(OSError), open(f"/proc/self/{name}", "w") as file:
                    file.write(line)
            return set(protections)
    return set()


def _only_this_folder(code: str, folder_bytes: int) -> bool:
    """Makes everything read-only, and the working directory and /dev/shm empty memory of so many bytes."""
    folder = os.getcwd()
    read_only = _MountAttributes(set=_READ_ONLY)
    size = ctypes.sizeof(read_only)
    attribute = (_SET_ATTRIBUTES, _AT_WORKING_DIRECTORY, b"/", _OF_ALL_BELOW, ctypes.byref(read_only), size)
    if libc.mount(b"none", b"/", None, _PRIVATE | _RECURSIVE, None) or libc.syscall(*attribute):
        return False
    options = f"size={folder_bytes}".encode()
    for place in (folder, "/dev/shm"):
        if libc.mount(b"tmpfs", place.encode(), b"tmpfs", _NO_SETUID | _NO_DEVICES, options):
            return False
    os.chdir(folder)
    with open(CODE, "w", encoding="utf-8") as file:
        file.write(code)
    return True


def _first_process(limits: Callable[[], None], memory: int, processes: int) -> int:
    """Forks the first process of the namespaces and, in it, the code; returns the wait status of the code."""
    results, result = os.pipe()
    child = os.fork()
    if child:
        os.close(result)
        os.waitpid(child, 0)
        status = os.read(results, 32)
        return int(status) if status else signal.SIGKILL
    libc.prctl(_DIES_WITH_PARENT, signal.SIGKILL)
    # without it the code sees the machine's processes, though it can do nothing to them
    sees_its_own = libc.mount(b"proc", b"/proc", b"proc", _NO_SETUID | _NO_DEVICES, None) == 0
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    code = os.fork()
    if not code:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
        os.close(results)
        os.close(result)
        limits()
        _run_code()
    os.write(result, str(_watch(code, sees_its_own, memory, processes)).encode())
    os._exit(0)


def _watch(code: int, sees_its_own: bool, memory: int, processes: int) -> int:
    """Waits for the code as long as all processes together keep to the limits; returns its wait status."""
    while True:
        signal.sigtimedwait({signal.SIGCHLD}, _WATCHED_EVERY)
        with suppress(ChildProcessError):
            # orphans of the code end up here too
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if ended[0] == code:
                    return ended[1]
        if sees_its_own and _is_too_much(memory, processes):
            return signal.SIGKILL


def _is_too_much(memory: int, processes: int) -> bool:
    pids = [name for name in os.listdir("/proc") if name.isdigit() and name != "1"]
    if len(pids) > processes:
        return True
    resident = 0
    for pid in pids:
        with suppress(OSError), open(f"/proc/{pid}/statm") as file:
            resident += int(file.read().split()[1])
    return resident * resource.getpagesize() > memory


def _run_code() -> None:
    libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    header = (ctypes.c_uint32 * 2)(_CAPABILITIES_V3, 0)
    libc.capset(header, (ctypes.c_uint32 * 6)())
    sys.argv = [CODE]
    runpy.run_path(CODE, run_name="__main__")
    # as the end of a program does
    sys.exit(0)


def _limit(kind: int, value: int) -> None:
    resource.setrlimit(kind, (value, value))


def _end_as(status: int) -> None:
    """Ends this process as that of the code ended."""
    if os.WIFSIGNALED(status):
        _limit(resource.RLIMIT_CORE, 0)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), os.WTERMSIG(status))
        signal.pause()
    os._exit(os.WEXITSTATUS(status))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
