"""What a process does that is told to stop: each in a process of its own, because the signals end it."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from trinity_data.shutdown import EXIT_CODE, STOPPED, Shutdown

PROGRAM = """
import asyncio, subprocess, sys, time
from trinity_data.shutdown import STOPPED, Shutdown

stop = Shutdown(closing_seconds=1.0)
stop.install()

async def save(seconds):
    await asyncio.sleep(seconds)
    print("saved", flush=True)

async def train(seconds, bound):
    print("ready", flush=True)
    try:
        await asyncio.sleep(60)
    finally:
        print("whole" if await stop.bounded(save(seconds), bound) else "given up", flush=True)

def body():
    WHAT

try:
    body()
except KeyboardInterrupt:
    print(STOPPED, file=sys.stderr)
    sys.exit(130)
finally:
    stop.is_over()
"""


def signalled(what: str, *after: tuple[signal.Signals, float]) -> tuple[list[str], float]:
    """What a program prints that is sent signals, each so many seconds after it was
    ready or the signal before.
    """
    program = PROGRAM.replace("WHAT", textwrap.indent(textwrap.dedent(what), "    ").strip())
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    for number, seconds in after:
        time.sleep(seconds)
        process.send_signal(number)
    started = time.monotonic()
    output = process.communicate(timeout=60)[0]
    assert process.returncode == EXIT_CODE, output
    assert "Traceback" not in output and output.count(STOPPED) == 1, output
    return output.splitlines(), time.monotonic() - started


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_work_that_was_begun_comes_to_its_end(number: signal.Signals) -> None:
    lines, _ = signalled("stop.run(train(0.3, 20))", (number, 0.1))
    assert [line for line in lines if "stopping" not in line] == ["saved", "whole", STOPPED]


def test_a_second_signal_does_not_wait_for_it() -> None:
    lines, seconds = signalled("stop.run(train(50, 50))", (signal.SIGINT, 0.1), (signal.SIGINT, 0.5))
    assert "given up" in lines and seconds < 20


def test_work_that_takes_too_long_is_given_up() -> None:
    lines, seconds = signalled("stop.run(train(50, 0.2))", (signal.SIGTERM, 0.1))
    assert "given up" in lines and seconds < 20


@pytest.mark.parametrize(
    "what",
    [
        # code that blocks the loop, a thread that nobody can end, clean-up that hangs
        "async def hang():\n    print('ready', flush=True)\n    while True: time.sleep(1)\nstop.run(hang())",
        (
            "async def hang():\n    print('ready', flush=True)\n    await asyncio.to_thread(time.sleep, "
            "60)\nstop.run(hang())"
        ),
        "try:\n    print('ready', flush=True)\n    time.sleep(60)\nfinally:\n    time.sleep(60)",
    ],
)
def test_whatever_code_does_the_process_ends(what: str) -> None:
    assert signalled(what, (signal.SIGINT, 0.1), (signal.SIGINT, 0.2))[1] < 20


def test_a_signal_after_the_end_is_reported_as_any_other() -> None:
    signalled("stop.is_over(); print('ready', flush=True); time.sleep(60)", (signal.SIGINT, 0.1))


def test_processes_that_were_started_end_with_it(tmp_path: Path) -> None:
    what = f"""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    open({str(tmp_path / "child")!r}, "w").write(str(child.pid))
    stop.is_over(); print('ready', flush=True); time.sleep(60)
    """
    signalled(what, (signal.SIGINT, 0.1))
    with pytest.raises(OSError, match="No such"):
        _wait_for_its_end(int((tmp_path / "child").read_text()))


def _wait_for_its_end(pid: int) -> None:
    for _ in range(200):
        with open(f"/proc/{pid}/stat") as stat:
            if stat.read().rpartition(")")[2].split()[0] == "Z":
                raise OSError("No such process: it has ended and nobody has asked how")
        time.sleep(0.1)


def test_work_that_is_not_stopped_runs_to_its_end_and_raises_what_it_raises() -> None:
    stop, done = Shutdown(), list[int]()

    async def work() -> None:
        done.append(1)

    async def broken() -> None:
        raise OSError("disk full")

    stop.run(work())
    assert done == [1]
    with pytest.raises(OSError, match="disk full"):
        asyncio.run(stop.bounded(broken(), 1))
