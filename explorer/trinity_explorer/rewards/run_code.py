"""Code that a model wrote, in a process of its own: limits on time, memory, files, processes and output, no
network, and nothing of the machine that it could change.

This keeps a run from being hurt by mistakes and by ordinary mischief. It is no sandbox against an attacker:
the process is the user's own and may read what the user may read. Where the system does not allow
namespaces, some of it is missing, and `unprotected` of the result says what.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from trinity_explorer.rewards import code_main

PROTECTIONS = {
    code_main.NETWORK: "the network can be reached",
    code_main.FILES: "files outside of its folder can be written",
    code_main.PROCESSES: "other processes can be seen, and what it starts in a session of its own stays",
}
"""What namespaces keep code from, and what is true without them."""


@dataclass(frozen=True)
class CodeResult:
    """What came of running code."""

    returncode: int | None
    """0 when it ended well; negative: the signal that ended it; None: it was stopped at its deadline."""
    output: str
    """The first `max_output` characters of what it printed, errors included."""
    unprotected: tuple[str, ...] = ()
    """Names of `PROTECTIONS` that the machine did not allow."""

    @property
    def network_cut(self) -> bool:
        """Whether it ran without a network."""
        return code_main.NETWORK not in self.unprotected

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
    max_folder_bytes: int = 2**26,
    max_processes: int = 64,
    max_output: int = 10_000,
) -> CodeResult:
    """Runs Python code in an empty folder that is removed afterwards, and waits for it.

    `memory_bytes` is of each process, and of all together where other processes cannot be seen.
    Raises nothing for bad code.
    """
    limits = (int(timeout_seconds) + 1, memory_bytes, max_file_bytes, max_folder_bytes, max_processes)
    with (
        tempfile.TemporaryDirectory(prefix="trinity_code_") as folder,
        tempfile.TemporaryFile() as input_file,
    ):
        Path(folder, code_main.CODE).write_text(code, encoding="utf-8", errors="replace")
        input_file.write(stdin.encode("utf-8", "replace"))
        input_file.seek(0)
        read_end, write_end = os.pipe()
        try:
            process = subprocess.Popen(
                [sys.executable, "-I", "-B", code_main.__file__, f"{write_end}", *map(str, limits)],
                stdin=input_file,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                cwd=folder,
                env=_environment(folder),
                pass_fds=[write_end],
                start_new_session=True,
            )
            os.close(write_end)
            returncode, output = _wait(process, timeout_seconds, max_output)
            unprotected = _unprotected(os.read(read_end, 100).decode())
        finally:
            os.close(read_end)
    return CodeResult(returncode, output, unprotected)


def _environment(folder: str) -> dict[str, str]:
    """Nothing of the run's own but the PATH; one thread, where libraries start one for each core."""
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    own = {"PATH": os.environ.get("PATH", ""), "HOME": folder, "TMPDIR": folder, "LANG": "C.UTF-8"}
    return own | threads


def _unprotected(report: str) -> tuple[str, ...]:
    """What is missing by the report of the process; nothing where it was stopped before the code began."""
    names: Collection[str] = report.split(",") if report else PROTECTIONS
    return tuple(name for name in PROTECTIONS if name not in names)


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
