"""`make bench`: every benchmark, one after another."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

for file in sorted(Path(__file__).parent.glob("bench_*.py")):
    print(f"\n== {file.stem}", flush=True)
    subprocess.run([sys.executable, "-m", f"tests.benchmarks.{file.stem}"], check=True)
