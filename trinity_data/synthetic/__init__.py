"""What a run makes for itself when it is given neither a model nor a task set.

The two names below stand where a path or hub id would. Importing this package loads nothing heavy.
"""

from __future__ import annotations

from typing import Final

TASKSET_URI: Final = "synthetic://gsm8k"
TASKSET_COLUMNS: Final = ("question", "answer")
MODEL_URI: Final = "synthetic://qwen2-1m"
