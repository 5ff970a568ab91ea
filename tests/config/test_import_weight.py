"""The configuration is read before anything heavy is."""

from __future__ import annotations

import resource
import subprocess
import sys

HEAVY = ("torch", "ray", "vllm", "datasets", "duckdb", "pyarrow", "transformers", "numpy", "pandas")
PROGRAM = f"""
import sys
import trinity_data.config, trinity_data.config.preflight, trinity_data.config.hub
print(sorted(set({HEAVY!r}) & set(sys.modules)))
"""


def test_importing_the_configuration_loads_nothing_heavy_and_is_quick() -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    # of the processor, so that other work on the machine does not count; it takes half a second
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 5
