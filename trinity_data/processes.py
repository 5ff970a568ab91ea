"""How the processes of a run use the machine: threads, memory, and how often Python looks for garbage."""

from __future__ import annotations

import gc
import os

# Without these, every step gives its large tensors back to the system and faults them in again; on a virtual machine
# that took half of a step's time. One arena, because the others give back whatever is above 64 MB.
KEEP_MEMORY = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": "4000000000",
    "MALLOC_TRIM_THRESHOLD_": "4000000000",
}


def compute_environment(num_threads: int) -> dict[str, str]:
    """For one rank or engine; what the user's own environment says goes before it."""
    chosen = KEEP_MEMORY | {"OMP_NUM_THREADS": f"{num_threads}", "TOKENIZERS_PARALLELISM": "false"}
    return {name: os.environ.get(name, value) for name, value in chosen.items()}


def threads_each(num_processes: int) -> int:
    """Ranks and engines compute at the same time; with more threads than cores each is many times slower."""
    return max(1, (os.cpu_count() or 1) // num_processes)


def collect_garbage_seldom() -> None:
    """Rows are many small objects without cycles; looking through them for cycles halves the rate of rollouts."""
    gc.freeze()
    gc.set_threshold(100_000, 20, 100)
