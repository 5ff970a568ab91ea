"""Code that a model wrote, in a process of its own: limits on time, memory, files and output, and no network.

This keeps a run from being hurt by mistakes and by ordinary mischief. It is no sandbox against an attacker:
the process is the user's own and may read what the user may read. Where namespaces are not allowed, the
network stays reachable, and `network_cut` of the result says so.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

# runs first in the new process, before the code. CLONE_NEWUSER | CLONE_NEWNET:
# a network of its own with nothing in it
_STARTER = """
import ctypes, os, resource, runpy, sys
said_to, seconds, memory, file_bytes = map(int, sys.argv[1:])
libc = ctypes.CDLL(None)
libc.prctl(1, 9)
cut = libc.unshare(0x10000000 | 0x40000000) == 0
os.write(said_to, b"1" if cut else b"0")
os.close(said_to)
for limit, value in ((resource.RLIMIT_CPU, seconds), (resource.RLIMIT_AS, memory),
                     (resource.RLIMIT_FSIZE, file_bytes), (resource.RLIMIT_CORE, 0),
                     (resource.RLIMIT_NOFILE, 64)):
    resource.setrlimit(limit, (value, value))
sys.argv = ["code.py"]
runpy.run_path("code.py", run_name="__main__")
"""


@dataclass(frozen=True)
class CodeResult:
    """What came of running code."""

    returncode: int | None
    """0 when it ended well; negative: the signal that ended it; None: it was stopped at its deadline."""
    output: str
    """The first `max_output` characters of what it printed, errors included."""
    network_cut: bool
    """Whether it ran without a network."""

    @property
    def ok(self) -> bool:
        """Whether it ended by itself and without an error."""
        return self.returncode == 0


def run_code(
    code: str,
    *,
    stdin: str = "",
    timeout_seconds: float = 10.0,
    memory_bytes: int = 2**30,
    max_file_bytes: int = 2**24,
    max_output: int = 10_000,
) -> CodeResult:
    """Runs Python code in an empty folder that is removed afterwards, and waits for it.

    Raises nothing for bad code.
    """
    limits = (f"{int(timeout_seconds) + 1}", f"{memory_bytes}", f"{max_file_bytes}")
    with tempfile.TemporaryDirectory(prefix="trinity_code_") as folder:
        Path(folder, "code.py").write_text(code, encoding="utf-8", errors="replace")
        with tempfile.TemporaryFile() as input_file:
            input_file.write(stdin.encode("utf-8", "replace"))
            input_file.seek(0)
            read_end, write_end = os.pipe()
            try:
                process = subprocess.Popen(
                    [sys.executable, "-I", "-B", "-c", _STARTER, f"{write_end}", *limits],
                    stdin=input_file,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    cwd=folder,
                    env={"PATH": os.environ.get("PATH", ""), "HOME": folder, "LANG": "C.UTF-8"},
                    pass_fds=[write_end],
                    start_new_session=True,
                )
                os.close(write_end)
                returncode, output = _wait(process, timeout_seconds, max_output)
                network_cut = os.read(read_end, 1) == b"1"
            finally:
                os.close(read_end)
    return CodeResult(returncode, output, network_cut)


def _wait(
    process: subprocess.Popen[bytes], timeout_seconds: float, max_output: int
) -> tuple[int | None, str]:
    """Reads what is printed, keeps its beginning, and ends the process with all its children."""
    kept = bytearray()
    assert process.stdout is not None
    out = process.stdout

    def read() -> None:
        while block := out.read1(65536):  # type: ignore[attr-defined]
            kept.extend(block[: 4 * max_output - len(kept)])

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        returncode: int | None = process.wait(timeout_seconds)
    except subprocess.TimeoutExpired:
        returncode = None
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    reader.join(1.0)
    return returncode, kept.decode("utf-8", "replace")[:max_output]
