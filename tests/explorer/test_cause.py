"""An engine's death is told with what its log says, not with a reference to it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from trinity_data.errors import EngineError
from trinity_explorer.engines.cause import causes_named, last_error

LOG = """\
(EngineCore pid=12) ERROR 11-22 03:26:52 [core.py:1512] Traceback (most recent call last):
(EngineCore pid=12) ERROR 11-22 03:26:52 [core.py:1512]     raise ValueError
(EngineCore pid=12) ERROR 11-22 03:26:52 [core.py:1512] RuntimeError: \
Unsupported CPU attention configuration: head_dim=16
(MainProcess pid=9) ERROR 11-22 03:26:52 [async_llm.py:906] vllm.v1.engine.exceptions.EngineDeadError: \
EngineCore encountered an issue. See stack trace (above) for the root cause.
"""


def test_the_cause_is_the_last_error_that_refers_to_no_other() -> None:
    assert last_error(LOG) == "RuntimeError: Unsupported CPU attention configuration: head_dim=16"
    assert last_error("torch.OutOfMemoryError: CUDA out of memory\n") == (
        "torch.OutOfMemoryError: CUDA out of memory"
    )
    assert last_error("all is well\n") is None


def test_the_log_is_the_processes_own(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "from trinity_explorer.engines.cause import causes_named\n"
        "print('IndexError: index out of range in self', file=sys.stderr, flush=True)\n"
        "try:\n"
        "    with causes_named():\n"
        "        raise RuntimeError('Engine core initialization failed. See root cause above.')\n"
        "except Exception as error:\n"
        "    print(error)\n"
    )
    log = tmp_path / "worker.err"
    with log.open("w") as stderr:
        done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=stderr, text=True)
    assert done.stdout.strip() == (
        f"vLLM's engine process ended: IndexError: index out of range in self; its log is {log}"
    )


def test_other_errors_stay_as_they_are() -> None:
    with pytest.raises(KeyError), causes_named():
        raise KeyError("x")
    with pytest.raises(EngineError, match="holds no weights"), causes_named():
        raise EngineError("x holds no weights")
