"""The configuration is read before anything heavy is."""

from __future__ import annotations

import subprocess
import sys
import time

HEAVY = ("torch", "ray", "vllm", "datasets", "duckdb", "pyarrow", "transformers", "numpy", "pandas")
PROGRAM = f"""
import sys
import trinity_data.config, trinity_data.config.preflight, trinity_data.config.hub
print(sorted(set({HEAVY!r}) & set(sys.modules)))
"""


def test_importing_the_configuration_loads_nothing_heavy_and_is_quick() -> None:
    started = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
    # half a second when idle; the machine may be busy
    assert time.perf_counter() - started < 5
