"""Rows of data sets that `datasets` reads: Parquet, and what lies on the hub."""

from __future__ import annotations

import glob
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa

from trinity_data.dataset.row import Row
from trinity_data.errors import ConfigError, TrinityError


class ArrowRows:
    """By number, of a data set that is loaded."""

    def __init__(self, rows: Any) -> None:
        self.columns: list[str] = rows.column_names
        self._rows = rows.with_format("arrow")

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, number: int) -> Row:
        return plain_rows(self._rows[[number]])[0]


def plain_rows(table: pa.Table) -> list[Row]:
    """As Python has them; a value of 32 bits as the number that was written, not as its nearest of 64."""
    rows: list[Row] = table.to_pylist()
    for field in table.schema:
        if pa.types.is_float32(field.type):
            for row in rows:
                if row[field.name] is not None:
                    row[field.name] = float(str(np.float32(row[field.name])))
    return rows


def load(path: str, split: str, /, *named: str | None, **options: Any) -> Any:
    """What `datasets.load_dataset` gives; `path` and `split` are named where it cannot be read."""
    from datasets import disable_progress_bars, load_dataset

    disable_progress_bars()
    with naming_problems(path, split):
        return load_dataset(*named, trust_remote_code=False, **options)


def parquet_names(files: Sequence[Path]) -> list[str]:
    """For `data_files`: `datasets` reads a path as a pattern, and what is before a colon as a protocol."""
    return [glob.escape(str(file.absolute())) for file in files]


@contextmanager
def naming_problems(path: str, split: str) -> Iterator[None]:
    """Raises ConfigError for whatever `datasets` raises."""
    try:
        yield
    except TrinityError:
        raise
    # the boundary to `datasets`, which raises what its readers raise, StopIteration too
    except Exception as error:
        problem, cause = type(error).__name__, cast("BaseException | None", error)
        while cause is not None:
            if str(cause):
                problem = f"{type(cause).__name__}: {cause}"
            cause = cause.__cause__ or cause.__context__
        raise ConfigError(f"{path}: split {split!r} cannot be read: {problem}") from error
