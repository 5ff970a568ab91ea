"""The GPUs of this machine, counted without importing torch."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path


def count_gpus() -> int:
    """NVIDIA GPUs that this process may use."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [] if visible is None else [name for name in visible.split(",") if name.strip() not in ("", "-1")]
    if visible is not None and not names:
        return 0
    installed = _installed_gpus()
    return installed if visible is None else min(installed, len(names))


def first_gpus(count: int) -> str:
    """`CUDA_VISIBLE_DEVICES` for the first `count` GPUs that this process may use; empty for none."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [str(n) for n in range(count)] if visible is None else visible.split(",")
    return ",".join(name.strip() for name in names[:count])


def _installed_gpus() -> int:
    listed = Path("/proc/driver/nvidia/gpus")
    if listed.is_dir():
        return sum(1 for _ in listed.iterdir())
    try:
        printed = subprocess.run(
            ["nvidia-smi", "-L"], capture_output=True, text=True, timeout=10, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return 0
    return sum(line.startswith("GPU ") for line in printed.splitlines())
