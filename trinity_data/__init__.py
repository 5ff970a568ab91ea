"""Reinforcement fine-tuning where the run is a database: `trinity_data.open(run).sql("select …")`.

Importing this package imports nothing else; what a call needs is imported by the call.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trinity_data.query.result import Runs

__all__ = ["__version__", "open"]

__version__: str


def open(*runs: str | Path, as_of: int | str | None = None) -> Runs:
    """Runs to be asked in SQL: job folders, or project/name under the checkpoint root.

    With several, every view has a column `run`. `as_of` shows them as they were at the end
    of a step, or at a tag.
    """
    from trinity_data.query.result import Runs
    from trinity_data.runs import resolve_runs

    return Runs(resolve_runs(runs), as_of=as_of)


def __getattr__(name: str) -> str:
    """`__version__`: the version of the installed distribution, read when it is asked for."""
    if name != "__version__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib.metadata import version

    return version("trinity-data")
