"""A run of several commands that is disturbed at random times; a command that ends early is started again."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.launch.conftest import processes_of

COMMON = ("ray_host", "raylet/raylet", "StoreActor", "WorkerActor")
"""Marks of the processes that serve a pair."""


@dataclass
class DisturbedRun:
    """Commands by name, each with how it is started. Their output is read when they end: make it little."""

    root: Path
    start: Mapping[str, Callable[[], subprocess.Popen[str]]]
    chance: random.Random
    running: dict[str, subprocess.Popen[str]] = field(default_factory=dict)
    outputs: list[str] = field(default_factory=list)
    """Of commands that have ended."""

    def to_the_end(self, disturb: Callable[[], None], *, most_seconds: float) -> None:
        """Until all have ended well; `disturb` is called at most so many seconds apart."""
        done = set[str]()
        while len(done) < len(self.start):
            for name in self.start.keys() - done:
                process = self.running.get(name)
                if process is not None and process.poll() is not None:
                    self.outputs.append(process.communicate()[0])
                    assert "Traceback" not in self.outputs[-1], self.outputs[-1]
                    done |= {name} if process.returncode == 0 else set()
                if name not in done and (process is None or process.returncode is not None):
                    self.running[name] = self.start[name]()
            time.sleep(self.chance.uniform(0.5, most_seconds))
            disturb()

    def send(self, what: str, number: signal.Signals) -> int | None:
        """To a command, or to a process with this mark: the one that got the signal, as `signals.txt` says
        too; None where there is no such process now.
        """
        is_command = what in self.running
        processes = [self.running[what].pid] if is_command else processes_of(self.root, what)
        if not processes:
            return None
        process = self.chance.choice(processes)
        try:
            os.kill(process, number)
        except ProcessLookupError:
            return None
        with (self.root / "signals.txt").open("a") as file:
            file.write(f"{time.time():.0f} {number.name} {what}\n")
        return process

    def killed(
        self, processes: Sequence[str], *, kills: int, seconds: float, most_seconds: float
    ) -> list[str]:
        """Runs to the end, and kills some of these, so many at most and only in the first so many seconds."""
        killed, end = list[str](), time.monotonic() + seconds

        def kill() -> None:
            if len(killed) < kills and time.monotonic() < end:
                what = self.chance.choice(processes)
                killed.extend([what] if self.send(what, signal.SIGKILL) is not None else [])

        self.to_the_end(kill, most_seconds=most_seconds)
        return killed
