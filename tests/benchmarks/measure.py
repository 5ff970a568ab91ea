"""Times of both sides of a comparison, taken in turns, because disks and neighbours vary."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path

Seconds = list[float]


def timed(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def in_turns(sides: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, Seconds]:
    """Every side once a round; the first round warms up and is not counted."""
    times: dict[str, Seconds] = {name: [] for name in sides}
    for number in range(rounds + 1):
        for name, work in sides.items():
            seconds = timed(work)
            if number:
                times[name].append(seconds)
    return times


def show(times: Mapping[str, Seconds], *, ours: str, rows: int) -> None:
    """A line a side: median, the slow end, rows a second, and how many times longer than ours it takes."""
    median = statistics.median(times[ours])
    for name, seconds in times.items():
        middle = statistics.median(seconds)
        beside = "" if name == ours else f"{middle / median:9.2f} x ours"
        slow = sorted(seconds)[int(0.99 * (len(seconds) - 1))]
        print(
            (
                f"{name:44} {middle * 1e3:9.2f} ms  p99 {slow * 1e3:9.2f} ms {rows / middle:12,.0f} "
                f"rows/s{beside}"
            ),
            flush=True,
        )


def show_machine() -> None:
    """What else keeps the processors busy."""
    pressure = Path("/proc/pressure/cpu")
    waiting = pressure.read_text().splitlines()[0] if pressure.exists() else "not known"
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, CPU pressure: {waiting}", flush=True)
