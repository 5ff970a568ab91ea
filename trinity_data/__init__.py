"""Reinforcement fine-tuning where the run is a database: `trinity_data.open(run).sql("select …")`.

What users write with, in one place. Importing this package imports nothing else: a name is loaded from its
module when it is first read.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trinity_data.dataset.task import Task
    from trinity_data.errors import ConfigError, RolloutError, StoreError, TrinityError
    from trinity_data.query.result import QueryResult, Runs
    from trinity_data.schema import rows_to_table
    from trinity_data.store.sql import open_sql
    from trinity_data.store.store import Store
    from trinity_data.store.types import Commit
    from trinity_explorer.chat import ChatClient, ChatModel, Reply
    from trinity_explorer.engines.fake import FakeEngine
    from trinity_explorer.rewards.reward import Reward
    from trinity_explorer.rewards.run_code import run_code
    from trinity_explorer.workflows.workflow import Workflow
    from trinity_operators.base import (
        Column,
        Expander,
        Expansion,
        Filter,
        FilterResult,
        Mapper,
        MapperResult,
        choose_reason,
        float_column,
        group_codes,
        metric_column,
    )
    from trinity_operators.functions import filter, mapper
    from trinity_operators.row_answer import RowAnswer, add_totals

__all__ = [
    "ChatClient",
    "ChatModel",
    "Column",
    "Commit",
    "ConfigError",
    "Expander",
    "Expansion",
    "FakeEngine",
    "Filter",
    "FilterResult",
    "Mapper",
    "MapperResult",
    "QueryResult",
    "Reply",
    "Reward",
    "RolloutError",
    "RowAnswer",
    "Runs",
    "Store",
    "StoreError",
    "Task",
    "TrinityError",
    "Workflow",
    "__version__",
    "add_totals",
    "choose_reason",
    "filter",
    "float_column",
    "group_codes",
    "mapper",
    "metric_column",
    "open",
    "open_sql",
    "rows_to_table",
    "run",
    "run_code",
]

__version__: str

_MODULES = {
    "ChatClient": "trinity_explorer.chat",
    "ChatModel": "trinity_explorer.chat",
    "Column": "trinity_operators.base",
    "Commit": "trinity_data.store.types",
    "ConfigError": "trinity_data.errors",
    "Expander": "trinity_operators.base",
    "Expansion": "trinity_operators.base",
    "FakeEngine": "trinity_explorer.engines.fake",
    "Filter": "trinity_operators.base",
    "FilterResult": "trinity_operators.base",
    "Mapper": "trinity_operators.base",
    "MapperResult": "trinity_operators.base",
    "QueryResult": "trinity_data.query.result",
    "Reply": "trinity_explorer.chat",
    "Reward": "trinity_explorer.rewards.reward",
    "RolloutError": "trinity_data.errors",
    "RowAnswer": "trinity_operators.row_answer",
    "Runs": "trinity_data.query.result",
    "Store": "trinity_data.store.store",
    "StoreError": "trinity_data.errors",
    "Task": "trinity_data.dataset.task",
    "TrinityError": "trinity_data.errors",
    "Workflow": "trinity_explorer.workflows.workflow",
    "add_totals": "trinity_operators.row_answer",
    "choose_reason": "trinity_operators.base",
    "filter": "trinity_operators.functions",
    "float_column": "trinity_operators.base",
    "group_codes": "trinity_operators.base",
    "mapper": "trinity_operators.functions",
    "metric_column": "trinity_operators.base",
    "open_sql": "trinity_data.store.sql",
    "rows_to_table": "trinity_data.schema",
    "run_code": "trinity_explorer.rewards.run_code",
}


def open(*runs: str | Path, as_of: int | str | None = None) -> Runs:
    """Opens runs for queries in SQL: job folders, or project/name under the checkpoint root.

    With several, every view has a column `run`. `as_of` shows them as they were at the end
    of a step, or at a tag. Raises StoreError for a run that does not exist.
    """
    from trinity_data.query.result import Runs
    from trinity_data.runs import resolve_runs

    return Runs(resolve_runs(runs), as_of=as_of)


def run(
    pipeline: str | Path | Mapping[str, Any],
    *overrides: str,
    quiet: bool = False,
    accept_changes: bool = False,
) -> Runs:
    """Runs or resumes a pipeline file, or the same as a dict, and opens the run for queries.

    `overrides` are those of the command line, such as `"buffer.total_steps=20"`; `quiet` prints warnings
    only; `accept_changes` resumes although a reward, an operator or the algorithm changed. Paths in a
    dict are relative to the working directory. Raises ConfigError with every problem of the pipeline
    file, another TrinityError for a run that fails, KeyboardInterrupt after a checkpoint on Ctrl-C.
    """
    from trinity_data.launch.run import run_pipeline

    return open(run_pipeline(pipeline, overrides, quiet=quiet, accept_changes=accept_changes))


if not TYPE_CHECKING:  # type checkers report an unknown name only without it

    def __getattr__(name: str) -> Any:
        """Loads a public name when it is first read."""
        if name in _MODULES:
            value = getattr(import_module(_MODULES[name]), name)
        elif name == "__version__":
            value = version("trinity-data")
        else:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals()[name] = value
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
